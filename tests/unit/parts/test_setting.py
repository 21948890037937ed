"""Settings of modules with a value for each stage: windows, repeats of a block, active experts."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower
from growlab.base.errors import UserError
from growlab.grower.cost import forward_flops
from growlab.grower.network import no_widths
from growlab.grower.triggers import At, ByMethod, Never
from growlab.growth.methods.pairs import PairGrowth
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.lab.training.plan import StageCost
from growlab.parts import Averages, Setting
from growlab.widths import trace
from tests.cases import Around
from tests.unit.parts.stages import check_resumed, check_undone

transformers = pytest.importorskip("transformers")

WIDTH = 8
TOKENS = torch.randint(11, (4, 12), generator=torch.Generator().manual_seed(0))
STAGES = {0: 1.0, 1: 1.0, 2: 1.0}


class Looped(nn.Module):
    """One shared block, applied several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH)
        self.hidden, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head, self.repeats = nn.Linear(WIDTH, 11), 4

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(self.repeats):
            x = x + self.out(F.relu(self.hidden(self.norm(x))))
        return self.head(x)


def logits_of(model: nn.Module) -> nn.Module:
    return Around(lambda net, tokens: net.model(tokens).logits, model=model)


_SIZES: dict[str, Any] = {
    **{"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "attention_dropout": 0.0},
}


def mistral() -> nn.Module:
    torch.manual_seed(0)
    return logits_of(transformers.MistralForCausalLM(transformers.MistralConfig(**_SIZES, sliding_window=8)))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=4)
    return logits_of(transformers.MixtralForCausalLM(config))


# Network, names of the setting and its values.
CASES = {
    "repeats": (Looped, "repeats", [1, 2, 4]),
    "window": (mistral, "*.sliding_window", [2, 4, 8]),
    "experts": (mixtral, ["*.gate.top_k", "*.num_experts_per_tok"], [1, 2, 4]),
}


def read(network: nn.Module, case: str) -> Any:
    return {
        "repeats": lambda: network.repeats,
        "window": lambda: network.model.config.sliding_window,
        "experts": lambda: network.model.model.layers[0].mlp.gate.top_k,
    }[case]()


def grower(case: str, **settings: Any) -> Grower:
    network, names, values = CASES[case]
    # Tracing these models takes seconds, and their widths stay.
    quick = {} if case == "repeats" else {"trace": "model.lm_head"}
    given = {"method": PairGrowth(), "trigger": STAGES, "verbose": False, **quick, **settings}
    return Grower(network(), TOKENS, parts=[Setting(names, values), Averages(decay=0.7)], **given)


def loss_of(network: nn.Module) -> Tensor:
    return F.cross_entropy(network(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


@pytest.mark.parametrize("case", CASES)
def test_each_stage_is_the_ordinary_network_with_its_value(case: str) -> None:
    growing, values = grower(case), CASES[case][2]
    plain = CASES[case][0]()
    plain.load_state_dict(growing.network.state_dict())
    for epoch, value in enumerate(values):
        before = evaluate(growing.network, (TOKENS,))
        growing.step(epoch=epoch)
        Setting(CASES[case][1], values)._set(plain, value)
        for network in (growing.network, *growing.copies().values()):
            assert read(network, case) == value
            assert torch.equal(evaluate(network, (TOKENS,)), evaluate(plain, (TOKENS,)))
        for event in growing.events[epoch - 1 : epoch] if epoch else ():
            moved = relative_error(before, evaluate(growing.network, (TOKENS,)))
            assert event.notes["setting"] == value
            assert event.notes["setting_output_change"] == pytest.approx(moved) and moved > 1e-4
            assert event.parity_error_eval < 1e-6
    assert read(grower(case, trigger=Never()).network, case) == values[-1]
    assert type(growing.finish()) is type(plain) and read(growing.network, case) == values[-1]


def test_a_stage_costs_what_it_computes() -> None:
    """Of 12 tokens: the head's 2 W 11 FLOPs a token, and 8 W^2 for each repeat of the block."""
    network, tokens = Looped(), TOKENS.shape[1]
    part = Setting("repeats", [1, 2, 4])
    graph = trace(copy.deepcopy(network), TOKENS)
    graph = part.prepare(network, graph, 0, (TOKENS,))
    cost, full = StageCost(network, graph, [part], TOKENS), graph.full_widths
    for share, repeats in ((0.0, 1), (0.5, 2), (1.0, 4), (None, 4)):
        assert cost(full, share) == tokens * (2 * WIDTH * 11 + repeats * 8 * WIDTH**2)
    assert network.repeats == 4


def test_experts_cost_what_they_compute() -> None:
    """Each token and active expert: three matrices of 16 x 24."""
    network, part, flops = mixtral(), Setting(*CASES["experts"][1:]), []
    for share in (0.0, 0.5, 1.0):
        part.shrink_to(network, no_widths(), share)
        flops.append(forward_flops(network, TOKENS[:1]))
    one = 12 * 3 * 2 * 16 * 24
    assert [more - less for less, more in pairwise(flops)] == [one, 2 * one]


@pytest.mark.parametrize(("case", "epoch"), [("repeats", 1), ("window", 2)])
def test_resumed_it_trains_like_undisturbed(case: str, epoch: int) -> None:
    check_resumed(lambda: grower(case), loss_of, epoch)


@pytest.mark.parametrize("case", ["repeats", "experts"])
def test_an_event_that_fails_is_undone(case: str) -> None:
    growing, first = grower(case), CASES[case][2][0]
    check_undone(growing, TOKENS)
    assert growing.parts[0].value == first
    assert {read(each, case) for each in (growing.network, *growing.copies().values())} == {first}


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        ("repeat", [1, 4], "is no attribute of a module"),
        ("repeats", [1, 2], "must end with the network's own repeats, 4"),
        ("repeats", ["a", 4], "does not run with repeats='a'"),
        ("repeats", [4], "must be a list of one value a stage"),
        ("repeats", 4, "must be a list of one value a stage"),
    ],
)
def test_settings_that_do_not_fit_are_refused(names: str, values: Any, message: str) -> None:
    network = Looped()
    with pytest.raises(UserError, match=message):
        Grower(network, TOKENS, method=PairGrowth(), trigger=STAGES, parts=[Setting(names, values)])
    assert network.repeats == 4


def test_it_needs_a_trigger_that_knows_how_far_growth_has_come() -> None:
    with pytest.raises(UserError, match="need a trigger that knows how far growth has come"):
        grower("repeats", trigger=ByMethod())
    assert Setting("repeats", [1, 4]).applies(At(STAGES)) and not Setting("repeats", [1, 4]).applies(Never())
