"""Sentence pairs: prepared once from raw text, or in fairseq-preprocess's format."""

import gzip
import shutil
from pathlib import Path

import pytest

from growlab.base.errors import UserError
from growlab.recipes.translation.data import TranslationData
from growlab.recipes.translation.sentence_pairs import Preparation, SentencePiece, SubwordNMT, open_pairs


def test_batches_decode_to_the_raw_text(data, folder):
    for split, name in (("val", "val"), ("test", "test")):
        assert data.references(split) == (folder / f"{name}.en").read_text().splitlines()
    positions = data.evaluation("test").plan.batches()
    texts = {}
    for batch, (_, _, target) in zip(positions, data.evaluation("test"), strict=True):
        texts |= {int(index): data.text(row) for index, row in zip(batch, target, strict=True)}
    assert [texts[index] for index in range(data.num_test)] == data.references("test")
    assert (data.num_train, data.num_val, data.num_test) == (300, 20, 30)


def test_a_binarised_folder_is_used_directly(data):
    again = TranslationData("tiny", str(data.pairs.folder), batch_tokens=100)
    again.setup()
    assert again.pairs.folder == data.pairs.folder
    assert sum(again.samples_in_batches(0, 100)) == 300
    for mine, other in zip(again.train_dataloader(), data.train_dataloader(), strict=True):
        assert all(a.equal(b) for a, b in zip(mine, other, strict=True))


def test_gzipped_text_is_prepared_separately(data, folder, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in folder.iterdir():
        with path.open("rb") as plain, gzip.open(packed / f"{path.name}.gz", "wb") as file:
            shutil.copyfileobj(plain, file)
    other = open_pairs(packed, "tiny", data.preparation)
    assert other.folder != data.pairs.folder
    assert other.references("test") == data.references("test")


def test_missing_files_are_named(folder, tmp_path):
    preparation = Preparation("de", "en", "none", 100, False, True, 0)
    with pytest.raises(UserError, match="there is no folder"):
        open_pairs(tmp_path / "nowhere", "tiny", preparation)
    with pytest.raises(UserError, match=r"contains no train\*\.de and no train\*\.en and no test"):
        open_pairs(tmp_path, "tiny", preparation)
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn)
    (torn / "test.en").write_text("one line\n")
    with pytest.raises(UserError, match=r"test\.de 30, test\.en 1"):
        open_pairs(torn, "tiny", preparation)


def test_invalid_arguments_are_refused(folder):
    for wrong, sentence in (({"batch_sentences": 8}, "give one of"), ({"max_length": 0}, "must be at least 1")):
        with pytest.raises((UserError, ValueError), match=sentence):
            TranslationData("tiny", str(folder), **wrong)


def test_subwords_decode_to_the_text(tmp_path: Path, folder: Path):
    lines = (folder / "train.de").read_text().splitlines()
    SentencePiece.learn(tmp_path, lines, 40)
    pieces = SentencePiece(tmp_path)
    SubwordNMT.learn(tmp_path, [("de", line) for line in lines], 20)
    merges = SubwordNMT(tmp_path, "de")
    for line in lines[:20]:
        assert pieces.decode(pieces.encode(line)) == line
        assert merges.decode(merges.encode(line)).replace(" ", "") == line.replace(" ", "")
    assert "@@" in merges.encode("Hundmann")
