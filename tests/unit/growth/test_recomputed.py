"""Checkpointed layers and custom functions: correct gradients or an error. Bare weights load in any order."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_states
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from growlab import Grower, Net2Net, VarianceTransfer
from growlab.base.errors import UserError
from growlab.growth import PairGrowth
from tests.cases import Around, train

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
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__(12, 12)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight) + self.bias


class Bare(nn.Module):
    """Bare weights, checkpointed or not, with a functional normalisation or a submodule."""

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
        return self.own(x) + (checkpoint(called, x, use_reentrant=self.reentrant) if self.how != "plain" else called(x))


def gradients(network: nn.Module) -> tuple[float, float]:
    """Derivative of a loss along a direction of the input: analytic and numeric."""

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


@pytest.mark.parametrize(
    ("method", "how", "reentrant"),
    [
        *((VarianceTransfer, "plain", True), (VarianceTransfer, "submodule", False)),
        *((VarianceTransfer, "outside", True), (Net2Net, "submodule", True), (Net2Net, "outside", False)),
    ],
)
def test_gradients_behind_an_event_are_those_of_the_function(method: Any, how: str, reentrant: bool) -> None:
    made = network(Bare("plain" if how == "outside" else how, reentrant))
    grower = Grower(made, X, method=method(), trigger={0: 0.34, 1: 1.0})
    grower.step(epoch=1)
    assert grower.state.multipliers or grower.state.norm_weights
    around = Around(lambda net, x: checkpoint(net.inner, x, use_reentrant=reentrant), inner=made)
    run = around if how == "outside" else made
    analytic, numeric = gradients(run)
    assert analytic == pytest.approx(numeric, rel=1e-5)


@pytest.mark.parametrize(
    ("middle", "code"),
    [
        (lambda: ByFunction(Product), r"the torch\.autograd\.Function Product"),
        (lambda: ByFunction(Separate), r"the torch\.autograd\.Function Separate"),
        (lambda: Bare("weight", True), r"torch\.utils\.checkpoint"),
        (lambda: Bare("weight", False), r"torch\.utils\.checkpoint"),
    ],
)
def test_recomputed_weights_with_wrong_gradients_raise_an_error_before_training(middle: Any, code: str) -> None:
    made = network(middle())
    before, optimizer = dict(made.named_parameters()), torch.optim.SGD(made.parameters(), lr=0.1)
    with pytest.raises(UserError, match=rf"2\.weight is used inside {code}, .* set layer_multipliers=False"):
        Grower(made, X, method=VarianceTransfer(), trigger={0: 0.34, 1: 1.0})
    # The network is unchanged and trains as before.
    assert all(p is before[name] for name, p in made.named_parameters())
    made(X).sum().backward()
    optimizer.step()
    grower = Grower(made, X, method=VarianceTransfer(layer_multipliers=False), trigger={0: 0.34, 1: 1.0})
    grower.step(epoch=1)
    analytic, numeric = gradients(made)
    assert analytic == pytest.approx(numeric, rel=1e-5)


class Normalised(torch.autograd.Function):
    """NAFNet's layer normalisation over the channels of images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / (variance + 1e-6).sqrt()
        ctx.save_for_backward(y, variance, weight)
        return weight.view(1, -1, 1, 1) * y + bias.view(1, -1, 1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, variance, weight = ctx.saved_tensors
        g = gradient * weight.view(1, -1, 1, 1)
        inner = g - y * (g * y).mean(1, keepdim=True) - g.mean(1, keepdim=True)
        return inner / (variance + 1e-6).sqrt(), (gradient * y).sum((0, 2, 3)), gradient.sum((0, 2, 3))


class Norm(nn.Module):
    def __init__(self, channels: int, how: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.how = how

    def own(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.movedim(1, -1), (x.shape[1],), self.weight, self.bias)
        return x.movedim(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "function":
            return Normalised.apply(x, self.weight, self.bias)
        return checkpoint(self.own, x, use_reentrant=False) if self.how == "checkpoint" else self.own(x)


@pytest.mark.parametrize(
    ("how", "method"), [("function", VarianceTransfer), ("checkpoint", Net2Net), ("plain", PairGrowth)]
)
def test_channels_normalised_inside_a_checkpoint_keep_their_width(how: str, method: Any) -> None:
    torch.manual_seed(0)
    made = Around(
        # A residual block of NAFNet's between two convolutions.
        lambda net, x: net.last((h := net.first(x)) + net.narrow(F.gelu(net.wide(net.norm(h))))),
        **{"first": nn.Conv2d(3, 16, 3, padding=1), "norm": Norm(16, how), "last": nn.Conv2d(16, 3, 3, padding=1)},
        **{"wide": nn.Conv2d(16, 32, 1), "narrow": nn.Conv2d(32, 16, 1)},
    ).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    grower = Grower(made, x, method=method(), trigger={0: 0.5, 1: 1.0})
    code = {"function": "the torch.autograd.Function Normalised", "checkpoint": "torch.utils.checkpoint"}
    if how == "plain":
        assert "first" in grower.graph.groups
    else:
        assert set(grower.graph.groups) == {"wide"}
        assert grower.graph.fixed["first"].startswith(f"Norm normalises over them inside {code[how]}, whose")
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval < 1e-12


@pytest.mark.parametrize("what", ["1", "2"])
def test_data_parallel_raises_an_error(what: str) -> None:
    """Modules are replicated as in `nn.DataParallel`, which itself needs GPUs."""
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
    with pytest.raises(UserError, match=r"torch\.nn\.DataParallel copies (Linear|LayerNorm) to several devices"):
        copied(x)
    assert module(x).isfinite().all()


STAGES = {0: 0.25, 1: 0.5, 2: 1.0}


class BareWeights(nn.Module):
    """Bare weights and a functional normalisation around a layer."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(16, 6) * 0.4), nn.Parameter(torch.randn(3, 16) * 0.3)
        self.gain, self.shift = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))
        self.hidden, self.normalised = nn.Linear(16, 16), normalised

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.first)
        if self.normalised:
            x = F.layer_norm(x, (x.shape[-1],), self.gain, self.shift)
        return F.linear(torch.relu(self.hidden(torch.relu(x))), self.last)


def at_stage(normalised: bool, stage: int, steps: int = 0) -> tuple[nn.Module, Grower, torch.optim.Optimizer]:
    torch.manual_seed(1)
    network = BareWeights(normalised).double()
    grower = Grower(network, X, method=VarianceTransfer(multipliers="keep"), trigger=STAGES)
    optimizer = torch.optim.Adam(network.parameters())
    grower.follow(optimizer)
    for epoch in range(stage + 1):
        grower.step(epoch=epoch)
        train(network, optimizer, X, steps=steps)
    return network, grower, optimizer


@pytest.mark.parametrize(
    ("normalised", "stage", "start"),
    [
        *((False, 0, 2), (False, 1, 1), (False, 2, 0), (False, 2, 1)),
        *((True, 0, 1), (True, 1, 0), (True, 1, 2), (True, 2, 2)),
    ],
)
def test_checkpoints_of_weights_at_the_root_load_in_any_order(normalised: bool, stage: int, start: int) -> None:
    saved = at_stage(normalised, stage, steps=3)
    states: list[Any] = [copy.deepcopy(one.state_dict()) for one in saved]
    assert any("unfinished_growth" in name for name in states[0]) == (stage > 0)
    for order in itertools.permutations(range(3)):
        loading = at_stage(normalised, start)
        for index in order:
            loading[index].load_state_dict(copy.deepcopy(states[index]))
        assert torch.equal(loading[0](X), saved[0](X)), order


def test_a_copy_loads_by_itself_and_nothing_is_left_behind() -> None:
    saved = copy.deepcopy(at_stage(False, 2, steps=3)[0].state_dict())
    network, grower, optimizer = at_stage(False, 0)
    twin, _ = copy.deepcopy((grower, optimizer))
    expected = network(X)
    twin.network.load_state_dict(saved)
    assert torch.equal(network(X), expected)
    assert not torch.equal(twin.network(X), expected)
    before = twin.network(X)
    twin.finish()
    torch.testing.assert_close(twin.network(X), before)
    grower.finish(at_any_stage=True)
    for module in (*network.modules(), *twin.network.modules()):
        assert not module._load_state_dict_pre_hooks
        assert not module._state_dict_hooks
    plain = BareWeights(False).double()
    plain.load_state_dict(twin.network.state_dict())
    torch.testing.assert_close(plain(X), before)


@pytest.mark.filterwarnings("ignore")  # of torch's own, without a process group
@pytest.mark.parametrize("method", [VarianceTransfer(), VarianceTransfer(output_multiplier=False)])
def test_distributed_checkpoints_restore_a_growing_network(method: Any, tmp_path: Path) -> None:
    """torch.distributed.checkpoint's helpers, at every stage, with multipliers and weighted statistics."""

    def make() -> tuple[nn.Module, Grower, torch.optim.Optimizer]:
        torch.manual_seed(1)
        layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        network = nn.Sequential(nn.Sequential(*layers[:3]), *layers[3:]).double()
        grower = Grower(network, X, method=method, trigger={0: 0.25, 1: 0.5, 2: 1.0}, anneal_steps=5)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        grower.follow(optimizer)
        return network, grower, optimizer

    network, grower, optimizer = make()
    for epoch in range(3):
        grower.step(epoch=epoch)
        train(network, optimizer, X, steps=3)
        model, moments = dcp_states.get_state_dict(network, optimizer)
        assert model.keys() == network.state_dict().keys() == dcp_states.get_model_state_dict(network).keys()
        assert moments["state"].keys() == dict(network.named_parameters()).keys()
        dcp.save({"model": model, "optimizer": moments}, checkpoint_id=str(tmp_path / str(epoch)))
        saved = copy.deepcopy(grower.state_dict())
        other, again, resumed = make()
        again.load_state_dict(saved)
        train(other, resumed, X, steps=3)
        # Training has annealed its normalisations further.
        again.load_state_dict(saved)
        model, moments = dcp_states.get_state_dict(other, resumed)
        dcp.load({"model": model, "optimizer": moments}, checkpoint_id=str(tmp_path / str(epoch)))
        dcp_states.set_model_state_dict(other, model)
        dcp_states.set_optimizer_state_dict(other, resumed, moments)
        assert torch.equal(other(X), network(X))
        whole = dcp_states.get_model_state_dict(
            network, options=dcp_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        dcp_states.set_model_state_dict(other, whole)
        assert torch.equal(other(X), network(X))
        twin, its = copy.deepcopy((grower, optimizer))
        train(twin.network, its, X, steps=3)
        train(other, resumed, X, steps=3)
        assert torch.equal(other(X), twin.network(X))
