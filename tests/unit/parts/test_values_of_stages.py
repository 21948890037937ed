"""Parts with a value per stage: patch sizes; settings such as windows, repeats of a block, active experts."""

import copy
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
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
from growlab.parts import Averages, Depth, Part, PatchSize, Resolution, Setting
from growlab.parts.patch_size import resample_patches, resize_positions
from growlab.widths import trace
from tests.cases import Around, train
from tests.unit.grower.test_trained import decoder
from tests.unit.parts.stages import check_resumed, check_undone

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(11, (4, 12), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4) % 3
PATCHES, WIDTH = [8, 4], 8
# True: for images.
STAGES: dict[bool, dict[int, float]] = {True: {0: 0.5, 1: 1.0}, False: {0: 1.0, 1: 1.0, 2: 1.0}}


def logits_of(model: nn.Module) -> nn.Module:
    """A model of transformers that returns its logits."""
    return Around(lambda net, x: net.model(x).logits, model=model)


def of_timm(patch: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return timm.models.VisionTransformer(16, patch, embed_dim=16, depth=1, num_heads=2, num_classes=3)


def of_transformers(patch: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **{"image_size": 16, "patch_size": patch, "hidden_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "intermediate_size": 24, "num_labels": 3},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    return logits_of(transformers.ViTForImageClassification(config))


def clip(patch: int = 4) -> nn.Module:
    """Its position embeddings are looked up by a buffer of indices."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 16, "patch_size": patch}
    config = transformers.CLIPConfig(vision_config=vision, text_config=sizes, num_labels=3)
    return logits_of(transformers.CLIPForImageClassification(config))


def of_torchvision(patch: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(16, patch, 1, 2, 16, 24, num_classes=3)


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


def mistral() -> nn.Module:
    torch.manual_seed(0)
    return logits_of(decoder("Mistral", 16, 1, sliding_window=8))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return logits_of(decoder("Mixtral", 16, 1, num_local_experts=4, num_experts_per_tok=4))


VITS = {"timm": of_timm, "transformers": of_transformers, "clip": clip, "torchvision": of_torchvision}
# Network, names of the setting and its values.
SETTINGS: dict[str, tuple[Callable[[], nn.Module], Any, list[int]]] = {
    "repeats": (Looped, "repeats", [1, 2, 4]),
    "window": (mistral, "*.sliding_window", [2, 4, 8]),
    "experts": (mixtral, ["*.gate.top_k", "*.num_experts_per_tok"], [1, 2, 4]),
}


def read(network: nn.Module, case: str) -> Any:
    return {
        "transformers": lambda: network.model.config.patch_size,
        "repeats": lambda: network.repeats,
        "window": lambda: network.model.config.sliding_window,
        "experts": lambda: network.model.model.layers[0].mlp.gate.top_k,
    }[case]()


def inputs_of(case: str) -> Tensor:
    return IMAGES if case in VITS else TOKENS


def grower(case: str, **settings: Any) -> Grower:
    make = VITS[case] if case in VITS else SETTINGS[case][0]
    part: Part = PatchSize(PATCHES) if case in VITS else Setting(*SETTINGS[case][1:])
    # Tracing these models takes seconds, and their widths are fixed.
    quick = {"trace": "model.lm_head"} if case in ("window", "experts") else {}
    given = {"method": PairGrowth(), "trigger": STAGES[case in VITS], "verbose": False, **quick, **settings}
    return Grower(make(), inputs_of(case), parts=[part, Averages(decay=0.7)], **given)


@settings(deadline=None, max_examples=20)
@given(small=st.integers(1, 6), factor=st.integers(1, 3), extra=st.integers(0, 2))
def test_larger_patches_compute_the_same_of_enlarged_ones(small: int, factor: int, extra: int) -> None:
    large = small * factor + extra
    generator = torch.Generator().manual_seed(small)
    patches = torch.randn(5, 3, small, small, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, 3, small, small, generator=generator, dtype=torch.float64)
    enlarged = F.interpolate(patches, (large, large), mode="bilinear", antialias=True)
    expected = torch.einsum("nchw,ochw->no", patches, weight)
    found = torch.einsum("nchw,ochw->no", enlarged, resample_patches(weight, large))
    torch.testing.assert_close(found, expected)
    assert resample_patches(weight, small) is not weight
    torch.testing.assert_close(resample_patches(weight, small), weight)


def test_resized_positions_keep_extra_tokens_and_constants() -> None:
    table = torch.cat([torch.tensor([[[5.0], [6.0]]]), torch.full((1, 6, 1), 2.0)], dim=1)
    resized = resize_positions(table, 2, (2, 3), (4, 6))
    assert resized.shape == (1, 26, 1) and resized[0, :2].flatten().tolist() == [5, 6]
    torch.testing.assert_close(resized[0, 2:], torch.full((24, 1), 2.0))
    image = table[:, 2:].reshape(1, 1, 2, 3)
    torch.testing.assert_close(resize_positions(image, None, (2, 3), (4, 6)), torch.full((1, 1, 4, 6), 2.0))


def test_patches_of_half_precision_and_with_padding_by_name() -> None:
    """CPUs do not interpolate in half precision; "valid" means no padding."""
    network = of_timm().bfloat16()
    network.patch_embed.proj.padding = "valid"
    images, part = IMAGES.bfloat16(), PatchSize([8, 4])
    Grower(network, images, method=PairGrowth(), trigger=STAGES[True], parts=[part])
    assert network.patch_embed.proj.kernel_size == (8, 8)
    assert network.pos_embed.dtype == network(images).dtype == torch.bfloat16


@pytest.mark.parametrize("name", VITS)
def test_each_stage_is_the_ordinary_network_of_its_patches(name: str) -> None:
    growing = grower(name)
    optimizer = torch.optim.AdamW(growing.network.parameters(), lr=0.01)
    growing.follow(optimizer)
    for epoch, patch in enumerate(PATCHES):
        before = evaluate(growing.network, (IMAGES,))
        growing.step(epoch=epoch)
        moved = relative_error(before, evaluate(growing.network, (IMAGES,)))
        train(growing.network.train(), optimizer, IMAGES, LABELS)
        tensors = growing.network.state_dict()
        made = VITS[name](patch).state_dict()
        assert tensors.keys() == made.keys()
        for key in tensors if epoch else [key for key in tensors if tensors[key].dim() == 4]:
            assert tensors[key].shape[2:] == made[key].shape[2:]
    resampled = [p for p in growing.network.parameters() if p.dim() == 4]
    # The optimizer's state starts anew with a resampled weight.
    assert [optimizer.state[p]["step"] for p in resampled] == [1]
    (event,) = growing.events
    assert event.notes["patch_size"] == 4 and event.parity_error_eval < 1e-5
    # Norms were annealed after the event, which changed the outputs slightly.
    assert event.notes["patch_size_output_change"] > 1e-4 < moved
    for copied in growing.copies().values():
        assert all(copied.state_dict()[key].shape == tensor.shape for key, tensor in tensors.items())
    assert {k: t.shape for k, t in grower(name, trigger=Never()).network.state_dict().items()} == {
        k: t.shape for k, t in tensors.items()
    }
    network = growing.finish(at_any_stage=True)
    plain = VITS[name]()
    plain.load_state_dict(network.state_dict())
    assert torch.equal(plain.eval()(IMAGES), network.eval()(IMAGES))


@pytest.mark.parametrize("case", SETTINGS)
def test_each_stage_is_the_ordinary_network_with_its_value(case: str) -> None:
    growing, values = grower(case), SETTINGS[case][2]
    plain = SETTINGS[case][0]()
    plain.load_state_dict(growing.network.state_dict())
    for epoch, value in enumerate(values):
        before = evaluate(growing.network, (TOKENS,))
        growing.step(epoch=epoch)
        Setting(SETTINGS[case][1], values)._set(plain, value)
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


class Slow(torch.optim.Optimizer):
    """Pulls weights back to slow copies, which it makes in its constructor only, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, {}
        self.state = {p: {"slow": p.detach().clone()} for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["slow"].lerp_(parameter, 0.5))


@pytest.mark.parametrize("make", [lambda ps: Slow(torch.optim.AdamW(ps)), torch.optim.LBFGS], ids=["wrapper", "LBFGS"])
def test_optimizers_with_state_of_their_own_continue_with_smaller_patches(make: Any) -> None:
    growing = grower("timm")
    network = growing.network
    optimizer = make(list(network.parameters()))
    growing.follow(optimizer)

    def closure() -> Tensor:
        network.zero_grad()
        loss = F.cross_entropy(network(IMAGES), LABELS)
        loss.backward()
        return loss

    for epoch in range(2):
        growing.step(epoch=epoch)
        if isinstance(optimizer, Slow):
            for p in network.parameters() if epoch else ():
                assert optimizer.state[p]["slow"].shape == p.shape
            assert torch.equal(optimizer.state[network.pos_embed]["slow"], network.pos_embed)
        before = network.pos_embed.detach().clone()
        optimizer.step(closure)
        assert not torch.equal(before, network.pos_embed)


def test_an_encoder_may_output_one_vector_per_token() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=4)
    network = transformers.SiglipVisionModel(config)
    growing = Grower(network, IMAGES, method=PairGrowth(), trigger=STAGES[True], parts=[PatchSize(PATCHES)])
    assert growing.network(IMAGES).last_hidden_state.shape[1] == 4
    (event,) = growing.step(epoch=1)
    assert event.notes == {"patch_size": 4}
    assert growing.network(IMAGES).last_hidden_state.shape[1] == 16


def test_a_stage_costs_what_its_patches_cost() -> None:
    network, part = of_timm(), PatchSize(PATCHES)
    graph = part.prepare(network, trace(network, IMAGES), 0, (IMAGES,))
    cost, full = StageCost(network, graph, [part], IMAGES), graph.full_widths
    assert cost(full, 0.0) == forward_flops(of_timm(8), IMAGES[:1])
    assert cost(full, 1.0) == cost(full) == forward_flops(of_timm(), IMAGES[:1])


def test_a_stage_costs_what_it_computes() -> None:
    """Per token, of 12: 2 W 11 FLOPs in the head, and 8 W^2 for each repeat of the block."""
    network, tokens = Looped(), TOKENS.shape[1]
    part = Setting("repeats", [1, 2, 4])
    graph = trace(copy.deepcopy(network), TOKENS)
    graph = part.prepare(network, graph, 0, (TOKENS,))
    cost, full = StageCost(network, graph, [part], TOKENS), graph.full_widths
    for share, repeats in ((0.0, 1), (0.5, 2), (1.0, 4), (None, 4)):
        assert cost(full, share) == tokens * (2 * WIDTH * 11 + repeats * 8 * WIDTH**2)
    assert network.repeats == 4


def test_experts_cost_what_they_compute() -> None:
    """Each token and active expert: three matrices of 16 x 32."""
    network, part, flops = mixtral(), Setting(*SETTINGS["experts"][1:]), []
    for share in (0.0, 0.5, 1.0):
        part.shrink_to(network, no_widths(), share)
        flops.append(forward_flops(network, TOKENS[:1]))
    one = 12 * 3 * 2 * 16 * 32
    assert [more - less for less, more in pairwise(flops)] == [one, 2 * one]


@pytest.mark.parametrize(
    ("case", "epoch"), [("timm", 1), ("clip", 1), ("transformers", 2), ("repeats", 1), ("window", 2)]
)
def test_a_resumed_run_equals_the_uninterrupted_one(case: str, epoch: int) -> None:
    def loss(network: nn.Module) -> Tensor:
        logits = network(inputs_of(case))
        if case in VITS:
            return F.cross_entropy(logits, LABELS)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())

    check_resumed(lambda: grower(case), loss, epoch)


@pytest.mark.parametrize(("case", "first"), [("transformers", 8), ("repeats", 1), ("experts", 1)])
def test_an_event_that_fails_is_undone(case: str, first: int) -> None:
    growing = grower(case)
    check_undone(growing, inputs_of(case))
    assert {read(each, case) for each in (growing.network, *growing.copies().values())} == {first}
    assert case in VITS or growing.parts[0].value == first


@pytest.mark.parametrize(
    ("network", "part", "message"),
    [
        (of_timm, lambda: PatchSize([8, 2]), "must end with the network's own patches of 4 pixels"),
        (
            *(of_timm, lambda: PatchSize([5, 4])),
            r"does not take patches of size 5 \(images of \[16, 16\] pixels are no multiples",
        ),
        (
            *(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), lambda: PatchSize([8, 4])),
            "this network has none",
        ),
        (of_timm, lambda: PatchSize([4, 8]), "descending order"),
        (of_timm, lambda: PatchSize([4]), "descending order"),
        (of_timm, lambda: PatchSize("8"), "descending order"),
        (Looped, lambda: Setting("repeat", [1, 4]), "is no attribute of a module"),
        (Looped, lambda: Setting("repeats", [1, 2]), "must end with the network's own repeats, 4"),
        (Looped, lambda: Setting("repeats", ["a", 4]), "does not run with repeats='a'"),
        (Looped, lambda: Setting("repeats", [4]), "must be a list of one value a stage"),
        (Looped, lambda: Setting("repeats", 4), "must be a list of one value a stage"),
    ],
)
def test_invalid_values_raise_errors(network: Any, part: Callable[[], Part], message: str) -> None:
    made, of_images = network(), network is not Looped
    with pytest.raises(UserError, match=message):
        Grower(made, IMAGES if of_images else TOKENS, method=PairGrowth(), trigger=STAGES[of_images], parts=[part()])
    assert of_images or made.repeats == 4


@pytest.mark.parametrize("part", [Setting("repeats", [1, 4]), Resolution([8, 16]), Depth()], ids=lambda part: part.name)
def test_parts_of_several_stages_need_a_trigger_that_knows_how_far_growth_has_come(part: Part) -> None:
    with pytest.raises(UserError, match="need a trigger that knows the fraction of growth at each stage"):
        part.check(SimpleNamespace(trigger=ByMethod(), seed_widths={}))
    assert part.applies(At(STAGES[False])) and not part.applies(Never())


def test_one_size_of_images_needs_no_trigger_of_stages() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
    assert Grower(network, IMAGES, method=PairGrowth(), trigger=ByMethod(), parts=[Resolution([8])]).parts[0].size == 8
