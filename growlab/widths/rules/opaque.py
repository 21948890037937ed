"""Operations that growth cannot pass: whatever enters them keeps its full width.

They are known to be safe; an operation that neither is listed here nor has a rule is refused, since it has not been
examined yet.
"""

from typing import TYPE_CHECKING, Any

from growlab.widths.rules.recurrent import RECURRENT
from growlab.widths.rules.registry import RULES, Arguments, keep_full_width, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

OPAQUE = (
    *(
        *("cross", "outer", "dot", "vdot", "addmv", "kron", "trace", "diag", "diagonal", "diag_embed"),
        *("matrix_exp", "linalg_inv", "linalg_solve", "linalg_qr", "linalg_svd", "linalg_cross"),
        "meshgrid",
        "bernoulli",
        "native_group_norm",
        "_weight_norm",
        "cdist",
        *("dist", "_linalg_det", "_linalg_slogdet", "_linalg_svd", "_linalg_eigh", "linalg_eig"),
        *(
            "linalg_inv_ex",
            "linalg_matrix_exp",
            "linalg_cholesky_ex",
            "_linalg_solve_ex",
            "linalg_lu_factor_ex",
        ),
        *("linalg_pinv", "cholesky_inverse", "cholesky_solve", "triangular_solve"),
        *("prod", "histc", "histogram", "frexp", "slice_scatter", "renorm"),
        *(
            "linalg_householder_product",
            "_pdist_forward",
            "masked_scatter",
            "masked_select",
            "segment_reduce",
        ),
    ),
    *(
        "bincount",
        "searchsorted",
        "bucketize",
        "nonzero",
        "stft",
        "istft",
    ),
)

#: Operations that may multiply channels by a parameter without being a layer of the width graph.
MIXING = frozenset(
    (
        *("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "bilinear", *RECURRENT),
        *("_grouped_mm", "grouped_mm_fallback"),
    )
)
# Checks of a tensor's type or entries, without an output.
CHECKS = (
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range_for_size",
    "_print",
)


@rule(*CHECKS)
def nothing(tracer: "Tracer", node: Any, args: Arguments) -> None:
    """Check without an output: channels are not affected."""


for name in OPAQUE:
    RULES.setdefault(name, keep_full_width)
