"""More tokens for a growing language model: same outputs, padded moments, ties, biases, averages, checkpoints."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import growlab
from growlab import Grower, UserError
from growlab.growth.parity import relative_error
from growlab.optim import BaseRate
from growlab.parts import Freeze, OldGradient, Warmup
from tests.cases import differing, same_parameters
from tests.unit.frontends import trainer_runs
from tests.unit.grower.test_trained import TEXT, TOKENS, decoder, gpt2, llama, output, residual, same, train

transformers = pytest.importorskip("transformers")
NEW = {name: x + 16 * (x >= 56) for name, x in TEXT.items()}


def phi(width: int, layers: int) -> Any:
    """A model whose output layer has a bias and is not tied to the embedding."""
    no_dropout = dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop"), 0.0)
    return decoder("Phi", width, layers, **no_dropout).double()


def started(make: Any) -> tuple[Any, Any, Grower]:
    torch.manual_seed(0)
    small = make(16, 2)
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)
    train(small, optimizer, TEXT, 3)
    wide = make(32, 2)
    trigger = {0: "small", 1: 1.0}
    return wide, optimizer, Grower.from_trained(small, wide, TEXT, optimizer=optimizer, trigger=trigger)


def resized_by_hand(twin: Any, network: Any, optimizer: Any, size: int) -> tuple[Any, Any]:
    """Add rows of means to the small network and zeros to its optimizer's state, using torch alone."""
    twin.resize_token_embeddings(size, mean_resizing=False)
    twin = twin.double()
    other = type(optimizer)(twin.parameters(), lr=1e-2)
    new, state = dict(twin.named_parameters()), {}
    for index, (name, old) in enumerate(network.named_parameters()):
        more = size - len(old) if new[name].shape != old.shape else 0
        rest = old.detach().mean(0, keepdim=True).expand(more, *old.shape[1:])
        with torch.no_grad():
            new[name].copy_(torch.cat([old.detach(), rest]))
        state[index] = {
            key: torch.cat([value, value.new_zeros(more, *old.shape[1:])]) if value.dim() else value.clone()
            for key, value in optimizer.state[old].items()
        }
    groups = [{**group, "params": list(state)} for group in optimizer.state_dict()["param_groups"]]
    other.load_state_dict({"state": state, "param_groups": groups})
    return twin, other


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gpt2, phi])
def test_training_continues_as_with_a_network_resized_by_hand(make: Any) -> None:
    wide, optimizer, grower = started(make)
    twin, other = resized_by_hand(make(16, 2), wide, optimizer, 80)
    before = output(wide, TEXT)
    event = grower.resize_vocabulary(77, multiple_of=16)
    assert (event.notes["tokens_before"], event.notes["tokens"]) == (64, 80)
    assert wide.config.vocab_size == 80 and event.num_params == sum(p.numel() for p in wide.parameters())
    assert relative_error(before, output(wide, TEXT)[..., :64]) < 1e-12
    assert [n for n, _ in wide.named_parameters()] == [n for n, _ in twin.named_parameters()]
    for _ in range(3):
        assert same(twin, wide, NEW) < 1e-12
        train(wide, optimizer, NEW, 1)
        train(twin, other, NEW, 1)
    before = output(wide, NEW)
    (grown,) = grower.step(epoch=1)
    assert grown.stage == 2 and relative_error(before, output(wide, NEW)) < 1e-12
    train(wide, optimizer, NEW, 1)
    grower.finish()
    fresh = make(32, 2)
    fresh.resize_token_embeddings(80, mean_resizing=False)
    fresh.load_state_dict(wide.state_dict())
    assert same(fresh.double(), wide, NEW) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("network_first", [False, True])
def test_a_resumed_training_is_equal_bit_for_bit(network_first: bool) -> None:
    def run(grower: Grower, wide: Any, optimizer: Any, epochs: range) -> None:
        for epoch in epochs:
            if epoch == 2 and len(wide.get_input_embeddings().weight) == 64:
                grower.resize_vocabulary(80)
            grower.step(epoch=epoch)
            train(wide, optimizer, NEW if epoch > 1 else TEXT, 1)

    wide, optimizer, grower = started(gpt2)
    average = AveragedModel(wide)
    grower.follow(average)
    run(grower, wide, optimizer, range(3))
    average.update_parameters(wide)
    saved = copy.deepcopy([each.state_dict() for each in (wide, average, optimizer, grower)])
    run(grower, wide, optimizer, range(3, 5))
    again, other, resumed = started(gpt2)
    mean = AveragedModel(again)
    resumed.follow(mean)
    pairs = list(zip((again, mean, other, resumed), saved, strict=True))
    for each, state in pairs if network_first else reversed(pairs):
        each.load_state_dict(state)
    assert same(average.module, mean.module, NEW) == 0 and again.config.vocab_size == 80
    run(resumed, again, other, range(3, 5))
    assert same_parameters(wide, again)


@pytest.mark.slow
def test_averages_and_other_optimizers_follow() -> None:
    torch.manual_seed(0)
    wide = gpt2(32, 2)
    grower = Grower(wide, TEXT, trigger={0: 0.5, 1: 1.0})
    optimizer, average = torch.optim.Adafactor(wide.parameters()), AveragedModel(wide)
    grower.follow(optimizer, average)
    train(wide, optimizer, TEXT, 1)
    average.update_parameters(wide)
    before = output(average.module, TEXT)
    grower.resize_vocabulary(80)
    assert relative_error(before, output(average.module, TEXT)[..., :64]) < 1e-12
    train(wide, optimizer, NEW, 1)
    average.update_parameters(wide)
    before = output(average.module, NEW)
    assert len(grower.step(epoch=1)) == 1
    assert relative_error(before, output(average.module, NEW)) < 1e-12


def test_an_old_gradient_has_no_entries_for_new_tokens() -> None:
    torch.manual_seed(0)
    wide, part = gpt2(32, 1), OldGradient("run")
    grower = Grower(wide, TEXT, trigger={0: 0.5, 1: 1.0}, parts=[part])
    grower.provide(
        loss=lambda output, words: nn.functional.cross_entropy(output.logits.flatten(0, 1), words.flatten()),
        epoch_batches=lambda epoch, seed: [(TOKENS, TOKENS)],
        steps=[1, 3],
    )
    optimizer = torch.optim.SGD(wide.parameters(), lr=1e-2)
    grower.follow(optimizer)
    train(wide, optimizer, TEXT, 1)
    grower.step(epoch=1, step=1)
    before = part.state_dict()["gradients"]
    grower.resize_vocabulary(80)
    old = part.state_dict()["gradients"]
    table = "transformer.wte.weight"
    assert torch.equal(old[table][:64], before[table]) and not old[table][64:].any()
    train(wide, optimizer, NEW, 1)
    along = sum(float((old[name] * p.grad).sum()) for name, p in wide.named_parameters())
    assert abs(along) < 1e-12 and part.state_dict()["gradients"][table].abs().max() > 0


@pytest.mark.slow
def test_the_trainer_continues_with_more_tokens(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from growlab.frontends.transformers import Growth

    torch.manual_seed(0)
    small = llama(16, 2).float()
    growth, sizes = Growth(start=small, trigger={0: "small", 2: 1.0}), []

    class More(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                assert growth.grower is not None
                growth.grower.resize_vocabulary(80)

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            sizes.append((len(model.lm_head.weight), model.config.hidden_size, model.lm_head.in_features))

    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "save_steps": 6}
    trainer_runs.trained(tmp_path / "run", llama(32, 2).float(), data, growth, More(), **settings)
    assert [size[0] for size in sizes] == [64, 64, 80, 80, 80, 80]
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert loaded.lm_head.weight.shape == (80, 32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_outputs_that_depend_on_the_number_of_tokens_are_rejected(dtype: torch.dtype) -> None:
    model = phi(32, 2).to(dtype)

    class Normalised(type(model)):
        def forward(self, *inputs: Any, **named: Any) -> Any:
            outputs = super().forward(*inputs, **named)
            outputs.logits = outputs.logits.log_softmax(-1)
            return outputs

    model.__class__ = Normalised
    with pytest.raises(UserError, match=r"cannot take 640 tokens: .* depends on their number"):
        Grower(model, TEXT).resize_vocabulary(640)
    assert model.config.vocab_size == 64


def test_resize_vocabulary_rejects_invalid_sizes_and_networks() -> None:
    wide, optimizer, grower = started(llama)
    for size in (64, 12, 0, 80.5):
        with pytest.raises(UserError):
            grower.resize_vocabulary(size)  # type: ignore[arg-type]
    images = residual(16, 2)
    x = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    with pytest.raises(UserError, match="not a language model"):
        Grower(images, x).resize_vocabulary(80)
    assert wide.config.vocab_size == 64 and isinstance(wide.lm_head, nn.Linear)
    train(wide, optimizer, TEXT, 1)


@pytest.mark.parametrize("make", [pytest.param(gpt2, marks=pytest.mark.slow), phi])
def test_rows_of_new_tokens_are_newborn(make: Any) -> None:
    """Masks, parts that act on newborn entries, and the ages of an optimizer that has them."""
    torch.manual_seed(0)
    small = make(16, 2)
    old = growlab.optim.AdamW(small.parameters(), lr=1e-2, rule=BaseRate(), weight_decay=0.0)
    train(small, old, TEXT, 3)
    wide, trigger, warm = make(32, 2), {0: "small", 1: 1.0}, Warmup(4)
    grower = Grower.from_trained(
        small, wide, TEXT, optimizer=old, trigger=trigger, parts=[warm, Freeze(1)], state="reset_new"
    )
    event = grower.resize_vocabulary(80)
    new = grower.newborn(event.stage)
    table = wide.get_input_embeddings().weight
    names = {name for name, p in wide.named_parameters() if len(p) == 80}
    assert set(new.masks) == names and not new.parameters
    assert new.num_entries == sum(16 * (p.numel() // 80) for p in wide.parameters() if len(p) == 80)
    assert all(mask[64:].all() and not mask[:64].any() for mask in new.masks.values())
    before = {name: p.detach().clone() for name, p in wide.named_parameters()}
    train(wide, old, NEW, 1)
    used = NEW["input_ids"].unique()
    moved = (table.detach() - before["model.embed_tokens.weight" if make is phi else "transformer.wte.weight"]).abs()
    assert not moved[:64].any() and moved[used[used >= 64]].max() == pytest.approx(1e-2 / 4, rel=1e-2)
    assert set(differing(before, dict(wide.named_parameters()))) <= names
    (grown,) = grower.step(epoch=1)
    assert grown.stage == 2 and grower.newborn(1).masks[min(names)][64:].all()
    assert not grower.newborn(2).masks["model.embed_tokens.weight" if make is phi else min(names)][64:, :16].any()
