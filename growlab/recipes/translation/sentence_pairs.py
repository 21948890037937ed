"""Read sentence pairs from raw text (split into subwords and binarised once) or from fairseq's binary files."""

import gzip
import hashlib
import importlib
import io
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from hydra.core.config_store import ConfigStore

from growlab.base.errors import UserError, how_to_install
from growlab.lab.data.cache import cache_dir, files_fingerprint, locked

EXTRA = f"needs a package that is not installed: {how_to_install('translation')}"


def fairseq_module(name: str) -> ModuleType:
    """Import a module of fairseq, such as `fairseq.data`.

    On its first import, fairseq registers configurations in Hydra's store under names of growlab's groups (`model`,
    `optimizer`). They are removed, so that all jobs of a sweep compose the same configuration. Messages about optional
    packages are suppressed.
    """
    store = ConfigStore.instance()
    before = _copied(store.repo)
    root = logging.getLogger()
    handlers = list(root.handlers)
    quiet = logging.NullHandler()
    # Prevents logging.basicConfig() from adding a handler.
    root.addHandler(quiet)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"translation with fairseq {EXTRA} ({error}).") from error
    finally:
        store.repo, root.handlers = before, handlers


def extra_module(name: str) -> ModuleType:
    """Import a module of another package of the extra `translation`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"translation {EXTRA} ({error}).") from error


def _copied(repository: dict) -> dict:
    # Copy the dictionaries, which are folders, but not their entries.
    return {name: _copied(node) if isinstance(node, dict) else node for name, node in repository.items()}


Subwords = Literal["none", "sentencepiece", "subword_nmt"]
# File of the learned pieces or merges in a prepared folder.
FILES = {"sentencepiece": "sentencepiece.model", "subword_nmt": "code"}
_SPACE = "▁"


class Words:
    """Whitespace-separated words or ready-made subwords; decoding removes `@@ ` and SentencePiece's marks.

    Examples:
        >>> Words().decode("a gro@@ wing net@@ work"), Words().decode("▁a ▁gro wing")
        ('a growing network', 'a growing')
    """

    def encode(self, sentence: str) -> str:
        """Return the sentence as tokens separated by spaces."""
        return sentence

    def decode(self, subwords: str) -> str:
        """Return the sentence."""
        if _SPACE in subwords:
            return subwords.replace(" ", "").replace(_SPACE, " ").strip()
        return (subwords + " ").replace("@@ ", "").rstrip()


class SentencePiece(Words):
    """Byte-pair encoding of raw text by SentencePiece, with one model for all languages."""

    def __init__(self, folder: Path) -> None:
        library = extra_module("sentencepiece")
        self._model = library.SentencePieceProcessor(model_file=str(folder / FILES["sentencepiece"]))

    def encode(self, sentence: str) -> str:
        """Return the pieces, separated by spaces."""
        return " ".join(self._model.encode(sentence, out_type=str))

    def decode(self, subwords: str) -> str:
        """Return the sentence with its original spaces."""
        return str(self._model.decode(subwords.split()))

    @staticmethod
    def learn(folder: Path, sentences: Iterable[str], size: int) -> None:
        """Learn a vocabulary of this size and store it in the folder."""
        library, model = extra_module("sentencepiece"), io.BytesIO()
        # Decoding restores the sentence exactly, as references need.
        exact = {"model_type": "bpe", "character_coverage": 1.0, "normalization_rule_name": "identity"}
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=model, vocab_size=size, **exact, minloglevel=2
        )
        (folder / FILES["sentencepiece"]).write_bytes(model.getvalue())


class SubwordNMT(Words):
    """Moses' tokeniser, then byte-pair encoding by subword-nmt, as in fairseq's prepare-iwslt14.sh."""

    def __init__(self, folder: Path, language: str) -> None:
        moses, merges = extra_module("sacremoses"), extra_module("subword_nmt.apply_bpe")
        self._tokenise, self._join = moses.MosesTokenizer(language), moses.MosesDetokenizer(language)
        with (folder / FILES["subword_nmt"]).open(encoding="utf-8") as file:
            self._merges = merges.BPE(file)

    def encode(self, sentence: str) -> str:
        """Return the subwords, separated by spaces."""
        words = self._tokenise.tokenize(sentence, return_str=True, escape=False)
        return str(self._merges.process_line(words))

    def decode(self, subwords: str) -> str:
        """Return the detokenised sentence."""
        return str(self._join.detokenize(super().decode(subwords).split()))

    @classmethod
    def learn(cls, folder: Path, sentences: Iterable[tuple[str, str]], size: int) -> None:
        """Learn this many merges from (language, sentence) pairs and store them in the folder."""
        moses, learning = extra_module("sacremoses"), extra_module("subword_nmt.learn_bpe")
        tokenisers: dict[str, Any] = {}
        words = io.StringIO()
        for language, sentence in sentences:
            tokeniser = tokenisers.setdefault(language, moses.MosesTokenizer(language))
            words.write(tokeniser.tokenize(sentence, return_str=True, escape=False) + "\n")
        words.seek(0)
        with (folder / FILES["subword_nmt"]).open("w", encoding="utf-8") as file:
            learning.learn_bpe(words, file, size)


log = logging.getLogger(__name__)

# Prefixes of file names by split, in fairseq's terms.
SPLITS = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}
# Settings of a prepared folder; written last, so it marks a complete folder.
_MADE = "growlab.json"
# Part of the cache key; increment it when prepared folders change.
_VERSION = 1


@dataclass(frozen=True)
class Preparation:
    """Settings for converting raw text to token ids; see `TranslationData`."""

    source: str = "de"
    target: str = "en"
    subwords: Subwords = "sentencepiece"
    subword_size: int = 8000
    lowercase: bool = False
    joined_dictionary: bool = True
    least_count: int = 0


@dataclass(frozen=True)
class Side:
    """Sentences of one language as token ids, concatenated.

    Attributes:
        tokens: int32 [sum of lengths]; every sentence ends with the dictionary's end-of-sentence token.
        starts: int64 [sentences + 1].
    """

    tokens: np.ndarray
    starts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sentence, including its end; int64 [sentences]."""
        return np.diff(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True)
class SentencePairs:
    """Binarised text in the format of fairseq-preprocess; `subwords` are those of the target."""

    folder: Path
    source: str
    target: str
    source_dictionary: Any
    target_dictionary: Any
    subwords: Words

    def has(self, split: str) -> bool:
        """True if there is such a split: train, valid or test."""
        return (self.folder / f"{split}.{self.source}-{self.target}.{self.source}.idx").exists()

    def read(self, split: str) -> tuple[Side, Side]:
        """Read the sentences of a split: source and target."""
        return self._side(split, self.source), self._side(split, self.target)

    def references(self, split: str) -> list[str] | None:
        """Return the target sentences before tokenisation; None if they were not stored."""
        path = self.folder / f"{split}.{self.target}.txt"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else None

    def _side(self, split: str, language: str) -> Side:
        prefix = self.folder / f"{split}.{self.source}-{self.target}.{language}"
        data = fairseq_module("fairseq.data.data_utils").load_indexed_dataset(str(prefix), None)
        if data is None:
            raise UserError(f"{self.folder} lacks {prefix.name}.bin and .idx; run fairseq-preprocess again.")
        starts = np.concatenate([[0], np.cumsum(np.asarray(data.sizes, dtype=np.int64))])
        tokens = np.empty(starts[-1], dtype=np.int32)
        for index in range(len(data)):
            tokens[starts[index] : starts[index + 1]] = data[index].numpy()
        return Side(tokens, starts)


def open_pairs(root: Path, name: str, preparation: Preparation) -> SentencePairs:
    """Open a folder of binarised data, or of raw text, which is prepared once in the cache folder.

    It contains `dict.xx.txt` and `train.xx-yy.xx.bin`, or the text files `train*.xx`, `val*.xx` and `test*.xx`,
    possibly gzipped, and likewise for the other language.
    """
    # Report a missing package before missing data.
    fairseq_module("fairseq.data")
    if not root.is_dir():
        raise UserError(f"found no {name} data: there is no folder {root}; {_looked_for(preparation)}.")
    if (folder := _binarised(root, preparation)) is not None:
        return _opened(folder, preparation)
    texts = {split: text_files(root, split, (preparation.source, preparation.target)) for split in SPLITS}
    missing = [
        f"{split}*.{language}" for split in ("train", "test") for language, path in texts[split].items() if path is None
    ]
    if missing:
        raise UserError(f"{root} contains no {' and no '.join(missing)}; {_looked_for(preparation)}.")
    complete = {split: paths for split, paths in texts.items() if None not in paths.values()}
    files = [path for paths in complete.values() for path in paths.values()]
    key = f"{_VERSION}\n{files_fingerprint(files)}\n{json.dumps(asdict(preparation), sort_keys=True)}"
    folder = cache_dir() / "translation" / hashlib.sha256(key.encode()).hexdigest()[:24]
    with locked(folder):
        if not (folder / _MADE).exists():
            _prepare(folder, complete, preparation)
    return _opened(folder, preparation)


def _looked_for(preparation: Preparation) -> str:
    source, target = preparation.source, preparation.target
    return (
        f"point data.root=FOLDER at raw text (train.{source}, train.{target}, likewise val and test; .gz or not) or at "
        f"the output of fairseq-preprocess (dict.{source}.txt, train.{source}-{target}.{source}.bin ...)"
    )


def _binarised(root: Path, preparation: Preparation) -> Path | None:
    pair = f"{preparation.source}-{preparation.target}"
    for folder in (root, *(child for child in sorted(root.iterdir()) if child.is_dir())):
        if (folder / f"train.{pair}.{preparation.source}.idx").exists():
            return folder
    return None


def text_files(root: Path, split: str, languages: tuple[str, str]) -> dict[str, Path | None]:
    """Find the files of a split, one per language: the first two with the same name, else the first of each."""
    by_language = [_texts(root, split, language) for language in languages]
    common = [name for name in by_language[0] if name in by_language[1]]
    chosen = [paths[common[0]] if common else next(iter(paths.values()), None) for paths in by_language]
    return dict(zip(languages, chosen, strict=True))


def _texts(root: Path, split: str, language: str) -> dict[str, Path]:
    """Map names without the language to files of a split, in order of preference."""
    files: dict[str, Path] = {}
    for start in SPLITS[split]:
        for pattern in (f"{start}.{language}", f"{start}*.{language}"):
            for ending in ("", ".gz"):
                for path in sorted(root.glob(pattern + ending)):
                    files.setdefault(path.name.removesuffix(".gz").removesuffix(f".{language}"), path)
    return files


def open_subwords(folder: Path, language: str) -> Words:
    """Return the subwords of a prepared folder; plain words if it has none."""
    if (folder / FILES["sentencepiece"]).exists():
        return SentencePiece(folder)
    return SubwordNMT(folder, language) if (folder / FILES["subword_nmt"]).exists() else Words()


def _opened(folder: Path, preparation: Preparation) -> SentencePairs:
    dictionary = fairseq_module("fairseq.data").Dictionary
    source, target = (
        dictionary.load(str(folder / f"dict.{language}.txt")) for language in (preparation.source, preparation.target)
    )
    is_ours = (folder / _MADE).exists()
    return SentencePairs(
        folder,
        preparation.source,
        preparation.target,
        source,
        source if source == target else target,
        open_subwords(folder, preparation.target) if is_ours else Words(),
    )


def _prepare(folder: Path, texts: dict[str, dict[str, Path]], preparation: Preparation) -> None:
    """Create the folder atomically."""
    log.info("preparing %s for translation, once, in %s", texts["train"][preparation.source], folder)
    lines = {
        split: {language: _lines(path, preparation.lowercase) for language, path in paths.items()}
        for split, paths in texts.items()
    }
    for split, sides in lines.items():
        counts = {language: len(sentences) for language, sentences in sides.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            listed = ", ".join(f"{texts[split][language].name} {count}" for language, count in counts.items())
            raise UserError(f"a split needs the same number of lines, at least one, in both languages: {listed}.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _binarise(temporary, lines, preparation)
        (temporary / _MADE).write_text(json.dumps(asdict(preparation), indent=2))
        # A folder that exists here is incomplete.
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _lines(path: Path, lowercase: bool) -> list[str]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        # Unlike str.splitlines(), this does not split at separators such as U+2028 inside sentences.
        lines = [" ".join(line.split()) for line in file]
    return [line.lower() for line in lines] if lowercase else lines


def _binarise(folder: Path, lines: dict[str, dict[str, list[str]]], preparation: Preparation) -> None:
    """Write subwords, dictionaries and indexed files under fairseq's names."""
    texts = lines["train"]
    if preparation.subwords == "sentencepiece":
        all_lines = (line for sentences in texts.values() for line in sentences)
        SentencePiece.learn(folder, all_lines, preparation.subword_size)
    elif preparation.subwords == "subword_nmt":
        pairs = ((language, line) for language, sentences in texts.items() for line in sentences)
        SubwordNMT.learn(folder, pairs, preparation.subword_size)
    options = {"train": "--trainpref", "valid": "--validpref", "test": "--testpref"}
    languages = [f"--source-lang={preparation.source}", f"--target-lang={preparation.target}"]
    words = [f"--threshold{side}={preparation.least_count}" for side in ("src", "tgt")]
    words += ["--joined-dictionary"] * preparation.joined_dictionary
    with tempfile.TemporaryDirectory() as temporary:
        for split, sides in lines.items():
            for language, sentences in sides.items():
                subwords = open_subwords(folder, language)
                encoded = "".join(f"{subwords.encode(line)}\n" for line in sentences)
                Path(temporary, f"{split}.{language}").write_text(encoded, encoding="utf-8")
        prefixes = [f"{options[split]}={temporary}/{split}" for split in lines]
        parser = fairseq_module("fairseq.options").get_preprocessing_parser()
        arguments = parser.parse_args([*prefixes, *languages, *words, f"--destdir={folder}"])
        fairseq_module("fairseq_cli.preprocess").main(arguments)
    for split, sides in lines.items():
        text = "".join(f"{line}\n" for line in sides[preparation.target])
        (folder / f"{split}.{preparation.target}.txt").write_text(text, encoding="utf-8")
