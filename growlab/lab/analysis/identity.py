"""Identity of a run: the settings that a resumed run, or runs of the same table row, must share."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Settings, each with all below it, that do not affect training.
FREE = (
    *("name", "ckpt_path", "checkpoint", "logger", "num_threads", "check_ranks", "plan"),
    *("log_every_n_steps", "log_rates_every_n_steps", "schedule.max_memory_gib_per_device"),
    *("data.download", "data.num_workers", "data.in_memory", "data.eval_batch_size"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    "trainer.max_restarts",
)
# A resumed run may also compile or read its data from elsewhere; its task checks `sync_batchnorm` itself.
_FREE_ON_RESUME = (*FREE, "compile", "data.root", "trainer.sync_batchnorm")
# A row also averages over seeds and settings that affect only rounding or records. Other options of Lightning, such as
# gradient clipping, change the training.
_FREE_IN_ROW = (
    *(*FREE, "seed", "probe_size", "log_layers_every_n_steps", "trainer._target_", "trainer.precision"),
    *("trainer.benchmark", "trainer.deterministic", "trainer.profiler", "trainer.detect_anomaly"),
    *("trainer.inference_mode", "trainer.enable_autolog_hparams", "trainer.model_registry"),
)
# Overrides that `Group` has fields for, so that a row's name does not repeat them.
_FIELDS = (
    *("experiment", "model", "data", "growth", "lr_adapt", "optimizer", "method", "trainer"),
    *("schedule.total_epochs", "data.root", "data.limit_train"),
)
# Settings that name the network or data within a choice of its group.
_WHICH = {"model": ("_target_", "name", "type"), "data": ("_target_", "source", "source._target_", "name", "path")}
_NAMED = {*_FIELDS, *(f"{group}.{key}" for group, keys in _WHICH.items() for key in keys)}
# Settings that choices of `method` add to a row's name, beyond the fields of `Group`.
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
# Likewise for an optimizer with another default.
_MEANS_FOR = {("method=ours_with_state", "sgd"): ("optimizer_state=inherit",)}
# Data that `data.root` identifies; for other data it is only a place on this machine.
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
    """Return the Hydra overrides that distinguish a run's method, sorted and with normalised values.

    Seed, paths, hardware, loggers and the fields of `Group` are left out. Settings that change the training, such as
    `trainer.gradient_clip_val`, are kept, and so is `compile`: compiled and eager seconds must not share a row.
    """
    overrides = list(overrides)
    expanded = [setting for override in overrides for setting in _MEANS_FOR.get((override, optimizer), ())]
    expanded += [setting for override in overrides for setting in _MEANS.get(override, (override,))]
    kept: dict[str, str] = {}
    for override in expanded:
        key, equals, value = override.partition("=")
        deleted = key.startswith("~")
        key = key.lstrip("+~").strip()
        if key in _NAMED or key.startswith("hydra/") or _is_below(key, (*_FREE_IN_ROW, "hydra")):
            continue
        # Of two overrides of a key, the later one wins, as in Hydra.
        kept[key] = f"~{key}" if deleted else f"{key}={spelling(value)}" if equals else key
    return tuple(sorted(kept.values()))


def choice_of(group: str, choice: str, overrides: Sequence[str]) -> str:
    """Return the choice in a config group, with the network or data that overrides name: `timm resnet18`."""
    values = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    keys = [*_WHICH[group], *(("root",) if group == "data" and choice in KNOWN_BY_ROOT else ())]
    names = [spelling(values[key]) for key in (f"{group}.{setting}" for setting in keys) if key in values]
    # Part of the data counts as other data: its epochs cost less, and its scores are lower.
    if values.get(f"{group}.limit_train", "null") != "null":
        names.append(f"limit_train={spelling(values[f'{group}.limit_train'])}")
    return " ".join([choice, *names])


def resume_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested settings that determine a run's numbers, which a resumed run must share."""
    settings = copy.deepcopy(dict(config))
    for name in _FREE_ON_RESUME:
        *parents, key = name.split(".")
        branch = settings
        for parent in parents:
            branch = branch.get(parent, {})
        branch.pop(key, None)
    return settings


def spelling(value: str) -> str:
    """Normalise a value, so that 0.10 and .1, True and true, 'a' and a are equal."""
    value = value.strip().strip("'\"")
    if value.lower() in ("true", "false", "null"):
        return value.lower()
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return value


def _is_below(key: str, names: Sequence[str]) -> bool:
    """True if a dotted name is one of `names` or below one."""
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
        run_id: name for loggers, the same after an interruption.
        settings: the settings that determine the run's numbers; a checkpoint with other settings is not resumed.
        yaml: the composed configuration.
        row: entries of results.json that follow from settings alone.
        before: `settings` of the run already in the folder, or None.
    """

    run_id: str
    settings: Mapping[str, Any]
    yaml: str
    row: Mapping[str, Any]
    before: Mapping[str, Any] | None = None

    @property
    def replaces(self) -> bool:
        """True if the folder has a run with other settings."""
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
    """List the settings that differ, as `name=theirs, not ours`.

    Examples:
        >>> differences({"seed": 0, "model": {"width": 16}}, {"seed": 0, "model": {"width": 32}})
        ['model.width=16, not 32']
    """
    lines = []
    for key in sorted({*theirs, *ours}):
        their, our, name = theirs.get(key), ours.get(key), f"{prefix}{key}"
        if isinstance(their, Mapping) and isinstance(our, Mapping):
            lines += differences(their, our, f"{name}.")
        elif their != our:
            lines.append(f"{name}={_brief(their)}, not {_brief(our)}")
    return lines


def _brief(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
