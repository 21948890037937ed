"""Checkpoints that are whole or not there."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from growlab.errors import UserError
from growlab.files import write_atomically

CHECKPOINT_FOLDER = "checkpoints"
LAST = "last.ckpt"
# Where growlab keeps its own part of a checkpoint.
HEADER = "growlab"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside the old one and renames it, so that a kill or a full disk leaves the old one."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint.

        Raises:
            UserError: the disk is full or not writable.
        """
        save(path, checkpoint)


def save(path: str | os.PathLike[str], content: Any) -> None:
    """`torch.save`, atomically.

    Raises:
        UserError: the disk is full or not writable; what was at `path` is left as it was.
    """

    def write(file: BinaryIO) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch's zip writer hides what the file said, such as a full disk, behind an error of its own.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    write_atomically(path, write)


class SaveEveryEpoch(Checkpoint):
    """Keeps the state after the last finished epoch in one file.

    Lightning runs callbacks of this kind after all others. Its own `ModelCheckpoint(save_top_k=0,
    save_last=True)` saves nothing before training ends.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, on every rank at once."""
        trainer.save_checkpoint(self._path)


def last_checkpoint(run_dir: Path) -> Path:
    """Where a run keeps the checkpoint of its last finished epoch."""
    return run_dir / CHECKPOINT_FOLDER / LAST


def read_header(path: Path) -> dict[str, Any]:
    """What a checkpoint says beside its tensors, which are not read.

    Raises:
        UserError: there is no such file, or it is not a checkpoint of growlab.
    """
    if not path.is_file():
        raise UserError(f"ckpt_path={path} is not a file; give a checkpoint's path or ckpt_path=last.")
    try:
        checkpoint = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, BadZipFile, EOFError, OSError, ValueError) as error:
        raise UserError(f"ckpt_path={path} is not a checkpoint that growlab can read ({error}).") from error
    header = checkpoint.get(HEADER) if isinstance(checkpoint, dict) else None
    if header is None:
        raise UserError(
            f"ckpt_path={path} is not a checkpoint of a growlab run; give a run's {CHECKPOINT_FOLDER}/{LAST} or "
            "ckpt_path=last."
        )
    return header


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ, as `name=theirs, not ours`; tuples and lists are alike.

    Args:
        theirs: nested settings.
        ours: likewise.
        prefix: of the names.
    """
    found = []
    for key in sorted({*theirs, *ours}):
        one, other, name = theirs.get(key), ours.get(key), f"{prefix}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += differences(one, other, f"{name}.")
        elif one != other:
            found.append(f"{name}={_brief(one)}, not {_brief(other)}")
    return found


def _brief(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
