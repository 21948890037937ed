"""Growth from a trained network: outputs, moments, optimizers, inserted layers, training loops, ranks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import growlab
from growlab import At, Grower, HyperCloning, Net2Net, UserError, VarianceTransfer
from growlab.grower import renew
from growlab.growth import GrowthMethod
from growlab.growth.outputs import evaluate, network_inputs
from growlab.growth.parity import relative_error
from growlab.optim import BaseRate
from growlab.parts import Depth, Part
from tests.cases import differing, same_parameters, tracked
from tests.cases import train as take_steps
from tests.command_line import CommandLine
from tests.unit.frontends import trainer_runs
from tests.unit.frontends.lightning_runs import Plain, Save, trainer_of

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(3))
TEXT_ALONE = {"input_ids": TOKENS}
TEXT = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}


def decoder(kind: str, width: int, layers: int, head: int = 8, mlp: int = 2, **more: Any) -> Any:
    """A small decoder of transformers; `mlp` is the ratio of the hidden width to the stream's width."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=width, intermediate_size=mlp * width, num_hidden_layers=layers,
        num_attention_heads=width // head, num_key_value_heads=width // head, head_dim=head, use_cache=False,
        **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


def llama(width: int, layers: int, head: int = 8) -> Any:
    return decoder("Llama", width, layers, head, mlp=3).double()


def qwen3(width: int, layers: int) -> Any:
    return decoder("Qwen3", width, layers).double()


def gemma3(width: int, layers: int) -> Any:
    attention = {"sliding_window": 8, "layer_types": ["full_attention"] * layers}
    return decoder("Gemma3Text", width, layers, **attention).double()


def mixtral(width: int, layers: int) -> Any:
    # Its grouped matrix products do not support float64.
    return decoder("Mixtral", width, layers, num_local_experts=4, num_experts_per_tok=2)


def gpt2(width: int, layers: int) -> Any:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=width, n_layer=layers, n_head=width // 8, n_positions=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def vit(width: int, layers: int) -> Any:
    config = transformers.ViTConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=width // 8,
        image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).double()


def convnext(width: int, layers: int) -> Any:
    config = transformers.ConvNextConfig(
        hidden_sizes=[width, 2 * width], depths=[layers, layers], num_stages=2, num_labels=5, image_size=16,
        patch_size=2,
    )  # fmt: skip
    return transformers.ConvNextForImageClassification(config).double()


def resnet(width: int, layers: int) -> Any:
    """The first layer of its second stage has a stride and a projection, so that no other layer can copy it."""
    config = transformers.ResNetConfig(
        embedding_size=width, hidden_sizes=[width, 2 * width], depths=[layers, layers], layer_type="basic",
        num_labels=5,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config).double()


class Residual(nn.Module):
    """Convolutions with batch normalisation and a residual stream."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(_Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width)
        self.second = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).relu())


def residual(width: int, layers: int) -> nn.Module:
    return Residual(width, layers).double()


IMAGES = {"pixel_values": torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))}
LABELS = torch.tensor([0, 1, 2, 3])
CASES: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "llama": (llama, TEXT),
    "gpt2": (gpt2, TEXT),
    "qwen3": (qwen3, TEXT),
    "vit": (vit, IMAGES),
    "gemma3": (gemma3, TEXT),
    "mixtral": (mixtral, TEXT),
    "convnext": (convnext, IMAGES),
    "resnet": (resnet, IMAGES),
    "residual": (residual, IMAGES),
}


def loss_of(network: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output = network(**inputs)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), TOKENS.flatten() if logits.dim() == 3 else LABELS)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor], steps: int) -> None:
    network.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(network, inputs).backward()
        optimizer.step()


def trained(make: Callable[..., Any], inputs: dict[str, Tensor], steps: int = 5) -> tuple[Any, Any]:
    torch.manual_seed(0)
    small = make(16, 2)
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-3)
    train(small, optimizer, inputs, steps)
    return small, optimizer


def same(before: nn.Module, after: nn.Module, inputs: dict[str, Tensor]) -> float:
    return relative_error(output(before, inputs), output(after, inputs))


def output(network: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return evaluate(network, network_inputs(inputs, network))


def test_outputs_stay_and_the_result_loads_into_a_fresh_network() -> None:
    make, inputs = CASES["residual"]
    small, optimizer = trained(make, inputs)
    torch.manual_seed(1)
    wide, start = make(32, 4), copy.deepcopy(small)
    grower = Grower.from_trained(small, wide, inputs, optimizer=optimizer, trigger={0: "small", 1: 1.0})
    assert same(small, wide, inputs) < 1e-10
    assert same_parameters(small, start)
    grower.step(epoch=0)
    train(wide, optimizer, inputs, 2)
    before = copy.deepcopy(output(wide, inputs))
    (event,) = grower.step(epoch=1)
    assert event.stage == 1
    assert relative_error(before, output(wide, inputs)) < 1e-10
    grower.finish()
    fresh = make(32, 4)
    fresh.load_state_dict(wide.state_dict())
    assert relative_error(before, output(fresh, inputs)) < 1e-10
    assert set(tracked(optimizer)) == {id(p) for p in wide.parameters()}
    train(wide, optimizer, inputs, 1)


def test_training_continues_as_the_small_network_would_have() -> None:
    small, optimizer = trained(llama, TEXT)
    twin = copy.deepcopy(small)
    alone = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    wide = llama(32, 4)
    Grower.from_trained(small, wide, TEXT, optimizer=optimizer, trigger={0: "small", 9: 1.0})
    train(wide, optimizer, TEXT, 3)
    train(twin, alone, TEXT, 3)
    assert same(twin, wide, TEXT) < 1e-12


@pytest.mark.parametrize(("layers", "kept"), [([0, 3], [0, 3]), pytest.param("end", [0, 1], marks=pytest.mark.slow)])
def test_layers_are_inserted_at_the_given_positions(layers: Any, kept: list[int]) -> None:
    small, _ = trained(llama, TEXT)
    wide = llama(16, 4)
    grower = Grower.from_trained(small, wide, TEXT, layers=layers)
    (event,) = grower.step()
    new = [place for place in range(4) if place not in kept]
    assert sorted(one["block"] for one in event.notes["inserted"]) == [f"model.layers.{place}" for place in new]
    for place, old in zip(kept, small.model.layers, strict=True):
        assert torch.equal(wide.model.layers[place].mlp.up_proj.weight, old.mlp.up_proj.weight)
    for place in new:
        original = small.model.layers[max(i for i, p in enumerate(kept) if p < place)]
        assert torch.equal(wide.model.layers[place].mlp.up_proj.weight, original.mlp.up_proj.weight)
    assert same(small, wide, TEXT) < 1e-12


@pytest.mark.parametrize(
    ("method", "width", "warns"),
    [(HyperCloning(), 32, True), (Net2Net(), 32, True), (HyperCloning(), 16, False), (None, 32, False)],
)
def test_equal_copies_cause_a_warning(method: Any, width: int, warns: bool, caplog: Any) -> None:
    Grower.from_trained(residual(16, 2), residual(width, 2), IMAGES, method=method)
    assert ("stay equal throughout training" in caplog.text) == warns


@pytest.mark.parametrize("method", [VarianceTransfer(), pytest.param(Net2Net(), marks=pytest.mark.slow)])
def test_inexact_growth_of_a_normalised_stream_raises_an_error(method: Any) -> None:
    small, optimizer = trained(llama, TEXT)
    # For Net2Net, a width that is no multiple of the old one.
    wide = llama(24 if isinstance(method, Net2Net) else 32, 2)
    grower = Grower.from_trained(small, wide, TEXT, method=method, optimizer=optimizer)
    before = copy.deepcopy(wide.state_dict())
    with pytest.raises(UserError, match="HyperCloning"):
        grower.step()
    assert grower.events == [] and same(small, wide, TEXT) < 1e-12
    assert not differing(before, wide.state_dict())


@pytest.mark.parametrize(
    ("wide", "arguments", "message"),
    [
        (lambda: llama(16, 2, head=4), {}, "the two differ in more than widths"),
        (
            lambda: llama(32, 2),
            {"optimizer": torch.optim.AdamW(nn.Linear(2, 2).parameters())},
            "AdamW has no parameter of the trained",
        ),
        (lambda: llama(32, 4), {"layers": "middle"}, "layers='middle' must be \"interleave\""),
        (lambda: llama(32, 4), {"layers": [1, 2]}, "the first at 0"),
        (lambda: llama(32, 2), {"trigger": {0: 0.25, 5: 1.0}}, "let it begin with"),
        pytest.param(*(lambda: gpt2(32, 2), {}, "which no widths of GPT2LMHeadModel give"), marks=pytest.mark.slow),
    ],
)
def test_from_trained_rejects_invalid_arguments(wide: Any, arguments: dict[str, Any], message: str) -> None:
    small, _ = trained(llama, TEXT)
    with pytest.raises(UserError) as error:
        Grower.from_trained(small, wide(), TEXT, **arguments)
    assert message in str(error.value)


def test_another_number_of_classes_is_named_with_both_shapes() -> None:
    small = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    wide = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    with pytest.raises(
        UserError, match=r"2\.weight .* \[3, 4\], .* it is \[5, 16\] at full width \(the network's output"
    ):
        Grower.from_trained(small, wide, torch.randn(2, 8))


def test_a_small_network_wider_than_the_large_one_raises_an_error() -> None:
    small, _ = trained(residual, IMAGES)
    with pytest.raises(UserError, match="wider than Residual"):
        Grower.from_trained(small, residual(8, 2), IMAGES)


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_the_lightning_callback_starts_from_a_trained_network(tmp_path: Path, from_checkpoint: bool) -> None:
    class Module(Plain):
        def __init__(self, width: int, layers: int) -> None:
            super().__init__()
            self.network = residual(width, layers)

    data = torch.utils.data.TensorDataset(IMAGES["pixel_values"], LABELS)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    torch.manual_seed(0)
    small = Module(16, 2)
    trainer = trainer_of(tmp_path, max_epochs=2)
    trainer.fit(small, loader)
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    start, seen = tmp_path / "small.ckpt" if from_checkpoint else small.network, []
    growth = growlab.Growth("network", trigger={0: "small", 1: 1.0}, start=start)

    class First(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            seen.append((same(small.network, module.network, IMAGES), len(trainer.optimizers[0].state)))

    wide = Module(32, 3)
    trainer_of(tmp_path, growth, First(), max_epochs=2).fit(wide, loader)
    error, states = seen[0]
    assert error < 1e-12 and bool(states) == from_checkpoint
    (event,) = growth.events
    assert event.num_params == sum(p.numel() for p in wide.parameters())
    residual(32, 3).load_state_dict(wide.network.state_dict())


def perceptron(width: int) -> Any:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 3)).double()


X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_state_dict_may_have_the_names_of_torch_s_wrappers() -> None:
    small, wide = perceptron(8), perceptron(16)
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        wide = perceptron(16)
        state = {f"{prefix}{name}": tensor for name, tensor in small.state_dict().items()}
        Grower.from_trained(state, wide, X).step()
        assert torch.allclose(small(X), wide(X), rtol=1e-12)
    with pytest.raises(UserError, match="'model' of the trained network's state_dict is no tensor"):
        Grower.from_trained({"model": small.state_dict()}, wide, X)


def test_networks_of_stages_become_deeper_in_each_of_them() -> None:
    sizes: dict[str, Any] = {"image_size": 16, "depths": [1, 2], "num_labels": 3}
    convnext = transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(hidden_sizes=[8, 16], num_stages=2, patch_size=2, **sizes)
    )
    swin = transformers.SwinForImageClassification(
        transformers.SwinConfig(patch_size=2, embed_dim=8, num_heads=[2, 4], window_size=4, **sizes)
    )
    x = {"pixel_values": torch.randn(2, 3, 16, 16)}
    for small, layers in ((convnext, "interleave"), (swin, "end")):
        deeper, _ = growlab.enlarge(small, depth=2, layers=layers, example=x)
        assert deeper.config.depths == [2, 4] and relative_error(output(small, x), output(deeper, x)) < 1e-5
    with pytest.raises(UserError, match="does not become wider with its configuration's sizes"):
        growlab.enlarge(swin, width=2, example=x)


def test_enlarge_fills_the_given_large_network() -> None:
    network, larger = perceptron(8), perceptron(16)
    result, _ = growlab.enlarge(network, wide=larger, example=X[:5])
    assert result is larger and torch.allclose(network(X), larger(X), rtol=1e-12)
    with pytest.raises(UserError, match="give the large network as wide="):
        growlab.enlarge(network, 2)


def test_enlarge_leaves_the_optimizer_unchanged_if_it_fails() -> None:
    small = llama(16, 1)
    optimizer = torch.optim.AdamW(small.parameters())
    small(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    before = {p: dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(UserError, match="grow it by a whole factor"):
        growlab.enlarge(small, 1.5, optimizer=optimizer)
    assert set(optimizer.state) == set(small.parameters()) == set(optimizer.param_groups[0]["params"])
    assert all(optimizer.state[p][key] is value for p, state in before.items() for key, value in state.items())
    wide, _ = growlab.enlarge(small, 2, optimizer=optimizer)
    assert set(optimizer.state) == set(wide.parameters())


def test_parameters_of_absent_blocks_leave_an_optimizer_made_before() -> None:
    """A loaded state of all parameters waits for the blocks; finishing without them raises an error."""
    for steps in (1, 0):
        wide = residual(32, 3)
        optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-3)
        full = copy.deepcopy(optimizer.state_dict())
        grower = Grower(wide, IMAGES, trigger={0: 0.5, 1: 1.0}, parts=[Depth()])
        grower.follow(optimizer)
        assert set(tracked(optimizer)) == {id(p) for p in wide.parameters()}
        if steps:
            train(wide, optimizer, IMAGES, 1)
            grower.step(epoch=1)
            assert set(tracked(optimizer)) == {id(p) for p in wide.parameters()}
            train(wide, optimizer, IMAGES, 1)
        optimizer.load_state_dict(full)
        with nullcontext() if steps else pytest.raises(UserError, match="the state of 22 parameters, and has 10"):
            grower.finish(at_any_stage=True)


@pytest.mark.parametrize("steps", [0, 1])
def test_newborn_entries_have_their_own_age_after_a_state_of_torch(steps: int) -> None:
    """After a loaded state without ages, the first step of new entries has length lr, not 0.1 / sqrt(0.001) lr."""
    small, wide = perceptron(8), perceptron(16)
    optimizer = torch.optim.AdamW(small.parameters())
    take_steps(small, optimizer, X, steps=50)
    own = growlab.optim.AdamW(small.parameters(), rule=BaseRate(), weight_decay=0.0)
    own.load_state_dict(optimizer.state_dict())
    own.param_groups[0]["weight_decay"] = 0.0
    grower = Grower.from_trained(small, wide, X, optimizer=own, method=VarianceTransfer(), trigger={0: "small", 1: 1.0})
    take_steps(wide, own, X, steps=steps)
    grower.step(epoch=1)
    before = wide[0].weight.detach().clone()
    take_steps(wide, own, X)
    moved = (wide[0].weight - before).abs()[8:]
    assert torch.allclose(moved, torch.full_like(moved, 1e-3), rtol=1e-2)


def test_resizing_the_vocabulary_without_the_grower_raises_an_error() -> None:
    small, optimizer = trained(llama, TEXT)
    wide = llama(32, 2)
    grower = Grower.from_trained(small, wide, TEXT, optimizer=optimizer)
    wide.resize_token_embeddings(80, mean_resizing=False)
    actions = (lambda: train(wide, optimizer, TEXT, 1), grower.step, lambda: grower.finish(at_any_stage=True))
    for act in actions:
        with pytest.raises(UserError, match="resized from 64 to 80 tokens without the Grower"):
            act()


class Scaled(nn.Module):
    """Embeddings times the root of their width, an unsaved buffer (as in Gemma) or a number, and a tied head."""

    def __init__(self, width: int, as_number: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.scale = width**0.5 if as_number else nn.Buffer(torch.tensor(width**0.5), persistent=False)
        self.hidden, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale
        x = x + self.back(self.hidden(x).relu())
        return self.head(self.norm(x))


def test_a_factor_that_code_computes_from_the_width_moves_into_weights_and_moments() -> None:
    torch.manual_seed(0)
    small, inputs = Scaled(16).double(), {"input_ids": TOKENS}
    optimizer = torch.optim.AdamW(small.parameters(), lr=0.0, weight_decay=0.0)
    train(small, optimizer, inputs, 1)
    wide = Scaled(32).double()
    grower = Grower.from_trained(small, wide, inputs, optimizer=optimizer, method=HyperCloning())
    for _ in range(2):
        assert same(small, wide, inputs) < 1e-12
        wide.zero_grad()
        loss_of(wide, inputs).backward()
        for name, parameter in wide.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(optimizer.state[parameter]["exp_avg"], 0.1 * parameter.grad, rtol=1e-6), name
        grower.step()
    assert len(grower.events) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_that_code_computes_from_the_width_is_found_in_low_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    small, wide, inputs = Scaled(16).to(dtype), Scaled(32).to(dtype), {"input_ids": TOKENS}
    assert Grower.from_trained(small, wide, inputs, method=HyperCloning()).moved_factors
    assert same(small, wide, inputs) < 16 * torch.finfo(dtype).eps


def test_a_trained_network_is_rounded_to_the_precision_of_the_large_one() -> None:
    small, wide, inputs = Scaled(16, as_number=True), Scaled(32, as_number=True).bfloat16(), {"input_ids": TOKENS}
    small.scale = wide.scale = 4.0
    Grower.from_trained(small, wide, inputs, method=HyperCloning())
    assert 0 < same(small, wide, inputs) < 0.1


def test_width_and_depth_grow_separately() -> None:
    small, optimizer = trained(residual, IMAGES)
    wide = residual(32, 4)
    trigger = {1: {"width": 1.0}, 2: {"depth": 0.5}, 3: {"depth": 1.0}}
    grower = Grower.from_trained(small, wide, IMAGES, optimizer=optimizer, trigger=trigger)
    seen = []
    for epoch in range(4):
        for event in grower.step(epoch=epoch):
            inserted = [one["block"] for one in event.notes.get("inserted", ())]
            seen.append((event.epoch, event.widths_before != event.widths_after, inserted))
    assert seen == [(1, True, []), (2, False, ["layers.1"]), (3, False, ["layers.3"])]
    assert same(small, grower.finish(), IMAGES) < 1e-12


def test_depth_grows_without_width_and_refuses_to_shrink() -> None:
    trigger = At({0: {"width": 0.5}, 4: {"depth": 0.5}, 6: 1.0})
    assert [trigger.fraction_grown(stage, {}) for stage in range(3)] == [0.0, 0.5, 1.0]
    for depths in ((1.0, 0.5), (0.0, 1.5), (0.0, "all")):
        with pytest.raises(UserError, match="must be a fraction of the blocks, from"):
            At({epoch: {"depth": depth} for epoch, depth in enumerate(depths)})


@pytest.mark.parametrize("method", [HyperCloning(), VarianceTransfer()])
def test_growth_ends_at_once_where_normalisations_count_all_channels_equally(method: GrowthMethod) -> None:
    network = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3)).double()
    grower = Grower(network, X, method=method, trigger={0: 0.25, 1: 1.0})
    grower.step(epoch=1)
    before, refused = evaluate(network, (X,)), pytest.raises(UserError, match="need 100 more optimizer steps")
    with nullcontext() if isinstance(method, HyperCloning) else refused:
        grower.finish()
    assert relative_error(before, evaluate(network, (X,))) < 1e-12


class Unusual(nn.Module):
    """Fused projections of attention, stacked experts, a tied table, and blocks with a scalar parameter."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.heads = width // 4
        self.embed = nn.Embedding(64, 16)
        self.qkv, self.out = nn.Linear(16, 3 * width), nn.Linear(width, 16)
        self.gate_up = nn.Parameter(0.1 * torch.randn(3, 16, 4 * width))
        self.down = nn.Parameter(0.1 * torch.randn(3, 2 * width, 16))
        self.layers = nn.ModuleList(_Scaled(width) for _ in range(layers))
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = torch.einsum("bti,eih->beth", x, self.gate_up).chunk(2, -1)
        x = x + torch.einsum("beth,eho->bto", F.silu(gate) * up, self.down)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down((self.scale * self.up(x)).relu())


def test_masks_of_newborn_entries_cover_what_unusual_tensors_gained() -> None:
    small, _ = trained(lambda width, layers: Unusual(width // 2, layers).double(), TEXT_ALONE)
    wide = Unusual(16, 3).double()
    grower = Grower.from_trained(small, wide, TEXT_ALONE, layers="end")
    old = {name: p.numel() for name, p in small.named_parameters()}
    grower.step()
    new = grower.newborn()
    assert set(new.parameters) == {
        f"layers.2.{n}" for n in ("scale", "up.weight", "up.bias", "down.weight", "down.bias")
    }
    gained = {name: p.numel() - old.get(name, 0) for name, p in wide.named_parameters()}
    found = {name: int(mask.sum()) for name, mask in new.masks.items()}
    assert found == {name: n for name, n in gained.items() if n and name not in new.parameters}
    assert new.num_entries == sum(gained.values())
    # The heads 2 and 3 of each third are new, and the second half of gate and of up.
    assert new.masks["qkv.weight"][:, 0].view(3, 4, 4).any(-1).tolist() == [[False, False, True, True]] * 3
    halves = new.masks["gate_up"].view(3, 16, 2, 2, 16)
    assert not halves[:, :, :, 0].any() and halves[:, :, :, 1].all()


@pytest.mark.parametrize("as_number", [False, True])
def test_a_state_dict_alone_causes_a_warning_and_an_error_if_code_computes_from_a_width(
    as_number: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match="the root of a width that grows"):
        Grower.from_trained(Scaled(16, as_number).state_dict(), Scaled(32, as_number), TEXT_ALONE)
    assert "as tensors alone" not in caplog.text
    Grower.from_trained(residual(16, 1).state_dict(), residual(32, 1), IMAGES)
    assert "as tensors alone" in caplog.text


FAMILIES = tuple(name for name in CASES if CASES[name][0] is not residual)
STEPS, EVENT = 4, 2


@dataclass(frozen=True)
class Run:
    """Settings of a training run, in which each epoch is one step on all data."""

    name: str
    lr: float
    method: GrowthMethod | None
    layers: tuple[int, int]
    betas = (0.9, 0.999)

    def network(self, large: bool) -> Any:
        torch.manual_seed(large)
        return CASES[self.name][0](32 if large else 16, self.layers[large])

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {k: x for k, x in CASES[self.name][1].items() if k != "attention_mask"}

    @property
    def batch(self) -> dict[str, Tensor]:
        # The Trainer divides by the number of labels. The first one is never predicted, so it is masked.
        words = TOKENS.masked_fill(torch.arange(TOKENS.shape[1]) == 0, -100)
        return {**self.inputs, "labels": words if "input_ids" in self.inputs else LABELS}

    def rows(self) -> list[dict[str, Tensor]]:
        return [{key: x[index] for key, x in self.batch.items()} for index in range(4)]

    @property
    def trigger(self) -> dict[float, Any]:
        return {0: "small", EVENT: 1.0}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, betas=self.betas, weight_decay=0.0)


class Watch(Part):
    """Note the outputs before the first step and after the last one, and their change in events."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs, self.errors = inputs, list[float]()
        self.first: Tensor | None = None

    def _now(self, grower: Any) -> Tensor:
        return output(grower.network, self.inputs)

    def before_growth(self, grower: Any, widths: Any) -> Mapping[str, Any]:
        self.last = self._now(grower)
        return {}

    def after_growth(self, grower: Any, event: Any) -> Mapping[str, Any]:
        self.errors.append(relative_error(self.last, self._now(grower)))
        return {}

    def check(self, grower: Any) -> None:
        """Note the outputs before training, since this is called last."""
        self.first = self._now(grower)

    def after_step(self, grower: Any) -> None:
        self.last = self._now(grower)


Trained = tuple[nn.Module, torch.optim.Optimizer]


class ByHand:
    """A plain loop."""

    def small(self, run: Run, folder: Path) -> Any:
        small = run.network(False)
        optimizer = run.optimizer(small.parameters())
        self._steps(run, small, optimizer, STEPS)
        return small, optimizer

    def grow(self, run: Run, start: Any, folder: Path, parts: Sequence[Part], stop: int | None = None) -> Trained:
        wide, (small, optimizer) = run.network(True), copy.deepcopy(start)
        grower = Grower.from_trained(
            small, wide, run.inputs, optimizer=optimizer, trigger=run.trigger, parts=parts, method=run.method
        )
        grower.provide(total_steps=STEPS)
        objects = (grower, wide, optimizer)
        if stop is not None:
            for each, state in zip(objects, torch.load(folder / f"{stop}.pt", weights_only=True), strict=True):
                each.load_state_dict(state)
        for epoch in range(stop or 0, STEPS):
            torch.save([each.state_dict() for each in objects], folder / f"{epoch}.pt")
            grower.step(epoch)
            self._steps(run, wide, optimizer, 1)
        return grower.finish(), optimizer

    @staticmethod
    def _steps(run: Run, network: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            network.train()(**run.batch).loss.backward()
            optimizer.step()


class Lightning:
    """A LightningModule, its checkpoint, and the callback."""

    def _fit(self, run: Run, network: Any, folder: Path, callbacks: list[Any], checkpoint: Path | None = None) -> Any:
        class Module(Plain):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def training_step(self, batch: Any, _: int) -> Tensor:
                loss: Tensor = self.network(**batch).loss
                return loss

            def configure_optimizers(self) -> Any:
                return run.optimizer(self.parameters())

        trainer = trainer_of(folder, *callbacks, max_epochs=STEPS)
        trainer.fit(Module(), torch.utils.data.DataLoader(run.rows(), batch_size=4), ckpt_path=checkpoint)
        return trainer

    def small(self, run: Run, folder: Path) -> Any:
        small = run.network(False)
        trainer = self._fit(run, small, folder, [])
        if run.name == "gemma3":
            # Checkpoints do not have its factor on embeddings.
            small.save_pretrained(folder / "small")
            torch.save(trainer.optimizers[0].state_dict(), folder / "small" / "optimizer.pt")
            return folder / "small"
        trainer.save_checkpoint(folder / "small.ckpt")
        return folder / "small.ckpt"

    def grow(self, run: Run, start: Any, folder: Path, parts: Sequence[Part], stop: int | None = None) -> Trained:
        wide = run.network(True)
        growth = growlab.Growth(
            "network", start=start, trigger=run.trigger, parts=parts, method=run.method, example=run.inputs
        )
        callbacks = [growth, *([Save(folder)] if stop is None else [])]
        trainer = self._fit(run, wide, folder, callbacks, None if stop is None else folder / f"epoch{stop - 1}.ckpt")
        return wide, trainer.optimizers[0]


class Trainer:
    """The Trainer of transformers, and the callback."""

    def _fit(self, run: Run, network: Any, folder: Path, callbacks: list[Any], stop: int | None = None) -> Any:
        adam = {"learning_rate": run.lr, "adam_beta1": run.betas[0], "adam_beta2": run.betas[1]}
        usual = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_steps": 1, "num_train_epochs": STEPS}
        checkpoint = None if stop is None else folder / f"checkpoint-{stop}"
        settings = {**adam, **usual, "per_device_train_batch_size": 4}
        return trainer_runs.trained(folder, network, run.rows(), *callbacks, resume=checkpoint, **settings)

    def small(self, run: Run, folder: Path) -> Any:
        self._fit(run, run.network(False), folder / "small", [])
        return folder / "small" / f"checkpoint-{STEPS}"

    def grow(self, run: Run, start: Any, folder: Path, parts: Sequence[Part], stop: int | None = None) -> Trained:
        from growlab.frontends.transformers import Growth

        wide = run.network(True)
        growth = Growth(start=start, trigger=run.trigger, parts=parts, method=run.method, example=run.inputs)
        trainer = self._fit(run, wide, folder / "wide", [growth], stop)
        return wide, getattr(trainer.optimizer, "optimizer", trainer.optimizer)


LOOPS: dict[str, Any] = {"plain": ByHand(), "lightning": Lightning(), "trainer": Trainer()}
TABLE = [
    pytest.param(name, loop, id=f"{name}-{loop}", marks=[pytest.mark.slow] * ((name, loop) != ("llama", "plain")))
    for name in FAMILIES
    for loop in LOOPS
]


def exact(network: nn.Module) -> float:
    return 1e-10 if next(network.parameters()).dtype == torch.float64 else 1e-5


@pytest.mark.parametrize(("name", "loop"), TABLE)
def test_outputs_stay_from_the_trained_network_to_the_saved_result(name: str, loop: str, tmp_path: Path) -> None:
    """Width and depth, with noise; a resumed training ends with the same bits."""
    run, row = Run(name, 1e-3, None, (1, 2)), LOOPS[loop]
    start, watch = row.small(run, tmp_path), Watch(run.inputs)
    wide, _ = row.grow(run, start, tmp_path, [watch])
    small = start[0] if loop == "plain" else run.network(False)
    if loop != "plain" and start.is_dir():
        small = type(small).from_pretrained(start)
    elif loop == "lightning":
        tensors = torch.load(start, weights_only=True)["state_dict"]
        small.load_state_dict({n.removeprefix("network."): t for n, t in tensors.items()})
    assert watch.first is not None
    assert relative_error(output(small, run.inputs), watch.first) < exact(wide)
    assert len(watch.errors) == 1 and watch.errors[0] < exact(wide)
    assert relative_error(watch.last, found := output(wide, run.inputs)) < exact(wide)
    wide.save_pretrained(tmp_path / "saved")
    state = type(wide).from_pretrained(tmp_path / "saved").state_dict()
    # In a network made as `wide` is, because Gemma's factor, which is not saved, must be rounded to float32 too.
    (loaded := run.network(True)).load_state_dict(state)
    assert relative_error(found, output(loaded, run.inputs)) < exact(wide)
    for stop in (1, 3):
        again, _ = row.grow(run, start, tmp_path, [Watch(run.inputs)], stop)
        for (key, tensor), other in zip(again.state_dict().items(), wide.state_dict().values(), strict=True):
            assert torch.equal(tensor, other), (stop, key)


@pytest.mark.parametrize(("name", "loop"), TABLE)
def test_moments_are_those_of_the_large_network_s_gradient(name: str, loop: str, tmp_path: Path) -> None:
    """With a rate of 0 the gradient is the same in each step, and moments after t steps are 1 - beta**t of it.

    Layers in front of a normalisation and keys have biases without a gradient: theirs is rounding, as are its moments.
    """
    run, row = Run(name, 0.0, HyperCloning(), (2, 2)), LOOPS[loop]
    wide, optimizer = row.grow(run, row.small(run, tmp_path), tmp_path, [])
    wide.train().zero_grad()
    wide(**run.batch).loss.backward()
    relative, rounding = (1e-5, 1e-9) if exact(wide) < 1e-9 else (1e-3, 1e-6)
    largest = max(float(p.grad.abs().max()) for p in wide.parameters())
    shares = [1 - beta ** (2 * STEPS) for beta in run.betas]
    for key, parameter in wide.named_parameters():
        state, gradient = optimizer.state[parameter], parameter.grad
        assert state["step"] == 2 * STEPS
        bound = relative * float(gradient.abs().max()) + rounding * largest
        assert float((state["exp_avg"] / shares[0] - gradient).abs().max()) < bound, key
        assert float((state["exp_avg_sq"] / shares[1]).sqrt().sub(gradient.abs()).abs().max()) < bound, key


def on_rank(rank: int, folder: Path) -> None:
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    run = Run((folder / "name").read_text(), 1e-3, None, (1, 2))
    small, wide = run.network(False), run.network(True)
    optimizer = run.optimizer(small.parameters())
    grower = Grower.from_trained(small, wide, run.inputs, optimizer=optimizer, trigger=run.trigger)
    wrapped = nn.parallel.DistributedDataParallel(wide)
    mine = {key: x[2 * rank : 2 * rank + 2] for key, x in run.batch.items()}
    for epoch in range(STEPS):
        grower.step(epoch, then=lambda: renew(wrapped))
        optimizer.zero_grad()
        wrapped.train()(**mine).loss.backward()
        optimizer.step()
    torch.save(dict(grower.finish().named_parameters()), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_end_with_the_same_bits(cli: CommandLine, tmp_path: Path, name: str) -> None:
    (tmp_path / "name").write_text(name)
    cli.on_two_ranks(on_rank, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert all(first[key].shape == p.shape for key, p in CASES[name][0](32, 2).named_parameters())
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())
