"""Atomic checkpoints."""

import os
import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from growlab.base.errors import UserError, WriteError
from growlab.base.files import CHECKPOINT_FOLDER, write_atomically

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
# Key of growlab's part of a checkpoint.
HEADER = "growlab"
# What else resuming needs, which some tools leave out.
_WHOLE = {
    **dict.fromkeys(("state_dict", "loops", "callbacks"), Mapping),
    **dict.fromkeys(("optimizer_states", "lr_schedulers"), list),
    "pytorch-lightning_version": str,
}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints whole and keeps the one before, so that neither a kill nor a full disk loses both.

    A checkpoint that cannot be written is a warning, and training continues: the disk may have room when the next
    one is due.

    Attributes:
        failure: why the newest checkpoint could not be written; None if it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: str | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint; Lightning calls this on the first rank alone."""
        path = Path(path)
        try:
            save(path, checkpoint, path.with_name(PREVIOUS))
        except WriteError as error:
            self.failure = str(error)
            print(f"warning: no checkpoint at step {checkpoint['global_step']}: {error}", file=sys.stderr)
        else:
            self.failure = None


def save(path: str | os.PathLike[str], content: Any, previous: Path | None = None) -> None:
    """`torch.save`, atomically.

    Args:
        path: of the file.
        content: plain containers of tensors and numbers.
        previous: where the old file goes; None: nowhere.

    Raises:
        WriteError: the disk is full or not writable; what was at `path` is left as it was.
    """

    def write(file: BinaryIO) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch's zip writer hides what the file said, such as a full disk, or Ctrl-C.
            if isinstance(error.__context__, OSError | KeyboardInterrupt):
                raise error.__context__ from error
            raise

    write_atomically(path, write, previous)


def last_checkpoint(run_dir: Path) -> Path:
    """Path of a run's newest checkpoint."""
    return run_dir / CHECKPOINT_FOLDER / LAST


def usable_checkpoint(run_dir: Path) -> tuple[Path | None, str | None]:
    """The newest checkpoint of a run that is whole, None if the run has none; and a warning about it, if any.

    Nothing is changed: all ranks read at the same time.

    Raises:
        UserError: there are checkpoints, and none of them can be read.
    """
    last = last_checkpoint(run_dir)
    previous = last.with_name(PREVIOUS)
    reasons = {path: damage(path) for path in (last, previous) if path.is_file()}
    if not reasons:
        return None, f"no checkpoint in {run_dir} yet: starting from the beginning"
    if reasons.get(last, "missing") is None:
        return last, None
    if reasons.get(previous, "missing") is not None:
        damages = "; ".join(f"{path}: {reason}" for path, reason in reasons.items())
        raise UserError(f"no checkpoint can be read ({damages}); start anew without ckpt_path.")
    reason = reasons.get(last)
    return previous, reason and f"{last} is damaged ({reason}): going on from the checkpoint before it"


def damage(path: Path) -> str | None:
    """Read a checkpoint's file to its end and say what is wrong with it; None if nothing.

    torch writes a checksum with every tensor, but does not check it on loading.

    Raises:
        UserError: this user may not read it, which is no damage.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except PermissionError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    # What zipfile raises at any byte that is wrong: in the directory, a name, a method, a length, at the end.
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        return str(error)
    return None if broken is None else f"{broken} does not match its checksum"


def read_header(path: Path) -> dict[str, Any]:
    """Header of a checkpoint; its tensors are checked but not loaded.

    Raises:
        UserError: there is no such file, or it is not a checkpoint of growlab.
    """
    if not path.is_file():
        raise UserError(f"ckpt_path={path} is not a file; give a checkpoint's path or ckpt_path=last.")
    reason = damage(path)
    try:
        if reason is not None:
            raise ValueError(reason)
        checkpoint = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # What torch says is that the file can be loaded if its code may run.
        raise UserError(
            f"ckpt_path={path} holds objects other than tensors, numbers and text, which growlab does not load: "
            "loading them could run code; give a checkpoint that growlab has written."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise UserError(f"ckpt_path={path} is not a checkpoint that growlab can read ({error}).") from error
    header = checkpoint.get(HEADER) if isinstance(checkpoint, dict) else None
    if header is None:
        raise UserError(
            f"ckpt_path={path} is not a checkpoint of a growlab run; give a run's {CHECKPOINT_FOLDER}/{LAST} or "
            "ckpt_path=last."
        )
    lacking = [
        name
        for name, kind in _WHOLE.items()
        if not (value := checkpoint.get(name)) or not isinstance(value, kind)
    ]
    if lacking:
        raise UserError(
            f"ckpt_path={path} is a checkpoint without {' and '.join(lacking)}, which a run needs to go "
            "on: give one as a run has written it."
        )
    return header


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ, as `name=theirs, not ours`; tuples equal lists.

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


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor, for `differences`."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def as_precise(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make a module float64 before float64 tensors are loaded into it.

    Lightning converts a module to `trainer.precision` only after it has loaded a checkpoint, whose bits would be lost.
    """
    if all(tensors[name].dtype == torch.float64 for name, _ in module.named_parameters()):
        module.double()


def _brief(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
