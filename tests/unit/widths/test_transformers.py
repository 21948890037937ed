"""Networks of transformers, small and untrained: what of them grows, exactly and into what the library builds."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growlab.growth import VarianceTransfer, anneal_norms, finish, grow, make_seed
from growlab.growth.outputs import observe
from growlab.growth.parity import relative_error
from growlab.widths import trace
from tests.cases import roughen

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
LENGTHS = {"intermediate_size": 40, "max_position_embeddings": 16}
GPT2 = {"vocab_size": 40, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 16}
# Class, configuration, and share of the parameters that grow.
CASES: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, 0.99),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, **LENGTHS, "num_key_value_heads": 2}, 0.99),
    "bert": ("BertForSequenceClassification", "BertConfig", {**SIZES, **LENGTHS}, 0.95),
}


class Logits(nn.Module):
    """The first output of a network that is given tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(tokens)[0]


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert"))])
def test_a_network_of_transformers_grows_exactly(name: str) -> None:
    kind, config, settings, share = CASES[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    network, tokens = Logits(made).double(), torch.randint(3, 40, (2, 7))
    fresh, graph = copy.deepcopy(network), trace(network, tokens)
    parameters = dict(network.named_parameters())
    growing = sum(p.numel() for name, p in parameters.items() if graph.grows(name))
    assert growing >= share * sum(p.numel() for p in parameters.values())
    state = make_seed(
        network, graph, VarianceTransfer(), {n: max(2, g.full_width // 4) for n, g in graph.groups.items()}, 0
    )
    roughen(network)
    for part in (2, 4):
        widths = {n: max(2, g.full_width * part // 4) for n, g in graph.groups.items()}
        event = grow(network, graph, VarianceTransfer(), state, widths, 0, (tokens,))
        assert max(event.parity_error_eval, event.parity_error_train) <= 1e-10
        anneal_norms(network, graph, state, 1.0)
    finish(network, graph, VarianceTransfer(), state)
    fresh.load_state_dict(network.state_dict(), strict=True)
    grown, built = (observe(module, (tokens,)).eval for module in (network, fresh))
    assert grown.abs().max() > 1e-3
    assert relative_error(grown, built) <= 1e-12
