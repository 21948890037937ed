"""Names of runs, in the path of their folder, in titles and in results."""

import re
from collections.abc import Collection, Mapping, Sequence

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

# Groups that a name contains, and the word in front of each after an experiment's name.
_WORDS = {"model": "with", "data": "on"}


def experiment_name(
    choices: Mapping[str, str | None], overrides: Sequence[str], swept: Collection[str] = ()
) -> str:
    """The experiment's name, or one made of the network and the data that the command line chooses instead.

    Nobody asks for the default experiment, so with another network or other data a run is named after these alone.

    Args:
        choices: the option chosen in each group of the configuration.
        overrides: those of the command line.
        swept: keys that the experiment itself sweeps over; its name stands for all their values.

    Examples:
        >>> choices = {"experiment": "digits", "model": "resnet20", "data": "digits"}
        >>> experiment_name(choices, ["growth=pairs", "seed=1"])
        'digits'
        >>> experiment_name({**choices, "data": "mnist"}, ["data=mnist"])
        'resnet20_on_mnist'
        >>> experiment_name({**choices, "experiment": "table6"}, ["experiment=table6", "model=vgg11"])
        'table6_with_vgg11'
    """
    given = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    named: dict[str, str] = {}
    for group in _WORDS:
        if group in given and group not in swept:
            named[group] = _plain(given[group])
        if f"{group}.name" in given:
            named[group] = _plain(given[f"{group}.name"])
        if f"{group}._target_" in given:
            named[group] = _plain(given[f"{group}._target_"].rpartition(".")[2])
    experiment = choices.get("experiment")
    if experiment and not named:
        return experiment
    if experiment and "experiment" in given:
        return "_".join([experiment, *(f"{word}_{named[g]}" for g, word in _WORDS.items() if g in named)])
    model, data = (named.get(group) or _plain(choices.get(group) or group) for group in _WORDS)
    return f"{model}_on_{data}"


def _plain(value: str) -> str:
    """A value as part of a folder's name: mnist,cifar10 becomes mnist_cifar10."""
    return re.sub(r"\W+", "_", value).strip("_")


def _of_this_run() -> str:
    hydra = HydraConfig.get()
    return experiment_name(
        hydra.runtime.choices, hydra.overrides.task, (hydra.sweeper.get("params") or {}).keys()
    )


def register() -> None:
    """Let configurations say `${growlab.name:}`, this run's, and `${growlab.sweep:}`, that of the sweep it is a job of.

    The second is worked out once: Hydra hands what it found for the sweep on to each job.
    """
    OmegaConf.register_new_resolver("growlab.name", _of_this_run, replace=True)
    OmegaConf.register_new_resolver("growlab.sweep", _of_this_run, use_cache=True, replace=True)
