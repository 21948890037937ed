"""Operations that growth cannot pass: whatever enters them keeps its full width.

They are known and safe; an operation that is neither here nor has a rule is refused, because nobody has thought
about it yet.
"""

from typing import TYPE_CHECKING, Any

from growlab.widths.rules.registry import RULES, Arguments, keep_full_width, rule

if TYPE_CHECKING:
    from growlab.widths.tracer import Tracer

OPAQUE = (
    *("baddbmm", "einsum"),
    *(
        "index_put",
        "index_put_",
        "index_select",
        "gather",
        "scatter",
    ),
    *(
        "std_mean",
        "var_mean",
        "argmax",
        "argmin",
        "topk",
    ),
    *("unfold",),
    *(
        "im2col",
        "col2im",
        "repeat_interleave",
    ),
    *(
        "cross",
        "outer",
        "tril",
        "triu",
        "meshgrid",
        "grid_sampler",
        "bernoulli",
        "native_group_norm",
    ),
    *(
        "movedim",
        "copy",
        "copy_",
        "fill",
        "fill_",
        "zero_",
        "all",
        "any",
        "round",
    ),
)

# One operation that runs a whole module.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")

#: Operations that may multiply channels by a parameter without being a layer of the width graph.
MIXING = frozenset(("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", *RECURRENT))
# They look at a tensor's type or entries and put nothing out.
CHECKS = (
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range_for_size",
    "_print",
)


@rule(*CHECKS)
def nothing(tracer: "Tracer", node: Any, args: Arguments) -> None:
    """Channels are left alone."""


for name in (*OPAQUE, *RECURRENT):
    RULES.setdefault(name, keep_full_width)
