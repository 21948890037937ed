"""Operations that growth cannot pass: whatever enters them keeps its full width.

They are known and safe; an operation that is neither here nor has a rule is refused, because nobody has thought
about it yet.
"""

from growlab.widths.rules.registry import RULES, keep_full_width

OPAQUE = (
    *(
        "softmax",
        "log_softmax",
        "matmul",
        "bmm",
        "mm",
        "addmm",
        "baddbmm",
        "einsum",
        "scaled_dot_product_attention",
    ),
    *(
        "index",
        "index_put",
        "index_put_",
        "index_select",
        "gather",
        "scatter",
        "embedding",
        "masked_fill",
        "where",
    ),
    *(
        "linalg_vector_norm",
        "norm",
        "std",
        "var",
        "std_mean",
        "var_mean",
        "argmax",
        "argmin",
        "cumsum",
        "topk",
    ),
    *(
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "pixel_shuffle",
        "pixel_unshuffle",
        "unfold",
    ),
    *(
        "im2col",
        "col2im",
        "repeat",
        "repeat_interleave",
        "stack",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_not",
    ),
    *(
        "glu",
        "cross",
        "outer",
        "tril",
        "triu",
        "meshgrid",
        "grid_sampler",
        "bernoulli",
        "native_group_norm",
        "std",
    ),
    *(
        "movedim",
        "numpy_T",
        "t",
        "masked_fill_",
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

for name in OPAQUE:
    RULES.setdefault(name, keep_full_width)
