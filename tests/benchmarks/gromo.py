"""Seconds of a growth event relative to GroMo's, on the same network and batches.

Both compute TINY's statistics on the first batch and the losses at amplitudes 0 and 1 on the second, GradMax's on both
batches. growlab also compares outputs before and after, counts FLOPs and can undo the event, which GroMo does not.
"""

import copy
import functools
import warnings
from collections.abc import Iterator

import torch

from growlab.growth import GradMax, Tiny
from tests.benchmarks.ratios import Ratio, Setting, timed
from tests.unit.growth.test_gromo import STATISTICS, conv_ours, conv_theirs, grown, ours, theirs

# Small: 40 inputs and 4 neurons, to measure overhead; the others have realistic sizes.
KINDS = {
    "linear, small": (ours, theirs, {}),
    "convolution, small": (conv_ours, conv_theirs, {}),
    "linear": (ours, theirs, {"inputs": 784, "width": 512, "size": 512}),
    "convolution": (conv_ours, conv_theirs, {"inputs": 16, "width": 64, "side": 12}),
}


def events(setting: Setting) -> Iterator[Ratio]:
    """GradMax and TINY events, including checks, relative to GroMo's."""
    warnings.filterwarnings("ignore")
    before = torch.get_default_dtype()
    # GroMo creates tensors of torch's default dtype.
    torch.set_default_dtype(torch.float64)
    try:
        for name in STATISTICS:
            for kind in list(KINDS)[: 1 if setting.small else None]:
                yield _ratio(setting, name, kind)
    finally:
        torch.set_default_dtype(before)


def _ratio(setting: Setting, name: str, kind: str) -> Ratio:
    make, copied, sizes = KINDS[kind]
    method = Tiny(amplitudes=[1.0]) if name == "tiny" else GradMax()
    run = make(method, **sizes)
    start, old = copied(run), run.state.widths["0"]
    count, times = old // 2, ([], [])
    shown, held_out = (run.batches[:1], run.batches[1:]) if name == "tiny" else (run.batches, [])
    options = {**STATISTICS[name], "count": count, "held_out": held_out}
    for _ in range(setting.repeats + 1):
        made = copy.copy(run)
        made.network, made.state = copy.deepcopy(run.network), copy.deepcopy(run.state)
        other = copy.deepcopy(start)
        times[0].append(timed("cpu", functools.partial(made.grow, {"0": old + count})))
        times[1].append(timed("cpu", functools.partial(grown, other, shown, 1.0, **options)))
    mine, gromo = (min(found[1:]) for found in times)
    return Ratio(f"{name} event / GroMo's", kind, mine / gromo, 1.0, 1.0, mine)
