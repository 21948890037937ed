"""Windows of a text as characters: targets, resuming, ranks."""

import random
from pathlib import Path

import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.data import TextData
from tests.lab.data.conftest import equal

TEXT = "".join(random.Random(0).choices("abcdefghij", k=1000))
CONTEXT = 8


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def data(path: str | None, **settings: float) -> TextData:
    made = TextData(path, **{"context": CONTEXT, "batch_size": 10, "seed": 3, **settings})
    made.setup()
    return made


def text_of(text: TextData, tokens: torch.Tensor) -> str:
    return "".join(text.vocabulary[token] for token in tokens.tolist())


def test_targets_are_the_characters_after_each(path: str) -> None:
    text = data(path)
    loaders = (text.train_dataloader(), text.val_dataloader(), text.test_dataloader())
    for loader, part in zip(loaders, (TEXT[:900], TEXT[900:950], TEXT[950:]), strict=True):
        for x_BT, y_BT in loader:
            assert x_BT.shape == y_BT.shape and x_BT.shape[1] == CONTEXT
            assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
            for x, y in zip(x_BT, y_BT, strict=True):
                assert text_of(text, x) + text_of(text, y[-1:]) in part


def test_a_resumed_loader_continues_and_ranks_share_a_batch(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = data(path)
    whole = list(text.training_loader(2, 2))
    stopped, resumed = text.training_loader(2, 2), text.training_loader(2, 2)
    iterator = iter(stopped)
    for _ in range(4):
        next(iterator)
    resumed.load_state_dict(stopped.state_dict())
    assert equal(list(resumed), whole[4:])
    # The next pass is complete again.
    assert equal(list(resumed), whole)
    with pytest.raises(ValueError, match="cannot resume in epoch"):
        text.training_loader(1, 1).load_state_dict(stopped.state_dict())
    assert not torch.equal(next(iter(data(path, seed=4).training_loader(2, 2)))[0], whole[0][0])
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(text, "_place", lambda rank=rank: (rank, 2))
        parts.append([x for x, _ in text.training_loader(2, 2)])
    assert torch.equal(torch.cat([parts[0][3], parts[1][3]]), whole[3][0])
    text.batch_size_at_epoch = lambda epoch: 9
    with pytest.raises(UserError, match="9 does not divide among 2"):
        text.train_dataloader()


def test_the_default_text_is_pythons_language_reference() -> None:
    text = data(None, limit_characters=5000)
    assert "assert" in text_of(text, text.probe_batch(100).flatten())
    assert text.network_arguments == {"vocabulary_size": len(text.vocabulary), "context": CONTEXT}
    assert torch.equal(text.probe_batch(3), data(None, limit_characters=5000).probe_batch(3))
    # Probe batches have a similar number of tokens for any context.
    assert [TextData(None, context=context).probe_size for context in (8, 128, 300)] == [64, 4, 2]


def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "some.txt").write_text("abc" * 400)
    assert data("~/some.txt").vocabulary == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"context": 0}, "context must be at least 1, not 0"),
        ({"limit_characters": 100}, "a text of 100 characters is too short for a window of data.context=8"),
        ({"test_fraction": 0.96}, "data.test_fraction=0.96 must be above 0"),
    ],
)
def test_invalid_settings_are_refused(path: str, settings: dict, sentence: str) -> None:
    with pytest.raises((UserError, ValueError), match=sentence):
        data(**{"path": path, **settings})
