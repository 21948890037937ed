"""Shapes without arithmetic: those that torch computes, and no shape where torch finds none."""

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
    "transposed convolution": lambda: F.conv_transpose2d(made(2, 4, 5, 5), made(4, 2, 3, 3), made(4), groups=2),
    "transposed convolution of one": lambda: F.conv_transpose1d(made(4, 5), made(4, 3, 2)),
    "rows added": lambda: made(3, 4).index_add(0, made(2, dtype=torch.int64), made(2, 4)),
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


def test_tensors_in_memory_are_computed() -> None:
    with Shapes():
        assert torch.equal(torch.ones(2, 3) + torch.ones(3), torch.full((2, 3), 2.0))


def test_channels_that_device_meta_does_not_compare_are_compared() -> None:
    with Shapes():
        for number, call in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
            with pytest.raises(ValueError, match="transposed weight"):
                call(made(2, 2, *[5] * number), made(8, 4, *[3] * number))
        for add in (torch.index_add, Tensor.index_add, Tensor.index_add_):
            with pytest.raises(ValueError, match="cannot be added into"):
                add(made(3, 4), 0, made(2, dtype=torch.int64), made(2, 5))
