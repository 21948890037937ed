"""Batch sizes that fit into memory: search, trial steps, and the count of live tensors."""

import contextlib
import weakref
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from growlab.base.errors import UserError
from growlab.growth.schedule import stage_batch_sizes
from growlab.lab.training.batch_fit import LiveTensors, TrialRun, TrialSteps, _sizes, fit_batch_sizes
from growlab.widths import trace

EQ8 = {
    "batch_growth_rate": 0.2,
    "max_batch_size": None,
    "max_batch_size_per_device": None,
    "batch_size_stage": "last",
    "batch_sizes": None,
}


def fitted(limits: list[int], num_train: int = 10_000, processes: int = 1, agree=int, **changes) -> list[int]:
    """Return the batch sizes if `limits` images fit on a device in each stage."""
    stages = fit_batch_sizes(
        len(limits), EQ8 | changes, num_train, processes, lambda stage, size: size <= limits[stage], agree
    )
    return [stage["batch_size"] for stage in stages]


# The search -------------------------------------------------------------------------------------------------


def test_sizes_are_by_equation_8_if_they_fit_and_else_by_memory() -> None:
    assert fitted([1000, 1000, 128]) == [185, 154, 128] == stage_batch_sizes(3, 128, 0.2)
    assert fitted([170, 1000, 128]) == [160, 154, 128]
    assert fitted([1000, 1000, 1000], batch_size_stage="first") == [960, 800, 667]
    assert fitted([1000, 500, 1000], batch_size_stage="first") == [960, 480, 667]


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"max_batch_size": 100}, [100, 100, 100]),
        ({"max_batch_size": 100, "batch_growth_rate": 0.0}, [100, 100, 100]),
        ({"num_train": 150}, [150, 150, 128]),
        ({"processes": 4}, [736, 616, 512]),
        ({"processes": 4, "max_batch_size_per_device": 140}, [560, 560, 512]),
        ({"processes": 4, "max_batch_size_per_device": 100}, [400, 400, 400]),
        # The process with the least memory decides.
        ({"processes": 2, "agree": lambda size: min(size, 60)}, [120, 120, 120]),
    ],
)
def test_sizes_respect_limits_and_divide_among_processes(changes: dict, sizes: list[int]) -> None:
    assert fitted([1000, 1000, 128], **changes) == sizes


@given(st.integers(2, 100_000), st.integers(2, 100_000))
def test_the_largest_size_is_found_to_an_eighth_of_an_octave(limit: int, at_most: int) -> None:
    (size,) = fitted([limit], num_train=at_most)
    assert size <= min(limit, at_most) < 1.13 * size + 1
    sizes = _sizes(at_most)
    assert sizes[0] == 2 and sizes[-1] == at_most and all(smaller < larger for smaller, larger in pairwise(sizes))


@pytest.mark.parametrize(
    ("limits", "changes", "sentence"),
    [
        ([100, 1], {}, "not even 2 images on each device fit into memory in stage 1 of 0 to 1;"),
        ([1, 100], {}, "not even 2 images on each device fit into memory in stage 0 of 0 to 1;"),
        ([9, 9], {"max_batch_size": 7, "processes": 4}, "room for 2 images on each of 4 devices"),
        ([9, 9], {"batch_sizes": [4, 2]}, "leave schedule.batch_sizes out"),
    ],
)
def test_without_a_size_that_fits_there_is_an_error(limits: list[int], changes: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        fitted(limits, **changes)


# Trial steps ------------------------------------------------------------------------------------------------


class Network(nn.Sequential):
    """Convolutional network that runs out of memory above `most` images times channels."""

    seen: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, width: int, most: int | None = None) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 5),
        )
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.most is not None and self.training:
            self.seen.append((len(x), self[0].out_channels))
            if len(x) * self[0].out_channels > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much.")
        return super().forward(x)


def trial(network: Network, gib: float | None = 1.0, **changes) -> TrialRun:
    graph = trace(network, torch.zeros(2, 1, 8, 8))
    network.seen.clear()
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    device = torch.device("cpu")
    return TrialRun(network, graph, make, Precision(), device, (1, 8, 8), max_memory_gib=gib, **changes)


def test_the_last_steps_parameters_are_freed_at_the_end() -> None:
    parameter_refs: list[weakref.ref] = []

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        parameter_refs.extend(map(weakref.ref, parameters))
        return torch.optim.SGD(parameters, lr=0.1)

    run = replace(trial(Network(8)), make_optimizer=make)
    with TrialSteps(run, stages(run, 4)) as steps:
        assert steps.fits(0, 2)
        assert all(ref() is not None for ref in parameter_refs)
    assert parameter_refs and all(ref() is None for ref in parameter_refs)
    del steps  # still alive here


def stages(run: TrialRun, *widths: int) -> list[dict[str, int]]:
    return [dict.fromkeys(run.graph.full_widths, width) for width in widths]


def test_trials_catch_out_of_memory_errors_and_have_no_side_effects() -> None:
    run = trial(Network(8, most=400))
    before = {name: tensor.clone() for name, tensor in run.network.state_dict().items()}
    torch.manual_seed(0)
    random = torch.get_rng_state()
    with TrialSteps(run, stages(run, 4, 8)) as steps:
        sizes = fit_batch_sizes(2, EQ8, 1000, 1, steps.fits, int)
        assert [(stage["eq8"], stage["batch_size"]) for stage in sizes] == [(58, 58), (48, 48)]
        # 100 * 4 fits exactly, and the device still works after running out of memory.
        assert steps.fits(0, 100) and not steps.fits(0, 101) and steps.fits(0, 100)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.network.state_dict().items())
    assert {channels for _, channels in run.network.seen} == {4, 8}


def test_other_errors_are_raised() -> None:
    run = trial(Network(4))
    run.network[6].register_forward_pre_hook(lambda layer, inputs: inputs[0].view(-1, 3, 4))
    with TrialSteps(run, stages(run, 4)) as steps, pytest.raises(RuntimeError, match="invalid for input"):
        steps.fits(0, 4)


def test_on_a_cpu_no_step_beyond_the_limit_is_tried() -> None:
    network = Network(8, most=10**9)
    run = trial(network, gib=8 / 1024)
    with TrialSteps(run, stages(run, 8)) as steps:
        assert steps.limit_bytes == 8 * 2**20
        (size,) = (stage["batch_size"] for stage in fit_batch_sizes(1, EQ8, 10**6, 1, steps.fits, int))
        tried = max(images for images, _ in network.seen)
        assert tried <= size, "a step that would not fit was not tried"
        assert not steps.fits(0, 2 * size)
        # At least four float tensors [B, 8, 8, 8] (convolution, normalisation, ReLU, dropout) and a mask.
        assert size < 8 * 2**20 / (4 * 4 * 512) < 2 * size
    with TrialSteps(trial(network, gib=8 / 1024, held_bytes=4 * 2**20), stages(run, 8)) as steps:
        (other,) = (stage["batch_size"] for stage in fit_batch_sizes(1, EQ8, 10**6, 1, steps.fits, int))
        assert other == pytest.approx(size / 2, rel=0.15), "the data take half of the memory"


def test_a_narrower_network_fits_more_images() -> None:
    run = trial(Network(8), gib=4 / 1024, num_copies=1)
    with TrialSteps(run, stages(run, 4, 8)) as steps:
        sizes = fit_batch_sizes(2, EQ8 | {"batch_growth_rate": 5.0}, 10**6, 1, steps.fits, int)
    narrow, wide = (one["batch_size"] for one in sizes)
    assert 1.7 * wide < narrow < 2.2 * wide and sizes[0]["eq8"] == 6 * wide


def test_a_limit_is_required_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"set schedule\.max_memory_gib_per_device"):
        TrialSteps(trial(Network(4), gib=None), [])


# The count --------------------------------------------------------------------------------------------------


def test_tensors_are_counted_until_they_are_freed() -> None:
    weight = torch.zeros(100, 100, requires_grad=True)
    live = LiveTensors([weight, weight.view(-1)])
    assert live.bytes == 40_000
    with live:
        x = torch.ones(10, 100)
        y = (x @ weight).exp()
        assert live.bytes == live.peak - 4000 == 40_000 + 2 * 4000, "exp only saves its result"
        view = y[:5]
        del y
        assert live.bytes == 48_000, "the view keeps the whole storage"
        view.sum().backward()
        assert live.bytes >= 88_000, "the gradient"
    del view, x
    weight.grad = None
    assert live.bytes == 40_000


@pytest.mark.gpu
def test_trials_on_a_gpu_respect_the_limit_and_free_its_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    run = trial(Network(64), gib=0.5)
    run = TrialRun(**(vars(run) | {"device": device}))
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    # cuBLAS keeps a workspace for each thread.
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with TrialSteps(run, stages(run, 32, 64)) as steps:
        sizes = fit_batch_sizes(2, EQ8 | {"batch_growth_rate": 5.0}, 10**6, 1, steps.fits, int)
        assert torch.cuda.max_memory_allocated(device) <= 2**29
    narrow, wide = (one["batch_size"] for one in sizes)
    # At least four float tensors [B, 64, 8, 8].
    assert 100 < wide < 2**29 / (4 * 4 * 64 * 64) and 1.5 * wide < narrow < 2.5 * wide
    assert torch.cuda.get_per_process_memory_fraction(device) == fraction
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated(device) == before
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(2**30, dtype=torch.uint8, device=device)
