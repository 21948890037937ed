"""Text, character by character: windows of one long text, in an order that depends on seed and epoch alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor

from growlab.data.arguments import check_numbers
from growlab.data.augment import Augmentation
from growlab.data.loaders import EpochPlan, ResumableLoader
from growlab.data.order import OFFSET, draws
from growlab.errors import UserError

# Training windows are drawn in another order each epoch, as images are that are not changed otherwise.
_TRAINING = Augmentation()


@dataclass
class TextLoader(ResumableLoader):
    """Windows of a text.

    Yields (tokens int64 [B, T], the tokens behind them int64 [B, T]).

    Attributes:
        tokens_N: the text.
        context: T.
    """

    tokens_N: Tensor
    context: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        within_T = torch.arange(self.context + 1, device=self.tokens_N.device)
        offset = 0
        if self.plan.augmentation is not None:
            # Windows begin elsewhere in each epoch, or the same few characters would always lack their context.
            offset = int(
                draws(np.zeros(1), OFFSET, self.plan.seed, self.plan.epoch)[0] % np.uint64(self.context)
            )
        for batch in self._left():
            starts_B = torch.from_numpy(batch).to(self.tokens_N.device) * self.context + offset
            windows_BT = self.tokens_N[starts_B[:, None] + within_T]
            self._given += 1
            yield windows_BT[:, :-1], windows_BT[:, 1:]


class TextData(LightningDataModule):
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
        super().__init__()
        check_numbers(1, context=context, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_numbers(1, limit_characters=limit_characters)
        if not (validation_fraction > 0 and test_fraction > 0 and validation_fraction + test_fraction < 1):
            raise UserError(
                f"data.validation_fraction={validation_fraction} and data.test_fraction={test_fraction} must be above "
                "0 and leave something to train on."
            )
        self.path, self.context, self.limit_characters = path, context, limit_characters
        self.batch_size, self.eval_batch_size, self.seed = batch_size, eval_batch_size, seed
        self._fractions = {"val": validation_fraction, "test": test_fraction}
        #: Global batch size of an epoch, set by the experiment from the growth schedule; None = `batch_size`.
        self.batch_size_at_epoch: Callable[[int], int] | None = None
        self._tokens: dict[str, Tensor] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read the text, once, whatever the stage."""
        if self._tokens:
            return
        text = self._text()[: self.limit_characters]
        #: The characters of the text; a token is a place among them.
        self.vocabulary = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.vocabulary)}
        tokens_N = torch.tensor([numbers[character] for character in text], dtype=torch.int64)
        held_out = [int(len(text) * fraction) for fraction in self._fractions.values()]
        parts = tokens_N.split([len(text) - sum(held_out), *held_out])
        # Training windows may begin up to a window later.
        spare = {"train": self.context, "val": 1, "test": 1}
        self._windows = {
            name: (len(part) - spare[name]) // self.context for name, part in zip(spare, parts, strict=True)
        }
        if min(self._windows.values()) < 1:
            raise UserError(
                f"a text of {len(text)} characters has no whole window of data.context={self.context} in each of its "
                "parts; take a longer text or a smaller context."
            )
        self._tokens = dict(zip(spare, parts, strict=True))
        self.num_train, self.num_val, self.num_test = self._windows.values()

    @property
    def network_arguments(self) -> dict[str, Any]:
        """What a network has to know of the data."""
        return {"vocabulary_size": len(self.vocabulary), "context": self.context}

    def samples_in_batches(self, epoch: int, batch_size: int) -> list[int]:
        """Return the number of windows in each training batch of an epoch that has batches of this size."""
        whole, rest = divmod(self.num_train, batch_size)
        return [batch_size] * whole + [rest] * bool(rest)

    def train_dataloader(self) -> TextLoader:
        """Return the batches of the trainer's current epoch (0 without a trainer).

        Raises:
            UserError: the number of processes does not divide the batch size.
        """
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        size = self.batch_size if self.batch_size_at_epoch is None else self.batch_size_at_epoch(epoch)
        rank, world_size = self._place()
        if size % world_size:
            raise UserError(
                f"a batch of {size} windows does not divide among {world_size} processes; choose a data.batch_size "
                f"that {world_size} divides, or another number of devices."
            )
        plan = EpochPlan(self.num_train, size, self.seed, epoch, _TRAINING, rank, world_size)
        return self._loader("train", plan)

    def val_dataloader(self) -> TextLoader:
        """Return the windows of the validation part in order."""
        return self._evaluation("val")

    def test_dataloader(self) -> TextLoader:
        """Return the windows of the test part in order."""
        return self._evaluation("test")

    def probe_batch(self, n: int) -> Tensor:
        """Return n training windows, int64 [n, T] on the CPU: always the same ones, repeated if there are fewer."""
        windows = torch.arange(n) % self.num_train
        return self._tokens["train"].cpu()[windows[:, None] * self.context + torch.arange(self.context)]

    def _text(self) -> str:
        if self.path is None:
            return "\n\n".join(topics[name] for name in sorted(topics))
        try:
            return Path(self.path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
            raise UserError(f"data.path={self.path} cannot be read: {reason}.") from error

    def _evaluation(self, part: str) -> TextLoader:
        plan = EpochPlan(self._windows[part], self.eval_batch_size, self.seed, 0, None, *self._place())
        return self._loader(part, plan)

    def _loader(self, part: str, plan: EpochPlan) -> TextLoader:
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        self._tokens[part] = self._tokens[part].to(device)
        return TextLoader(plan, self._tokens[part], self.context)

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
