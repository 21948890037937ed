"""Identity of a run: the composed settings that make it a run of one row of a table."""

from collections.abc import Iterator, Mapping
from typing import Any

# Settings that do not change what is trained, or that a row averages over; each with all that stands below it.
_FREE = (
    *(
        "name",
        "seed",
        "ckpt_path",
        "checkpoint",
        "logger",
        "num_threads",
        "check_ranks",
        "plan",
        "probe_size",
    ),
    *("log_rates_every_n_steps", "log_layers_every_n_steps", "schedule.max_memory_gib_per_device"),
    *("data.download", "data.num_workers", "data.in_memory", "data.eval_batch_size"),
    # Of Lightning's options those that say where and how fast; others, such as clipping, change what is trained.
    *(
        "trainer.accelerator",
        "trainer.devices",
        "trainer.num_nodes",
        "trainer.strategy",
        "trainer.max_restarts",
    ),
    *(
        "trainer.precision",
        "trainer.benchmark",
        "trainer.deterministic",
        "trainer.profiler",
        "trainer._target_",
    ),
    *(
        "trainer.detect_anomaly",
        "trainer.inference_mode",
        "trainer.enable_autolog_hparams",
        "trainer.model_registry",
    ),
)
# Data that their folder alone tells from others of that choice; of the others it is where this machine has them.
KNOWN_BY_ROOT = {"folder"}
_RENAMED = {"RegionalSGD": "SGD"}


def row_settings(config: Mapping[str, Any], data: str, optimizer: str, growth: str) -> dict[str, str]:
    """Settings by dotted name in which the runs of one row of a table are equal.

    Classes of growlab go by their names, wherever their modules are.

    Args:
        config: the composed configuration in plain containers, resolved.
        data: the choice of the config group of that name.
        optimizer: likewise.
        growth: likewise.
    """
    settings = dict(_leaves(config, ""))
    if settings.get("data.seed") == settings["seed"]:
        del settings["data.seed"]
    if data not in KNOWN_BY_ROOT:
        settings.pop("data.root", None)
    if settings.get("optimizer_state") == "auto" and optimizer == "sgd":
        settings["optimizer_state"] = "inherit" if growth == "isotropic" else "reset"
    free = tuple(f"{name}." for name in _FREE)
    return {key: _text(value) for key, value in settings.items() if not f"{key}.".startswith(free)}


def _text(value: Any) -> str:
    text = str(value)
    if not text.startswith("growlab."):
        return text
    name = text.rpartition(".")[2]
    return _RENAMED.get(name, name)


def _leaves(config: Mapping[str, Any], parents: str) -> Iterator[tuple[str, Any]]:
    """Yield each setting of a nested configuration with its dotted name."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{parents}{key}.")
        else:
            yield f"{parents}{key}", value
