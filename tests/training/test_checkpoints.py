import errno
import os
import zipfile
from pathlib import Path

import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.training.checkpoints import (
    AtomicCheckpointIO,
    differences,
    last_checkpoint,
    save,
    usable_checkpoint,
)


def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's writer turns the file's own error into a RuntimeError about positions."""
    path = tmp_path / "last.ckpt"
    save(path, {"weight": torch.ones(2)})
    before = path.read_bytes()

    class Full:
        def __init__(self, file) -> None:
            self._file, self._written = file, 0

        def write(self, content) -> int:
            self._written += len(content)
            if self._written > 5_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self._file.write(content)

        def __getattr__(self, name):
            return getattr(self._file, name)

    original = torch.save
    monkeypatch.setattr(torch, "save", lambda content, file: original(content, Full(file)))
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"weight": torch.ones(100_000), "global_step": 3}, path)
    told = capsys.readouterr().err
    assert told.startswith("warning: no checkpoint at step 3: ") and "No space left on device" in told
    assert writer.failure in told
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_ctrl_c_while_a_checkpoint_is_written_is_no_error_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, {"weight": torch.ones(2)})
    before = path.read_bytes()

    class Interrupted:
        def __init__(self, file) -> None:
            self._file = file

        def write(self, content) -> int:
            raise KeyboardInterrupt

        def __getattr__(self, name):
            return getattr(self._file, name)

    original = torch.save
    monkeypatch.setattr(torch, "save", lambda content, file: original(content, Interrupted(file)))
    with pytest.raises(KeyboardInterrupt):
        save(path, {"weight": torch.ones(3)})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_other_errors_of_saving_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, TypeError)):
        save(tmp_path / "x.pt", {"function": lambda: 0})
    assert list(tmp_path.iterdir()) == []


def test_differences_name_settings_by_their_path() -> None:
    theirs = {"seed": 0, "model": {"width": 16, "shortcut": "A"}, "gone": None, "list": [1, 2]}
    ours = {"seed": 0, "model": {"width": 32, "shortcut": "A"}, "new": 1, "list": [1, 2]}
    assert differences(theirs, ours) == ["model.width=16, not 32", "new=null, not 1"]
    assert differences(theirs, theirs) == []


def test_a_checkpoint_that_may_not_be_read_is_not_passed_over_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would go on from the one before it, and write over the newest."""
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
