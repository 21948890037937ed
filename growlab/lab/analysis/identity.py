"""Identity of a run: the settings that make it the same run when resumed, or a run of one row of a table."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Settings that do not change what is trained, each with all below it.
FREE = (
    *("name", "ckpt_path", "checkpoint", "logger", "num_threads", "check_ranks", "plan"),
    *("log_every_n_steps", "log_rates_every_n_steps", "schedule.max_memory_gib_per_device"),
    *("data.download", "data.num_workers", "data.in_memory", "data.eval_batch_size"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    "trainer.max_restarts",
)
# Besides, a resumed run may compile and read its data elsewhere; its task compares what matters of `sync_batchnorm`.
_FREE_ON_RESUME = (*FREE, "compile", "data.root", "trainer.sync_batchnorm")
# Besides, a row averages over seeds and over what changes numbers by rounding alone or nothing but records. Other
# options of Lightning, such as clipping, change what is trained.
_FREE_IN_ROW = (
    *(*FREE, "seed", "probe_size", "log_layers_every_n_steps", "trainer._target_", "trainer.precision"),
    *("trainer.benchmark", "trainer.deterministic", "trainer.profiler", "trainer.detect_anomaly"),
    *("trainer.inference_mode", "trainer.enable_autolog_hparams", "trainer.model_registry"),
)
# Overrides that `Group` has fields for: a row's name has them already.
_FIELDS = (
    *("experiment", "model", "data", "growth", "lr_adapt", "optimizer", "method", "trainer"),
    *("schedule.total_epochs", "data.root", "data.limit_train"),
)
# Network or data that one choice of many stands for.
_WHICH = {"model": ("_target_", "name", "type"), "data": ("_target_", "source", "source._target_", "name", "path")}
_NAMED = {*_FIELDS, *(f"{group}.{key}" for group, keys in _WHICH.items() for key in keys)}
# Choices of `method` as the settings that they stand for in a row's name, beyond the fields of `Group`.
_MEANS = {
    "method=equal_flops": ("schedule.equal_flops=true",),
    "method=equal_flops_mup": ("schedule.equal_flops=true", "growth.initialisation=mup"),
    "method=fixed_size_mup": ("growth.initialisation=mup",),
    "method=growing_vt_constraint": ("growth.rule=constraint",),
    "method=growing_vt_cost": ("schedule.learning_rate.progress_unit=cost",),
    "method=grown_both": ("depth.blocks=auto", "schedule.initial_width=0.5"),
    "method=grown_depth": ("depth.blocks=auto", "schedule.initial_width=1.0"),
    "method=grown_resolution": ("schedule.initial_width=1.0",),
    "method=grown_width": ("schedule.initial_width=0.5",),
    "method=mup": ("growth.initialisation=mup",),
    "method=ours_batches": ("schedule.batch_growth_rate=0.2",),
    "method=ours_osgd": ("osgd.anneal=stage",),
    "method=ours_without_state": ("optimizer_state=reset",),
    "method=smaller": ("depth.blocks=auto", "growth.depth_multiple=0.0"),
}
# Likewise for an optimizer whose default is another.
_MEANS_FOR = {("method=ours_with_state", "sgd"): ("optimizer_state=inherit",)}
# Data that only their folder distinguishes; elsewhere it is a place on this machine.
KNOWN_BY_ROOT = {"folder"}
_RENAMED = {"RegionalSGD": "SGD"}


def row_settings(config: Mapping[str, Any], data: str, optimizer: str, growth: str) -> dict[str, str]:
    """Return the settings, by dotted name, that all runs of a table's row share.

    Classes of growlab are compared by name only, without their module.
    """
    settings = dict(leaves(config, ""))
    if settings.get("data.seed") == settings["seed"]:
        del settings["data.seed"]
    if data not in KNOWN_BY_ROOT:
        settings.pop("data.root", None)
    if settings.get("optimizer_state") == "auto" and optimizer == "sgd":
        settings["optimizer_state"] = "inherit" if growth == "isotropic" else "reset"
    return {key: _text(value) for key, value in settings.items() if not _is_below(key, _FREE_IN_ROW)}


def row_overrides(overrides: Iterable[str], optimizer: str = "") -> tuple[str, ...]:
    """Hydra overrides that distinguish a run's method, sorted, in one spelling each.

    Seed, places, hardware, loggers and the fields of `Group` are left out. Settings that change the training are kept,
    such as `trainer.gradient_clip_val`, and so is `compile`: compiled and eager seconds must not share a row.
    """
    overrides = list(overrides)
    meant = [each for override in overrides for each in _MEANS_FOR.get((override, optimizer), ())]
    meant += [each for override in overrides for each in _MEANS.get(override, (override,))]
    kept: dict[str, str] = {}
    for override in meant:
        key, equals, value = override.partition("=")
        deleted = key.startswith("~")
        key = key.lstrip("+~").strip()
        if key in _NAMED or key.startswith("hydra/") or _is_below(key, (*_FREE_IN_ROW, "hydra")):
            continue
        # Hydra takes the later one of two overrides of one key.
        kept[key] = f"~{key}" if deleted else f"{key}={spelling(value)}" if equals else key
    return tuple(sorted(kept.values()))


def choice_of(group: str, choice: str, overrides: Sequence[str]) -> str:
    """Choice in a config group, with the network or data that the command line names: `timm resnet18`."""
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    keys = [*_WHICH[group], *(("root",) if group == "data" and choice in KNOWN_BY_ROOT else ())]
    which = [spelling(given[key]) for key in (f"{group}.{each}" for each in keys) if key in given]
    # A part of the data is other data: its epochs cost less, and it is learned less well.
    if given.get(f"{group}.limit_train", "null") != "null":
        which.append(f"limit_train={spelling(given[f'{group}.limit_train'])}")
    return " ".join([choice, *which])


def resume_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested settings that determine a run's numbers, which a resuming run must share."""
    settings = copy.deepcopy(dict(config))
    for name in _FREE_ON_RESUME:
        *parents, key = name.split(".")
        branch = settings
        for parent in parents:
            branch = branch.get(parent, {})
        branch.pop(key, None)
    return settings


def spelling(value: str) -> str:
    """One spelling for equal values: 0.10 and .1, True and true, 'a' and a."""
    value = value.strip().strip("'\"")
    if value.lower() in ("true", "false", "null"):
        return value.lower()
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return value


def _is_below(key: str, names: Sequence[str]) -> bool:
    """True if a dotted name is one of others or below one."""
    return f"{key}.".startswith(tuple(f"{name}." for name in names))


def _text(value: Any) -> str:
    text = str(value)
    if not text.startswith("growlab."):
        return text
    name = text.rpartition(".")[2]
    return _RENAMED.get(name, name)


def leaves(config: Mapping[str, Any], parents: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting of a nested configuration with its dotted name."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{parents}{key}.")
        else:
            yield f"{parents}{key}", value


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
    from omegaconf import OmegaConf  # tables need none of it

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
