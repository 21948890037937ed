"""Operations of torch between two layers: growth preserves the function, or tracing raises an error."""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.growth import VarianceTransfer
from growlab.widths import UnsupportedOperation, trace
from tests.cases import Around as Layers

IMAGE = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Around(nn.Module):
    """A function of the channels h [2, 8, 6, 6]; layers read its result if it has the shape of h."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.a(x)) * 0.8 + 0.1
        result = self.last(torch.relu(self.b(h)))
        found = self.function(h)
        for y in found if isinstance(found, tuple | list) else [found]:
            if isinstance(y, Tensor):
                y = (y.abs() if y.is_complex() else y).double()
                same_shape = y.shape == h.shape
                result = result + (self.last(torch.tanh(self.c(torch.tanh(y)))) if same_shape else y.tanh().sum())
        return result


def grown(function: Callable[[Tensor], Any]) -> list[str]:
    """Grow twice around a function, with new weights each time; an event that changes the output raises an error."""
    torch.manual_seed(0)
    network = Around(function).double()
    grower = Grower(network, IMAGE, method=VarianceTransfer(), trigger={0: 0.5, 1: 0.75, 2: 1.0})
    for epoch in range(3):
        grower.step(epoch=epoch)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return list(grower.full_graph.groups)


@pytest.mark.parametrize(
    "function",
    [
        # Composite operations are decomposed, so all channels may grow.
        lambda h: F.cosine_similarity(h, h * h, dim=2)[:, :, None] * h,
        lambda h: torch.subtract(h, h * h, alpha=0.5),
        lambda h: torch.swapdims(h, 2, 3),
        lambda h: torch.special.expit(h),
        lambda h: torch.special.softmax(h, 2),
        lambda h: torch.vstack([h, h])[:2],
        lambda h: F.smooth_l1_loss(h, h * h, reduction="none"),
        lambda h: h.clone().subtract_(0.5),
        # Along one dimension.
        lambda h: torch.cumprod(h, 2),
        lambda h: h.clone().cumprod_(3),
        # Elementwise operations, according to torch's tag.
        lambda h: torch.special.i0e(h),
        lambda h: h.clone().sin_(),
        lambda h: torch.deg2rad(h),
        lambda h: torch.heaviside(h, h * h),
        lambda h: h.clone().lt_(0.5),
    ],
)
def test_channels_grow_through_composite_and_elementwise_operations(function: Callable[[Tensor], Any]) -> None:
    assert set(grown(function)) >= {"a", "b"}


@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch.roll(h, 1),
        lambda h: torch.dist(h, h * h),
        lambda h: F.cosine_similarity(h, h * h, dim=1),
        lambda h: F.cross_entropy(h, h.argmax(1)),
        lambda h: torch.cumprod(h, 1),
        lambda h: torch.masked_scatter(h, h > 0.5, h * h),
        lambda h: F.pdist(h.flatten(0, 1).flatten(1)),
        lambda h: torch.linalg.householder_product(h.flatten(2).mT, h[:, :, 0, 0]),
        lambda h: torch.segment_reduce(h.mean((2, 3)), "sum", lengths=torch.tensor([1, 1])),
    ],
)
def test_channels_that_are_mixed_keep_their_width(function: Callable[[Tensor], Any]) -> None:
    assert "a" not in grown(function)


def test_sums_that_nothing_reads_have_one_width() -> None:
    """In many networks with skip connections, the last block adds to a stream that nothing reads afterwards."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h, total = net.stem(x), torch.zeros(())
        for inner, skip, residual in zip(net.inner, net.skip, net.residual, strict=True):
            y = torch.tanh(inner(h))
            total, h = total + skip(y), h + residual(y)
        return net.out(F.relu(total))

    sizes = {"inner": (8, 10), "skip": (10, 6), "residual": (10, 8)}
    parts = {name: nn.ModuleList(nn.Linear(*size) for _ in range(2)) for name, size in sizes.items()}
    network = Layers(forward, stem=[3, 8], out=[6, 2], **parts).double()
    grower = Grower(network, torch.randn(4, 3).double(), method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    grower.step(epoch=1)
    assert set(grower.full_graph.groups) == {"stem", "inner.0", "inner.1", "skip.0"}


def test_elementwise_operations_are_basis_dependent() -> None:
    """They do not commute with the rotations of channels in isotropic layers."""
    network = nn.Sequential(nn.Linear(3, 8), Layers(lambda net, x: torch.special.i0e(x)), nn.Linear(8, 2))
    graph = trace(network, torch.randn(4, 3), follow_norms=True)
    assert graph.basis_dependent["0"].startswith("special_i0e")


@pytest.mark.parametrize("function", [torch.subtract, torch.heaviside])
def test_the_last_layer_stays_the_last_behind_a_table_that_changes_its_output(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    shifted = Layers(
        lambda net, x: function(net.last(torch.relu(net.a(x))), net.table),
        **{"a": [3, 8], "last": [8, 2], "table": nn.Parameter(torch.zeros(4, 2))},
    )
    layers = {layer.name: layer for layer in trace(shifted, torch.randn(4, 3)).layers}
    assert layers["last"].is_output and not layers["a"].is_output


def test_vmap_raises_an_error_of_one_sentence() -> None:
    def ensemble(h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * 2)(h)

    with pytest.raises(UnsupportedOperation, match=r"torch\.vmap cannot be traced .*torch\.einsum"):
        grown(ensemble)


# Ways to call a function whose signature is unknown.
CALLS: tuple[Callable[[Any, Tensor], Any], ...] = (
    lambda f, h: f(h),
    lambda f, h: f(h, h),
    lambda f, h: f(h, h * 0.5 + 0.1),
    lambda f, h: f(h, 1),
    lambda f, h: f(h, -2),
    lambda f, h: f(h, 0.5),
    lambda f, h: f(h, 1, 1),
    lambda f, h: f(h, h, h),
    lambda f, h: f(h, (2, 2)),
    lambda f, h: f([h, h]),
)
NAMESPACES = (torch, F, torch.special, torch.linalg, torch.fft, torch.Tensor)


def repeats(network: nn.Module) -> bool:
    """Return True if the network computes the same finite numbers twice, so that none is uninitialised memory."""
    # Fill uninitialised memory with NaN, because it may hold the same numbers twice by chance.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second = network(IMAGE), network(IMAGE)
    except Exception:  # the function cannot be called like this
        return False
    finally:
        torch.use_deterministic_algorithms(False)
    return isinstance(first, Tensor) and math.isfinite(first.sum()) and first.equal(second)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(torch.empty_like, False), (lambda h: h.new_empty(h.shape), False), (torch.rand_like, False), (torch.sin, True)],
)
def test_numbers_from_memory_that_nothing_filled_do_not_repeat(
    function: Callable[[Tensor], Tensor], expected: bool
) -> None:
    assert repeats(Around(function).double().eval()) is expected


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_every_function_of_torch_is_exact_or_raises_an_error() -> None:
    tried = 0
    for namespace in NAMESPACES:
        for name in sorted(set(dir(namespace)) - {"set_", "resize_", "backward", "share_memory_", "compile", "export"}):
            function = getattr(namespace, name)
            if name[0] in "_ABCDEFGHIJKLMNOPQRSTUVWXYZ" or isinstance(function, type) or not callable(function):
                continue
            for call in CALLS:
                network = Around(lambda h, f=function, call=call: call(f, h)).double().eval()
                if not repeats(network):
                    continue
                with contextlib.suppress(UserError):
                    grown(network.function)
                tried += 1
    assert tried > 1500
