"""Which run `ckpt_path=last` means."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from growlab.configuration import PRIMARY, config_dir
from growlab.errors import UserError
from growlab.processes import in_folder, name_of

_LAST = "ckpt_path=last"
_RUN_DIR = "hydra.run.dir"
_SWEEP_DIR = "hydra.sweep.dir"


def resume_override(overrides: list[str], multirun: bool = False) -> str | None:
    """The override that sends a run back into the folder of the run that it resumes.

    Args:
        overrides: those given on the command line.
        multirun: whether they make a sweep, each of whose jobs goes on in its own folder below the sweep's.

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
        raise UserError(f"{_LAST} with -m needs to know which sweep: add {_SWEEP_DIR}=FOLDER.")
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(PRIMARY, overrides=overrides, return_hydra_config=True)
    # `hydra:` interpolations, such as the experiment's name, are resolved from here.
    HydraConfig.instance().set_config(cfg)
    folder = Path(cfg.hydra.run.dir).parent
    runs = [path.parent for path in folder.glob("*/config.yaml") if not path.parent.name.startswith("sweep_")]
    if not runs:
        raise UserError(
            f"{_LAST}, but {folder} holds no earlier run of this experiment; leave ckpt_path out, or name the "
            f"run's folder with {_RUN_DIR}=FOLDER."
        )
    return in_folder(max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime))
