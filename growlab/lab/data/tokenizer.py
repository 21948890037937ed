"""Tokenizers of the `tokenizers` library: byte-level byte-pair encoding, trained here or loaded from a file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from growlab.base.errors import UserError, how_to_install

#: Of a tokenizer that is trained here: stands behind each document.
END_OF_TEXT = "<|endoftext|>"
# Names by which other tokenizers call it, the likelier ones first.
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")
_FILE = "tokenizer.json"
# Beside tokenizer.json these may say which token ends a text.
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_BYTES = 256


@dataclass(frozen=True)
class TextTokenizer:
    """Text to token ids.

    Attributes:
        core: of the `tokenizers` library.
        end: id of the token behind each document.
        end_text: the token itself.
    """

    core: Any
    end: int
    end_text: str

    def __len__(self) -> int:
        """Token ids run from 0 to below this number."""
        return max(self.core.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, with the end behind them; int64 [T]."""
        found = self.core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*one.ids, self.end], dtype=np.int64) for one in found]

    def byte_lengths(self) -> np.ndarray | None:
        """Bytes of UTF-8 that each token stands for, int64 [vocabulary]; None where tokens do not stand for bytes."""
        described = json.loads(self.core.to_str())
        if not _is_byte_level(described.get("decoder")):
            return None
        lengths = np.zeros(len(self), dtype=np.int64)
        for token, number in self.core.get_vocab(with_added_tokens=False).items():
            # The alphabet of byte-level tokenizers has a character for each byte.
            lengths[number] = len(token)
        for token in described.get("added_tokens", ()):
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        return lengths

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and what `AutoTokenizer.from_pretrained` needs beside it."""
        self.core.save(str(folder / _FILE))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end_text}
        (folder / _SETTINGS[0]).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level byte-pair encoding (Radford et al. 2019): no text is unknown, and every one comes back to the letter.

    Args:
        texts: to learn merges from.
        vocab_size: tokens, the 256 bytes and the end of a text among them; fewer where the text has no more to merge.

    Raises:
        UserError: fewer tokens than bytes, or `tokenizers` is not installed.
    """
    library = _library()
    if vocab_size <= _BYTES:
        raise UserError(
            f"data.vocab_size={vocab_size} must be above {_BYTES}: each byte has a token, and so has the end of a text."
        )
    core = library.Tokenizer(library.models.BPE())
    core.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return _opened(core, END_OF_TEXT)


def load_tokenizer(path: str, end_of_text: str | None = None) -> TextTokenizer:
    """A tokenizer from a `tokenizer.json`, or the folder of one.

    Args:
        path: of the file or folder.
        end_of_text: the token behind each document; None: as the folder says, or by the usual names.

    Raises:
        UserError: there is no such tokenizer, or no such token.
    """
    library = _library()
    file = tokenizer_file(path)
    try:
        core = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"data.tokenizer={path} cannot be read: {reason}.") from error
    # Truncation and padding are settings of whoever saved it.
    core.no_truncation()
    core.no_padding()
    known = core.get_vocab(with_added_tokens=True)
    named = end_of_text or _end_in(file.parent)
    if named is None:
        named = next((token for token in _ENDS if token in known), None)
    if named is None or named not in known:
        given = (
            f"data.end_of_text={named} is none of its"
            if end_of_text
            else "none of the usual names is among its"
        )
        raise UserError(
            f"data.tokenizer={path}: {given} {len(known)} tokens; name the one that ends a text with data.end_of_text."
        )
    return _opened(core, named)


def tokenizer_file(path: str) -> Path:
    """The `tokenizer.json` that a path means.

    Raises:
        UserError: it is not there.
    """
    place = Path(path).expanduser()
    file = place / _FILE if place.is_dir() else place
    if not file.is_file():
        raise UserError(
            f"data.tokenizer={path}: there is no {file}; transformers writes one with "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    return file


def _opened(core: Any, end_text: str) -> TextTokenizer:
    # A text that quotes a special token holds its letters, not the token.
    core.encode_special_tokens = True
    return TextTokenizer(core, core.token_to_id(end_text), end_text)


def _end_in(folder: Path) -> str | None:
    for name in _SETTINGS:
        path = folder / name
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError, OSError) as error:
                raise UserError(f"{path} cannot be read: {error}.") from error
            if found:
                return found["content"] if isinstance(found, dict) else found
    return None


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders", ())
    return decoder.get("type") == "ByteLevel" or any(map(_is_byte_level, inner))


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise UserError(f"data=tokens needs tokenizers: {how_to_install('transformers')}.") from error
    return tokenizers
