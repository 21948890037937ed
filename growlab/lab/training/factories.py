"""The data, network and objective of a run, made for each other; what does not go together is told."""

import warnings
from typing import Any

import hydra
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parameter import is_lazy

from growlab.base.errors import UserError
from growlab.base.settings import parameters
from growlab.lab.data import CustomData, RunData
from growlab.lab.training.custom_objective import CustomObjective
from growlab.lab.training.objective import Objective

_OF_AN_OBJECTIVE = ("metric_names", "evaluated_names", "uneven", "bind", "metrics", "evaluate", "exports")


def make_network(model: DictConfig, data: RunData) -> nn.Module:
    """The network at full width.

    Args:
        model: the configuration's `model`.
        data: set up.

    Raises:
        UserError: the network is not for such data, or no network.
    """
    given = data.network_arguments
    unknown = [name for name in given if not _takes(model._target_, name)]
    if unknown:
        raise UserError(
            f"model._target_={model._target_} does not take {' and '.join(unknown)}, which the data give"
            + _advice(data)
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        network = hydra.utils.instantiate(model, **given, **_offered(model, data))
    if not isinstance(network, nn.Module):
        raise UserError(f"model._target_={model._target_} makes a {type(network).__name__}, not a network.")
    if empty := [
        name for name, value in network.named_parameters() if not is_lazy(value) and not value.numel()
    ]:
        shape = list(network.get_parameter(empty[0]).shape)
        zeros = [f"model.{name}=0" for name, value in model.items() if value == 0 and value is not False]
        raise UserError(
            f"the network's {empty[0]} is of the shape {shape}, without entries"
            + (f", with {' and '.join(zeros)}" if zeros else "")
            + ": sizes of layers must be at least 1."
        )
    return network


def make_data(settings: DictConfig, seed: int) -> RunData:
    """The data module; what is no data module of growlab's becomes the source of one.

    Args:
        settings: the configuration's `data`.
        seed: of the order, where the data are a user's own.
    """
    made = hydra.utils.instantiate(settings)
    return made if isinstance(made, RunData) else CustomData(made, seed=seed)


def make_objective(objective: DictConfig, data: RunData) -> Objective:
    """The objective, bound to the data.

    Args:
        objective: the configuration's `objective`.
        data: set up.

    Raises:
        UserError: it is none, or not for such data.
    """
    if "label_smoothing" in objective and not _takes(objective._target_, "label_smoothing"):
        # The default file's, where another loss is put in the place of its `_target_`.
        objective = OmegaConf.masked_copy(objective, [key for key in objective if key != "label_smoothing"])
    made = hydra.utils.instantiate(objective)
    if isinstance(made, nn.Module) and not hasattr(made, "metric_names"):
        made = CustomObjective(made)
    missing = [name for name in _OF_AN_OBJECTIVE if not hasattr(made, name)]
    if missing or not callable(made):
        raise UserError(
            f"objective._target_={objective._target_} is no objective, which has {', '.join(_OF_AN_OBJECTIVE)}, as "
            f"growlab.lab.training.Classification does, and no loss of torch.nn; any other loss goes into "
            f"objective=custom{_advice(data)}"
        )
    made.bind(data)
    return made


def _offered(model: DictConfig, data: RunData) -> dict[str, Any]:
    """Arguments that the network has, the configuration leaves open and the data tell."""
    try:
        taken = parameters(get_object(model._target_))
    except Exception:  # Making the network tells what is wrong.
        return {}
    known = (*model, *data.network_arguments)
    found = {name: data.offer(name) for name in taken if name not in known}
    for name, value in found.items():
        parameter = taken[name]
        open_ended = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if value is None and parameter.default is parameter.empty and not open_ended:
            raise UserError(
                f"model._target_={model._target_} takes {name}, which these data do not tell: set +model.{name}=VALUE, "
                f"or take another network{_advice(data)}"
            )
    return {name: value for name, value in found.items() if value is not None}


def _takes(target: str, name: str) -> bool:
    """Whether a callable has a parameter of this name; True too for one that cannot be imported or asked."""
    try:
        taken = parameters(get_object(target))
    except Exception:  # Whatever is wrong with the user's own module, making the network tells it.
        return True
    return name in taken or any(p.kind == p.VAR_KEYWORD for p in taken.values())


def _advice(data: RunData) -> str:
    return f": {data.goes_with}." if data.goes_with else "."
