"""One pass over the memory of all weights for a step with a rate per region; launched by `gpu.py`.

As `kernels.c` is for a CPU. A program takes one block of consecutive elements of one weight. What it reads of a
weight is a row of `weights`: addresses of the weight, of up to three tensors of state, of the gradient, of the kind of
each row and of the region of each (kind, column), then columns and elements. A row of `blocks` names the weight, the
block's number in it, and the first and last region in its rows. Sums go block by block and then in order, so they are
the same each time.
"""

import triton
import triton.language as tl

WEIGHT_ENTRIES = tl.constexpr(9)
BLOCK_ENTRIES = tl.constexpr(4)


@triton.jit
def _entry(weights, blocks, place: tl.constexpr):
    weight = tl.load(blocks + BLOCK_ENTRIES * tl.program_id(0)).to(tl.int64)
    return tl.load(weights + WEIGHT_ENTRIES * weight + place)


@triton.jit
def _places(weights, blocks, BLOCK: tl.constexpr):
    """Offsets of the block's elements, which of them there are, and the regions of these."""
    columns = _entry(weights, blocks, 7).to(tl.int32)
    i = tl.load(blocks + BLOCK_ENTRIES * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    there = i < _entry(weights, blocks, 8).to(tl.int32)
    row = i // columns
    kinds = _entry(weights, blocks, 5).to(tl.pointer_type(tl.int32))
    regions = _entry(weights, blocks, 6).to(tl.pointer_type(tl.int32))
    kind = tl.load(kinds + row, mask=there, other=0)
    return i, there, tl.load(regions + kind * columns + (i - row * columns), mask=there, other=0)


@triton.jit
def _value(values, blocks, region, there, place: tl.constexpr, num_values: tl.constexpr, num_regions):
    """What differs between regions, of `values` [weights, num_values, num_regions]."""
    weight = tl.load(blocks + BLOCK_ENTRIES * tl.program_id(0))
    return tl.load(values + (weight * num_values + place) * num_regions + region, mask=there, other=0.0)


@triton.jit
def _sum_squares(p, region, there, blocks, sums, num_regions):
    block = tl.program_id(0)
    squares = tl.where(there, p * p, 0.0)
    first = tl.load(blocks + BLOCK_ENTRIES * block + 2)
    last = tl.load(blocks + BLOCK_ENTRIES * block + 3)
    for k in range(first, last + 1):
        total = tl.sum(tl.where(region == k, squares, 0.0), axis=0)
        tl.store(sums + block * num_regions + k, total.to(tl.float64))


@triton.jit
def sgd(
    weights,
    blocks,
    settings,
    values,
    sums,
    num_regions,
    REAL: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
    NEGATED: tl.constexpr,
    DECAYED: tl.constexpr,
    MOVING: tl.constexpr,
    NESTEROV: tl.constexpr,
):
    """SGD's step; flags as in `torch.optim.SGD`, MOVING: with momentum."""
    i, there, region = _places(weights, blocks, BLOCK)
    weight = _entry(weights, blocks, 0).to(tl.pointer_type(REAL))
    p = tl.load(weight + i, mask=there, other=0.0)
    g = tl.load(_entry(weights, blocks, 4).to(tl.pointer_type(REAL)) + i, mask=there, other=0.0)
    rate = _value(values, blocks, region, there, 0, 1, num_regions)
    if NEGATED:
        g = -g
    if DECAYED:
        g += tl.load(settings + 2).to(REAL) * p
    if MOVING:
        momentum = tl.load(settings).to(REAL)
        buffer = _entry(weights, blocks, 1).to(tl.pointer_type(REAL))
        b = momentum * tl.load(buffer + i, mask=there, other=0.0) + tl.load(settings + 1).to(REAL) * g
        tl.store(buffer + i, b, mask=there)
        g = g + momentum * b if NESTEROV else b
    p += g * rate
    tl.store(weight + i, p, mask=there)
    if SUMMED:
        _sum_squares(p, region, there, blocks, sums, num_regions)


@triton.jit
def adam(
    weights,
    blocks,
    settings,
    values,
    sums,
    num_regions,
    REAL: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
    NEGATED: tl.constexpr,
    DECAYED: tl.constexpr,
    DECOUPLED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Adam's step; DECAYED: by the gradient, DECOUPLED: AdamW's way, LARGEST: AMSGrad."""
    i, there, region = _places(weights, blocks, BLOCK)
    num_values: tl.constexpr = 3 if DECOUPLED else 2
    weight = _entry(weights, blocks, 0).to(tl.pointer_type(REAL))
    first = _entry(weights, blocks, 1).to(tl.pointer_type(REAL))
    second = _entry(weights, blocks, 2).to(tl.pointer_type(REAL))
    p = tl.load(weight + i, mask=there, other=0.0)
    g = tl.load(_entry(weights, blocks, 4).to(tl.pointer_type(REAL)) + i, mask=there, other=0.0)
    m = tl.load(first + i, mask=there, other=0.0)
    v = tl.load(second + i, mask=there, other=0.0)
    rate = _value(values, blocks, region, there, 0, num_values, num_regions)
    eps = _value(values, blocks, region, there, 1, num_values, num_regions)
    if NEGATED:
        g = -g
    if DECOUPLED:
        p *= _value(values, blocks, region, there, 2, num_values, num_regions)
    if DECAYED:
        g += tl.load(settings + 2).to(REAL) * p
    m += (1 - tl.load(settings + 3)).to(REAL) * (g - m)
    v = tl.load(settings + 4).to(REAL) * v + (1 - tl.load(settings + 4)).to(REAL) * g * g
    tl.store(first + i, m, mask=there)
    tl.store(second + i, v, mask=there)
    if LARGEST:
        largest = _entry(weights, blocks, 3).to(tl.pointer_type(REAL))
        v = tl.maximum(v, tl.load(largest + i, mask=there, other=0.0))
        tl.store(largest + i, v, mask=there)
    # Where there is nothing, eps is 0 as well.
    p += m / tl.where(there, tl.sqrt(v) + eps, 1.0) * rate
    tl.store(weight + i, p, mask=there)
    if SUMMED:
        _sum_squares(p, region, there, blocks, sums, num_regions)


@triton.jit
def squares(weights, blocks, sums, num_regions, REAL: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of squares alone."""
    i, there, region = _places(weights, blocks, BLOCK)
    p = tl.load(_entry(weights, blocks, 0).to(tl.pointer_type(REAL)) + i, mask=there, other=0.0)
    _sum_squares(p, region, there, blocks, sums, num_regions)


@triton.jit
def add_blocks(starts, sums, totals, num_regions, REGIONS: tl.constexpr, TILE: tl.constexpr):
    """Sums of one weight's blocks: `starts` [weights + 1], `sums` [blocks, regions], `totals` [weights, regions]."""
    weight = tl.program_id(0)
    k = tl.arange(0, REGIONS)
    total = tl.zeros([REGIONS], dtype=tl.float64)
    end = tl.load(starts + weight + 1)
    for start in range(tl.load(starts + weight), end, TILE):
        block = start + tl.arange(0, TILE)
        there = (block < end)[:, None] & (k < num_regions)[None, :]
        places = sums + block[:, None] * num_regions + k[None, :]
        total += tl.sum(tl.load(places, mask=there, other=0.0), axis=0)
    tl.store(totals + weight * num_regions + k, total, mask=k < num_regions)
