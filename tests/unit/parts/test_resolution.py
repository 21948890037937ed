"""Training on small images and short sequences first."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from growlab import Grower, Growth
from growlab.base.errors import UserError
from growlab.grower.cost import forward_flops
from growlab.growth.methods.pairs import PairGrowth
from growlab.lab.networks import CausalTransformer, CifarResNet
from growlab.lab.training.plan import StageCost
from growlab.parts import Resolution
from growlab.parts.resolution import Cut
from growlab.widths import trace
from tests.unit.frontends.lightning_runs import Plain, trainer_of
from tests.unit.grower.test_sharded import gpt2
from tests.unit.parts.stages import check_resumed

IMAGES = torch.randn(4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(11, (4, 12), generator=torch.Generator().manual_seed(0))
STAGES = {0: 0.5, 1: 0.75, 2: 1.0}


class Seeing(nn.Module):
    """A network that records its latest inputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.seen: list[Tensor] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        self.seen[:] = inputs
        return self.network(*inputs)


def segmenting() -> nn.Module:
    """Two channels of scores for each pixel."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return CifarResNet(1, 10, 3, (4, 8))


def small_gpt() -> nn.Module:
    torch.manual_seed(0)
    return CausalTransformer(11, 12, 1, width=16, num_heads=2, head_dim=8, rotary_dim=4, hidden=24)


def grower(network: nn.Module, example: Tensor, sizes: object, **settings: object) -> Grower:
    return Grower(network, example, method=PairGrowth(), trigger=STAGES, parts=[Resolution(sizes)], **settings)


def test_images_are_small_only_in_training_steps() -> None:
    growing = grower(Seeing(small_resnet()), IMAGES, [8, 12, 16])
    network = growing.network
    for epoch, size in enumerate((8, 12, 16)):
        growing.step(epoch=epoch)
        network.train()
        network(IMAGES).sum().backward()
        expected = F.interpolate(IMAGES, (size, size * 3 // 2), mode="bilinear", antialias=True)
        torch.testing.assert_close(network.seen[0], expected if size < 16 else IMAGES, rtol=0, atol=1e-6)
        with torch.no_grad():
            network(IMAGES)
        assert network.seen[0] is IMAGES
        network.eval()(IMAGES)
        assert network.seen[0] is IMAGES
    assert [event.notes["input_size"] for event in growing.events] == [12, 16]
    assert [event.parity_error_eval < 1e-5 for event in growing.events] == [True, True]
    growing.finish()
    assert not network._forward_pre_hooks and not network._forward_pre_hooks_with_kwargs


def test_sequences_and_their_targets_are_cut_only_in_training_steps() -> None:
    growing = grower(small_gpt(), TOKENS, [4, 12])
    network = growing.network.train()
    logits = network(TOKENS)
    assert logits.shape == (4, 4, 11)
    assert torch.equal(growing.targets(TOKENS), TOKENS[:, :4])
    # The logits are those without the later tokens.
    torch.testing.assert_close(logits, growing.network.eval()(TOKENS[:, :4]))
    network.train()(TOKENS)
    # Some loops ask for targets before the forward pass in evaluation.
    network.eval()
    assert torch.equal(growing.targets(TOKENS), TOKENS)
    assert growing.network(TOKENS).shape == (4, 12, 11)
    assert torch.equal(growing.targets(TOKENS), TOKENS)


def test_targets_that_are_maps_of_classes_are_resized_with_the_images() -> None:
    growing = grower(segmenting(), IMAGES, [8, 16])
    classes = torch.randint(255, (4, 16, 24))
    logits = growing.network.train()(IMAGES)
    small = growing.targets(classes)
    assert logits.shape[-2:] == small.shape[-2:] == (8, 12) and small.dtype == torch.int64
    # Nearest: each is the class of a pixel.
    assert torch.equal(small, F.interpolate(classes[:, None].float(), (8, 12), mode="nearest-exact")[:, 0].long())
    shares = growing.targets(torch.rand(4, 16, 24))
    assert shares.shape == (4, 8, 12)
    labels = torch.arange(4)
    assert growing.targets(labels) is labels


@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=6).map(sorted), stages=st.integers(1, 9))
def test_sizes_are_reached_evenly_with_the_share_of_growth(sizes: list[int], stages: int) -> None:
    part = Resolution(sizes)
    reached = [part.size_at(stage / (stages - 1) if stages > 1 else 1.0) for stage in range(stages)]
    assert reached == sorted(reached) and reached[-1] == sizes[-1] and set(reached) <= set(sizes)
    if stages > 1:
        assert reached[0] == sizes[0]
    if stages == len(sizes):
        assert reached == sizes


def test_a_stage_costs_what_its_inputs_cost() -> None:
    """The reference uses full inputs, even if training never does."""
    network = small_resnet()
    graph = trace(copy.deepcopy(network), IMAGES)
    cost, full = StageCost(network, graph, [Resolution([8, 16])], IMAGES), graph.full_widths
    assert cost(full) == cost(full, 1.0) == forward_flops(network, IMAGES[:1])
    assert cost(full, 0.0) == forward_flops(network, F.interpolate(IMAGES[:1], (8, 12)))
    cost = StageCost(network, graph, [Resolution(8)], IMAGES)
    assert cost(full) == forward_flops(network, IMAGES[:1]) > 3 * cost(full, 1.0)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_resumed_run_equals_the_uninterrupted_one(epoch: int) -> None:
    def loss(network: nn.Module) -> Tensor:
        return F.cross_entropy(network(IMAGES), torch.arange(4))

    check_resumed(lambda: grower(small_resnet(), IMAGES, [8, 12, 16]), loss, epoch)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_network_sees_the_same_sizes(in_place: bool) -> None:
    torch.compiler.reset()
    eager, plain = (grower(Seeing(segmenting()), IMAGES, [8, 12, 16]), Seeing(segmenting()))
    if in_place:
        plain.compile(backend="eager")
    compiled = plain if in_place else torch.compile(plain, backend="eager")
    growing = grower(compiled, IMAGES, [8, 12, 16])
    for epoch in range(3):
        for each in (eager, growing):
            each.step(epoch=epoch)
        assert torch.equal(compiled.train()(IMAGES), eager.network.train()(IMAGES))
        assert torch.equal(growing.targets(IMAGES), eager.targets(IMAGES))
    torch.compiler.reset()


def test_a_network_with_its_hook_can_be_copied_and_pickled() -> None:
    growing = grower(small_gpt(), TOKENS, [4, 12])
    copied = copy.deepcopy(growing.network)
    for again in (copied, pickle.loads(pickle.dumps(copied))):
        assert torch.equal(again.train()(TOKENS), growing.network.train()(TOKENS))


@pytest.mark.parametrize(
    ("network", "example", "sizes", "message"),
    [
        (
            lambda: torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=3),
            torch.randn(2, 3, 32, 32),
            [16, 32],
            "does not take inputs of size 16 (Wrong image height! Expected 32 but got 16!)",
        ),
        (small_resnet, IMAGES, [16, 32], "[16, 32] changes nothing: the inputs are no larger"),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4), [2], "are [2, 4]"),
    ],
)
def test_inputs_that_cannot_be_resized_raise_errors(network, example, sizes, message) -> None:
    with pytest.raises(UserError) as refused:
        grower(network(), example, sizes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("example", "parts", "sizes"),
    [
        (torch.randn(2, 3, 32, 48), [0.5, 0.67, 1.0], [16, 24, 32]),
        (torch.randn(2, 3, 8, 8), [0.67, 1], [5, 8]),
        (torch.randn(2, 3, 20, 20), [0.01, 0.99, 1.0], [8, 16, 20]),
    ],
)
def test_sizes_can_be_fractions_of_the_datas(example: Tensor, parts: list[float], sizes: list[int]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    part = Resolution(parts)
    run = Grower(network, example, method=PairGrowth(), trigger={0: 0.25, 1: 0.5, 2: 1.0}, parts=[part])
    reached = [part.size_at(share / (len(sizes) - 1)) for share in range(len(sizes))]
    assert reached == sizes and part.size == sizes[0]
    run.step(epoch=2)
    assert part.size == sizes[-1]


def test_a_vision_transformer_that_interpolates_positions_trains_at_the_sizes() -> None:
    timm = pytest.importorskip("timm")
    network = timm.models.VisionTransformer(32, 8, embed_dim=16, depth=1, num_heads=2, dynamic_img_size=True)
    x = torch.randn(2, 3, 32, 32)
    growing = grower(network, x, [16, 32])
    small = F.interpolate(x, 16, mode="bilinear", antialias=True)
    torch.testing.assert_close(growing.network.train()(x), growing.network.eval()(small))


def test_models_of_transformers_get_labels_and_masks_cut_with_their_inputs() -> None:
    torch.manual_seed(0)
    growing = grower(gpt2(), TOKENS, [5, 12])
    mask = (torch.arange(12) < torch.tensor([[3], [12], [12], [4]])).long()
    given = {"labels": TOKENS, "attention_mask": mask, "input_ids": TOKENS}
    cut = {name: value[:, :5] for name, value in given.items()}
    torch.testing.assert_close(growing.network.train()(**given).loss, growing.network.eval()(**cut).loss)


def test_any_lightning_module_trains_at_the_sizes(tmp_path: Path) -> None:
    module, sizes = Plain(), list[int]()
    module.network = Seeing(small_resnet())
    module.network.register_forward_hook(lambda network, *_: sizes.append(network.seen[0].shape[2]))
    growth = Growth("network", method=PairGrowth(), trigger=STAGES, parts=[Resolution([8, 12, 16])])
    data = DataLoader(list(zip(IMAGES, torch.arange(4), strict=True)), batch_size=4)
    trainer_of(tmp_path, growth, max_epochs=3).fit(module, data)
    assert set(sizes) == {8, 12, 16} and sizes[-1] == 16


def test_a_finished_network_that_loads_an_early_checkpoint_trains_at_its_size_again() -> None:
    growing = grower(Seeing(segmenting()), IMAGES, [8, 12, 16])
    early = copy.deepcopy([growing.network.state_dict(), growing.state_dict()])
    for epoch in (1, 2):
        growing.step(epoch=epoch)
    growing.finish()
    growing.reattach_hooks()
    growing.network.load_state_dict(early[0])
    growing.load_state_dict(early[1])
    growing.network.train()(IMAGES)
    assert growing.network.seen[0].shape[2] == 8


def test_images_in_half_precision_are_resized_on_a_cpu() -> None:
    cut, images = Cut((16, 24), (8, 12)), IMAGES.bfloat16()
    small = cut.apply(images)
    assert small.dtype == torch.bfloat16
    assert torch.equal(small, cut.apply(images.float()).bfloat16())
