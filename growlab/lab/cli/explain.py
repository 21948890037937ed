"""Turn a library's error about user input into one sentence."""

import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from traceback import walk_tb
from typing import Any

import yaml
from hydra.errors import (
    CompactHydraException,
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from growlab.base.errors import UserError, how_to_install
from growlab.lab.cli.commands import COMMANDS
from growlab.lab.training.configuration import config_dir

_EXTRAS = {name: name for name in ("wandb", "tensorboard", "timm")}
_EXTRAS |= {"tensorboardX": "tensorboard", "fairseq": "translation"}
# Prefixes of lines in which Hydra, OmegaConf and torch describe their own objects.
_INSIDES = ("full_key:", "object_type=", "reference_type=", "See https:", "Config search", "Exception raised")

# Prefixes of libraries' messages about a run's settings, and the sentence to print instead ("": their own).
_ADVICE = {
    "Expected more than 1 value per channel when training": (
        "batch normalisation cannot compute statistics from a single value per channel, and a training batch, perhaps "
        "the last of an epoch, has only one: change data.batch_size, or use a network with another normalisation"
    ),
    "DataLoader worker (pid": "a process that loads data died; if memory ran out, lower data.num_workers",
    "Cannot overwrite study direction": (
        "the search in this folder has another hydra.sweeper.direction: continue it with that one, or choose another "
        "hydra.sweep.dir"
    ),
    "Early stopping conditioned on metric": "",
    "Dataset not found or corrupted": "",
}


def explain(error: BaseException, overrides: Sequence[str] = ()) -> str | None:
    """Return the sentence to print after `error:`, without a line break; None if the failure deserves a traceback."""
    for cause in sorted(_chain(error), key=lambda cause: not isinstance(cause, UserError)):
        if text := _sentence(cause, overrides):
            return text if text.endswith((".", "!", "?")) else f"{text}."
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and its causes, for Hydra's exceptions also implicit ones."""
    while error is not None:
        yield error
        implicit = error.__context__ if isinstance(error, CompactHydraException) else None
        error = error.__cause__ or implicit


def _sentence(error: BaseException, overrides: Sequence[str]) -> str | None:
    text = _first_lines(error)
    match error:
        case UserError():
            return " ".join(str(error).split())
        case MissingConfigException(missing_cfg_file=str(name)):
            group, _, option = name.rpartition("/")
            known = [choice for choice in error.options or () if not choice.startswith("_")]
            if group == "experiment":
                known += [f"papers/{path.stem}" for path in (config_dir() / "experiment/papers").glob("*.yaml")]
            near = get_close_matches(option, {choice.rpartition("/")[2] for choice in known}, n=5)
            options = ", ".join(choice for choice in known if choice.rpartition("/")[2] in near or not near)
            more = f"; more come with {how_to_install('sweeps')}" if group.startswith("hydra/") else ""
            listed = f"; {'near it' if near else 'choose one of'}: {options}" if options else ""
            return f"there is no {group or 'configuration'} '{option}'{listed}{more}"
        case OverrideParseException(override=override) if "=" not in override:
            return f"'{override}' is neither NAME=VALUE, such as seed=1, nor a command ({', '.join(COMMANDS)})"
        case OverrideParseException():
            return f"cannot read '{error.override}' (is a quote or bracket missing?): {text}"
        case ConfigCompositionException():
            cause = next((each for each in _chain(error) if isinstance(each, OmegaConfBaseException)), None)
            where = f"{text.partition(': ')[0]}: " if text.startswith("In '") else ""
            return text if cause is None else f"{where}{_of_value(cause)}"
        case ConfigAttributeError() | ConfigKeyError() if not any(each.startswith("~") for each in overrides):
            return None  # a bug: our code reads a key that does not exist
        case OmegaConfBaseException():
            return _of_value(error)
        case InstantiationException():
            return _of_constructor(error, overrides)
        case CompactHydraException():
            return text
        case yaml.MarkedYAMLError() if (mark := error.problem_mark) is not None:
            return f"{mark.name}, line {mark.line + 1}, is not valid YAML: {error.problem}"
        case OSError(filename=str(path)):
            return f"cannot use {path}: {error.strerror}"
        case UnicodeDecodeError():
            return f"a text is not in UTF-8: {text}"
        case MemoryError():
            return f"there is not enough memory: {text}"
        case RuntimeError() | ValueError() if known := [each for each in _ADVICE if str(error).startswith(each)]:
            return _ADVICE[known[0]] or text
        case _ if _raised_by_hydra(error):
            return text or f"Hydra cannot use {' '.join(overrides)}"
    # Compare by name, so that help and composition need not import torch or Lightning.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "ParityError" in kinds:
        return f"{text} Lower optimizer.lr or choose another growth method."
    # Lightning's MisconfigurationException is about invalid arguments; wandb's are about keys and connections.
    of_wandb = type(error).__module__.partition(".")[0] == "wandb"
    return text if of_wandb or kinds & {"MisconfigurationException", "UnsupportedOperation"} else None


def _first_lines(error: BaseException) -> str:
    """Return an exception's message on one line, without appended details of libraries' objects."""
    lines = [line.strip() for line in str(error).partition("Exception raised from ")[0].splitlines()]
    end = next((number for number, line in enumerate(lines) if line.startswith(_INSIDES)), len(lines))
    return " ".join(filter(None, lines[:end]))


def _of_value(error: OmegaConfBaseException) -> str:
    """Explain an unknown key, suggesting the nearest one, or a value of the wrong type."""
    name, parent, text = error.full_key, error.parent_node, _first_lines(error)
    near = []
    if isinstance(error, ConfigAttributeError | ConfigKeyError) and isinstance(parent, DictConfig):
        names: Any = OmegaConf.to_container(parent)
        inside = {
            key: (value is None, f"{group}.{key}")
            for group, inner in names.items()
            if isinstance(inner, dict)
            for key, value in inner.items()
        }
        near = get_close_matches(error.key, names, n=1, cutoff=0.7)
        # Settings with a value first, such as schedule.total_epochs.
        nested = sorted((inside[key] for key in get_close_matches(error.key, inside)), key=lambda place: place[0])
        near = near or [place for _, place in nested]
        if "is not in struct" in text:
            name, text = "", f"there is no setting '{error.full_key}'"
    where = f"{name}: " if name and name not in text else ""
    return f"{where}{text}" + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")


def _of_constructor(error: InstantiationException, overrides: Sequence[str]) -> str | None:
    """Explain a `_target_` that cannot be imported or does not accept its arguments."""
    cause = error.__cause__
    found = re.search(r"full_key: (\S+)", str(error)) or re.search(r"target '([^']+)'", str(error))
    name = found[1] if found else "a constructor"
    if cause is None or isinstance(cause, InstantiationException):
        return _first_lines(error) if cause is None else None  # the cause is more specific
    text = _first_lines(cause)
    if isinstance(cause, ImportError) and (missing := re.search(rf"\b({'|'.join(_EXTRAS)})\b", text)):
        return f"{name} needs a package that is not installed: {how_to_install(_EXTRAS[missing[1]])}"
    if isinstance(cause, ImportError) and (missing := re.search(r"\b(mlflow|aim|comet[-_]ml)\b", text)):
        return f"{name} needs a package that is not installed: pip install {missing[1].replace('_', '-')}"
    if str(error).startswith("Error locating target"):
        return f"{name}: {_first_lines(error)}: {text}"
    if isinstance(cause, ValueError):
        # `batches must be at least 1` from `growth` names the setting growth.batches.
        inside = re.match(r"[a-z_]+ must ", text) is not None
        return text if text.startswith(f"{name}.") else f"{name}{'.' if inside else ': '}{text}"
    # A single frame (Hydra's): the arguments do not match the signature.
    at_the_call = cause.__traceback__ is not None and cause.__traceback__.tb_next is None
    at_the_call = at_the_call or "unexpected keyword argument" in text
    # Deeper inside, the command line's settings are the likely cause, unless the class is the user's own.
    typed = [each.lstrip("+") for each in overrides if each.lstrip("+").startswith(f"{name}.")]
    if at_the_call or (typed and not any(each.startswith(f"{name}._target_=") for each in typed)):
        return f"{name} cannot be created{' with ' if typed else ''}{' '.join(typed)}: {text}"
    return None


def _raised_by_hydra(error: BaseException) -> bool:
    """True if Hydra's code failed, or its call of the standard library or OmegaConf."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    ignored = {*sys.stdlib_module_names, "omegaconf"}
    outside = [name for name in modules if name.partition(".")[0] not in ignored]
    return bool(outside) and outside[-1].startswith("hydra.")
