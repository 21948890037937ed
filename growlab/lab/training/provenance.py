"""Where a result comes from: versions, commit, machine."""

import contextlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import growlab


def versions() -> dict[str, str | None]:
    """Version of Python and of what the result depends on; None for one that was not installed as a package."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "lightning", "growlab"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit() -> str | None:
    """Commit of the checkout that growlab runs from, `-dirty` behind it after changes; None outside of one."""
    package = Path(growlab.__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=package, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        # An installed copy may lie inside a repository that it is no part of.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../conf")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine(device: torch.device) -> dict[str, str | int]:
    """Name of the device that trained, and the number of CPU threads."""
    return {"device": _device_name(device), "threads": torch.get_num_threads()}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
