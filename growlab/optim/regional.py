"""Base class of optimizers with a rate per region of a weight, whose steps run over pieces of weights.

On a CPU an optimizer's step is memory-bound: it is computed piece by piece while a piece is in cache, together with the
norm for the next step. Rows of a weight that were added at the same stage are contiguous and have the same rates along
the columns: such a run of rows, as a matrix, is a piece, and its rates are one row vector. If runs are short, a piece
has several of them, its rates are a matrix, and its squares are summed by a product with a one-hot matrix. Elsewhere
(GPUs, other memory layouts) a piece is a whole weight and its rates a tensor of its size, so that a step takes the same
few kernels for any number of weights: see `Flat`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from growlab.optim.rates import BaseRate, RateRule
from growlab.optim.regions import Regions
from growlab.optim.settings import check_settings

Update = Callable[..., None]
_SAME = (torch.float32, torch.float64)
# Most elements for which torch's foreach functions are used: their temporaries then fit in cache.
_MOST_TOGETHER = 2**18
# Elements in a piece and in a batch of pieces. Measured on ResNet-18 (11.2 M parameters): 2^17 to 2^18 are best,
# 2^15 is slower by operation overhead and 2^20 by leaving the cache.
BLOCK_ELEMENTS = 2**18
# Runs shorter than this on average share a piece: one operation over several is faster than several operations.
_SHORT_RUN = 2**16
# With more runs than this (a fused qkv projection of many heads), operation overhead outweighs the cache.
_MAX_RUNS = 64
# Longer segments are cut: on a GPU a single block of threads sums a segment.
_LONGEST = 4096
# Output buffer of sums over rows: a row [C], or a matrix [R, C] and the one-hot matrix [R, rows] of its runs.
SumRows = tuple[Tensor, Tensor | None]


class Regional(torch.optim.Optimizer):
    """Base of optimizers whose rate differs between the regions of a weight.

    With the update d that the optimizer computes at its learning rate, region k of a weight moves by

        W_k <- W_k + scale * factor_k * d_k,    factor_k = rule(||W_0||, ||W_1||, ...)_k

    (Yuan et al. 2023, Eq. 5). The factor multiplies the whole update, weight decay included. Vectors (biases, norm
    parameters) and tensors outside of layers (embeddings, tables) keep the base rate. Parameters without regions, and
    weights with a single one, are updated by torch's own function.

    Args:
        args: arguments of torch's optimizer.
        rule: turns region norms into factors; None treats every parameter as one region.
        kwargs: arguments of torch's optimizer.

    Attributes:
        divide_output_lr_by_fan_in: divide the rate of a network's output layers by their fan-in in the seed, C_0 (Table
            1); a Grower does so when it sets regions.
    """

    divide_output_lr_by_fan_in: bool = False

    def __init__(self, *args: Any, rule: RateRule | None = None, **kwargs: Any) -> None:
        # First, since torch compares values of wrong types.
        check_settings(dict(zip(signature(super().__init__).parameters, args, strict=False)) | kwargs)
        super().__init__(*args, **kwargs)
        # A step by regions cannot unscale gradients, as torch's fused kernels do.
        self._step_supports_amp_scaling = False
        self.rule = rule
        self._regions: dict[Tensor, Regions] = {}
        self._scales: dict[Tensor, float] = {}
        self._pieces: dict[Tensor, Pieces] = {}
        # By the first weight of each list.
        self._flat: dict[Tensor, Flat] = {}
        # Likewise: values that subclasses cache until regions change.
        self._kept: dict[Tensor, Any] = {}
        self._square_sums: dict[Tensor, tuple[int, int, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        names = (
            "_rule",
            "_spares_one",
            "_regions",
            "_scales",
            "_step_supports_amp_scaling",
            "divide_output_lr_by_fan_in",
        )
        state = {name: self.__dict__[name] for name in names if name in self.__dict__}
        return {**super().__getstate__(), **state, "_pieces": {}, "_flat": {}, "_kept": {}, "_square_sums": {}}

    @property
    def rule(self) -> RateRule | None:
        """The rate rule."""
        return self._rule

    @rule.setter
    def rule(self, rule: RateRule | None) -> None:
        if rule is not None and (isinstance(rule, type) or not hasattr(rule, "factors")):
            raise ValueError(f"rule={rule!r} must be a rate rule, such as growlab.optim.NormRatio(), or None.")
        self._rule = rule
        # If the rule gives a single region the base rate, weights that never grew need no extra work.
        self._spares_one = rule is not None and bool((rule.factors(torch.tensor([2.0], device="cpu")) == 1.0).all())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do.

        Raises:
            ValueError: a setting of the group is invalid.
        """
        if isinstance(param_group, dict):
            check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def set_regions(self, regions: Mapping[Tensor, Regions], scales: Mapping[Tensor, float] | None = None) -> None:
        """Set the birth stages of parameters' elements; call it again after every growth event.

        Args:
            regions: regions by parameter.
            scales: additional factors on parameters' rates (1 / C_0 on the output layer, Table 1).

        Raises:
            ValueError: regions do not have the parameter's shape, or belong to a complex parameter.
        """
        for param, region in regions.items():
            if not region.fits(param):
                shape = (len(region.rows_O), len(region.columns_I))
                raise ValueError(f"regions of {shape} do not fit a weight of {tuple(param.shape)}")
            if param.is_complex() and region.has_rates(param):
                raise ValueError("complex parameters have no regional rates; leave them out of the regions")
        self._regions = {p: region.to(p.device) for p, region in regions.items() if not p.is_complex()}
        self._scales = dict(scales or {})
        self._pieces, self._flat, self._kept, self._square_sums = {}, {}, {}, {}

    def factors(self, param: Tensor) -> Tensor | None:
        """Current rate factor of each region of a weight, [K]; None for vectors and others at the base rate."""
        if self._rule is None or param not in self._regions or not self._regions[param].has_rates(param):
            return None
        return self._rule.factors(self._norms(param)) * self._scales.get(param, 1.0)

    def region_norms(self, param: Tensor) -> tuple[Tensor, Tensor] | None:
        """Stages [K] and Frobenius norms [K] of a parameter's regions; None if it has none."""
        regions = self._regions.get(param)
        return None if regions is None else (regions.stages, self._norms(param))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one update.

        Args:
            closure: computes the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable", False))):
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        plain: list[Tensor] = []
        regional: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
        for param in params:
            if self._is_regional(param):
                regional.setdefault((param.device, param.dtype, self._is_cut(param)), []).append(param)
            else:
                plain.append(param)
        if plain:
            self._step_plain({**group, "params": plain})
        if regional and group.get("capturable"):
            raise RuntimeError(
                f"{type(self).__name__} cannot step regions inside a CUDA graph: their rates are recomputed from "
                f"the weights; leave capturable=False, or the parameters out of set_regions"
            )
        for together in regional.values():
            if any(p.grad.is_sparse for p in together if p.grad is not None):
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients of regions")
            self._step_regional({**group, "params": together}, self._factors(together))

    def _step_plain(self, group: dict[str, Any]) -> None:
        """Update the group's parameters by torch's function."""
        raise NotImplementedError

    def _foreach(self, group: dict[str, Any]) -> bool | None:
        """Return torch's `foreach` argument: True for small dense parameters on a CPU.

        On a CPU this is faster for many small vectors, with equal results in single and double precision (not in half);
        large tensors would need more memory.
        """
        if group["foreach"] is not None or group["fused"] or group["differentiable"]:
            return group["foreach"]
        params = group["params"]
        dense = all(p.device.type == "cpu" and p.dtype in _SAME and not p.grad.is_sparse for p in params)
        small = sum(p.numel() for p in params) <= _MOST_TOGETHER
        return True if dense and small and not isinstance(group["lr"], Tensor) else None

    def _step_regional(self, group: dict[str, Any], factors_PK: Tensor) -> None:
        """Update the group's parameters with rate factors [P, K], padded."""
        raise NotImplementedError

    def _is_regional(self, param: Tensor) -> bool:
        regions = self._regions.get(param)
        if regions is None or self._rule is None or not regions.has_rates(param):
            return False
        if not self._spares_one or (self._scales and self._scales.get(param, 1.0) != 1.0):
            return True
        return regions.num_regions > 1 and not isinstance(self._rule, BaseRate)

    def _factors(self, params: Sequence[Tensor]) -> Tensor:
        """Rate factors of parameters' regions, [P, K], padded."""
        assert self._rule is not None
        norms_PK = self._squares(params).sqrt_()
        device = norms_PK.device
        unrated = [i for i, p in enumerate(params) if not self._regions[p].has_rates(p)]
        if unrated:
            rows = to_device(torch.tensor(unrated, device="cpu"), device)
            norms_PK = norms_PK.index_fill(0, rows, 1.0)
        factors_PK = self._rule.factors(norms_PK)
        if self._scales:
            scales = torch.tensor([self._scales.get(p, 1.0) for p in params], dtype=factors_PK.dtype, device="cpu")
            factors_PK = factors_PK * to_device(scales, device)[:, None]
        if unrated:
            factors_PK = factors_PK.index_fill(0, rows, 1.0)
        return factors_PK

    def _sweep(
        self, params: Sequence[Tensor], tensors: Sequence[Sequence[Tensor]], values_PK: Sequence[Tensor], update: Update
    ) -> None:
        """Run `update(weights, *tensors, *values)`, with lists of equal length, over batches of pieces, in place.

        Either all `params` are cut into pieces or none. `tensors` are lists of gradients and state in the order of
        `params`. `values_PK` are passed to `update` spread over the elements, in shapes that broadcast with the pieces.
        """
        values_PK = [values.to(params[0].device, params[0].dtype) for values in values_PK]
        if not self._is_cut(params[0]):
            flat = self._flattened(params)
            update(params, *tensors, *[flat.spread(values) for values in values_PK])
            return
        cuts = [self._cut(p) for p in params]
        lists: list[list[Tensor]] = []
        for entries in (params, *tensors):
            lists.append([piece for cut, t in zip(cuts, entries, strict=True) for piece in cut.cut(t)])
        for values in values_PK:
            lists.append([row for cut, row_K in zip(cuts, values.unbind(0), strict=True) for row in cut.rates(row_K)])
        needs_norms = not isinstance(self._rule, BaseRate)
        sum_rows = [row for cut in cuts for row in cut.sum_rows] if needs_norms else []
        for part in batches([n for cut in cuts for n in cut.elements]):
            update(*(pieces[part] for pieces in lists))
            if needs_norms:
                add_squares(lists[0][part], sum_rows[part])
        if needs_norms:
            for param, cut in zip(params, cuts, strict=True):
                self._square_sums[param] = (param._version, param.data_ptr(), cut.take_sums())

    def _gradients(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients with the strides of their parameters."""
        return [aligned(p.grad, p) for p in params if p.grad is not None]

    def _aligned_state(self, param: Tensor, key: str) -> Tensor:
        """Return a state tensor with the strides of its parameter; those of a checkpoint may differ."""
        state = self.state[param]
        state[key] = aligned(state[key], param)
        return state[key]

    def _cut(self, param: Tensor) -> "Pieces":
        pieces = self._pieces.get(param)
        if pieces is None or not pieces.matches(param):
            regions = self._regions[param].to(param.device)
            pieces = self._pieces[param] = Pieces(param, regions)
        return pieces

    def _is_cut(self, param: Tensor) -> bool:
        """Return True if steps run over pieces of the parameter, False if over whole parameters."""
        if param.device.type != "cpu" or self.defaults.get("differentiable", False):
            return False
        return not self._cut(param).whole

    def _flattened(self, params: Sequence[Tensor]) -> "Flat":
        flat = self._flat.get(params[0])
        if flat is None or not flat.matches(params):
            regions = [self._regions[p].to(p.device) for p in params]
            flat = self._flat[params[0]] = Flat(params, regions)
        return flat

    def _squares(self, params: Sequence[Tensor]) -> Tensor:
        """Sums of squares of parameters' regions, [P, K], padded with 0.

        On a CPU, sums from the end of the last step are reused while the parameter's version counter and storage are
        the same. Writes through `.data` do not change the version and take effect one step later.
        """
        if isinstance(self._rule, BaseRate):
            num_regions = max(self._regions[p].num_regions for p in params)
            dtype = torch.promote_types(params[0].dtype, torch.float32)
            return torch.ones(len(params), num_regions, dtype=dtype, device=params[0].device)
        if not any(map(self._is_cut, params)):
            return self._flattened(params).square_sums(params)
        return pad_sequence([self._own_squares(p) for p in params], batch_first=True)

    def _own_squares(self, param: Tensor) -> Tensor:
        if not self._is_cut(param):
            return self._flattened([param]).square_sums([param])[0]
        known = self._square_sums.get(param)
        if known is not None and known[0] == param._version and known[1] == param.data_ptr():
            return known[2]
        return self._cut(param).square_sums(param.detach())

    def _norms(self, param: Tensor) -> Tensor:
        with torch.no_grad():
            return self._regions[param].norms(param)


class Pieces:
    """Partition of a tensor, its gradient and its state into pieces, valid for the tensor's shape, strides and device.

    Attributes:
        whole: the tensor is not partitioned, because of its layout or its number of runs of rows.
    """

    def __init__(self, tensor: Tensor, regions: Regions) -> None:
        self.key = layout_key(tensor)
        self.regions = regions
        rows = regions.rows_O.tolist()
        num_columns = tensor.numel() // len(rows)
        starts = [i for i, birth in enumerate(rows) if i == 0 or birth != rows[i - 1]]
        self.channels_last = not tensor.is_contiguous()
        fits = tensor.is_contiguous() or (
            tensor.dim() == 4
            and tensor.is_contiguous(memory_format=torch.channels_last)
            and regions.num_column_axes == 1
        )
        self.whole = not fits or len(starts) > _MAX_RUNS
        self.sizes: list[int] = []
        if self.whole:
            return
        longest = max(1, BLOCK_ELEMENTS // num_columns)
        runs_are_short = tensor.numel() < _SHORT_RUN * len(starts)
        bounds = [0, len(rows)] if runs_are_short else [*starts, len(rows)]
        # First row of each run of each piece; `index_RI` has one row for each.
        first_rows: list[int] = []
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        # For each piece: the rows of `index_RI` for its runs, and the run of each of its rows.
        self._runs: list[tuple[slice, Tensor | None, Tensor | None]] = []
        for start, end in pairwise(bounds):
            for row in range(start, end, longest):
                last = min(end, row + longest)
                own = [row] + [first for first in starts if row < first < last]
                here = slice(len(first_rows), len(first_rows) + len(own))
                first_rows += own
                self.sizes.append(last - row)
                if len(own) == 1:
                    self._runs.append((here, None, None))
                    continue
                firsts, rows_of_piece = torch.tensor(own, device="cpu"), torch.arange(row, last, device="cpu")
                run_of = torch.searchsorted(firsts, rows_of_piece, right=True) - 1
                one_hot = F.one_hot(run_of, len(own)).T.to(dtype).contiguous()
                self._runs.append((here, run_of, one_hot))
        self.elements = [size * num_columns for size in self.sizes]
        self.index_RI = regions.index_of(regions.rows_O[first_rows])
        self._inner = num_columns // len(regions.columns_I)
        births, column_of = torch.unique(regions.columns_I, return_inverse=True)
        self._columns = F.one_hot(column_of, len(births)).to(dtype)
        births_RC = torch.maximum(regions.rows_O[first_rows][:, None], births[None, :])
        both = torch.searchsorted(regions.stages, births_RC.flatten())
        self._both = F.one_hot(both, regions.num_regions).to(dtype)
        self.column_sums = torch.zeros(len(first_rows), num_columns, dtype=dtype, device="cpu")
        self.sum_rows: list[SumRows] = [
            (self.column_sums[here] if one_hot is not None else self.column_sums[here.start], one_hot)
            for here, _, one_hot in self._runs
        ]

    def matches(self, tensor: Tensor) -> bool:
        """Return True if the partition fits the tensor's shape, strides and device."""
        return self.key == layout_key(tensor)

    def cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut a tensor with the parameter's strides into views, one per piece."""
        if self.channels_last:
            tensor = tensor.permute(0, 2, 3, 1)
        return tensor.reshape(len(self.regions.rows_O), -1).split(self.sizes)

    def rates(self, values_K: Tensor) -> Sequence[Tensor]:
        """Spread one value per region over the elements of each piece, in shapes that broadcast."""
        table = self._spread(values_K[self.index_RI])
        if len(self._runs) == len(table):
            return table.unbind(0)
        return [
            table[here.start] if run_of is None else table[here].index_select(0, run_of)
            for here, run_of, _ in self._runs
        ]

    def take_sums(self) -> Tensor:
        """Sum of each region, [K], from the sums over rows in the `sum_rows` buffers."""
        sums = self.column_sums
        if self._inner > 1:
            rows, columns = self.index_RI.shape
            if self.channels_last:
                sums = sums.view(rows, self._inner, columns).sum(1)
            else:
                sums = sums.view(rows, columns, self._inner).sum(2)
        return (sums @ self._columns).flatten() @ self._both

    def _spread(self, values_RI: Tensor) -> Tensor:
        """Repeat a value for each input channel over the receptive field: [R, C], in the weight's memory order."""
        if self._inner == 1:
            return values_RI
        rows, columns = values_RI.shape
        if self.channels_last:
            return values_RI[:, None, :].expand(rows, self._inner, columns).reshape(rows, -1)
        return values_RI[:, :, None].expand(rows, columns, self._inner).reshape(rows, -1)

    def square_sums(self, tensor: Tensor) -> Tensor:
        """Sum of squares of each region of the tensor: [K]."""
        for piece, row in zip(self.cut(tensor.detach()), self.sum_rows, strict=True):
            add_squares([piece], [row])
        return self.take_sums()


class Flat:
    """Regions of many weights on one device, as segments of one flat tensor of all elements in memory order.

    Sums over all regions then take two deterministic segmented reductions, and one gather spreads values per region
    over the elements. Reads only shapes and strides of the weights.
    """

    def __init__(self, params: Sequence[Tensor], regions: Sequence[Regions]) -> None:
        self._key = [layout_key(p) for p in params]
        self._shape = len(params), max(own.num_regions for own in regions)
        self._strides = [torch.empty_like(p, device="meta").stride() for p in params]
        self._orders = [sorted(range(len(s)), key=s.__getitem__, reverse=True) for s in self._strides]
        self._sizes = [p.numel() for p in params]
        indices, segments, lengths = [], [], []
        for i, (param, own) in enumerate(zip(params, regions, strict=True)):
            index = torch.arange(own.num_regions, device=param.device) + i * self._shape[1]
            index = own.spread(index, param.dim()).expand(param.shape).permute(self._orders[i]).flatten()
            indices.append(index.int())
            num_cuts = 1 + index.numel() // _LONGEST
            cut = torch.arange(index.numel(), device=param.device) // _LONGEST
            segment, counts = torch.unique_consecutive(index * num_cuts + cut, return_counts=True)
            segments.append(segment // num_cuts)
            lengths.append(counts)
        self._index = torch.cat(indices)
        region_of = torch.cat(segments)
        self._ends = _ends(torch.cat(lengths))
        self._by_region = region_of.argsort(stable=True)
        self._region_ends = _ends(torch.bincount(region_of, minlength=self._shape[0] * self._shape[1]))

    def matches(self, params: Sequence[Tensor]) -> bool:
        """Return True if the parameters have the same shapes, strides and devices."""
        return self._key == [layout_key(p) for p in params]

    def square_sums(self, params: Sequence[Tensor]) -> Tensor:
        """Sums of squares of the regions, [P, K], padded with 0, in at least float32: squares overflow in float16."""
        flat = torch.cat([_flat(p.detach(), order) for p, order in zip(params, self._orders, strict=True)])
        squares = flat.to(torch.promote_types(flat.dtype, torch.float32)).square_()
        sums = torch.segment_reduce(squares, "sum", offsets=self._ends, unsafe=True)
        sums = sums.index_select(0, self._by_region)
        return torch.segment_reduce(sums, "sum", offsets=self._region_ends, unsafe=True).view(self._shape)

    def spread(self, values_PK: Tensor) -> list[Tensor]:
        """Spread a value per region over the elements: a tensor of the shape and strides of each parameter."""
        pieces = values_PK.flatten().index_select(0, self._index).split(self._sizes)
        return [
            piece.as_strided(key[0], strides)
            for piece, key, strides in zip(pieces, self._key, self._strides, strict=True)
        ]


def layout_key(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.device]:
    """Key of a partition: the tensor's shape, strides and device."""
    return tensor.shape, tensor.stride(), tensor.device


def _flat(tensor: Tensor, order: list[int]) -> Tensor:
    return tensor.flatten() if tensor.is_contiguous() else tensor.permute(order).flatten()


def _ends(lengths: Tensor) -> Tensor:
    """Offsets of segments of these lengths, with the total at the end."""
    return F.pad(lengths.cumsum(0), (1, 0))


def aligned(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the strides of `like`: itself if it has them, else a copy."""
    # Strides of dimensions of size 1 do not matter.
    if tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous()):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def add_squares(pieces: Sequence[Tensor], rows: Sequence[SumRows]) -> None:
    """Write the sums of squares over the rows of each run of each piece into its buffer."""
    # `vector_norm(dim=0)` is one operation, but slower than these two.
    for piece, (row, one_hot) in zip(pieces, rows, strict=True):
        piece = piece.to(row.dtype)  # Squares overflow in float16.
        squares = piece * piece
        if one_hot is None:
            torch.sum(squares, 0, dtype=row.dtype, out=row)
        else:
            torch.mm(one_hot, squares, out=row)


def batches(elements: Sequence[int]) -> Iterator[slice]:
    """Cut a list of pieces into runs of about `BLOCK_ELEMENTS` elements."""
    start = total = 0
    for i, number in enumerate(elements):
        if total and total + number > BLOCK_ELEMENTS:
            yield slice(start, i)
            start, total = i, 0
        total += number
    if total:
        yield slice(start, len(elements))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device without waiting for work queued there."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
