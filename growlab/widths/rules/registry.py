"""Registry of channel rules, and functions that several rules share.

A rule defines what one ATen operation does to axes and scales. It is called with the record of the trace, the graph
node and the operation's arguments by name, with a `Value` for each tensor. It returns the output's Value (or a list of
Values), and records layers and norms.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from growlab.widths.program import operation_of
from growlab.widths.values import SLID_OVER, Record, Value, values_in

Arguments = dict[str, Any]
RULES: dict[str, Callable[[Record, Any, Arguments], Any]] = {}
_Rule = TypeVar("_Rule", bound=Callable[..., Any])

#: Reason why channels of random numbers stay: pairs of new channels cancel only if both get the same numbers.
DRAWN = "as many random numbers"
# Operations that are linear in all of their inputs, and operations that are linear in each input.
_LINEAR = """
permute transpose swapaxes swapdims mT mH adjoint movedim moveaxis t view reshape _unsafe_view flatten unflatten squeeze
unsqueeze expand slice select split split_with_sizes chunk unbind getitem contiguous clone dropout to _to_copy neg alias
cat add sub
"""
_BILINEAR = frozenset(("mul", "div"))
# Operations whose operands keep their full width. An operation that is neither listed here nor has a rule raises an
# error, because it has not been examined yet.
_OPAQUE = """
cross outer dot vdot addmv kron trace diag diagonal diag_embed matrix_exp linalg_inv linalg_solve linalg_qr linalg_svd
linalg_cross meshgrid bernoulli native_group_norm cdist dist _linalg_det _linalg_slogdet _linalg_svd
_linalg_eigh linalg_eig linalg_inv_ex linalg_matrix_exp linalg_cholesky_ex _linalg_solve_ex linalg_lu_factor_ex
linalg_pinv cholesky_inverse cholesky_solve triangular_solve prod histc histogram frexp slice_scatter renorm
linalg_householder_product _pdist_forward masked_scatter masked_select segment_reduce bincount searchsorted bucketize
nonzero stft istft
"""
#: Recurrent modules, and single steps of recurrent cells.
MODULES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
#: Operations whose rules record an affine layer.
AFFINE = frozenset(("linear", *(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3))))
#: Operations that may multiply channels by a parameter without being a layer of the width graph.
MIXING = frozenset((*MODULES, *CELLS, "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "bilinear")) | {
    "_grouped_mm",
    "grouped_mm_fallback",
}
#: Checks of a tensor's type or entries, without an output.
CHECKS = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size", "_print")


def rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a rule for operations of these names (without the `aten::` prefix and overload)."""

    def register(function: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def linear_in(operation: str, args: Arguments) -> frozenset[str]:
    """Names of the parameters that an operation's result is linear in (see `Value`)."""
    operands = [value.linear_in for value in values_in(args)]
    numbers = [arg for arg in args.values() if isinstance(arg, (int, float))]
    if operation in _BILINEAR:
        dividend = operation == "mul" or operands[:1] != [frozenset()]
        operands = [names for names in operands if names]
        return operands[0] if len(operands) == 1 and dividend else frozenset()
    if operation not in _LINEAR.split() or (operation in ("add", "sub") and len(operands) < 2 and numbers):
        return frozenset()
    return operands[0] if operands and all(names == operands[0] for names in operands) else frozenset()


def overwritten(value: Any, written: Any) -> Any:
    """Return the value of a tensor after an in-place write to it: not linear, and made by the written layers too."""
    if not isinstance(value, Value) or value.name is not None:
        return value
    made_by = value.made_by.union(*(part.made_by for part in values_in(written)))
    return replace(value, linear_in=frozenset(), made_by=made_by)


def first_tensor(args: Arguments) -> Value:
    """Return the first argument that is a tensor."""
    return next(values_in(args))


def freeze_windows(record: Record, x: Value, num_windows: int) -> None:
    """Freeze the last `num_windows` dimensions, which windows slide over."""
    record.freeze_all(x.axes[len(x.axes) - num_windows :], SLID_OVER)


@rule(*_OPAQUE.split())
def keep_full_width(record: Record, node: Any, args: Arguments, reason: str | None = None) -> Any:
    """Rule for operations through which channels cannot grow: all operands keep their full width."""
    for value in values_in(args):
        record.scales.pin(value.scale)
        record.freeze_all(value.axes, reason or f"used by {operation_of(node)}")
    return record.fixed_outputs(node)


@rule(*CHECKS)
def nothing(record: Record, node: Any, args: Arguments) -> None:
    """Check without an output: channels are not affected."""
