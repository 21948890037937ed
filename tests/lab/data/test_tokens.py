"""Text files as tokens: splits, packed windows, bits per byte, and caches."""

import gzip
import json
import math
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.data import TextData, TokenData
from growlab.lab.data.tokens import PARTS
from growlab.lab.training import SubwordPrediction

tokenizers = pytest.importorskip("tokenizers")
CONTEXT, VOCABULARY = 8, 300
TEXT = "growing networks from a small seed keeps what they compute: naïve, größer, 增长 🌱"
WORDS = TEXT.split()


def document(number: int, words: int = 60) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=words)) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 documents with different suffixes in subfolders."""
    root = tmp_path / "texts"
    for number in range(40):
        place = root / f"part{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        if number % 4 == 0:
            (place / f"{number}.txt.gz").write_bytes(gzip.compress(document(number).encode()))
        elif number % 4 == 1:
            (place / f"{number}.html").write_text(f"<title>n</title><p>{document(number)}</p><script>x</script>")
        else:
            (place / f"{number}.{'md' if number % 4 == 2 else 'txt'}").write_text(document(number))
    return root


def data(path: Path | str, **settings) -> TokenData:
    made = TokenData(
        str(path), **{"context": CONTEXT, "batch_size": 10, "vocab_size": VOCABULARY, "seed": 3, **settings}
    )
    made.setup()
    return made


def text_of(made: TokenData, part: str) -> list[str]:
    """Decode the documents of a part."""
    tokenizer = made.store.tokenizer
    tokens = made.store.tokens(part)
    ends = np.flatnonzero(tokens == tokenizer.end)
    assert ends[0] == 0 and ends[-1] == len(tokens) - 1
    pieces = [tokens[a + 1 : b].tolist() for a, b in pairwise(ends)]
    return [tokenizer.core.decode(piece, skip_special_tokens=False) for piece in pieces]


def everything(made: TokenData) -> list[str]:
    return list(chain.from_iterable(text_of(made, part) for part in PARTS))


def test_each_document_is_in_one_part_and_decodes_exactly(folder: Path) -> None:
    made = data(folder, validation_fraction=0.1, test_fraction=0.2)
    found = {part: text_of(made, part) for part in PARTS}
    expected = [f"n\n{document(number)}" if number % 4 == 1 else document(number) for number in range(40)]
    assert sorted(everything(made)) == sorted(expected)
    for part, fraction in (("train", 0.7), ("val", 0.1), ("test", 0.2)):
        counted = made.store.parts[part]
        assert counted["bytes"] == len("".join(found[part]).encode())
        assert counted["documents"] == len(found[part]) == pytest.approx(40 * fraction, abs=3)
        assert counted["tokens"] == len(made.store.tokens(part))
    assert made.store.split == "documents"
    assert "split by documents: train" in made.describe()
    other = data(folder, validation_fraction=0.1, test_fraction=0.2, split_seed=1)
    assert sorted(text_of(other, "test")) != sorted(found["test"])


def test_each_test_token_is_predicted_once_and_bits_are_per_byte(folder: Path) -> None:
    """Compared with the loss of each token and the length of the text, computed directly."""
    made = data(folder, eval_batch_size=3)
    objective, torch_seed = SubwordPrediction(), torch.Generator().manual_seed(0)
    objective.bind(made)
    embedding = torch.randn(made.vocabulary_size, made.vocabulary_size, generator=torch_seed)
    sums, losses, targets = torch.zeros(5), [], []
    for x_BT, y_BT in made.test_dataloader():
        sums += objective(embedding[x_BT], y_BT)[1]
        real = y_BT != -100
        losses.append(torch.nn.functional.cross_entropy(embedding[x_BT][real], y_BT[real], reduction="sum"))
        targets += y_BT[real].tolist()
    tokens = made.store.tokens("test").tolist()
    assert targets == tokens[1:] and len(tokens) % CONTEXT != 1
    size = len("".join(text_of(made, "test")).encode())
    metrics = objective.metrics(sums.tolist())
    assert metrics["bits_per_byte"] == pytest.approx(float(sum(losses)) / math.log(2) / size, rel=1e-5)
    per_token = metrics["loss"] * len(targets) / size / math.log(2)
    assert metrics["bits_per_byte"] == pytest.approx(per_token, rel=1e-5)


def test_the_tokenizer_is_trained_on_the_training_part_only(folder: Path) -> None:
    made = data(folder)
    held_out = text_of(made, "test") + text_of(made, "val")
    assert made.vocabulary_size == VOCABULARY
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in (".md", ".txt") and path.read_text() in held_out:
            # The length stays, so that the same documents are held out.
            path.write_text("".join(sorted(path.read_text())))
    other = data(folder)
    assert made.store.folder != other.store.folder
    assert made.store.tokenizer.core.to_str() == other.store.tokenizer.core.to_str()


def test_windows_are_packed_and_each_is_in_an_epoch_once(folder: Path) -> None:
    made = data(folder, epochs_per_pass=3)
    tokens, seen = made.store.tokens("train").astype(np.int64), {}
    for epoch in range(6):
        loader = made.train_dataloader()
        loader.plan.set_epoch(epoch)
        batches = list(loader)
        assert [len(x) for x, _ in batches] == made.samples_in_batches(epoch, 10)
        windows = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in batches]).tolist()
        seen.setdefault(epoch // 3, []).extend(map(tuple, windows))
    for number, windows in seen.items():
        offsets = [
            offset for offset in range(CONTEXT) if tuple(tokens[offset : offset + CONTEXT + 1].tolist()) in set(windows)
        ]
        expected = [
            [tuple(tokens[start : start + CONTEXT + 1].tolist()) for start in range(offset, len(tokens), CONTEXT)]
            for offset in offsets
        ]
        assert any(sorted(windows) == sorted(one[: made.num_train]) for one in expected), number
    assert seen[0] != seen[1]
    with pytest.raises(UserError, match="leaves epochs without a batch"):
        data(folder, epochs_per_pass=999).samples_in_batches(0, 10)


def test_a_checkpoint_of_another_text_is_refused(folder: Path) -> None:
    saved = data(folder).state_dict()
    data(folder).load_state_dict(saved)
    # The same text with another order and windows.
    data(folder, seed=5, context=CONTEXT + 1, batch_size=3).load_state_dict(saved)
    with pytest.raises(UserError, match="the text is not the one that the checkpoint was trained on"):
        data(folder, vocab_size=VOCABULARY - 1).load_state_dict(saved)
    changed = folder / "part1" / "7.txt"
    changed.write_text(changed.read_text().replace("a", "e", 1))
    with pytest.raises(UserError, match="the text is not the one that the checkpoint was trained on"):
        data(folder).load_state_dict(saved)


@pytest.mark.parametrize("batch_bytes", [None, 100])
def test_one_document_is_cut_by_position_and_encoded_in_pieces(tmp_path: Path, monkeypatch, batch_bytes) -> None:
    if batch_bytes:
        monkeypatch.setattr("growlab.lab.data.tokens._BATCH_BYTES", batch_bytes)
    (tmp_path / "book.txt").write_text(text := "".join(document(number) for number in range(40)))
    made = data(tmp_path / "book.txt")
    assert made.store.split == "position" and "split by position" in made.describe()
    parts = ["".join(text_of(made, part)) for part in PARTS]
    assert "".join(parts) == text
    assert [len(part) / len(text) for part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.01)
    assert [made.store.parts[part]["documents"] for part in PARTS] == [1, 1, 1]


def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [document(number) for number in range(40)]
    (tmp_path / "files").mkdir()
    for number in range(2):
        rows = pa.table({"id": list(range(20)), "body": texts[20 * number : 20 * number + 20]})
        pq.write_table(rows, tmp_path / "files" / f"{number}.parquet", row_group_size=7)
    made = data(tmp_path / "files", column="body")
    assert sorted(everything(made)) == sorted(texts)
    refused(r"has no column text: its columns are id, body; choose one with data.column", tmp_path / "files")
    refused(r"the column id of .* has values of type int, not text", tmp_path / "files", column="id")
    whole = datasets.Dataset.from_dict({"text": texts})
    whole.save_to_disk(str(tmp_path / "whole"))
    saved = data(tmp_path / "whole")
    assert sorted(everything(saved)) == sorted(texts)
    splits = {"train": texts[:30], "validation": texts[30:35], "test": texts[35:]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()}
    ).save_to_disk(str(tmp_path / "splits"))
    own = data(tmp_path / "splits")
    assert [text_of(own, part) for part in PARTS] == list(splits.values())
    (tmp_path / "own.txt").write_text(texts[3] + "more\n")
    given = data(tmp_path / "files", column="body", test_path=str(tmp_path / "own.txt"))
    assert text_of(given, "test") == [texts[3] + "more\n"] and given.store.parts["train"]["documents"] < 40


def test_duplicates_of_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(document(number % 15))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.txt").write_bytes(bytes([0xFF, 0xD8, 0xFF]))
    made = data(tmp_path, validation_fraction=0.2, test_fraction=0.2)
    found = everything(made)
    assert sorted(found) == sorted({document(number) for number in range(15)})
    assert (made.store.dropped, made.store.skipped) == (16, 1)
    assert "left out: 1 files without text and 16 empty or repeated" in made.describe()


def test_concurrent_processes_prepare_the_text_once(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file lock makes one wait for the other, as ranks do."""
    both, made = threading.Barrier(2), []
    ask, make = TokenData._sources, TokenData._prepare

    def together(*arguments):
        both.wait(30)
        return ask(*arguments)

    monkeypatch.setattr(TokenData, "_sources", together)
    monkeypatch.setattr(TokenData, "_prepare", lambda *a: (made.append(a[1]), time.sleep(0.2), make(*a)))
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: data(folder), range(2))
    assert made == [one.store.folder] == [other.store.folder]
    assert [path for path in (own_cache / "tokens").iterdir() if path.is_dir()] == made


def test_a_cache_is_reused_and_replaced_if_damaged(folder: Path, own_cache: Path, tmp_path: Path) -> None:
    made = data(folder)
    content = made.store.tokens("train").tolist()
    place = made.store.folder
    before = (place / "train.bin").stat().st_ino
    # Equal files in another folder have the same key.
    folder.rename(tmp_path / "moved")
    assert (data(tmp_path / "moved").store.folder / "train.bin").stat().st_ino == before
    with (place / "train.bin").open("r+b") as file:
        file.truncate(10)
    again = data(tmp_path / "moved")
    assert again.store.folder == place and again.store.tokens("train").tolist() == content
    assert data(tmp_path / "moved", vocab_size=280).store.folder != place


def test_a_given_tokenizer_is_used(folder: Path, tmp_path: Path) -> None:
    made = data(folder)
    own = tmp_path / "own"
    own.mkdir()
    made.copy_tokenizer(own)
    settings = json.loads((own / "tokenizer_config.json").read_text()) | {"model_max_length": 77}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    again = data(folder, tokenizer=str(own), vocab_size=999)
    assert again.store.tokens("test").tolist() == made.store.tokens("test").tolist()
    assert again.vocabulary_size == VOCABULARY
    (tmp_path / "copied").mkdir()
    again.copy_tokenizer(tmp_path / "copied")
    assert json.loads((tmp_path / "copied" / "tokenizer_config.json").read_text())["model_max_length"] == 77
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"growing": 0, "?": 1, "</s>": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    lossy = data(folder, tokenizer=str(tmp_path / "words.json"))
    assert lossy.store.tokenizer.end == 2 and not lossy.store.byte_level
    held_out = [lossy.store.parts[part] for part in ("val", "test")]
    mean = sum(part["bytes"] for part in held_out) / sum(part["tokens"] - 1 for part in held_out)
    assert lossy.bytes_of_tokens.tolist() == pytest.approx([mean] * 3)
    assert made.store.byte_level


def test_the_end_of_text_inside_a_text_does_not_cut_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text := "a <|endoftext|> in the middle\n" + document(1, 400))
    made = data(tmp_path / "a.txt")
    assert "".join(text_of(made, "train")) == text[: len(text_of(made, "train")[0])]
    assert made.store.byte_level


def refused(sentence: str, path: Path | str | None, **settings) -> None:
    with pytest.raises((UserError, ValueError), match=sentence):
        data(path, **settings)


def test_invalid_settings_and_files_are_refused(tmp_path: Path, folder: Path, monkeypatch, make_unreadable) -> None:
    refused("data.path=/nowhere does not exist", "/nowhere")
    refused("has no matching file", "/nowhere/*.txt")
    refused("has no file with the suffix .doc or .parquet; set data.suffixes", folder, suffixes=[".doc"])
    refused("data.tokenizer=/nowhere.json: /nowhere.json does not exist", folder, tokenizer="/nowhere.json")
    (tmp_path / "no tokenizer.json").write_text("{")
    refused("no tokenizer.json cannot be read: ", folder, tokenizer=str(tmp_path / "no tokenizer.json"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refused("latin.txt cannot be read: 'utf-8' codec", tmp_path / "latin.txt")
    refused("is too short for a window of data.context=1000000", folder, context=10**6)
    refused("epochs_per_pass must be at least 1, not 0", folder, epochs_per_pass=0)
    with pytest.raises(UserError, match=r"data\.path is not set"):
        TokenData(None).setup()
    with pytest.raises(UserError, match="objective=tokens needs data that know the bytes of their tokens"):
        SubwordPrediction().bind(TextData(None))
    (tmp_path / "broken.parquet").write_text("PAR1")
    refused(r"cannot read .*broken.parquet as Parquet", tmp_path / "broken.parquet")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    core.save(str(tmp_path / "tokenizer.json"))
    refused(r"none of the usual names.* is not among its 1 tokens", folder, tokenizer=str(tmp_path))
    refused(r"end of a text \(b\) is not among", folder, tokenizer=str(tmp_path), end_of_text="b")
    make_unreadable(folder / "part1")
    with pytest.raises(PermissionError):
        data(folder)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("was saved by Hugging Face's datasets, which is not installed: pip install", tmp_path / "saved")
