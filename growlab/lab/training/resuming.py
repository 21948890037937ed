"""Find the run that `ckpt_path=last` resumes."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from growlab.base.errors import UserError
from growlab.lab.training.configuration import PRIMARY, SEARCHPATH, config_dir
from growlab.lab.training.processes import in_folder, name_of, quoted

LAST = "ckpt_path=last"
"""Asks for the newest run."""
_RUN_DIR = "hydra.run.dir"
_SWEEP_DIR = "hydra.sweep.dir"


def resume_override(
    overrides: list[str], multirun: bool = False, more: str | None = None, primary: str = PRIMARY
) -> str | None:
    """Return the override that sends a run back into the folder of the run that it resumes.

    Args:
        overrides: those given on the command line.
        multirun: whether they make a sweep, each of whose jobs resumes in its folder below the sweep's.
        more: a folder of the user's configurations, in addition to `conf/`.
        primary: name of the primary configuration.

    Returns:
        `hydra.run.dir=FOLDER` of the newest run of the experiment if `ckpt_path=last` is asked for without a
        folder; None where nothing has to be added.

    Raises:
        UserError: the experiment has no run yet, or the sweep's folder is not given.
    """
    named = _SWEEP_DIR if multirun else _RUN_DIR
    given = {name_of(override): override.partition("=")[2] for override in overrides}
    if given.get("ckpt_path") != "last" or named in given:
        return None
    if multirun:
        raise UserError(f"{LAST} with -m needs to know which sweep: add {_SWEEP_DIR}=FOLDER.")
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(primary, overrides=_found(overrides, more), return_hydra_config=True)
    # `hydra:` interpolations, such as the experiment's name, are resolved from here.
    HydraConfig.instance().set_config(cfg)
    folder = Path(cfg.hydra.run.dir).parent
    runs = [path.parent for path in folder.glob("*/config.yaml") if not path.parent.name.startswith("sweep_")]
    if not runs:
        raise UserError(
            f"{LAST}, but {folder} holds no earlier run of this experiment; leave ckpt_path out, or name the "
            f"run's folder with {_RUN_DIR}=FOLDER."
        )
    return in_folder(max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime))


def _found(overrides: list[str], more: str | None) -> list[str]:
    """The overrides, with the folder among those that are searched; `compose` has no `--config-dir`."""
    if more is None:
        return overrides
    given = next((one for one in overrides if name_of(one) == SEARCHPATH), f"{SEARCHPATH}=[]")
    others: Any = OverridesParser.create().parse_override(given).value()
    folders = [f"file://{Path(more).resolve()}", *(getattr(one, "text", one) for one in others)]
    searched = f"{SEARCHPATH}=[{','.join(map(quoted, folders))}]"
    return [*(one for one in overrides if one != given), searched]
