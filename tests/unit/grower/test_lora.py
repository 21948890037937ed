"""Growth of models with peft's adapters: adapters grow, the base stays frozen, merged models compute the same."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import growlab
from growlab import Grower
from growlab.base.errors import UserError
from growlab.growth import HyperCloning
from growlab.growth.parity import relative_error
from tests.cases import differing, tracked
from tests.command_line import ROOT
from tests.unit.frontends import trainer_runs
from tests.unit.grower.test_sharded import in_guide
from tests.unit.grower.test_trained import gpt2
from tests.unit.grower.test_trained import llama as llama_of_heads

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
EXACT, TRAINED_PART = 1e-12, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
TOKENS = torch.randint(32, (3, 6), generator=torch.Generator().manual_seed(0))


def llama(width: int = 8, layers: int = 2) -> Any:
    torch.manual_seed(0)
    return llama_of_heads(width, layers, head=4)


def adapted(model: Any, **settings: Any) -> Any:
    usual = {"r": 2, "lora_alpha": 4, "target_modules": TRAINED_PART, "lora_dropout": 0.1}
    model = peft.get_peft_model(model, peft.LoraConfig(**{**usual, **settings})).double()
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=source))
    return model


def output(model: Any) -> Tensor:
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=TOKENS).logits
    for module, training in modes.items():
        module.training = training
    return logits


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """AdamW for the parameters that require gradients, after two steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    train(model, optimizer, 2)
    return optimizer


def trained(frozen: bool = True, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = adapted(llama(), **settings)
    if not frozen:
        model.requires_grad_(True)
    return model, optimizer_of(model)


def enlarged(small: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Double the width and depth of a trained model; return it with its optimizer, after checking the outputs."""
    optimizer = optimizer_of(small)
    expected = output(small)
    model, same = growlab.enlarge(small, width=2, depth=2, optimizer=optimizer)
    assert same is optimizer and relative_error(expected, output(model)) < EXACT
    return model, optimizer


@pytest.mark.parametrize(
    ("width", "layers", "settings"),
    [(16, 2, {"use_rslora": True}), (8, 4, {}), (16, 4, {"rank_pattern": {"up_proj": 3}})],
    ids=str,
)
def test_adapters_follow_and_merged_models_compute_the_same(width: int, layers: int, settings: Any) -> None:
    small, optimizer = trained(**settings)
    expected, merged = output(small), copy.deepcopy(small).merge_and_unload()
    assert relative_error(expected, output(merged)) < EXACT
    wide = adapted(llama(width, layers), **settings)
    grower = Grower.from_trained(small, wide, {"input_ids": TOKENS}, optimizer=optimizer, verbose=False)
    assert relative_error(expected, output(wide)) < EXACT
    grower.step()
    ranks = {name: p.shape[0] for name, p in wide.named_parameters() if "lora_A" in name}
    assert set(ranks.values()) == {2, *settings.get("rank_pattern", {}).values()}
    grown = copy.deepcopy(wide).merge_and_unload()
    assert relative_error(expected, output(wide)) < EXACT and relative_error(expected, output(grown)) < EXACT
    # Growing the merged model gives the same function.
    Grower.from_trained(merged, again := llama(width, layers), {"input_ids": TOKENS}, verbose=False).step()
    assert relative_error(output(grown), output(again)) < EXACT
    # The optimizer has each adapter once, and trains adapters alone.
    assert sorted(tracked(optimizer)) == sorted(id(p) for name, p in wide.named_parameters() if "lora_" in name)
    base = {name: p.clone() for name, p in wide.named_parameters() if "lora_" not in name}
    train(wide, optimizer, 2)
    assert not differing(base, {name: p for name, p in wide.named_parameters() if name in base})
    assert all(p.requires_grad == ("lora_" in name) for name, p in wide.named_parameters())
    assert relative_error(expected, output(wide)) > 1e-3
    expected, plain = output(wide), grower.finish()
    assert relative_error(expected, output(plain)) < EXACT
    fresh = adapted(llama(width, layers), **settings)
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert relative_error(expected, output(fresh)) < EXACT


def test_moments_of_adapters_are_those_of_the_grown_gradient() -> None:
    small, optimizer = trained(lora_dropout=0.0)
    before = {name: dict(optimizer.state[p]) for name, p in small.named_parameters() if p.requires_grad}
    small.zero_grad()
    small(input_ids=TOKENS, labels=TOKENS).loss.backward()
    gradients = {name: small.get_parameter(name).grad for name in before}
    wide = adapted(llama(16), lora_dropout=0.0)
    settings: Any = {"method": HyperCloning(), "optimizer": optimizer, "verbose": False}
    Grower.from_trained(small, wide, {"input_ids": TOKENS}, **settings).step()
    wide(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, old in gradients.items():
        # Copies of the old gradient, times a factor.
        parameter = wide.get_parameter(name)
        new, moments = parameter.grad, optimizer.state[parameter]
        repeats = [wide // narrow for wide, narrow in zip(new.shape, old.shape, strict=True)]
        ratio = new / old.repeat(repeats)
        assert torch.allclose(ratio, ratio.median().expand_as(ratio), rtol=1e-6), name
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            expected = before[name][key].repeat(repeats) * ratio.median() ** power
            assert torch.allclose(moments[key], expected, rtol=1e-6), (name, key)


def test_a_base_that_trains_too_grows_with_its_state() -> None:
    small, optimizer = trained(frozen=False)
    expected, wide = output(small), adapted(llama(16)).requires_grad_(True)
    Grower.from_trained(small, wide, {"input_ids": TOKENS}, optimizer=optimizer, verbose=False).step()
    assert relative_error(expected, output(wide)) < EXACT
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in wide.parameters())


def test_a_warning_names_new_projections_that_can_never_learn(caplog: pytest.LogCaptureFixture) -> None:
    for targets, warns in ((TRAINED_PART, False), (["q_proj", "down_proj"], True)):
        small, optimizer = trained(target_modules=targets)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            wide = adapted(llama(8, 4), target_modules=targets)
            Grower.from_trained(small, wide, {"input_ids": TOKENS}, optimizer=optimizer, verbose=False).step()
        warnings = [one.getMessage() for one in caplog.records if "begins at zero and is frozen" in one.getMessage()]
        assert len(warnings) == warns
        if warns:
            assert warnings[0].startswith("base_model.model.model.layers.1.self_attn.o_proj.weight begins")


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=["dora", "modules_to_save"]
)
def test_unsupported_adapters_raise_errors(settings: dict[str, Any]) -> None:
    small = adapted(llama(), **settings)
    with pytest.raises(UserError, match="which no widths of PeftModel give"):
        Grower.from_trained(small, adapted(llama(16), **settings), {"input_ids": TOKENS}, verbose=False)


def test_the_guides_block_runs_as_written() -> None:
    network = llama()
    expected, names = output(network), {"network": network}
    exec(in_guide("peft", "trained"), names)
    model: Any = names["model"]
    assert type(model) is peft.PeftModel and model.config.hidden_size == 16 and model.config.num_hidden_layers == 4
    assert relative_error(expected, output(model)) < EXACT
    train(model, names["optimizer"], 1)


def test_the_trainer_resumes_with_the_base_that_has_grown(tmp_path: Path) -> None:
    from growlab.frontends.transformers import Growth

    data = [{"input_ids": TOKENS[n % 3], "labels": TOKENS[n % 3]} for n in range(12)]
    settings = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "save_steps": 2, "learning_rate": 0.01}

    def run(resume: Path | None = None) -> Any:
        growth = Growth(start=adapted(llama()), trigger={0: "small", 1: 1.0}, example={"input_ids": TOKENS})
        model = trainer_runs.trained(tmp_path, adapted(llama(16, 4)), data, growth, resume=resume, **settings).model
        assert [event.step for event in growth.events] == [3]
        assert "load_adapter" not in vars(model)
        return model

    uninterrupted = run()
    assert output(uninterrupted).isfinite().all() and uninterrupted.config.hidden_size == 16
    for step in (2, 4):  # before and after the event
        resumed = run(tmp_path / f"checkpoint-{step}")
        assert not differing(uninterrupted.state_dict(), resumed.state_dict()), step


def test_tied_tables_of_frozen_models_grow() -> None:
    small = llama()
    small.config.tie_word_embeddings = True
    small.tie_weights()
    model, optimizer = enlarged(adapted(small))
    base = model.get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight and base.model.norm.weight.shape == (16,)
    assert not base.model.norm.weight.requires_grad
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    train(model, optimizer, 2)
    assert not differing(frozen, {name: p for name, p in model.named_parameters() if name in frozen})


def test_enlarging_keeps_what_trains() -> None:
    small = adapted(llama())
    small.base_model.model.lm_head.weight.requires_grad_(True)
    model, optimizer = enlarged(small)
    assert set(tracked(optimizer)) == {id(p) for p in model.parameters() if p.requires_grad}
    assert id(model.base_model.model.lm_head.weight) in tracked(optimizer)


def test_layers_are_inserted_next_to_frozen_ones() -> None:
    small = llama()
    small.model.embed_tokens.requires_grad_(False)
    small.model.layers[0].requires_grad_(False)
    model, optimizer = enlarged(small)
    names = dict(model.named_parameters())
    assert not names["model.embed_tokens.weight"].requires_grad
    layers = {n for n in range(4) if id(names[f"model.layers.{n}.mlp.up_proj.weight"]) in tracked(optimizer)}
    assert len(layers) == 3 and 0 not in layers


def test_adapters_on_several_kinds_of_projection_of_gpt2_grow() -> None:
    model, _ = enlarged(adapted(gpt2(8, 2), target_modules="all-linear", fan_in_fan_out=True))
    adapters = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapters == {"c_attn", "c_proj", "c_fc"}
    expected = output(model)
    assert relative_error(expected, output(model.merge_and_unload())) < EXACT


def test_several_adapters_grow_while_all_are_active() -> None:
    small = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=TRAINED_PART))
    small.add_adapter("other", peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    small.double()
    with pytest.raises(UserError, match=r"the adapter other is not active.*set_adapter\(\['default', 'other'\]\)"):
        growlab.enlarge(small, width=2)
    small.base_model.set_adapter(["default", "other"])
    model, optimizer = enlarged(small)
    assert model.active_adapters == ["default", "other"]
    assert set(tracked(optimizer)) == {id(p) for name, p in model.named_parameters() if "lora_" in name}
    for name in ("default", "other"):
        small.set_adapter(name)
        model.set_adapter(name)
        assert relative_error(output(small), output(model)) < EXACT
        assert relative_error(output(small), output(copy.deepcopy(model).merge_and_unload())) < EXACT


def test_a_folder_of_adapters_alone_raises_an_error() -> None:
    with pytest.raises(UserError, match=r"PeftModel cannot be loaded from .* alone; give a network"):
        from growlab.frontends.common import trained as of_folder

        of_folder(ROOT, adapted(llama()), "")
