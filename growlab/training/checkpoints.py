"""Checkpoints that are whole or not there."""

import os
import pickle
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from growlab.errors import UserError
from growlab.files import write_atomically

CHECKPOINT_FOLDER = "checkpoints"
LAST = "last.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside the old one and renames it, so that a kill or a full disk leaves the old one."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint.

        Raises:
            UserError: the disk is full or not writable.
        """
        write_atomically(path, lambda file: torch.save(checkpoint, file))


def every_epoch(run_dir: Path) -> ModelCheckpoint:
    """A callback that keeps the state after the last finished epoch in `run_dir/checkpoints/last.ckpt`."""
    return ModelCheckpoint(
        dirpath=run_dir / CHECKPOINT_FOLDER,
        save_top_k=0,
        save_last=True,
        every_n_epochs=1,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )


def last_checkpoint(run_dir: Path) -> Path:
    """Where `every_epoch` keeps its checkpoint."""
    return run_dir / CHECKPOINT_FOLDER / LAST


def check_readable(path: Path) -> None:
    """Make sure that a file is a checkpoint before anything is built on it.

    Raises:
        UserError: there is no such file, or it is not a checkpoint.
    """
    if not path.is_file():
        raise UserError(f"ckpt_path={path} is not a file; give a checkpoint's path or ckpt_path=last.")
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, BadZipFile, EOFError, OSError, ValueError) as error:
        raise UserError(f"ckpt_path={path} is not a checkpoint that growlab can read ({error}).") from error
