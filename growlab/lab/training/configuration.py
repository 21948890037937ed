"""The configuration in `conf/`: its location, plugin defaults, names of runs, and the run to resume."""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from growlab.base.errors import UserError
from growlab.lab.training.processes import in_folder, name_of, quoted

PRIMARY = "config"
"""Name of the primary configuration: `conf/config.yaml`."""
LAST = "ckpt_path=last"
"""The override that resumes the newest run."""
_NAMING = "hydra.job.config.override_dirname.exclude_keys"
_NOT_IN_FOLDERS = ("experiment", "data.root", "ckpt_path")
# Most bytes of a folder's name; file systems allow 255.
_LONGEST = 200
_SEARCHPATH, _RUN_DIR, _SWEEP_DIR = "hydra.searchpath", "hydra.run.dir", "hydra.sweep.dir"
# Groups in a run's name, and the word before each if the name begins with an experiment's.
_WORDS = {"model": "with", "data": "on"}
# Defaults for launcher and sweeper plugins, if installed. They cannot be files in `conf/`: Hydra would use a file with
# a plugin's name instead of the plugin's own configuration.
_PLUGINS: dict[str, dict[str, Any]] = {
    # Jobs are long: a few at a time, each started when a process is free.
    "hydra/launcher/joblib": {"n_jobs": 2, "batch_size": "1", "pre_dispatch": "all"},
    # More than the default hour. One task for any number of devices: growlab starts the other processes itself.
    "hydra/launcher/submitit_local": {"timeout_min": 7 * 24 * 60, "name": "${name}"},
    "hydra/launcher/submitit_slurm": {"timeout_min": 24 * 60, "name": "${name}", "gpus_per_node": 1},
    # Maximizes accuracy; set [maximize,minimize] for accuracy and cost. Stored in the sweep's folder, so that the same
    # command with hydra.sweep.dir=FOLDER continues the search.
    "hydra/sweeper/optuna": {
        **{"direction": "maximize", "n_jobs": 1, "max_failure_rate": 1.0, "study_name": "growlab"},
        "storage": "sqlite:///${hydra.sweep.dir}/optuna.db",
    },
}


def config_dir(package: Path | None = None) -> Path:
    """Absolute path of `conf/`: inside the package in a wheel, next to it in a checkout or editable install."""
    package = Path(__file__).resolve().parents[2] if package is None else package.resolve()
    folders = (package / "conf", package.parent / "conf")
    for folder in folders:
        if (folder / f"{PRIMARY}.yaml").is_file():
            return folder
    raise UserError(
        f"no {PRIMARY}.yaml in {folders[0]} or {folders[1]}: install growlab again, in a checkout with "
        "`pip install -e .`"
    )


def set_plugin_defaults() -> None:
    """Register growlab's defaults for Hydra's plugins in its ConfigStore, before composing; idempotent."""
    store = ConfigStore.instance()
    # Load the plugins first: they store their own configurations, which would replace these.
    Plugins.instance()
    for path, values in _PLUGINS.items():
        group, _, name = path.rpartition("/")
        if f"{name}.yaml" in store.list(group):
            original = store.load(f"{path}.yaml")
            node = OmegaConf.merge(original.node, values)
            store.store(group=group, name=name, node=node, package=original.package, provider=original.provider)


def search_options() -> list[str]:
    """Options (and `hydra.searchpath`) that another command needs to find this job's configuration."""
    job = HydraConfig.get()
    options = [] if job.job.config_name == PRIMARY else ["--config-name", str(job.job.config_name)]
    for source in job.runtime.config_sources:
        if source.provider == "command-line":
            options += ["--config-dir", source.path]
    return [*options, *(override for override in job.overrides.hydra if name_of(override) == _SEARCHPATH)]


def experiment_name(choices: Mapping[str, str | None], overrides: Sequence[str], swept: Collection[str] = ()) -> str:
    """Name of the experiment, or of the network and data if the command line overrides those of the default one.

    Examples:
        >>> choices = {"experiment": "digits", "model": "resnet20", "data": "digits"}
        >>> experiment_name(choices, ["growth=pairs", "seed=1"])
        'digits'
        >>> experiment_name({**choices, "data": "mnist"}, ["data=mnist"])
        'resnet20_on_mnist'
        >>> experiment_name({**choices, "experiment": "papers/table6"}, ["experiment=papers/table6", "model=vgg11"])
        'table6_with_vgg11'
    """
    values = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    named: dict[str, str] = {}
    for group in _WORDS:
        if group in values and group not in swept:
            named[group] = _plain(values[group])
        if f"{group}.name" in values:
            named[group] = _plain(values[f"{group}.name"])
        if f"{group}._target_" in values:
            named[group] = _plain(values[f"{group}._target_"].rpartition(".")[2])
    experiment = (choices.get("experiment") or "").rpartition("/")[2]
    if experiment and not named:
        return experiment
    if experiment and "experiment" in values:
        return "_".join([experiment, *(f"{word}_{named[g]}" for g, word in _WORDS.items() if g in named)])
    model, data = (named.get(group) or _plain(choices.get(group) or group) for group in _WORDS)
    return f"{model}_on_{data}"


def _plain(value: str) -> str:
    """Format a value for a folder's name: mnist,cifar10 becomes mnist_cifar10."""
    return re.sub(r"\W+", "_", value).strip("_")


def _name_of_this_run() -> str:
    job = HydraConfig.get()
    return experiment_name(job.runtime.choices, job.overrides.task, (job.sweeper.get("params") or {}).keys())


def _job_folder(which: str = "") -> str:
    job = HydraConfig.get()
    named = job.job.override_dirname
    if which == "all":
        # `naming_override` has excluded those that all jobs share.
        shared = {*_NOT_IN_FOLDERS} & {*job.job.config.override_dirname.exclude_keys}
        shared -= {*(job.sweeper.get("params") or ())}
        named = ",".join(sorted(o for o in job.overrides.task if name_of(o) not in shared))
    full = named.replace("/", "_").encode()
    digest = hashlib.sha256(full).hexdigest()[:8]
    short = full if len(full) <= _LONGEST else full[: _LONGEST - 9] + f"_{digest}".encode()
    name = short.decode(errors="ignore")
    # Without a number: a continued search numbers its trials from 0 again.
    if which == "all" or "BasicSweeper" not in str(job.sweeper.get("_target_")):
        return name
    # Keep the folder of a finished job, whose number differs if the sweep was extended.
    folders = [path.name for path in Path(job.sweep.dir).glob(f"*_{escape(name)}")] if name else []
    earlier = sorted(f for f in folders if f.partition("_")[0].isdecimal() and f.partition("_")[2] == name)
    numbered = f"{job.job.num}_{name}".rstrip("_")
    return earlier[0] if earlier and numbered not in earlier else numbered


def naming_override(overrides: Sequence[str]) -> str:
    """Return the override that excludes what all jobs of a sweep share from their folders' names."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    swept = [o.get_key_element() for o in parsed if o.is_sweep_override()]
    shared = [o.get_key_element().lstrip("+~") for o in parsed if not o.is_sweep_override()]
    excluded = [*(name for name in _NOT_IN_FOLDERS if name not in swept), *shared]
    return f"{_NAMING}=[{','.join(map(quoted, excluded))}]"


# `growlab.name` is this run's name, `growlab.job` a job's folder within its sweep, and `growlab.sweep` the sweep's name
# (cached, since Hydra passes it on to each job).
OmegaConf.register_new_resolver("growlab.name", _name_of_this_run, replace=True)
OmegaConf.register_new_resolver("growlab.job", _job_folder, replace=True)
OmegaConf.register_new_resolver("growlab.sweep", _name_of_this_run, use_cache=True, replace=True)


def resume_override(
    overrides: list[str], multirun: bool = False, more: str | None = None, primary: str = PRIMARY
) -> str | None:
    """Return `hydra.run.dir=FOLDER` of the newest run for `ckpt_path=last` without a folder, else None.

    `more` is another folder to search for configurations.
    """
    values = {name_of(override): override.partition("=")[2] for override in overrides}
    if values.get("ckpt_path") != "last" or (_SWEEP_DIR if multirun else _RUN_DIR) in values:
        return None
    if multirun:
        raise UserError(f"{LAST} with -m needs to know which sweep: add {_SWEEP_DIR}=FOLDER.")
    cfg = composed(overrides, more, primary)
    folder = Path(cfg.hydra.run.dir).parent
    runs = [path.parent for path in folder.glob("*/config.yaml") if not path.parent.name.startswith("sweep_")]
    if not runs:
        raise UserError(
            f"{LAST}, but {folder} has no earlier run of this experiment; leave ckpt_path out, or name the "
            f"run's folder with {_RUN_DIR}=FOLDER."
        )
    return in_folder(max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime))


def composed(overrides: list[str], more: str | None = None, primary: str = PRIMARY) -> DictConfig:
    """Compose the configuration with its `hydra` section; `more` is another folder to search."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(primary, overrides=_with_searched(overrides, more), return_hydra_config=True)
    # For `hydra:` interpolations, such as the experiment's name.
    HydraConfig.instance().set_config(cfg)
    return cfg


def _with_searched(overrides: list[str], more: str | None) -> list[str]:
    """Add a folder to the search path by an override, since `compose` has no `--config-dir`."""
    if more is None:
        return overrides
    present = next((o for o in overrides if name_of(o) == _SEARCHPATH), f"{_SEARCHPATH}=[]")
    others: Any = OverridesParser.create().parse_override(present).value()
    folders = [f"file://{Path(more).resolve()}", *(getattr(folder, "text", folder) for folder in others)]
    return [*(o for o in overrides if o != present), f"{_SEARCHPATH}=[{','.join(map(quoted, folders))}]"]
