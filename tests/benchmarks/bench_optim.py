"""What rates per region cost: step times on ResNet-18's parameters (11.2 M) after nine stages, as ratios.

`make bench` runs it. Times are taken in turns, A B A B, so that other load hits all alike; "min" compares the best
times and "median" is the median of the ratios within a turn. One thread on a CPU is timed by its own CPU time,
which other processes disturb less.
"""

import statistics
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab.growth import make_schedule
from growlab.optim import SGD, AdamW, BaseRate, NormRatio, weight_regions
from growlab.widths import trace

BATCH = 32
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def resnet18():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    network = resnet18(num_classes=100)
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return network


@pytest.fixture(scope="module")
def regions():
    """Regions by name, as growth in nine stages leaves them."""
    network = resnet18()
    graph = trace(network, torch.randn(2, 3, 32, 32))
    births = {name: [] for name in graph.groups}
    for stage, widths in enumerate(make_schedule(160, 128).widths(graph)):
        for name, born in births.items():
            born.extend([stage] * (widths[name] - len(born)))
    return weight_regions(graph, births)


def prepared(make, regions, device):
    """A step of the optimizer over parameters with gradients of their own."""
    network = resnet18().to(device)
    optimizer = make(network.parameters())
    source = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=source).to(device)
    if hasattr(optimizer, "set_regions"):
        optimizer.set_regions({p: regions[n] for n, p in network.named_parameters() if n in regions})
    return optimizer.step


def seconds(step, device):
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def in_turns(steps, device, turns):
    times = {name: [] for name in steps}
    for turn in range(turns + 3):
        for name, step in steps.items():
            taken = seconds(step, device)
            if turn >= 3:
                times[name].append(taken)
    return times


def ratio(times, a, b):
    turns = sorted(x / y for x, y in zip(times[a], times[b], strict=True))
    return min(times[a]) / min(times[b]), statistics.median(turns)


KINDS = {
    "SGD": (torch.optim.SGD, SGD, {"lr": 1e-6, "momentum": 0.9, "weight_decay": 5e-4}),
    "AdamW": (torch.optim.AdamW, AdamW, {"lr": 1e-6}),
}


def print_times(title, times):
    print(f"\n{title}")
    for name, taken in times.items():
        print(f"  {name:28s} {1e3 * min(taken):8.2f} ms min {1e3 * statistics.median(taken):8.2f} ms median")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_step_time_against_torch(kind, threads, device, regions):
    if device == "cuda" and threads > 1:
        pytest.skip("threads do not matter on a GPU")
    theirs, ours, options = KINDS[kind]
    makers = {
        f"{kind}(foreach)": lambda p: theirs(p, foreach=True, **options),
        f"{kind}(fused)": lambda p: theirs(p, fused=True, **options),
        f"regional {kind}": lambda p: ours(p, rule=NormRatio(), **options),
        f"regional {kind}(fused)": lambda p: ours(p, rule=NormRatio(), fused=True, **options),
        f"{kind}, ages only": lambda p: ours(p, rule=BaseRate(), **options),
    }
    if kind == "SGD":
        makers.popitem()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        times = in_turns({name: prepared(make, regions, device) for name, make in makers.items()}, device, 9)
    finally:
        torch.set_num_threads(before)
    print_times(f"{kind}, {device}, {threads} thread{'s' * (threads > 1)}", times)
    for name in list(makers)[2:4]:
        for reference, target in (
            (f"{kind}(foreach)", 1.05),
            (f"{kind}(fused)", 1.6 if device == "cpu" else 1.1),
        ):
            least, median = ratio(times, name, reference)
            print(f"  {name} / {reference}: {least:.2f} min, {median:.2f} median (target {target})")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 2])
def test_whole_training_step(threads, device, regions):
    """Forward, backward and SGD on ResNet-18 with 32x32 images: how much regional rates add to it."""
    if device == "cuda" and threads > 1:
        pytest.skip("threads do not matter on a GPU")
    network = resnet18().to(device)
    batch = BATCH if device == "cpu" else 128
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(100, (batch,), device=device)

    def backward():
        network.zero_grad()
        F.cross_entropy(network(x), y).backward()

    theirs, ours, options = KINDS["SGD"]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        spent = min(in_turns({"": backward}, device, 2)[""])
        steps = {
            "SGD(foreach)": prepared(lambda p: theirs(p, foreach=True, **options), regions, device),
            "regional SGD": prepared(lambda p: ours(p, rule=NormRatio(), **options), regions, device),
        }
        times = {name: statistics.median(taken) for name, taken in in_turns(steps, device, 9).items()}
    finally:
        torch.set_num_threads(before)
    part = (spent + times["regional SGD"]) / (spent + times["SGD(foreach)"])
    print(
        f"\nwhole step, batch {batch}, {device}, {threads} threads: forward and backward {1e3 * spent:.0f} ms"
    )
    print(f"  with regional SGD / with SGD(foreach): {part:.3f} (target 1.02)")
