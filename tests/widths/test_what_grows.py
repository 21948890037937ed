"""Which channels of odd networks grow: `tests/test_odd_networks.py` asks how exactly they do."""

import pytest

from growlab.widths import trace
from tests.odd_networks import ODD_NETWORKS

GROWING = {
    "convnext_by_hand": {"a": 12, "up": 24},
    "group_norms_with_an_activation": {"a": 4, "b": 8},
    "mixer_with_norms_in_its_forward": {"a": 12, "blocks.0.up": 18, "blocks.1.up": 18},
    "norms_of_two_streams_in_one_forward": {"d": 10},
    "centred_both_ways": {"a": 12, "b": 9},
    "attention_with_biases_apart": {"a": 12, "attention.qkv": 3},
    "tokens_mixed_by_convolutions_of_one_position": {"a": 12, "mix.0": 8},
    "channels_beside_one_another": {"a": 12, "b": 10},
    "frozen_batch_norms": {"a": 12, "b": 16},
    "no_register_tokens": {"a": 12, "up": 18},
    "windows_that_a_short_sequence_does_not_fill": {"a": 12, "b": 9},
    "lambda_over_the_network": {"a": 12, "up": 16},
    "parts_bound_by_partial": {"a": 12, "up": 16},
    "functions_in_containers": {"a": 12, "up": 16},
    "forwards_that_are_decorated": {"a": 12, "up": 16},
    "layers_of_the_surrounding_function": {"layers.0": 12, "layers.1": 16},
}


@pytest.mark.parametrize("name", GROWING)
def test_they_grow_where_an_exact_way_is_known(name):
    case = ODD_NETWORKS[name]
    graph = trace(case.make().double(), case.inputs)
    assert graph.full_widths == GROWING[name]
    if name == "norms_of_two_streams_in_one_forward":
        assert graph.fixed["a"] == graph.fixed["b"] == "the network normalises several streams of channels"
