"""Weights of wider networks whose code multiplies what their embeddings put out."""

import pytest
import torch
from torch import Tensor, nn

from growlab.growth import HyperCloning
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.widen.weights import Widening
from growlab.widths import layouts


class Embedded(nn.Module):
    """A stream that begins with embeddings times a number of the code's, as Gemma's does."""

    def __init__(self, width: int, times: float) -> None:
        super().__init__()
        self.times = times
        self.embed, self.norm = nn.Embedding(11, width), nn.RMSNorm(width)
        self.inside, self.last, self.head = (
            nn.Linear(width, width, bias=False),
            nn.RMSNorm(width),
            nn.Linear(width, 5),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.times
        return self.head(self.last(x + self.inside(self.norm(x)))).mean(1)


@pytest.mark.parametrize("by_code", [2.0, 0.7])
def test_a_number_of_the_codes_own_is_taken_off_the_table(by_code: float) -> None:
    """Embeddings may be multiplied by more, or less, than the stream that they begin grows by."""
    torch.manual_seed(0)
    narrow = Embedded(8, 3.0).double().eval()
    ids = torch.randint(0, 11, (4, 6))
    with torch.no_grad():
        for parameter in narrow.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    wide = Embedded(12, 3.0 * by_code).double().eval()
    graph = layouts(wide, (ids,))
    widths = {group: 8 for group in graph.groups}
    errors = []
    state = narrow.state_dict()
    widening = Widening(graph, lambda name, rows: state[name][rows], widths, 0, HyperCloning())
    for way in widening.ways([by_code]):
        wide.load_state_dict(widening.tensors(way))
        errors.append(relative_error(evaluate(narrow, (ids,)), evaluate(wide, (ids,))))
    assert min(errors) < 1e-12 and sum(error < 1e-12 for error in errors) < len(errors)
