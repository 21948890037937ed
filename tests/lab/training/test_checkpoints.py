import errno
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.training.checkpoints import AtomicCheckpointIO, last_checkpoint, save, usable_checkpoint


class Failing:
    """File that raises after a number of bytes."""

    def __init__(self, file: Any, most: int, error: BaseException) -> None:
        self._file, self._left, self._error = file, most, error

    def write(self, content: bytes) -> int:
        self._left -= len(content)
        if self._left < 0:
            raise self._error
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_failed_save_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's writer replaces the file's error, and Ctrl-C, by a RuntimeError."""
    path, original = tmp_path / "last.ckpt", torch.save
    save(path, {"weight": torch.ones(2)})
    before = path.read_bytes()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(torch, "save", lambda content, file: original(content, Failing(file, 5_000, full)))
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"weight": torch.ones(100_000), "global_step": 3}, path)
    warning = capsys.readouterr().err
    assert warning.startswith("warning: no checkpoint at step 3: ") and "No space left on device" in warning
    assert writer.failure in warning
    stop = KeyboardInterrupt()
    monkeypatch.setattr(torch, "save", lambda content, file: original(content, Failing(file, 0, stop)))
    with pytest.raises(KeyboardInterrupt):
        save(path, {"weight": torch.ones(3)})
    monkeypatch.setattr(torch, "save", original)
    with pytest.raises((AttributeError, TypeError)):
        save(path, {"function": lambda: 0})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_without_read_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for damaged, it would be overwritten by a run that resumes from the previous one."""
    path = last_checkpoint(tmp_path)
    for place in (path, path.with_name("previous.ckpt")):
        save(place, {"weight": torch.ones(2)})
    opened = zipfile.ZipFile

    def forbidden(file, *arguments):
        if file == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened(file, *arguments)

    monkeypatch.setattr(zipfile, "ZipFile", forbidden)
    with pytest.raises(UserError, match=r"cannot read .*last\.ckpt: Permission denied"):
        usable_checkpoint(tmp_path)
