"""Models created from configurations, trained by Hugging Face's Trainer with the callback."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from growlab.base.errors import UserError
from growlab.grower.triggers import At
from growlab.growth import VarianceTransfer
from growlab.parts import Averages
from tests.cases import differing
from tests.command_line import CommandLine, join, offer_port
from tests.unit.frontends import trainer_runs

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

from growlab.frontends.transformers import Growth  # noqa: E402

EPOCHS, STEPS = 3, 3
SOURCE = torch.Generator().manual_seed(0)
WORDS = torch.randint(5, 40, (12, 6), generator=SOURCE)
DATA = [{"input_ids": words, "labels": words.sum() % 3} for words in WORDS]


def bert(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(**sizes, **dropouts, intermediate_size=24, max_position_embeddings=8)
    return transformers.BertForSequenceClassification(config)


def run(
    folder: Path,
    resume: Path | None = None,
    dropout: float = 0.1,
    frozen: bool = False,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[Any, Growth]:
    usual = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 4, "save_steps": 1, "learning_rate": 5e-3}
    growth = Growth(
        method=VarianceTransfer(noise_std=1e-3, multipliers="keep"),
        trigger={0: 0.5, 1: 0.75, 2: 1.0},
        parts=[Averages(decay=0.7)],
        example=(WORDS[:4],),
        anneal_steps=2,
    )
    model = bert(dropout).to(dtype)
    if frozen:
        model.bert.embeddings.requires_grad_(False)
    settings = {**usual, **settings}
    return trainer_runs.trained(folder, model, DATA, growth, resume=resume, **settings), growth


def everything(trainer: Any, growth: Growth) -> list[Any]:
    optimizer = trainer.optimizer.state_dict()
    moments = [value for state in optimizer["state"].values() for value in state.values()]
    followed = [value for part in growth.grower.parts for value in part.state_dict().values()]
    tensors = [*trainer.model.state_dict().values(), *(torch.as_tensor(m) for m in moments), *followed]
    events = [
        {n: v for n, v in event.as_dict().items() if not n.startswith("seconds")} for event in growth.grower.events
    ]
    return [*(tensor.tolist() for tensor in tensors), events]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Growth, list[Any]]:
    """An uninterrupted run with its checkpoints: folder, Trainer, callback and final state."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer, growth = run(folder, logging_strategy="epoch")
    return folder, trainer, growth, everything(trainer, growth)


def test_a_run_resumed_from_any_checkpoint_equals_the_uninterrupted_one(uninterrupted: Any, tmp_path: Path) -> None:
    folder, trainer, growth, expected = uninterrupted
    assert [event.epoch for event in growth.events] == [1, 2]
    assert all(event.parity_error_eval < 1e-4 for event in growth.events)
    # The last entry is the Trainer's summary.
    logs = [(log["growth/stage"], log["growth/num_params"]) for log in trainer.state.log_history[:-1]]
    assert logs == [(0, growth.events[0].num_params_before), *((e.stage, e.num_params) for e in growth.events)]
    # Right before an event, and inside an epoch while normalisations are annealed.
    for step in (3, 7):
        checkpoint = folder / f"checkpoint-{step}"
        resumed = run(tmp_path, checkpoint, save_strategy="no", resume_from_checkpoint=str(checkpoint))
        assert everything(*resumed) == expected, step
    # The result is an ordinary model of its original configuration.
    outputs = trainer.model.eval()(WORDS).logits
    trainer.save_model(str(tmp_path / "model"))
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert torch.allclose(again(WORDS).logits, outputs, atol=1e-6)
    bert().load_state_dict(trainer.model.state_dict(), strict=True)
    # Its last checkpoint, written before growth was finished, is one too.
    last = folder / f"checkpoint-{EPOCHS * STEPS}"
    kept = torch.load(last / "growlab.pt", weights_only=True)["kept"]
    assert kept and any((trainer.model.state_dict()[name] != tensor).any() for name, tensor in kept.items())
    again = transformers.BertForSequenceClassification.from_pretrained(last).eval()
    assert torch.allclose(again(WORDS).logits, outputs, atol=1e-6)


def test_the_hub_gets_plain_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[Any] = []

    class Hub:
        """The Hub, and the result of an upload."""

        def upload_folder(self, *, folder_path: str, **_: Any) -> "Hub":
            pushed.append(load_file(Path(folder_path) / "model.safetensors"))
            return self

        def done(self) -> bool:
            return True

    def init_hf_repo(self: Any, **_: Any) -> None:
        self.hub_model_id, self.push_in_progress = "me/it", None

    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", init_hf_repo)
    monkeypatch.setattr(transformers.trainer, "hf_api", Hub, raising=False)
    monkeypatch.setattr(transformers.trainer, "upload_folder", Hub().upload_folder, raising=False)
    trainer, _ = run(tmp_path, save_strategy="epoch", push_to_hub=True, hub_strategy="checkpoint")
    assert len(pushed) == 2 * EPOCHS  # the model and the checkpoint's folder
    for tensors in pushed[-2:]:
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(tensors[name], tensor), name
    # A push after training leaves the last checkpoint, which training is resumed from, as it is.
    extra = tmp_path / f"checkpoint-{EPOCHS * STEPS}" / "growlab.pt"
    before = extra.read_bytes()
    trainer.push_to_hub(blocking=False)
    assert extra.read_bytes() == before and len(pushed) == 2 * EPOCHS + 1


def test_a_second_training_keeps_the_optimizer_of_the_first(tmp_path: Path) -> None:
    """The small model's optimizer, which training started from, has other shapes."""
    half = {name: getattr(bert().config, name) // 2 for name in ("hidden_size", "intermediate_size")}
    small = transformers.BertForSequenceClassification(transformers.BertConfig(**{**bert().config.to_dict(), **half}))
    usual = {"per_device_train_batch_size": 4, "save_strategy": "epoch"}
    trainer_runs.trained(tmp_path, small, DATA, num_train_epochs=1, **usual)
    growth = Growth(start=tmp_path / f"checkpoint-{STEPS}", trigger={0: "small", 1: 1.0}, example=(WORDS[:4],))
    trainer = trainer_runs.trained(tmp_path, bert(), DATA, growth, num_train_epochs=2, **usual)
    trainer.train()
    for parameter, state in trainer.optimizer.state.items():
        assert state["exp_avg"].shape == parameter.shape and state["step"] == STEPS * (1 + 2 + 2)


def test_two_callbacks_raise_an_error(tmp_path: Path) -> None:
    class Towers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = bert(), bert()

    each = [Growth(name, trigger={0: 0.5, 1: 1.0}, example=(WORDS[:4],)) for name in ("one", "other")]
    with pytest.raises(UserError, match="one Growth callback"):
        trainer_runs.trained(tmp_path, Towers(), DATA, *each)


def test_frozen_tables_are_not_saved_in_the_trainers_own_file(tmp_path: Path) -> None:
    trainer, growth = run(tmp_path / "whole", frozen=True)
    assert growth.grower is not None and growth.grower.state.constants
    table = bert().bert.embeddings.position_embeddings.weight
    assert torch.equal(trainer.model.bert.embeddings.position_embeddings.weight, table)
    expected = everything(trainer, growth)
    for step in (3, 7):
        resumed = run(tmp_path / "whole", tmp_path / "whole" / f"checkpoint-{step}", frozen=True, save_strategy="no")
        assert everything(*resumed) == expected, step


def test_the_loss_inside_the_model_sees_the_output_factor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, growth = run(tmp_path, num_train_epochs=1, save_strategy="no")
    assert any("growth is due at epoch 1, but training ends after 1" in message for message in caplog.messages)
    assert any("training has ended in stage 0 of 2" in message for message in caplog.messages)
    growth.grower.reattach_hooks()
    network = growth.grower.network.eval()
    loss, logits = network(WORDS, labels=torch.zeros(12, dtype=torch.long))[:2]
    growth.grower.state.output_factor = 2.0
    doubled, scaled = network(WORDS, labels=torch.zeros(12, dtype=torch.long))[:2]
    assert torch.allclose(scaled, 2 * logits)
    assert torch.allclose(doubled, torch.nn.functional.cross_entropy(scaled, torch.zeros(12, dtype=torch.long)))
    assert not torch.allclose(loss, doubled)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({"n_gpu": 2}, r"one process would train on 2 GPUs .* torchrun --nproc_per_node=2"),
        ({"fsdp": ["full_shard"]}, "would use FSDP1, or no sharding on a CPU"),
        ({"deepspeed": "zero.json"}, "DeepSpeed shards parameters in flat buffers"),
    ],
)
def test_unsupported_devices_raise_errors(devices: dict[str, Any], message: str) -> None:
    """The callback sees these devices in the Trainer's arguments."""
    accelerate.Accelerator(cpu=True)
    arguments = SimpleNamespace(**{"n_gpu": 1, "fsdp": None, "deepspeed": None, **devices})
    growth = Growth(method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    with pytest.raises(UserError, match=message):
        growth.on_init_end(arguments, None, None, model=bert())


def one_loss_is_best(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the evaluation after an epoch (counted from 0) the best."""
    evaluate, calls = transformers.Trainer.evaluate, []

    def judged(self: Any, *arguments: Any, **named: Any) -> dict[str, float]:
        calls.append(None)
        metrics = evaluate(self, *arguments, **named)
        return {**metrics, "eval_loss": 0.0 if len(calls) == best + 1 else 1.0}

    monkeypatch.setattr(transformers.Trainer, "evaluate", judged)


@pytest.mark.parametrize("best", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_best_model_is_restored_with_its_state(
    best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights, widths, output factor and averages are those of its checkpoint's stage, finished."""
    one_loss_is_best(best, monkeypatch)
    each = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    with caplog.at_level(logging.WARNING):
        trainer, growth = run(tmp_path, load_best_model_at_end=True, **each)
    assert sum("training has ended in stage" in message for message in caplog.messages) == (best < EPOCHS - 1)
    checkpoint = tmp_path / f"checkpoint-{(best + 1) * STEPS}"
    assert trainer.state.best_model_checkpoint == str(checkpoint)
    assert growth.grower.state.stage == best and len(growth.grower.events) == best
    # Compare with a run that resumes from its checkpoint and trains no further epoch.
    again, resumed = run(tmp_path, checkpoint, num_train_epochs=best + 1, save_strategy="no")
    assert resumed.grower.state.widths == growth.grower.state.widths
    assert not differing(again.model.state_dict(), trainer.model.state_dict())
    if best == 1:
        (checkpoint / "trainer_state.json").unlink()
        arguments = SimpleNamespace(load_best_model_at_end=True)
        with pytest.raises(UserError, match="written without Growth or is gone"):
            growth.on_train_end(arguments, trainer.state, None)
    states = [[part.state_dict() for part in grown.grower.parts] for grown in (growth, resumed)]
    assert str(states[0]) == str(states[1])


# Settings with which two processes train like one: they would draw different dropout, and Adam amplifies rounding.
# The Trainer's average over tokens multiplies the loss by the number of processes, which a mean over samples must not.
COMPARABLE = {
    **{"dropout": 0.0, "dtype": torch.float64, "optim": "sgd", "learning_rate": 0.05},
    "average_tokens_across_devices": False,
}


def one_rank(rank: int, folder: Path) -> None:
    join(rank, folder)
    two = {"ddp_backend": "gloo", "per_device_train_batch_size": 2, "save_steps": STEPS, **COMPARABLE}
    expected = everything(*run(folder, **two))
    resumed = everything(*run(folder, folder / f"checkpoint-{2 * STEPS}", save_strategy="no", **two))
    assert resumed == expected
    (folder / f"{rank}.txt").write_text(repr(expected))


@pytest.mark.slow  # half a minute; test_loops_of_libraries.py has two processes
def test_two_processes_end_with_the_same_bits_and_compute_what_one_does(cli: CommandLine, tmp_path: Path) -> None:
    """The Trainer's wrapper is rebuilt after events, also after a checkpoint has changed the widths."""
    offer_port(tmp_path)
    cli.on_two_ranks(one_rank, tmp_path)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    alone = everything(*run(tmp_path / "one", save_strategy="no", **COMPARABLE))
    *together, events = eval(first)
    assert [event["widths_after"] for event in events] == [event["widths_after"] for event in alone[-1]]
    for pair in zip(together, alone, strict=False):
        torch.testing.assert_close(
            *(torch.tensor(numbers, dtype=torch.float64) for numbers in pair), rtol=1e-9, atol=1e-12
        )


def test_resuming_into_another_folder_needs_the_checkpoints_folder(uninterrupted: Any, tmp_path: Path) -> None:
    # Another run left a checkpoint of the same step here.
    run(tmp_path / "other", learning_rate=1e-2, max_steps=8)
    for folder in ("new", "other"):
        with pytest.raises(UserError, match=r"growlab\.pt is missing or of another run, and training cannot be resum"):
            run(tmp_path / folder, uninterrupted[0] / "checkpoint-8", save_strategy="no")


def test_dummy_inputs_of_a_users_model_are_its_example(tmp_path: Path) -> None:
    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
            self.post_init()

        @property
        def dummy_inputs(self) -> dict[str, torch.Tensor]:
            return {"x": torch.ones(2, 4)}

        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            return {"loss": self.second(self.first(x).relu()).square().mean()}

    data = [{"x": torch.ones(4), "labels": 0}] * 4
    model = Model(transformers.PretrainedConfig())
    grown = Growth(trigger={0: 0.5, 1: 1.0})
    trainer_runs.trained(tmp_path, model, data, grown, num_train_epochs=2, save_strategy="no")
    assert model.first.out_features == 8


def test_unsupported_triggers_and_settings_raise_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the Trainer knows only epochs and steps"):
        Growth(trigger=At({0: 0.5, 1: 1.0}, unit="cost"))
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
    with pytest.raises(UserError, match="give Growth an example of its input"):
        trainer_runs.trained(tmp_path, vit, DATA, Growth(trigger={0: 0.5, 1: 1.0}))
    with pytest.raises(UserError, match="restore_callback_states_from_checkpoint"):
        run(tmp_path, restore_callback_states_from_checkpoint=True, save_strategy="no")
