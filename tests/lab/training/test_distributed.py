"""Several processes: Lightning's internals that growlab uses, comparison of ranks, batch normalisation."""

import weakref
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from growlab import Grower
from growlab.base.errors import UserError
from growlab.base.ranks import agreed, checksums, differing
from growlab.frontends.lightning import renew_wrapper
from growlab.lab.training.distributed import SynchroniseBatchNorm, check_strategy


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group with this process only."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Small(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


# Undocumented parts of Lightning ---------------------------------------------------------------------------


def test_lightning_has_an_attribute_with_the_start_method() -> None:
    assert DDPStrategy()._start_method == "popen" and DDPStrategy(start_method="spawn")._start_method == "spawn"


def test_a_new_wrapper_has_the_new_parameters_and_the_old_one_is_freed(group: None) -> None:
    """Hooks of the old one would reduce gradients of kept parameters again."""
    module = Small()
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")], gradient_as_bucket_view=True)
    strategy.connect(module)
    strategy.configure_ddp()
    trainer: Any = SimpleNamespace(strategy=strategy, lightning_module=module)
    strategy.model(torch.randn(8, 4)).sum().backward()
    old, kept = weakref.ref(strategy.model), module.layers[2].bias
    module.layers[0].weight = nn.Parameter(torch.randn(6, 4))
    renew_wrapper(trainer, Grower(module, torch.randn(2, 4)))
    assert old() is None
    assert isinstance(strategy.model, DistributedDataParallel) and strategy.model.module is module
    module.zero_grad()
    strategy.model(torch.randn(8, 4)).sum().backward()
    assert module.layers[0].weight.grad is not None
    assert torch.equal(kept.grad, torch.full((2,), 8.0))


# Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DDPStrategy(start_method="spawn"), "growlab starts the processes of DDP itself"),
        (FSDPStrategy(), "cannot train with FSDPStrategy"),
        (type("DeepSpeedStrategy", (DDPStrategy,), {})(), "cannot train with DeepSpeedStrategy"),
    ],
    ids=["spawn", "fsdp", "deepspeed"],
)
def test_strategies_that_growth_does_not_support_are_refused(strategy: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_strategy(SimpleNamespace(strategy=strategy))  # type: ignore[arg-type]
    check_strategy(SimpleNamespace(strategy=DDPStrategy(static_graph=True)))  # type: ignore[arg-type]


# Comparing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((torch.float64, (3, 5)), (torch.float32, (70_001,)), (torch.bfloat16, (2, 3, 1, 7))),
        *((torch.int64, (70_001,)), (torch.uint8, (1,)), (torch.bool, (3, 5)), (torch.float32, ())),
    ],
)
def test_checksums_depend_on_values_positions_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 2, shape, generator=source).to(dtype)

    def checksum(tensor: torch.Tensor) -> int:
        names, sums = checksums(iter([("tensor", tensor)]))
        assert names == ["tensor"]
        return int(sums[0])

    assert checksum(tensor) == checksum(tensor.clone())
    flat = tensor.reshape(-1)
    for position in {0, len(flat) // 2, len(flat) - 1}:
        other = flat.clone()
        other[position] = 1 - other[position].to(torch.int64)
        assert checksum(other.view(shape)) != checksum(tensor), position
    if len(flat) > 1:
        moved = flat.clone()
        first, second = int(flat.double().argmax()), int(flat.double().argmin())
        moved[first], moved[second] = flat[second], flat[first]
        assert checksum(moved.view(shape)) != checksum(tensor)
        assert checksum(flat.view(1, -1)) != checksum(flat)
    # They do not depend on the memory layout, and exist for plain values too.
    x = torch.randn(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    _, sums = checksums(iter([("x", x), ("last", last), ("a", {"a": 1}), ("b", {"a": 2}), ("c", {"a": 1})]))
    assert sums[0] == sums[1] and sums[2] == sums[4] != sums[3]


def test_differing_tensors_are_named() -> None:
    assert differing([{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "c": 3}]) == "b"
    many = [dict.fromkeys("abcde", rank) for rank in (0, 1)]
    assert differing(many) == "a, b, c and 2 more"
    assert differing([{"a": 1}, {"a": 1, "b": 2}]) == "b (not on rank 0)"


def test_ranks_agree_on_the_largest_number_or_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growlab.base.ranks.gather", lambda ours: [ours, [2.0, 0.0], [float("nan"), 5.0]])
    one, other = agreed([1.0, 3.0])
    assert one != one and other == 5.0


# Batch normalisation over ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm2d(3), (5, 3, 4, 2)),
        (lambda: nn.BatchNorm1d(3, momentum=None), (6, 3)),
        (lambda: nn.BatchNorm1d(3, momentum=0.0), (6, 3)),
        (lambda: nn.BatchNorm3d(3, affine=False), (4, 3, 2, 2, 2)),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), (5, 3, 4, 2)),
    ],
    ids=["2d", "cumulative", "frozen", "no_weight", "no_statistics"],
)
def test_with_one_process_it_equals_batch_normalisation(group: None, make: Any, shape: tuple[int, ...]) -> None:
    """Outputs, gradients and statistics; tests/runs/test_processes.py compares two processes."""
    torch.manual_seed(0)
    plain, sync = make().double(), nn.Sequential(make().double())
    layers = SynchroniseBatchNorm(on_cpu=True)
    layers.apply(sync)
    x = torch.randn(shape, dtype=torch.float64)
    weights = torch.randn(shape, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for _ in range(3):
        outputs = [module(entry) for module, entry in zip((plain, sync), inputs, strict=True)]
    for output in outputs:
        (output * weights).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for (name, one), (_, other) in zip(plain.state_dict().items(), sync[0].state_dict().items(), strict=True):
        torch.testing.assert_close(other, one, msg=name)
    for one, other in zip(plain.parameters(), sync.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    sync.eval()
    plain.eval()
    torch.testing.assert_close(sync(x), plain(x))


def test_inputs_without_channels_and_layers_of_another_class_are_refused(group: None) -> None:
    network = SynchroniseBatchNorm(on_cpu=True).apply(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="at least 2 dimensions, not 1"):
        network(torch.randn(3))
    other = type("WithActivation", (nn.BatchNorm2d,), {})
    with pytest.raises(UserError, match=r"cannot synchronise 0, a WithActivation"):
        SynchroniseBatchNorm(on_cpu=True).apply(nn.Sequential(other(2)))


def test_revert_restores_the_layers() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(2)))
    modules, before = list(network.modules()), str(network)
    layers = SynchroniseBatchNorm(on_cpu=False)
    assert layers.apply(network) is network
    assert isinstance(network[1], nn.SyncBatchNorm) and isinstance(network[2][0], nn.SyncBatchNorm)
    assert layers.revert(network) is network
    assert list(network.modules()) == modules and str(network) == before
    assert vars(network[1]).keys() == vars(nn.BatchNorm2d(2)).keys()
