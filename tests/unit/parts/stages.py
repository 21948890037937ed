"""A residual block, and checks of parts whose value changes from stage to stage."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from growlab import Grower
from growlab.growth.outputs import evaluate
from tests.cases import differing


class Residual(nn.Module):
    """A residual block of a norm and two layers, like a Transformer layer without attention."""

    def __init__(self, width: int, hidden: int, normalise: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = normalise(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def check_resumed(start: Callable[[], Grower], loss_of: Callable[[torch.nn.Module], Tensor], epoch: int) -> None:
    """Check that three epochs, resumed before `epoch`, have the losses and weights of an uninterrupted run."""

    def begin() -> tuple[Grower, torch.optim.Optimizer]:
        growing = start()
        optimizer = torch.optim.AdamW(growing.network.parameters(), lr=0.01)
        growing.follow(optimizer)
        return growing, optimizer

    def train(growing: Grower, optimizer: torch.optim.Optimizer, epochs: range) -> list[float]:
        losses = []
        for each in epochs:
            growing.step(epoch=each)
            loss = loss_of(growing.network.train())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    uninterrupted, first, resumed = begin(), begin(), begin()
    expected = train(*uninterrupted, range(3))
    losses = train(*first, range(epoch))
    saved = pickle.dumps((first[0].state_dict(), first[0].network.state_dict(), first[1].state_dict()))
    for each, state in zip((resumed[0], resumed[0].network, resumed[1]), pickle.loads(saved), strict=True):
        each.load_state_dict(state)
    assert torch.equal(*(loss_of(growing.network.eval()) for growing, _ in (first, resumed)))
    assert losses + train(*resumed, range(epoch, 3)) == expected
    assert not differing(uninterrupted[0].network.state_dict(), resumed[0].network.state_dict())


def check_undone(growing: Grower, inputs: Tensor) -> None:
    """Check that an event that fails at its end leaves tensors and outputs unchanged."""
    before, outputs = copy.deepcopy(growing.network.state_dict()), evaluate(growing.network, (inputs,))

    def fail() -> None:
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        growing.step(epoch=1, then=fail)
    assert not differing(before, growing.network.state_dict())
    assert torch.equal(evaluate(growing.network, (inputs,)), outputs)
