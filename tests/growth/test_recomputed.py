"""Operations that a module takes inside a checkpoint or a function of its own: their gradients are right or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from growlab import Grower, Net2Net, VarianceTransfer
from growlab.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Separate(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Product.backward


class ByFunction(nn.Linear):
    function: type[torch.autograd.Function] = Product

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight) + self.bias


class BySeparate(ByFunction):
    function = Separate


class Bare(nn.Module):
    """Weights of its own, checkpointed or not; with a normalisation of its own or a submodule."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.weight, self.how, self.reentrant = nn.Parameter(torch.randn(12, 12) / 4), how, reentrant
        self.gain = nn.Parameter(torch.ones(12))
        self.inner = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.ReLU())

    def own(self, x: Tensor) -> Tensor:
        if self.how == "norm":
            return F.layer_norm(x, (x.shape[-1],), self.gain)
        return torch.relu(F.linear(x, self.weight))

    def forward(self, x: Tensor) -> Tensor:
        called = self.inner if self.how == "submodule" else self.own
        return self.own(x) + (
            checkpoint(called, x, use_reentrant=self.reentrant) if self.how != "plain" else called(x)
        )


def gradients(network: nn.Module) -> tuple[float, float]:
    """The derivative of a loss along a direction of the input, analytic and numeric."""

    def loss(x: Tensor) -> Tensor:
        return (network(x) ** 2).sum()

    x = X.clone().requires_grad_(True)
    loss(x).backward()
    direction = torch.randn(X.shape, generator=torch.Generator().manual_seed(1), dtype=X.dtype)
    with torch.no_grad():
        numeric = (loss(X + 1e-6 * direction) - loss(X - 1e-6 * direction)) / 2e-6
    return float((x.grad * direction).sum()), float(numeric)


def network(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), middle, nn.ReLU(), nn.Linear(12, 3)).double()


@pytest.mark.parametrize("method", [VarianceTransfer, Net2Net])
@pytest.mark.parametrize("how", ["plain", "submodule", "outside"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_behind_an_event_are_those_of_the_function(method: Any, how: str, reentrant: bool) -> None:
    made = network(Bare("plain" if how == "outside" else how, reentrant))
    grower = Grower(made, X, method=method(), trigger={0: 0.34, 1: 1.0})
    grower.step(epoch=1)
    assert grower.state.multipliers or grower.state.norm_weights
    run = made if how != "outside" else Checkpointed(made, reentrant)
    analytic, numeric = gradients(run)
    assert analytic == pytest.approx(numeric, rel=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    ("middle", "told"),
    [
        (lambda: ByFunction(12, 12), r"ByFunction takes weight inside the torch\.autograd\.Function Product"),
        (
            lambda: BySeparate(12, 12),
            r"BySeparate takes weight inside the torch\.autograd\.Function Separate",
        ),
        (lambda: Bare("weight", True), r"Bare takes weight inside torch\.utils\.checkpoint"),
        (lambda: Bare("weight", False), r"Bare takes weight inside torch\.utils\.checkpoint"),
        (lambda: Bare("norm", True), r"Bare takes a normalisation inside torch\.utils\.checkpoint"),
        (lambda: Bare("norm", False), r"Bare takes a normalisation inside torch\.utils\.checkpoint"),
    ],
)
def test_what_would_have_other_gradients_is_refused(middle: Any, told: str) -> None:
    made = network(middle())
    grower = Grower(made, X, method=VarianceTransfer(), trigger={0: 0.34, 1: 1.0})
    before, outputs = {k: t.clone() for k, t in made.state_dict().items()}, made(X)
    with pytest.raises(UserError, match=told):
        grower.step(epoch=1)
    # Nothing is lost: it trains on as it was.
    after = made.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
    assert torch.equal(made(X), outputs) and grower.state.stage == 0 and grower.events == []


def test_without_multipliers_a_function_of_ones_own_goes() -> None:
    made = network(ByFunction(12, 12))
    grower = Grower(made, X, method=VarianceTransfer(layer_multipliers=False), trigger={0: 0.34, 1: 1.0})
    grower.step(epoch=1)
    analytic, numeric = gradients(made)
    assert analytic == pytest.approx(numeric, rel=1e-5)


@pytest.mark.parametrize("what", ["1", "2"])
def test_copies_that_data_parallel_makes_are_refused(what: str) -> None:
    """As `nn.DataParallel` makes them for each of its devices, of which this machine has none."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    network = nn.Sequential(*layers).double()
    grower = Grower(network, X, method=VarianceTransfer(), trigger={0: 0.25, 1: 0.5})
    grower.step(epoch=0)
    grower.step(epoch=1)
    module = network.get_submodule(what)
    copied: Any = module._replicate_for_data_parallel()  # type: ignore[operator]
    for name, parameter in module.named_parameters():
        setattr(copied, name, parameter.clone())
    x = torch.randn(4, 8, dtype=torch.float64)
    with pytest.raises(
        UserError, match=r"torch\.nn\.DataParallel copies (Linear|LayerNorm) to several devices"
    ):
        copied(x)
    assert module(x).isfinite().all()
