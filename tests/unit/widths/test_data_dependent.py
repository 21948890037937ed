"""Networks whose sizes or branches depend on numbers in the data."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import VarianceTransfer
from growlab.widths import UnsupportedOperation, trace
from tests.cases import OLD_TORCH, Around, check_growth


def made(function: Callable[..., Tensor]) -> nn.Module:
    """Two layers and a classifier, with any function around the second one."""
    return Around(
        lambda net, x, given: net.last(function(net, F.relu(net.first(x)), given)),
        **{"first": [8, 16], "second": [16, 12], "last": [12, 3]},
    )


def rows_of_a_mask(net: Any, h: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros(*h.shape[:-1], net.second.out_features, dtype=h.dtype)
    out[mask] = net.second(h[mask])
    return out


def rows_that_are_not_zero(net: Any, h: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero().squeeze(-1)
    return net.second(h).index_add(0, rows, net.second(h[rows]))


def rows_where_it_is_true(net: Any, h: Tensor, mask: Tensor) -> Tensor:
    # Two conditions, as for an expert that is the first or the second choice of a token.
    rows, _ = torch.where(torch.stack([mask, ~mask], 1))
    return net.second(h).index_add(0, rows, net.second(h[rows]))


def up_to_the_longest(net: Any, h: Tensor, lengths: Tensor) -> Tensor:
    longest = int(lengths.max())
    kept = torch.arange(longest)[None] < lengths[:, None]
    return (net.second(h[:, :longest]) * kept[..., None]).sum(1)


def split_by_lengths(net: Any, h: Tensor, lengths: Tensor) -> Tensor:
    return net.second(torch.stack([part.mean(0) for part in h.split(lengths.tolist())]))


def a_branch_and_a_number(net: Any, h: Tensor, mask: Tensor) -> Tensor:
    if mask.any():
        h = 2 * h
    return net.second(h) / mask.sum().item()


def groups_of_rows(net: Any, h: Tensor, labels: Tensor) -> Tensor:
    names, inverse = torch.unique(labels, return_inverse=True)
    return net.second(h.new_zeros(len(names), h.shape[-1]).index_add(0, inverse, h))


def rows_of_experts(net: Any, h: Tensor, offset: Tensor) -> Tensor:
    """The last expert gets no rows, and the others' numbers of rows depend on a layer that grows."""
    expert = (net.last(net.second(h)) + offset).argmax(-1)
    order, counts = expert.argsort(), torch.bincount(expert, minlength=3).tolist()
    taken = torch.cat([net.second(part) * 0.5 for part in torch.split(h[order], counts)])
    out = torch.zeros_like(taken)
    out[order] = taken
    return out


ROWS = torch.tensor([True, False, True, True, False, True])
CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Tensor]] = {
    "rows of a mask": (rows_of_a_mask, (6,), ROWS),
    "positions of a mask": (rows_of_a_mask, (2, 6), torch.stack([ROWS, ~ROWS])),
    "rows that are not zero": (rows_that_are_not_zero, (6,), ROWS),
    "rows where it is true": (rows_where_it_is_true, (6,), ROWS),
    "up to the longest": (up_to_the_longest, (4, 7), torch.tensor([3, 5, 2, 5])),
    "split by lengths": (split_by_lengths, (6,), torch.tensor([1, 2, 3])),
    "a branch and a number": (a_branch_and_a_number, (6,), ROWS),
    "rows of experts": (rows_of_experts, (40,), torch.tensor([0.0, 0.0, -99.0])),
    "groups of rows": (groups_of_rows, (6,), torch.tensor([0, 3, 3, 1, 0, 9])),
}


@pytest.mark.parametrize("case", CASES)
def test_networks_whose_sizes_depend_on_data_grow_exactly(case: str) -> None:
    if OLD_TORCH and case == "rows of experts":
        pytest.skip("its torch.export asserts the example's number of rows")
    torch.manual_seed(0)
    function, shape, given = CASES[case]
    network, example = made(function).double(), (torch.randn(*shape, 8, dtype=torch.float64), given)
    graph = trace(network, example)
    assert graph.full_widths == {"first": 16, "second": 12}
    check_growth(network, graph, example, VarianceTransfer())


def test_a_layer_that_the_example_does_not_reach_is_named() -> None:
    def chosen(net: Any, h: Tensor, mask: Tensor) -> Tensor:
        return net.second(h) if mask.all() else h[:, :12]

    with pytest.raises(UnsupportedOperation, match=r"if mask\.all\(\).* does not read second\.weight for this"):
        trace(made(chosen), (torch.randn(6, 8), ROWS))
    assert trace(made(chosen), (torch.randn(6, 8), ROWS | True)).full_widths


def test_code_by_numbers_that_cannot_be_followed_is_named() -> None:
    def from_the_queue(net: Any, h: Tensor, mask: Tensor) -> Tensor:
        at = int(mask.sum())
        net.first.bias.data = net.first.bias.data * 1.0
        return net.second(h[at : at + 2])

    with pytest.raises(
        UnsupportedOperation, match=r"at `at = int\(mask\.sum\(\)\)`: the code branches on numbers in a tensor"
    ):
        trace(made(from_the_queue), (torch.randn(6, 8), ROWS))
