"""What layers.csv is measured on."""

from pathlib import Path

import torch
from torch import Tensor, nn

from growlab.lab.training.recorder import LayerStatistics


class Turned(nn.Module):
    """A network whose first parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.out = nn.Parameter(torch.ones(3, dtype=torch.cfloat)), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4).flatten(1))


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Turned()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


def test_images_take_the_precision_of_real_parameters(tmp_path: Path) -> None:
    statistics = LayerStatistics(tmp_path, torch.randn(6, 1, 3, 4).double(), torch.arange(6) % 5, 1)
    statistics._measure(Task(), 0)
    rows = statistics.state_dict()["rows"].splitlines()
    assert [row.split(",")[2] for row in rows[:4]] == ["loss", "accuracy", "activation", "gradient"]
