"""A residual block, and checks of parts whose value changes from stage to stage."""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from growlab import Grower
from growlab.growth.outputs import evaluate


class Residual(nn.Module):
    """A Transformer layer without attention: a norm and two layers around which the input is passed on."""

    def __init__(self, width: int, hidden: int, normalise: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = normalise(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def check_resumed(start: Callable[[], Grower], loss_of: Callable[[torch.nn.Module], Tensor], epoch: int) -> None:
    """Check that three epochs, interrupted before one, have the losses and weights of uninterrupted ones."""

    def begun() -> tuple[Grower, torch.optim.Optimizer]:
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

    whole, first, resumed = begun(), begun(), begun()
    wanted = train(*whole, range(3))
    losses = train(*first, range(epoch))
    saved = pickle.dumps((first[0].state_dict(), first[0].network.state_dict(), first[1].state_dict()))
    for each, state in zip((resumed[0], resumed[0].network, resumed[1]), pickle.loads(saved), strict=True):
        each.load_state_dict(state)
    assert torch.equal(*(loss_of(growing.network.eval()) for growing, _ in (first, resumed)))
    assert losses + train(*resumed, range(epoch, 3)) == wanted
    for name, tensor in whole[0].network.state_dict().items():
        assert torch.equal(tensor, resumed[0].network.state_dict()[name])


def check_undone(growing: Grower, inputs: Tensor) -> None:
    """Check that an event that fails at its end leaves tensors and outputs unchanged."""
    before = {name: tensor.clone() for name, tensor in growing.network.state_dict().items()}
    outputs = evaluate(growing.network, (inputs,))

    def fail() -> None:
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        growing.step(epoch=1, then=fail)
    for name, tensor in growing.network.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(evaluate(growing.network, (inputs,)), outputs)
