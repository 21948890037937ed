"""Text, character by character: windows of one long text."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from growlab.base.errors import UserError
from growlab.lab.data.arguments import check_numbers
from growlab.lab.data.windows import WindowData


class TextData(WindowData):
    """One text for causal language modelling over characters: the first part to train on, the last two held out.

    A sample is a window of `context` characters and the character behind each. An epoch has every window of the
    training part once.

    Args:
        path: of a text file in UTF-8; None: the language reference that comes with Python (`pydoc_data.topics`, some
            460,000 characters, another text in each version of Python).
        context: characters that a window predicts from.
        batch_size: windows in a training batch over all devices.
        eval_batch_size: windows in another batch.
        validation_fraction: part of the text that is watched each epoch.
        test_fraction: part of the text behind it, which the result is of.
        limit_characters: use only so many characters from the beginning; None: all.
        seed: of the order.

    Raises:
        UserError: an argument cannot be used; from `setup()` also, the text cannot be read or is too short.
    """

    goes_with = "text goes with model=gpt objective=characters"
    unit = "characters"

    def __init__(
        self,
        path: str | None = None,
        context: int = 128,
        batch_size: int = 32,
        eval_batch_size: int = 128,
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
        limit_characters: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(context, batch_size, eval_batch_size, seed=seed)
        check_numbers(1, limit_characters=limit_characters)
        if not (validation_fraction > 0 and test_fraction > 0 and validation_fraction + test_fraction < 1):
            raise UserError(
                f"data.validation_fraction={validation_fraction} and data.test_fraction={test_fraction} must be above "
                "0 and leave something to train on."
            )
        self.path, self.limit_characters = path, limit_characters
        self._fractions = {"val": validation_fraction, "test": test_fraction}
        #: The characters of the text; a token is a place among them. Known after `setup()`.
        self.vocabulary: list[str] = []

    @property
    def vocabulary_size(self) -> int:
        """Number of different characters; known after `setup()`."""
        return len(self.vocabulary)

    def _sequences(self) -> dict[str, np.ndarray]:
        text = self._text()[: self.limit_characters]
        self.vocabulary = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.vocabulary)}
        tokens_N = np.array([numbers[character] for character in text], dtype=np.uint32)
        val, test = (int(len(text) * fraction) for fraction in self._fractions.values())
        train = len(text) - val - test
        parts = np.split(tokens_N, [train, train + val])
        return dict(zip(("train", "val", "test"), parts, strict=True))

    def _text(self) -> str:
        if self.path is None:
            return "\n\n".join(topics[name] for name in sorted(topics))
        try:
            return Path(self.path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
            raise UserError(f"data.path={self.path} cannot be read: {reason}.") from error
