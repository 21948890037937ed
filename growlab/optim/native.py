"""Steps with a rate per region in one pass over memory, in C where the machine has a compiler.

A step is bound by memory. torch's operations pass over a weight several times, even in blocks that fit in cache;
`kernels.c` passes once: it reads weight, gradient and state, writes weight and state, and sums the squares that the
next rates need while it has them. It rounds as torch's operations do, so which way is taken changes no weight but
through the rounding of the summed norms and, with Adam, of the square root.

The file is compiled once in a process (half a second), into a folder that is removed at once. Without a compiler
(`CC`, else cc), or with `GROWLAB_NATIVE=0` in the environment, `blocks.py` does the same with torch's operations.
"""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from growlab.optim.regions import Regions

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC"),
    # Products are added with one rounding where torch does it, and nowhere else.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_TYPES = {
    torch.float32: ("float", "__builtin_fmaf", "__builtin_sqrtf"),
    torch.float64: ("double", "__builtin_fma", "__builtin_sqrt"),
}
# Elements in a block: what threads share out among themselves. Smaller ones cost more for their rates.
_BLOCK_ELEMENTS = 2**17


class Settings(ctypes.Structure):
    """Numbers that are the same for all regions."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("momentum", "undamped", "decay", "beta1", "beta2")),
        *((name, ctypes.c_int64) for name in ("nesterov", "maximize", "decoupled")),
    )


@dataclass(frozen=True, eq=False)
class Table:
    """How one weight is cut into blocks of rows of one kind.

    Attributes:
        columns: of the weight as a matrix.
        runs: for each kind of row, region and end of each run of columns of one region, int32 [kinds, runs, 2].
        blocks: int64 [blocks, 4]: 0, first row, number of rows, kind.
    """

    columns: int
    runs: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, weight: Tensor, regions: Regions) -> "Table | None":
        """The table of a weight [O, I, ...] or vector [I]; None where no kernel takes it."""
        if weight.device.type != "cpu" or library(weight.dtype) is None:
            return None
        contiguous = weight.is_contiguous()
        last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
        last = last and regions.num_column_axes == 1
        if weight.numel() == 0 or not (contiguous or last):
            return None
        rows = regions.rows_O.tolist()
        births, kind_of = torch.unique(regions.rows_O, return_inverse=True)
        index_KI = regions.index_of(births).int()
        inner = weight.numel() // (len(rows) * index_KI.shape[1])
        index = index_KI.repeat_interleave(inner, 1) if contiguous else index_KI.repeat(1, inner)
        starts = [i for i, birth in enumerate(rows) if i == 0 or birth != rows[i - 1]]
        columns = index.shape[1]
        most = max(1, _BLOCK_ELEMENTS // columns)
        kinds = kind_of.tolist()
        blocks = [
            (0, row, min(end, row + most) - row, kinds[row])
            for start, end in pairwise([*starts, len(rows)])
            for row in range(start, end, most)
        ]
        runs = []
        for regions_C in index:
            region, lengths = torch.unique_consecutive(regions_C, return_counts=True)
            runs.append(torch.stack([region, lengths.cumsum(0).int()], 1))
        # Kinds with fewer runs are padded with empty ones.
        padded = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True)
        return cls(columns, padded.contiguous(), torch.tensor(blocks))


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled kernels for a dtype; None where there are none."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or ""]
    if dtype not in _TYPES or os.environ.get("GROWLAB_NATIVE") == "0" or not compiler[0]:
        return None
    real, fma, sqrt = _TYPES[dtype]
    with tempfile.TemporaryDirectory(prefix="growlab-") as folder:
        target = Path(folder) / "kernels.so"
        defines = (f"-DREAL={real}", f"-DFMA={fma}", f"-DSQRT={sqrt}")
        # OpenMP's library is the one that torch has loaded, and so are its threads: others would have to wait for
        # these, which go on running for a while in case there is more to do. Without OpenMP a step takes one thread.
        problem: Exception | None = None
        for threads in (("-fopenmp",), ()):
            command = [*compiler, *_FLAGS, *threads, *defines, str(_SOURCE), "-o", str(target)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
                return ctypes.CDLL(str(target))
            except (OSError, subprocess.SubprocessError) as error:
                problem = error
        _LOG.info("steps take torch's operations: %s (%s)", problem, getattr(problem, "stderr", ""))
        return None


@lru_cache(maxsize=32)
def _joined(tables: tuple[Table, ...]) -> Tensor:
    """The blocks of several weights, each with its weight's place in the list."""
    blocks = torch.cat([table.blocks for table in tables])
    blocks[:, 0] = torch.cat([torch.full((len(table.blocks),), i) for i, table in enumerate(tables)])
    return blocks


def step(
    name: str,
    settings: Mapping[str, float],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    values_VPK: Tensor,
    tables: Sequence[Table],
    summed: bool,
) -> Tensor | None:
    """Update weights and state in place.

    Args:
        name: which kernel: sgd, adam, or squares, which changes nothing.
        settings: the parameter group's.
        params: weights, P of them, alike in dtype.
        grads: their gradients, that lie as the weights do and have their dtype, as all that follows.
        states: up to three lists of state tensors.
        values_VPK: what differs between regions.
        tables: of the weights.
        summed: return the sums of squares of the new weights by region, float64 [P, K].
    """
    kernels = library(params[0].dtype)
    assert kernels is not None
    num_values, num_params, num_regions = values_VPK.shape
    values_PVK = values_VPK.transpose(0, 1).to(params[0].dtype).contiguous()
    bytes_each = num_values * num_regions * values_PVK.element_size()
    rows = []
    for i, (param, grad, table) in enumerate(zip(params, grads, tables, strict=True)):
        pointers = [entries[i].data_ptr() for entries in states] + [0] * (3 - len(states))
        values = values_PVK.data_ptr() + i * bytes_each
        shape = (table.columns, num_regions, table.runs.shape[1])
        rows.append((param.data_ptr(), *pointers, grad.data_ptr(), values, table.runs.data_ptr(), *shape))
    weights = torch.tensor(rows, dtype=torch.int64)
    blocks = _joined(tuple(tables))
    sums = torch.zeros(len(blocks), num_regions, dtype=torch.float64) if summed else None
    failed = getattr(kernels, name)(
        *(ctypes.c_void_p(t.data_ptr()) for t in (weights, blocks)),
        ctypes.byref(Settings(**settings)),
        ctypes.c_void_p(None if sums is None else sums.data_ptr()),
        *(ctypes.c_int64(n) for n in (len(blocks), num_values, num_regions)),
        ctypes.c_int64(max(table.columns for table in tables)),
        ctypes.c_int64(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("no memory for the rates of a step")
    if name != "squares":
        torch.autograd.graph.increment_version([*params, *(t for entries in states for t in entries)])
    if sums is None:
        return None
    return torch.zeros(num_params, num_regions, dtype=torch.float64).index_add_(0, blocks[:, 0], sums)


def square_sums(weight: Tensor, table: Table, num_regions: int) -> Tensor:
    """Sums of squares by region as a step leaves them, to the last bit: float64 [K]."""
    nothing = torch.zeros(0, 1, num_regions)
    sums = step("squares", {}, [weight], [weight], [], nothing, [table], summed=True)
    assert sums is not None
    return sums[0]
