"""Settings that determine the numbers of a run: runs with equal ones are the same run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from growlab.lab.analysis.identity import resume_settings


@dataclass(frozen=True)
class Identity:
    """Settings of a run, in plain containers.

    Attributes:
        run_id: name for loggers that survives interruptions.
        settings: those that determine the run's numbers; a checkpoint of other settings is not resumed.
        row: entries of results.json that follow from settings alone.
        before: those of the run in the folder to resume, or None.
    """

    run_id: str
    settings: Mapping[str, Any]
    yaml: str
    row: Mapping[str, Any]
    before: Mapping[str, Any] | None = None

    @property
    def replaces(self) -> bool:
        """True if the folder contains a run with other settings."""
        return self.before is not None and bool(differences(self.before, self.settings))


def settings_in(folder: Path) -> dict[str, Any] | None:
    """Read the determining settings of the run in a folder, or None."""
    written = folder / "config.yaml"
    if not written.exists():
        return None
    content: Any = OmegaConf.to_container(OmegaConf.load(written), resolve=True)
    return resume_settings(content)


def other_settings(config: Mapping[str, Any], folder: Path) -> list[str]:
    """List the determining settings that differ from those of the run in a folder; [] without a run."""
    before = settings_in(folder)
    return [] if before is None else differences(before, resume_settings(config))


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ, as `name=theirs, not ours`.

    Examples:
        >>> differences({"seed": 0, "model": {"width": 16}}, {"seed": 0, "model": {"width": 32}})
        ['model.width=16, not 32']
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
