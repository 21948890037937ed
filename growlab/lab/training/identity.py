"""Settings that decide the numbers of a run: two runs of the same ones are the same run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from growlab.lab.analysis.identity import resume_settings
from growlab.lab.training.checkpoints import differences


@dataclass(frozen=True)
class Identity:
    """Settings of a run, in plain containers.

    Attributes:
        run_id: a name that survives interruptions, for loggers.
        settings: those that decide the run's numbers; a checkpoint of other settings is not resumed.
        yaml: all settings, for config.yaml.
        row: entries of results.json that follow from settings alone.
        before: those settings of the run in the folder that is resumed; None if there is none.
    """

    run_id: str
    settings: Mapping[str, Any]
    yaml: str
    row: Mapping[str, Any]
    before: Mapping[str, Any] | None = None

    @property
    def replaces(self) -> bool:
        """True if the folder contains a run of other settings."""
        return self.before is not None and bool(differences(self.before, self.settings))


def settings_in(folder: Path) -> dict[str, Any] | None:
    """Deciding settings of the run that a folder contains; None if there is none."""
    written = folder / "config.yaml"
    if not written.exists():
        return None
    return resume_settings(OmegaConf.to_container(OmegaConf.load(written), resolve=True))


def other_settings(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Deciding settings that differ from those of the run in a folder; [] if it contains none."""
    before = settings_in(folder)
    return [] if before is None else differences(before, resume_settings(config))
