"""Vision Transformers that train on large patches first."""

from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from growlab import Grower
from growlab.base.errors import UserError
from growlab.grower.cost import forward_flops
from growlab.grower.triggers import Never
from growlab.growth.methods.pairs import PairGrowth
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.lab.training.plan import StageCost
from growlab.parts import Averages, PatchSize
from growlab.parts.patch_size import resample_patches, resize_positions
from growlab.widths import trace
from tests.cases import Around
from tests.unit.parts.stages import check_resumed, check_undone

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4) % 3
SIZES, STAGES = [8, 4], {0: 0.5, 1: 1.0}
WIDTH = 16


def of_timm(patch: int = 4) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embed_dim": WIDTH, "depth": 1, "num_heads": 2, "num_classes": 3}
    return timm.models.VisionTransformer(16, patch, **sizes)


def of_transformers(patch: int = 4) -> nn.Module:
    """A model of transformers that returns its logits."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **{"image_size": 16, "patch_size": patch, "hidden_size": WIDTH, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "intermediate_size": 24, "num_labels": 3},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    return Around(lambda net, x: net.model(x).logits, model=transformers.ViTForImageClassification(config))


def of_torchvision(patch: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(16, patch, 1, 2, WIDTH, 24, num_classes=3)


NETWORKS = {"timm": of_timm, "transformers": of_transformers, "torchvision": of_torchvision}


def grower(name: str, trigger: Any = STAGES) -> Grower:
    parts = [PatchSize(SIZES), Averages(decay=0.7)]
    return Grower(NETWORKS[name](), IMAGES, method=PairGrowth(), trigger=trigger, parts=parts, verbose=False)


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


def test_a_table_of_positions_keeps_what_stands_in_front_and_constants() -> None:
    table = torch.cat([torch.tensor([[[5.0], [6.0]]]), torch.full((1, 6, 1), 2.0)], dim=1)
    resized = resize_positions(table, 2, (2, 3), (4, 6))
    assert resized.shape == (1, 26, 1) and resized[0, :2].flatten().tolist() == [5, 6]
    torch.testing.assert_close(resized[0, 2:], torch.full((24, 1), 2.0))
    image = table[:, 2:].reshape(1, 1, 2, 3)
    torch.testing.assert_close(resize_positions(image, None, (2, 3), (4, 6)), torch.full((1, 1, 4, 6), 2.0))


@pytest.mark.parametrize("name", NETWORKS)
def test_each_stage_is_the_ordinary_network_of_its_patches(name: str) -> None:
    growing = grower(name)
    optimizer = torch.optim.AdamW(growing.network.parameters(), lr=0.01)
    growing.follow(optimizer)
    for epoch, patch in enumerate(SIZES):
        before = evaluate(growing.network, (IMAGES,))
        growing.step(epoch=epoch)
        moved = relative_error(before, evaluate(growing.network, (IMAGES,)))
        F.cross_entropy(growing.network.train()(IMAGES), LABELS).backward()
        optimizer.step()
        tensors = growing.network.state_dict()
        made = NETWORKS[name](patch).state_dict()
        assert tensors.keys() == made.keys()
        for key in tensors if epoch else [key for key in tensors if "proj" in key and tensors[key].dim() == 4]:
            assert tensors[key].shape[2:] == made[key].shape[2:]
    resampled = [p for key, p in growing.network.named_parameters() if "proj" in key and p.dim() == 4]
    # Its state begins with it.
    assert [optimizer.state[p]["step"] for p in resampled] == [1]
    (event,) = growing.events
    assert event.notes["patch_size"] == 4 and event.parity_error_eval < 1e-5
    # Normalisations became plain behind the event: the outputs moved by a little more.
    assert event.notes["patch_size_output_change"] > 1e-4 < moved
    for copied in growing.copies().values():
        assert all(copied.state_dict()[key].shape == tensor.shape for key, tensor in tensors.items())
    assert {k: t.shape for k, t in grower(name, Never()).network.state_dict().items()} == {
        k: t.shape for k, t in tensors.items()
    }
    network = growing.finish(at_any_stage=True)
    plain = NETWORKS[name]()
    plain.load_state_dict(network.state_dict())
    assert torch.equal(plain.eval()(IMAGES), network.eval()(IMAGES))


def test_a_stage_costs_what_its_patches_cost() -> None:
    """The first stage costs what a network made with these patches costs."""
    network, part = of_timm(), PatchSize(SIZES)
    graph = part.prepare(network, trace(network, IMAGES), 0, (IMAGES,))
    cost, full = StageCost(network, graph, [part], IMAGES), graph.full_widths
    assert cost(full, 0.0) == forward_flops(of_timm(8), IMAGES[:1])
    assert cost(full, 1.0) == cost(full) == forward_flops(of_timm(), IMAGES[:1])


@pytest.mark.parametrize(("name", "epoch"), [("timm", 1), ("transformers", 2)])
def test_resumed_it_trains_like_undisturbed(name: str, epoch: int) -> None:
    check_resumed(lambda: grower(name), lambda network: F.cross_entropy(network(IMAGES), LABELS), epoch)


def test_an_event_that_fails_is_undone() -> None:
    growing = grower("transformers")
    check_undone(growing, IMAGES)
    assert growing.network.model.config.patch_size == 8


@pytest.mark.parametrize(
    ("network", "sizes", "message"),
    [
        (of_timm, [8, 2], "must end with the network's own patches of 4 pixels"),
        (of_timm, [5, 4], r"does not take patches of size 5 \(images of \[16, 16\] pixels are no multiples"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), [8, 4], "this network has none"),
        (of_timm, [4, 8], "descending order"),
        (of_timm, [4], "descending order"),
        (of_timm, "8", "descending order"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(network: Any, sizes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Grower(network(), IMAGES, method=PairGrowth(), trigger=STAGES, parts=[PatchSize(sizes)])
