"""Steps with a rate per region in one launch over all weights, on a GPU; what `native.py` is for a CPU.

On a GPU a step in torch's operations is bound by the number of launches (some eight for each weight) and passes over
memory several times. `triton_kernels.py` takes all weights of a group at once and passes once. Triton comes with
torch's GPU builds; without it, where it fails, and with `GROWLAB_NATIVE=0`, torch's operations do the same up to
rounding. Nothing here waits for the GPU.
"""

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from growlab.optim.regions import Regions

_LOG = logging.getLogger(__name__)
_BLOCK_ELEMENTS = 1024
_TILE = 64
_DTYPES = (torch.float32, torch.float64)
# Products are added with one rounding, as torch's kernels do; said, since Triton's default changes with its version.
_COMPILED = {"enable_fp_fusion": True}
_SETTINGS = ("momentum", "undamped", "decay", "beta1", "beta2")


@dataclass(frozen=True, eq=False)
class Table:
    """Where the regions of one weight lie in memory.

    Attributes:
        columns: of the weight as a matrix.
        kinds: of each row: rows of one kind have the same regions; int32 [O].
        regions: of each column, by kind of row; int32 [kinds, columns].
        blocks: int32 [blocks, 4]: 0, number, first and last region that its rows have.
    """

    columns: int
    kinds: Tensor
    regions: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, weight: Tensor, regions: Regions) -> "Table | None":
        """The table of a weight [O, I, ...] or vector [I]; None where no kernel takes it."""
        if not available(weight.device, weight.dtype):
            return None
        return cls.made_for(weight, regions)

    @classmethod
    def made_for(cls, weight: Tensor, regions: Regions) -> "Table | None":
        """As `of`, whatever the device."""
        contiguous = weight.is_contiguous()
        last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
        last = last and regions.num_column_axes == 1
        if not 0 < weight.numel() < 2**31 - _BLOCK_ELEMENTS or not (contiguous or last):
            return None
        births, kinds = torch.unique(regions.rows_O, return_inverse=True)
        index_KI = regions.index_of(births).int()
        inner = weight.numel() // (len(kinds) * index_KI.shape[1])
        index = index_KI.repeat_interleave(inner, 1) if contiguous else index_KI.repeat(1, inner)
        columns = index.shape[1]
        numbers = torch.arange(0, weight.numel(), _BLOCK_ELEMENTS)
        first_rows = (numbers // columns).tolist()
        last_rows = ((numbers + _BLOCK_ELEMENTS).clamp(max=weight.numel()).sub(1) // columns).tolist()
        # Per row, then over the rows of a block.
        smallest, greatest = (table[kinds].tolist() for table in (index.amin(1), index.amax(1)))
        blocks = [
            (0, number, min(smallest[a : b + 1]), max(greatest[a : b + 1]))
            for number, (a, b) in enumerate(zip(first_rows, last_rows, strict=True))
        ]
        on_device = torch.tensor(blocks, dtype=torch.int32, device=weight.device)
        return cls(columns, kinds.int(), index.contiguous(), on_device)


@cache
def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device and sum rightly there."""
    if device.type != "cuda" or dtype not in _DTYPES or os.environ.get("GROWLAB_NATIVE") == "0":
        return False
    weight = torch.arange(3 * _BLOCK_ELEMENTS, device=device, dtype=dtype).remainder(7).view(-1, 3)
    regions = Regions((torch.arange(len(weight)) * 2 // len(weight)).to(device), torch.arange(3).to(device))
    try:
        table = Table.made_for(weight, regions)
        assert table is not None
        found = square_sums(weight, table, regions.num_regions)
        # Small whole numbers: every order of sums gives the same.
        if not torch.equal(found, regions.sums(weight.double().square())):
            raise ArithmeticError("its sums are wrong")
    except Exception as error:
        # Whatever a compiler on somebody's machine may raise: a step can be taken without it.
        _LOG.warning("optimizer steps take torch's operations, since Triton fails here: %s", error)
        return False
    return True


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

    Takes and returns what `native.step` does, all of it on one device.
    """
    device, dtype = params[0].device, params[0].dtype
    num_regions = values_VPK.shape[2]
    weights, blocks, starts = _addresses(params, grads, states, tables)
    numbers = tuple(float(settings.get(key, 0.0)) for key in _SETTINGS)
    sums = torch.zeros(len(blocks) if summed else 0, num_regions, dtype=torch.float64, device=device)
    flags = {
        "sgd": {"MOVING": bool(states), "NESTEROV": bool(settings.get("nesterov"))},
        "adam": {"DECOUPLED": bool(settings.get("decoupled")), "LARGEST": len(states) == 3},
    }
    with _current(device):
        getattr(_kernels(), name)[(len(blocks),)](
            weights,
            blocks,
            _numbers(numbers, device),
            values_VPK.transpose(0, 1).to(dtype).contiguous(),
            sums,
            num_regions,
            REAL=_real(dtype),
            BLOCK=_BLOCK_ELEMENTS,
            SUMMED=summed,
            NEGATED=bool(settings.get("maximize")),
            DECAYED=bool(settings.get("decay")),
            **flags[name],
            **_COMPILED,
        )
        totals = _added(starts, sums, len(params)) if summed else None
    torch.autograd.graph.increment_version([*params, *(t for entries in states for t in entries)])
    return totals


def square_sums(weight: Tensor, table: Table, num_regions: int) -> Tensor:
    """Sums of squares by region as a step leaves them, to the last bit: float64 [K]."""
    weights, blocks, starts = _addresses([weight], [weight], [], [table])
    sums = torch.zeros(len(blocks), num_regions, dtype=torch.float64, device=weight.device)
    with _current(weight.device):
        _kernels().squares[(len(blocks),)](
            weights, blocks, sums, num_regions, REAL=_real(weight.dtype), BLOCK=_BLOCK_ELEMENTS, **_COMPILED
        )
        return _added(starts, sums, 1)[0]


def handed_over(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting until the device has done what it has to do already."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _added(starts: Tensor, sums: Tensor, num_params: int) -> Tensor:
    num_regions = sums.shape[1]
    totals = torch.empty(num_params, num_regions, dtype=torch.float64, device=sums.device)
    lanes = 1 << (num_regions - 1).bit_length()
    _kernels().add_blocks[(num_params,)](
        starts, sums, totals, num_regions, REGIONS=lanes, TILE=_TILE, **_COMPILED
    )
    return totals


def _addresses(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    tables: Sequence[Table],
) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels read: rows of weights and of blocks, and where each weight's blocks start."""
    rows = []
    for i, (param, grad, table) in enumerate(zip(params, grads, tables, strict=True)):
        state = [entries[i].data_ptr() for entries in states] + [0] * (3 - len(states))
        places = (table.kinds.data_ptr(), table.regions.data_ptr())
        rows.append((param.data_ptr(), *state, grad.data_ptr(), *places, table.columns, param.numel()))
    # A tensor's memory is mostly where it was a step ago.
    return _rows(tuple(rows), params[0].device), *_joined(tuple(tables))


@lru_cache(maxsize=64)
def _rows(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return handed_over(torch.tensor(rows, dtype=torch.int64), device)


@lru_cache(maxsize=32)
def _joined(tables: tuple[Table, ...]) -> tuple[Tensor, Tensor]:
    """Blocks of several weights, each with its weight's place in the list, and where each weight's start."""
    blocks = torch.cat([table.blocks for table in tables])
    lengths = torch.tensor([len(table.blocks) for table in tables])
    blocks[:, 0] = torch.arange(len(tables)).repeat_interleave(lengths).to(blocks)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return blocks, starts.int().to(blocks.device)


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return handed_over(torch.tensor(numbers, dtype=torch.float64), device)


def _current(device: torch.device) -> Any:
    """The kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _kernels() -> Any:
    return importlib.import_module("growlab.optim.triton_kernels")


def _real(dtype: torch.dtype) -> Any:
    language = importlib.import_module("triton.language")
    return language.float32 if dtype is torch.float32 else language.float64
