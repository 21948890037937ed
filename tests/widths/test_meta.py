"""Shapes told without arithmetic: those that torch works out, and no shape where torch finds none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from growlab.widths.meta import Shapes


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


CALLS: dict[str, Callable[[], Tensor]] = {
    "batch norm": lambda: F.batch_norm(made(2, 4, 3), made(4), made(4), made(4), made(4), training=True),
    "batch norm of others": lambda: F.batch_norm(made(2, 4, 3), made(4), made(5)),
    "batch norm of no others": lambda: F.batch_norm(made(1, 4), None, None, training=True),
    "layer norm": lambda: F.layer_norm(made(2, 3, 4), (3, 4), made(3, 4), made(3, 4)),
    "layer norm without": lambda: F.layer_norm(made(2, 4), [4]),
    "layer norm of others": lambda: F.layer_norm(made(2, 5), (4,)),
    "layer norm by others": lambda: F.layer_norm(made(2, 4), (4,), made(5)),
    "linear": lambda: F.linear(made(2, 3, 4), made(5, 4), made(5)),
    "linear of one": lambda: F.linear(made(4), made(5, 4)),
    "linear of others": lambda: F.linear(made(2, 3), made(5, 4)),
    "linear by others": lambda: F.linear(made(2, 4), made(5, 4), made(6)),
    "transposed convolution": lambda: F.conv_transpose2d(
        made(2, 4, 5, 5), made(4, 2, 3, 3), made(4), groups=2
    ),
    "transposed convolution of one": lambda: F.conv_transpose1d(made(4, 5), made(4, 3, 2)),
    "rows added": lambda: made(3, 4).index_add(0, made(2, dtype=torch.int64), made(2, 4)),
    "gelu": lambda: F.gelu(made(2, 3), approximate="tanh"),
    "attention": lambda: F.scaled_dot_product_attention(
        made(2, 3, 5, 4), made(2, 3, 6, 4), made(2, 3, 6, 7), scale=0.5
    ),
    "attention by heads": lambda: F.scaled_dot_product_attention(made(2, 3, 4), made(1, 3, 4), made(2, 3, 4)),
    "attention masked": lambda: F.scaled_dot_product_attention(
        made(2, 3, 4), made(2, 3, 4), made(2, 3, 4), attn_mask=made(3, 3)
    ),
    "attention of others": lambda: F.scaled_dot_product_attention(
        made(2, 3, 4), made(2, 3, 5), made(2, 3, 4)
    ),
    "attention to others": lambda: F.scaled_dot_product_attention(
        made(2, 3, 4), made(2, 6, 4), made(2, 5, 4)
    ),
    "sum": lambda: made(2, 1, 4) + made(3, 1),
    "sum of two types": lambda: made(2, dtype=torch.int64) + made(2, dtype=torch.float16),
    "sum of others": lambda: made(2, 4) + made(3),
    "part of a sum": lambda: torch.add(made(2, 4), made(4), alpha=2),
    "product": lambda: made(2, 4) * 0.5,
    "product in front": lambda: 2 * made(2, 4, dtype=torch.int64),
    "difference": lambda: made(2, 4) - made(4),
}


def outcome(call: Callable[[], Tensor]) -> tuple[torch.Size, torch.dtype] | None:
    try:
        result = call()
    except (RuntimeError, ValueError):
        return None
    assert result.is_meta
    return result.shape, result.dtype


@pytest.mark.parametrize("name", CALLS)
def test_a_shape_is_what_torch_works_out(name: str) -> None:
    expected = outcome(CALLS[name])
    with Shapes() as mode:
        found = outcome(CALLS[name])
    assert found == expected and mode.calls
    assert (found is None) == ("other" in name)


def test_what_lies_in_memory_is_worked_out() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with Shapes():
        assert torch.equal(F.linear(x, weight), torch.full((2, 4), 3.0))


def test_channels_that_device_meta_does_not_compare_are_compared() -> None:
    with Shapes():
        for number, call in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
            with pytest.raises(ValueError, match="transposed weight"):
                call(made(2, 2, *[5] * number), made(8, 4, *[3] * number))
        for add in (torch.index_add, Tensor.index_add, Tensor.index_add_):
            with pytest.raises(ValueError, match="cannot be added into"):
                add(made(3, 4), 0, made(2, dtype=torch.int64), made(2, 5))
