"""From raw sentences to space-separated subwords and back, with the libraries that fairseq's recipes use."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from growlab.base.errors import UserError
from growlab.recipes.translation.library import extra_module

KINDS = ("none", "sentencepiece", "subword_nmt")
# The file of the learned pieces or merges, in the folder of the prepared data.
FILES = {"sentencepiece": "sentencepiece.model", "subword_nmt": "code"}
_SPACE = "▁"


class Subwords(Protocol):
    """Splits sentences of one language into subwords."""

    def encode(self, sentence: str) -> str:
        """The subwords, separated by spaces."""

    def decode(self, subwords: str) -> str:
        """The sentence."""


class Words:
    """Words as they stand, or subwords that the text has already: `@@ ` and SentencePiece's marks are undone.

    Examples:
        >>> Words().decode("a gro@@ wing net@@ work"), Words().decode("▁a ▁gro wing")
        ('a growing network', 'a growing')
    """

    def encode(self, sentence: str) -> str:
        """The sentence itself."""
        return sentence

    def decode(self, subwords: str) -> str:
        """The words."""
        if _SPACE in subwords:
            return subwords.replace(" ", "").replace(_SPACE, " ").strip()
        return (subwords + " ").replace("@@ ", "").rstrip()


class SentencePiece:
    """Byte-pair encoding of raw text by SentencePiece, one model for all languages.

    Args:
        folder: holds the model.
    """

    def __init__(self, folder: Path) -> None:
        library = extra_module("sentencepiece")
        self._model = library.SentencePieceProcessor(model_file=str(folder / FILES["sentencepiece"]))

    def encode(self, sentence: str) -> str:
        """The pieces."""
        return " ".join(self._model.encode(sentence, out_type=str))

    def decode(self, subwords: str) -> str:
        """The sentence, spaces and all."""
        return self._model.decode(subwords.split())

    @staticmethod
    def learn(folder: Path, sentences: Iterable[str], size: int) -> None:
        """Learn so many pieces and leave them in the folder."""
        library = extra_module("sentencepiece")
        model = io.BytesIO()
        try:
            library.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=size,
                model_type="bpe",
                character_coverage=1.0,
                # What is taken apart is put together again to the letter, for references are.
                normalization_rule_name="identity",
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"SentencePiece cannot learn data.subword_size={size} pieces from this text ({reason}); choose another "
                "number."
            ) from error
        (folder / FILES["sentencepiece"]).write_bytes(model.getvalue())


class SubwordNMT:
    """Moses' words and then byte-pair encoding by subword-nmt, as fairseq's prepare-iwslt14.sh has it.

    Args:
        folder: holds the merges.
        language: two letters, for the tokeniser.
    """

    def __init__(self, folder: Path, language: str) -> None:
        moses, merges = extra_module("sacremoses"), extra_module("subword_nmt.apply_bpe")
        self._tokenise, self._join = moses.MosesTokenizer(language), moses.MosesDetokenizer(language)
        with (folder / FILES["subword_nmt"]).open(encoding="utf-8") as file:
            self._merges = merges.BPE(file)

    def encode(self, sentence: str) -> str:
        """The subwords."""
        return self._merges.process_line(self._words(sentence))

    def decode(self, subwords: str) -> str:
        """The sentence, with spaces where the language puts them."""
        return self._join.detokenize(Words().decode(subwords).split())

    def _words(self, sentence: str) -> str:
        return self._tokenise.tokenize(sentence, return_str=True, escape=False)

    @classmethod
    def learn(cls, folder: Path, sentences: Iterable[tuple[str, str]], size: int) -> None:
        """Learn so many merges from (language, sentence) and leave them in the folder."""
        moses, learning = extra_module("sacremoses"), extra_module("subword_nmt.learn_bpe")
        tokenisers: dict[str, Any] = {}
        words = io.StringIO()
        for language, sentence in sentences:
            tokeniser = tokenisers.setdefault(language, moses.MosesTokenizer(language))
            words.write(tokeniser.tokenize(sentence, return_str=True, escape=False) + "\n")
        words.seek(0)
        with (folder / FILES["subword_nmt"]).open("w", encoding="utf-8") as file:
            learning.learn_bpe(words, file, size)


def learn_subwords(folder: Path, kind: str, texts: dict[str, Sequence[str]], size: int) -> None:
    """Learn subwords of all languages together, and leave what was learned in the folder.

    Args:
        folder: of the prepared data.
        kind: one of `KINDS`.
        texts: training sentences by language.
        size: number of pieces, or of merges.
    """
    if kind == "sentencepiece":
        SentencePiece.learn(folder, (line for lines in texts.values() for line in lines), size)
    elif kind == "subword_nmt":
        pairs = ((language, line) for language, lines in texts.items() for line in lines)
        SubwordNMT.learn(folder, pairs, size)


def open_subwords(folder: Path, language: str) -> Subwords:
    """The subwords that a folder of prepared data was made with; plain words where it does not say."""
    if (folder / FILES["sentencepiece"]).exists():
        return SentencePiece(folder)
    if (folder / FILES["subword_nmt"]).exists():
        return SubwordNMT(folder, language)
    return Words()
