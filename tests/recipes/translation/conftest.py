"""A small artificial language; tests are skipped without fairseq."""

import random
from pathlib import Path

import pytest

from growlab.base.errors import UserError
from growlab.recipes.translation.data import TranslationData
from growlab.recipes.translation.sentence_pairs import fairseq_module

GERMAN, ENGLISH = "ein hund mann frau sieht läuft rot", "a dog man woman sees runs red"
WORDS = dict(zip(GERMAN.split(), ENGLISH.split(), strict=True))


@pytest.fixture(autouse=True, scope="session")
def fairseq():
    try:
        return fairseq_module("fairseq.data")
    except UserError as error:
        pytest.skip(f"make test-translation installs it: {error}", allow_module_level=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw text: sentences translated word by word, in reverse order."""
    path, draw = tmp_path_factory.mktemp("pairs"), random.Random(0)
    for split, number in (("train", 300), ("val", 20), ("test", 30)):
        german = [draw.choices(list(WORDS), k=draw.randint(2, 7)) for _ in range(number)]
        english = [[WORDS[word] for word in reversed(sentence)] for sentence in german]
        for language, sentences in (("de", german), ("en", english)):
            text = "".join(f"{' '.join(sentence)} .\n" for sentence in sentences)
            (path / f"{split}.{language}").write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def data(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TranslationData:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = TranslationData("tiny", str(folder), batch_tokens=100, eval_batch_tokens=100, subwords="none")
    data.setup()
    return data
