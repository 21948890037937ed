"""Models made from a configuration, trained by Hugging Face's Trainer with the callback."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from growlab import parts
from growlab.errors import UserError
from growlab.growth import VarianceTransfer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from growlab.frontends.transformers import Growth  # noqa: E402

EPOCHS, STEPS = 3, 3
SOURCE = torch.Generator().manual_seed(0)
WORDS = torch.randint(5, 40, (12, 6), generator=SOURCE)
DATA = [{"input_ids": words, "labels": words.sum() % 3} for words in WORDS]


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def run(folder: Path, resume: Path | None = None, **settings: Any) -> tuple[Any, Growth]:
    usual = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 4,
        "save_steps": 1,
        "learning_rate": 5e-3,
    }
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(str(folder), **{**usual, **quiet, **settings})
    growth = Growth(
        method=VarianceTransfer(noise_std=1e-3),
        trigger={0: 0.5, 1: 0.75, 2: 1.0},
        parts=[parts.Averages(decay=0.7)],
        example=(WORDS[:4],),
        anneal_steps=2,
    )
    trainer = transformers.Trainer(bert(), arguments, train_dataset=DATA, callbacks=[growth])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, growth


def everything(trainer: Any, growth: Growth) -> list[Any]:
    optimizer = trainer.optimizer.state_dict()
    moments = [value for state in optimizer["state"].values() for value in state.values()]
    averages = growth.grower.parts[0].state_dict().values()
    tensors = [*trainer.model.state_dict().values(), *(torch.as_tensor(m) for m in moments), *averages]
    events = [
        {n: v for n, v in event.items() if not n.startswith("seconds")} for event in growth.grower.events
    ]
    return [*(tensor.tolist() for tensor in tensors), events]


def test_resumed_from_any_checkpoint_it_is_the_uninterrupted_run(tmp_path: Path) -> None:
    trainer, growth = run(tmp_path)
    wanted = everything(trainer, growth)
    assert [event["epoch"] for event in growth.grower.events] == [1, 2]
    assert all(event["parity_error_eval"] < 1e-4 for event in growth.grower.events)
    # Inside epochs, before and after an event, while normalisations are annealed and once they are plain.
    for step in (2, 3, 4, 8):
        resumed = run(tmp_path, tmp_path / f"checkpoint-{step}", save_strategy="no")
        assert everything(*resumed) == wanted, step
    # An ordinary model, of the configuration that it was made from.
    outputs = trainer.model.eval()(WORDS).logits
    trainer.save_model(str(tmp_path / "model"))
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert torch.allclose(again(WORDS).logits, outputs, atol=1e-6)
    bert().load_state_dict(trainer.model.state_dict(), strict=True)
    # Its last checkpoint was written before growth was finished, and is one too.
    last = tmp_path / f"checkpoint-{EPOCHS * STEPS}"
    kept = torch.load(last / "growlab.pt", weights_only=True)["kept"]
    assert kept and any((trainer.model.state_dict()[name] != tensor).any() for name, tensor in kept.items())
    again = transformers.BertForSequenceClassification.from_pretrained(last).eval()
    assert torch.allclose(again(WORDS).logits, outputs, atol=1e-6)


def test_the_loss_inside_the_model_sees_the_output_factor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, growth = run(tmp_path, num_train_epochs=1, save_strategy="no")
    assert any("training has ended in stage 0 of 2" in record.message for record in caplog.records)
    growth.grower.reopen()
    network = growth.grower.network.eval()
    loss, logits = network(WORDS, labels=torch.zeros(12, dtype=torch.long))[:2]
    growth.grower.state.output_factor = 2.0
    doubled, scaled = network(WORDS, labels=torch.zeros(12, dtype=torch.long))[:2]
    assert torch.allclose(scaled, 2 * logits)
    assert torch.allclose(
        doubled, torch.nn.functional.cross_entropy(scaled, torch.zeros(12, dtype=torch.long))
    )
    assert not torch.allclose(loss, doubled)


@pytest.mark.parametrize("setting", ["load_best_model_at_end", "restore_callback_states_from_checkpoint"])
def test_what_cannot_be_is_told(setting: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=setting):
        run(tmp_path, **{setting: True}, save_strategy="no", eval_strategy="no")
