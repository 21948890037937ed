"""Windows of a text: every character predicted once an epoch, the same after a resumption and over ranks."""

import random
from pathlib import Path

import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.data import TextData

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


def loader_of(text: TextData, epoch: int):
    loader = text.train_dataloader()
    loader.plan.set_epoch(epoch)
    return loader


def test_targets_stand_behind_their_windows(path: str) -> None:
    text = data(path)
    for loader, part in (
        (text.train_dataloader(), TEXT[:900]),
        (text.val_dataloader(), TEXT[900:950]),
        (text.test_dataloader(), TEXT[950:]),
    ):
        for x_BT, y_BT in loader:
            assert x_BT.shape == y_BT.shape and x_BT.shape[1] == CONTEXT
            assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
            for x, y in zip(x_BT, y_BT, strict=True):
                assert text_of(text, x) + text_of(text, y[-1:]) in part


def test_an_epoch_has_every_window_once_and_each_epoch_others(path: str) -> None:
    text = data(path)
    starts = []
    for epoch in (0, 1):
        windows = sorted(text_of(text, x) for batch, _ in loader_of(text, epoch) for x in batch)
        assert (
            len(windows)
            == text.num_train
            == sum(text.samples_in_batches(epoch, 10))
            == (900 - CONTEXT) // CONTEXT
        )
        first = next(offset for offset in range(CONTEXT) if TEXT[offset : offset + CONTEXT] in windows)
        expected = (TEXT[first + CONTEXT * i :][:CONTEXT] for i in range(text.num_train))
        assert windows == sorted(expected)
        starts.append(first)
    assert starts[0] != starts[1]


def test_a_resumed_loader_goes_on_behind_what_was_given(path: str) -> None:
    text = data(path)
    whole = list(loader_of(text, 2))
    stopped = loader_of(text, 2)
    iterator = iter(stopped)
    for _ in range(4):
        next(iterator)
    resumed = loader_of(text, 2)
    resumed.load_state_dict(stopped.state_dict())
    rest = list(resumed)
    assert len(rest) == len(whole) - 4
    assert all(
        torch.equal(a, b) for pair in zip(rest, whole[4:], strict=True) for a, b in zip(*pair, strict=True)
    )
    other = data(path, seed=4)
    assert not torch.equal(next(iter(loader_of(other, 2)))[0], whole[0][0])


def test_ranks_share_a_batch(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = data(path)
    (whole, _), *_ = text.train_dataloader()
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr(text, "_place", lambda rank=rank: (rank, 2))
        parts.append(next(iter(text.train_dataloader()))[0])
    assert torch.equal(torch.cat(parts), whole)
    text.batch_size_at_epoch = lambda epoch: 9
    with pytest.raises(UserError, match="9 does not divide among 2"):
        text.train_dataloader()


def test_the_language_reference_comes_with_python() -> None:
    text = data(None, limit_characters=5000)
    assert "assert" in text_of(text, text.probe_batch(100).flatten())
    assert text.network_arguments == {"vocabulary_size": len(text.vocabulary), "context": CONTEXT}
    assert torch.equal(text.probe_batch(3), data(None, limit_characters=5000).probe_batch(3))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"context": 0}, "data.context=0 must be at least 1"),
        ({"limit_characters": 100}, "a text of 100 characters has no whole window of data.context=8"),
        ({"test_fraction": 0.96}, "data.test_fraction=0.96 must be above 0"),
        ({"path": "/nowhere.txt"}, "data.path=/nowhere.txt cannot be read: No such file"),
    ],
)
def test_bad_settings_are_told(path: str, settings: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        data(**{"path": path, **settings})


def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "some.txt").write_text("abc" * 400)
    data = TextData("~/some.txt", context=8)
    data.setup()
    assert data.vocabulary == ["a", "b", "c"]


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(bytes([0xFF, 0xD8, 0xFF]))
    with pytest.raises(UserError, match="not a text in UTF-8"):
        data(str(tmp_path / "image"))


@pytest.mark.parametrize(("context", "windows"), [(8, 64), (128, 4), (256, 2), (300, 2)])
def test_growth_is_checked_on_about_as_many_tokens_whatever_the_context(context: int, windows: int) -> None:
    assert TextData(str(Path(__file__)), context=context).probe_size == windows
