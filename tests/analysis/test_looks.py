"""A method has one colour in every figure."""

import pytest

from growlab.lab.analysis.style import FIXED_SIZE, MARKERS, PALETTE, looks


def colours(*methods: str) -> list[str]:
    return [look["color"] for look in looks(methods)]


def test_a_method_keeps_its_colour_among_others() -> None:
    ours, net2net, full = colours("ours + stagewise_norm", "net2net", "fixed-size, data.validation=none")
    assert colours("fixed-size", "random", "net2net", "tiny", "ours + stagewise_adam")[2::2] == [
        net2net,
        ours,
    ]
    assert full == FIXED_SIZE[0]
    # Whatever stands before it, a curve without a colour of its own takes none that another one has.
    assert colours("zero", "one", "ours + stagewise_norm")[2] == ours
    assert len(set(colours("zero", "one", "ours + stagewise_norm"))) == 3


def test_the_plain_method_has_its_colour_beside_a_longer_name_that_comes_first() -> None:
    (ours,) = colours("ours + stagewise_norm")
    assert colours("ours + stagewise_norm, osgd.anneal=stage", "ours + stagewise_norm")[1] == ours
    assert colours("net2net, a=1", "net2net", "net2net, b=1")[1] == colours("net2net")[0]


@pytest.mark.parametrize(
    "less",
    [
        "fixed-size, fewer blocks",
        "fixed-size, schedule.equal_flops=true",
        "fixed-size, growth.width_multiple=0.5",
    ],
)
def test_black_is_the_full_network(less: str) -> None:
    assert colours(less, "fixed-size") == [FIXED_SIZE[1], FIXED_SIZE[0]]
    assert colours("classical, xavier_in", "xavier_in")[0] == FIXED_SIZE[0]


def test_no_two_curves_look_alike() -> None:
    many = [f"ours, schedule.num_stages={n}" for n in range(20)] + [f"fixed-size, a={n}" for n in range(4)]
    found = looks(many)
    assert len({(look["color"], str(look["linestyle"])) for look in found}) == len(many)
    few = looks([*(f"method{n}" for n in range(len(PALETTE))), "fixed-size", "fixed-size, fewer blocks"])
    assert len({look["marker"] for look in few}) == len(few) == len(MARKERS)
