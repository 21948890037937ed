"""Blocks in networks of all kinds: which are found and inserted exactly, and the reasons against others."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower import no_widths
from growlab.growth import PairGrowth
from growlab.inspect.__main__ import main as widths_command
from growlab.parts import Depth
from growlab.parts.depth import Blocks
from growlab.parts.depth.search import Search
from tests.cases import Around, differing

EXACT = 1e-10
SAMPLES = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(2))


def images(side: int) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(3))


# Networks of users --------------------------------------------------------------------------------------------


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))


class Added(nn.Module):
    """A network that adds the outputs of its blocks itself; their list may have any name."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.whatever = nn.ModuleList([mlp() for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.whatever:
            x = x + 0.5 * block(x)
        return self.last(x)


class Attention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Pairs(nn.Module):
    """A list of pairs that the forward unpacks, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList([nn.ModuleList([Attention(), mlp()]) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.unsqueeze(1))
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
        return self.last(x.mean(1))


class Bare(nn.Module):
    """A block with direct parameters, and a scale at the end of its branch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 20)), nn.Parameter(torch.randn(20, 16))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (torch.relu(x @ self.up) @ self.down)


class Siblings(nn.Module):
    """Blocks as attributes instead of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.one, self.other, self.third = Bare(), Bare(), Bare()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.other(self.one(self.first(x)))))


class WithWeights(nn.Module):
    """Blocks that return a second tensor, which the network may use, or return in train mode."""

    def __init__(self, uses: bool = False, returns: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.uses, self.returns = nn.Linear(8, 16), nn.Linear(16, 4), uses, returns
        self.blocks = nn.ModuleList([Bare() for _ in range(3)])
        for block in self.blocks:
            block.register_forward_hook(lambda module, inputs, output: (output, inputs[0].softmax(-1)))

    def forward(self, x: Tensor) -> Any:
        x, others = self.first(x), []
        for block in self.blocks:
            x, weights = block(x)
            if self.uses and weights is not None:
                x = x * (1 + weights)
            others.append(weights)
        return (self.last(x), sum(others)) if self.returns and self.training else self.last(x)


class SharedWeight(Siblings):
    """A weight that all blocks share, registered in the first."""

    def __init__(self, name: str = "up") -> None:
        super().__init__()
        for block in (self.other, self.third):
            setattr(block, name, getattr(self.one, name))


def between(function: Callable[[Any, Tensor], Tensor], **blocks: nn.Module) -> nn.Module:
    """A function of the network and 16 channels between two layers, with the blocks that it uses."""
    return Around(lambda net, x: net.last(function(net, net.first(x))), first=[8, 16], last=[16, 4], **blocks)


def norms_apart() -> nn.Module:
    """Normalisations in a separate list."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for norm, block in zip(net.norms, net.blocks, strict=True):
            x = x + block(norm(x))
        return x

    norms, blocks = (nn.ModuleList([make() for _ in range(3)]) for make in (lambda: nn.LayerNorm(16), mlp))
    return between(forward, norms=norms, blocks=blocks)


def one_block_thrice() -> nn.Module:
    blocks = nn.ModuleList([Bare()] * 3)
    return between(lambda net, x: net.blocks[2](net.blocks[1](net.blocks[0](x))), blocks=blocks)


def layers() -> nn.Module:
    """Layers without a residual; the network applies the ReLU."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.relu(x)
        for layer in net.hidden:
            x = torch.relu(layer(x))
        return x

    return between(forward, hidden=nn.ModuleList([nn.Linear(16, 16) for _ in range(4)]))


def parallel() -> nn.Module:
    """Three parallel branches: none takes another's output."""
    branches = nn.ModuleList([Bare() for _ in range(3)])
    return between(lambda net, x: sum((branch(x) for branch in net.branches), x), branches=branches)


def post_norm() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for layer in net.layers:
            x = layer(x)
        return x

    encoder = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return between(forward, layers=nn.ModuleList([copy.deepcopy(encoder) for _ in range(3)]))


def plain_convnet() -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (3, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        models = pytest.importorskip("torchvision.models")
        return models.get_model(name, weights=None)

    return make


def timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return pytest.importorskip("timm").create_model(name, **settings)

    return make


def vit() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return models.VisionTransformer(32, 8, 3, 2, 16, 32, num_classes=4)


def of_transformers(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        return getattr(library, model)(getattr(library, config)(**{**sizes, **settings}))

    return make


class T5(nn.Module):
    """An encoder and a decoder of the same input."""

    def __init__(self) -> None:
        super().__init__()
        library = pytest.importorskip("transformers")
        sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
        self.t5 = library.T5ForConditionalGeneration(library.T5Config(**sizes, use_cache=False))

    def forward(self, ids: Tensor) -> Tensor:
        return self.t5(input_ids=ids, decoder_input_ids=ids).logits


GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"vocab_size": 50, "num_key_value_heads": 2, "use_cache": False}
IMAGES = images(32)
# Network, its input, how many blocks are left out and which come first.
FOUND: dict[str, tuple[Callable[[], nn.Module], Tensor, int, str]] = {
    "a shared weight": (SharedWeight, SAMPLES, 2, "other third"),
    "added by the network": (Added, SAMPLES, 2, "whatever.1 whatever.2"),
    "pairs in a list": (Pairs, SAMPLES, 2, "layers.1 layers.2"),
    "attributes": (Siblings, SAMPLES, 2, "other third"),
    "a second output that is not used": (WithWeights, SAMPLES, 2, "blocks.1 blocks.2"),
    "torchvision resnet18": (torchvision("resnet18"), IMAGES, 4, "layer1.1 layer2.1"),
    "torchvision convnext": (torchvision("convnext_tiny"), IMAGES, 14, "features.1.1 features.3.1"),
    "torchvision vit": (vit, IMAGES, 2, "encoder.layers.encoder_layer_1"),
    "torchvision swin": (torchvision("swin_t"), IMAGES, 8, "features.1.1 features.3.1"),
    "torchvision mobilenet_v2": (torchvision("mobilenet_v2"), IMAGES, 10, "features.3 features.5"),
    "torchvision mobilenet_v3": (torchvision("mobilenet_v3_small"), IMAGES, 6, "features.3 features.5"),
    # Its layers are dropped at random in train mode.
    "torchvision efficientnet": (torchvision("efficientnet_b0"), IMAGES, 9, "features.2.1 features.3.1"),
    "timm convnext": (timm("convnext_atto"), IMAGES, 8, "stages.0.blocks.1 stages.1.blocks.1"),
    "timm deit": (
        timm("deit_tiny_patch16_224", img_size=32, patch_size=8, drop_path_rate=0.2),
        *(IMAGES, 11, "blocks.1"),
    ),
    "timm nfnet": (timm("nfnet_f0"), IMAGES, 8, "stages.1.1"),
    "transformers GPT-2": (of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2), *(TOKENS, 2, "transformer.h.1")),
    "transformers Llama": (of_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA), *(TOKENS, 2, "model.layers.1")),
    "transformers Gemma 2": (
        of_transformers("Gemma2Model", "Gemma2Config", **LLAMA, head_dim=8),
        *(TOKENS, 2, "layers.1 layers.2"),
    ),
    "transformers Bloom": (
        of_transformers("BloomForCausalLM", "BloomConfig", vocab_size=50, n_layer=3, n_head=4),
        *(TOKENS, 2, "transformer.h.1"),
    ),
    "transformers T5": (T5, TOKENS, 4, "t5.encoder.block.1 t5.decoder.block.1"),
    "transformers ViT": (
        of_transformers("ViTModel", "ViTConfig", image_size=32, patch_size=8),
        *(IMAGES, 2, ("layers.1 layers.2", "encoder.layer.1 encoder.layer.2")),  # the latter in older releases
    ),
}
# One of each kind of block is fast.
SLOW = {
    *("torchvision convnext", "torchvision swin", "torchvision mobilenet_v2", "torchvision efficientnet"),
    *("timm nfnet", "timm convnext"),
}
# Copies replace zeros in the same way in all blocks, so that a few networks suffice.
COPIED = {"a shared weight", "pairs in a list", "transformers Llama", "transformers T5"}


def made(make: Callable[[], nn.Module], x: Tensor) -> tuple[nn.Module, tuple[Tensor]]:
    """The network and its input in float64, with parameters moved away from 0 and 1 as by training."""
    torch.manual_seed(0)
    network = make().double()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() < 2:
                parameter += 0.1 * torch.randn_like(parameter)
    return network, (x.double() if x.is_floating_point() else x,)


def shapes(network: nn.Module, path: str) -> dict[str, torch.Size]:
    """Shapes of a module's parameters and buffers, by name."""
    return {key: tensor.shape for key, tensor in network.get_submodule(path).state_dict().items()}


def earlier(network: nn.Module, path: str) -> list[dict[str, torch.Size]]:
    """The shapes of all modules before this one."""
    names = [name for name, _ in network.named_modules()]
    return [shapes(network, name) for name in names[: names.index(path)]]


CASES = [
    pytest.param(name, start, marks=pytest.mark.slow)
    if name in SLOW or (start == "stack" and name not in COPIED)
    else (name, start)
    for name in FOUND
    for start in ("zero", "stack")
]


@pytest.mark.parametrize(("name", "start"), CASES)
def test_blocks_are_found_and_inserted_exactly(name: str, start: str) -> None:
    make, x, number, first = FOUND[name]
    network, inputs = made(make, x)
    known = {key: tensor.shape for key, tensor in network.state_dict().items()}
    blocks = Blocks(network, no_widths(), None, start, inputs)
    if start == "zero":
        assert len(blocks.blocks) == number and " ".join(blocks.blocks).startswith(first)
    full = copy.deepcopy(network)
    blocks.leave_out(network)
    inserted = list(blocks.blocks)[:2] + list(blocks.blocks)[2:][-1:]
    for block in inserted:
        sources = all(any(map(shapes(full, path).__eq__, earlier(network, path))) for path in block.split())
        receipt, copied = blocks.insert(network, block, PairGrowth(), {}, 0, 1, inputs)
        assert receipt["parity_error_eval"] <= EXACT and receipt["parity_error_train"] <= EXACT
        # A block without an earlier one of the same shapes, such as after a strided one, begins at zero.
        assert bool(copied) == (receipt["copied_from"] is not None) == (start == "stack" and sources)
    for block in blocks.blocks.keys() - inserted:
        blocks.put_in(network, block, {})
    assert {key: tensor.shape for key, tensor in network.state_dict().items()} == known


STAYS: dict[str, tuple[Callable[[], nn.Module], Tensor, str, str]] = {
    "post-norm": (post_norm, SAMPLES, "zero", "no sum at its end passes its input on: .* NativeLayerNorm"),
    "norms apart": (norms_apart, SAMPLES, "zero", r"nothing would be learnt in norms\.\d\.weight without it"),
    "one block three times": (one_block_thrice, SAMPLES, "zero", "it runs 3 times in a forward pass"),
    "what would be zero is shared": (
        *(lambda: SharedWeight("scale"), SAMPLES, "zero"),
        r"would begin with other values of one\.scale, which other modules share",
    ),
    "a second output that is used": (lambda: WithWeights(True), SAMPLES, "zero", "uses or returns more than one"),
    "a second output that is returned": (lambda: WithWeights(returns=True), SAMPLES, "zero", "uses or returns more"),
    "side by side": (parallel, SAMPLES, "zero", r"its input is not the output of branches\.0"),
    "a residual for identity": (Siblings, SAMPLES, "identity", "it has a residual branch"),
    "layers for zero": (layers, SAMPLES, "zero", "finds no modules of one kind"),
    "densenet": (torchvision("densenet121"), IMAGES, "zero", r"maps shape \[2, 64, 8, 8\] to \[2, 32, 8, 8\]"),
    "shufflenet": (torchvision("shufflenet_v2_x0_5"), IMAGES, "zero", "its output is that of Cat"),
    "transformers BERT": (
        of_transformers("BertModel", "BertConfig", vocab_size=50),
        TOKENS,
        "zero",
        "no sum at its end passes its input on: .* NativeLayerNorm",
    ),
    "transformers ALBERT": (
        of_transformers("AlbertModel", "AlbertConfig", vocab_size=50, embedding_size=16),
        TOKENS,
        "zero",
        "finds no modules of one kind",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_blocks_that_are_not_found_are_named_with_the_reason(name: str) -> None:
    make, x, start, reason = STAYS[name]
    torch.manual_seed(0)
    with pytest.raises(UserError, match=reason):
        Blocks(make(), no_widths(), None, start, (x,))


def test_gstack_changes_a_post_norm_network_and_reports_it() -> None:
    network, inputs = made(post_norm, SAMPLES)
    blocks = Blocks(network, no_widths(), None, "gstack", inputs)
    assert list(blocks.blocks) == ["layers.1", "layers.2"]
    blocks.leave_out(network)
    receipt, copied = blocks.insert(network, "layers.1", PairGrowth(), {}, 0, 1, inputs)
    assert receipt["parity_tolerance"] is None and receipt["parity_error_eval"] > 1e-3
    assert receipt["copied_from"] == ["layers.0"] and len(copied) == len(list(network.layers[1].parameters()))
    for name, parameter in network.layers[1].named_parameters():
        assert torch.equal(parameter, network.layers[0].get_parameter(name))


@pytest.mark.parametrize(
    ("make", "x", "names"),
    [
        (layers, SAMPLES, ["hidden.1", "hidden.2", "hidden.3"]),
        (plain_convnet, images(8), ["3:6", "6:9"]),
        pytest.param(
            *(torchvision("vgg11_bn"), IMAGES, ["features.18:21", "features.22:25", "features.25:28"]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["list of layers", "convolutions", "vgg"],
)
def test_layers_without_a_residual_start_as_the_identity(
    make: Callable[[], nn.Module], x: Tensor, names: list[str]
) -> None:
    network, inputs = made(make, x)
    blocks = Blocks(network, no_widths(), None, "identity", inputs)
    assert set(names) <= set(blocks.blocks)
    blocks.leave_out(network)
    for name in names:
        receipt, _ = blocks.insert(network, name, PairGrowth(), {}, 0, 1, inputs)
        assert max(receipt["parity_error_eval"], receipt["parity_error_train"]) <= EXACT


def test_a_branch_that_the_network_adds_is_left_out_as_zero() -> None:
    """Not as the identity, which would double the stream."""
    network, inputs = made(Added, SAMPLES)
    Blocks(network, no_widths(), None, "zero", inputs).leave_out(network)
    x = network.first(*inputs)
    assert torch.allclose(network(*inputs), network.last(x + 0.5 * network.whatever[0](x)), rtol=1e-12)


def test_finding_blocks_leaves_the_network_unchanged() -> None:
    torch.manual_seed(0)
    network = Added().requires_grad_(False).train()
    before = copy.deepcopy(network.state_dict())
    drawn = torch.get_rng_state()
    blocks, chains = Search(network, (SAMPLES,), "zero").all()
    assert [block.name for block in blocks] == ["whatever.1", "whatever.2"]
    assert [(chain.kind, chain.names, chain.found) for chain in chains] == [
        ("Sequential", ("whatever.0", "whatever.1", "whatever.2"), ("whatever.1", "whatever.2"))
    ]
    assert not differing(before, network.state_dict())
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in network.modules())
    assert not any(p.requires_grad for p in network.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def added() -> tuple[nn.Module, tuple[Tensor]]:
    """A network with its input for the command line."""
    return Added(4), (SAMPLES,)


def test_the_report_of_a_network_lists_its_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert widths_command(["tests.unit.parts.test_finding:added", "--methods", "pairs"]) == 0
    assert (
        "depth 3 of 4 Sequential (whatever.1, whatever.2, whatever.3) may be inserted later, exactly with start=zero "
        "or stack" in " ".join(capsys.readouterr().out.split())
    )


def test_examine_reports_blocks_and_why_others_stay() -> None:
    torch.manual_seed(0)
    assert Depth.examine(layers(), (SAMPLES,)) == [
        "3 of 4 Linear (hidden.1, hidden.2, hidden.3) may be inserted later, exactly with start=identity"
    ]
    (line,) = Depth.examine(post_norm(), (SAMPLES,))
    assert line.startswith("layers.1, layers.2 cannot be left out: no sum at its end passes its input on")
    assert Depth.examine(nn.Linear(8, 4), (SAMPLES,)) == ["no modules of one kind in a row"]
    lines = Depth.examine(torchvision("resnet18")(), (IMAGES,))
    assert lines[0] == "1 of 2 BasicBlock (layer1.1) may be inserted later, exactly with start=zero or stack"
    assert lines[1] == "1 of 2 BasicBlock (layer2.1) may be inserted later, exactly with start=zero or stack"
