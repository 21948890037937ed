"""Arguments that errors of the engine name, called as they are on the command line.

The engine is used from Python too, so that its messages name arguments as Python does: "batches must be at least 1" or
"set fallback='pairs'". Such a message names an argument as its first word, before an `=`, or by a name with an
underscore. Here these become the settings that the arguments come from: `growth.batches`, `growth.fallback`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from growlab.base.errors import UserError
from growlab.base.settings import left_out

_ARGUMENT = re.compile(r"(?<![\w.'\"])([a-z][a-z_]*)(=|(?!\w|\.\w|\())")
_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
# What is chosen by a whole group on the command line.
_CHOICES = {
    "a fixed size": "growth=none",
    "a schedule of stages": "schedule=exponential",
    "set a validation set apart": "data.validation=split",
}


def arguments_of(cfg: DictConfig, path: str) -> dict[str, str]:
    """Settings that the values of a part of the configuration come from, by name of the argument."""
    above, _, own = path.rpartition(".")
    if above:
        # A part may stand elsewhere as a whole, where the configuration refers to it by one reference.
        path = _elsewhere(_unresolved(cfg, above).get(own)) or path
    own_values = _unresolved(cfg, path).items()
    return {
        name: _elsewhere(value) or f"{path}.{name}" for name, value in own_values if not name.startswith("_")
    }


def _unresolved(cfg: DictConfig, path: str) -> dict[str, Any]:
    """What stands in a part of the configuration, references as they are written."""
    node = OmegaConf.select(cfg, path)
    raw = OmegaConf.to_container(node, resolve=False) if isinstance(node, DictConfig) else {}
    assert isinstance(raw, dict)
    return {str(name): value for name, value in raw.items()}


def _elsewhere(value: Any) -> str | None:
    """The setting that a value refers to, if it is nothing but a reference."""
    found = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return found[1] if found else None


def in_settings(text: str, names: Mapping[str, str]) -> str:
    """A message in which settings take the place of arguments.

    Args:
        text: the message.
        names: settings by argument.

    Examples:
        >>> in_settings("batches must be at least 1, not None.", {"batches": "growth.batches"})
        'growth.batches must be at least 1, not null.'
        >>> in_settings("no batches: set batches=1.", {"batches": "growth.batches"})
        'no batches: set growth.batches=1.'
    """

    def called(found: re.Match[str]) -> str:
        name = found[1]
        first = not found.start() and text[found.end() :].startswith(" must ")
        if name not in names or not (first or found[2] or "_" in name):
            return found[0]
        return f"{names[name]}{found[2]}"

    told = _ARGUMENT.sub(called, text)
    if told == text:
        return text
    return re.sub(rf"\b({'|'.join(_CONSTANTS)})\b", lambda found: _CONSTANTS[found[1]], told)


@contextmanager
def named_as_settings(cfg: DictConfig) -> Iterator[None]:
    """Let errors name settings as one types them.

    Args:
        cfg: the run's configuration.

    Raises:
        UserError: what was raised inside, told so.
    """
    try:
        yield
    except InstantiationException as error:
        cause, part = error.__cause__, re.search(r"full_key: (\S+)", str(error))
        if isinstance(cause, (ValueError, UserError)) and part is not None:
            names = arguments_of(cfg, part[1])
            told = in_settings(str(cause), names)
            if told != str(cause) or told.partition(" ")[0] in names:
                raise UserError(told) from error
        raise
    except UserError as error:
        error.args = (_with_choices(in_settings(str(error), _of_run(cfg)), cfg),)
        raise


def _of_run(cfg: DictConfig) -> dict[str, str]:
    """Settings by argument, of everything that the engine is made of; those of two things are left as they are."""
    parts: dict[bool, list[str]] = {True: [], False: []}
    for name, part in cfg.parts.items():
        parts[left_out(part)].append(f"parts.{name}")
    made = _named(cfg, ("growth", "schedule.demand", *parts[False], "schedule", "data", "trainer"))
    # Of a schedule `batch_size` says whether sizes are found. Candidates of a plan have parts that it has not itself.
    names = {**_named(cfg, parts[True]), **made, "batch_size": {"data.batch_size"}}
    return {name: next(iter(settings)) for name, settings in names.items() if len(settings) == 1}


def _named(cfg: DictConfig, paths: Iterable[str]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for path in paths:
        for name, setting in arguments_of(cfg, path).items():
            names.setdefault(name, set()).add(setting)
    return names


def _with_choices(text: str, cfg: DictConfig) -> str:
    """The message with what one chooses on the command line behind what it is called in Python."""
    choices = dict(_CHOICES)
    for name, part in cfg.parts.items():
        own = arguments_of(cfg, f"parts.{name}")
        if own and "_target_" in part:
            choices[f"leave {part._target_.rpartition('.')[2]} out"] = f"{next(iter(own.values()))}=null"
    for phrase, setting in choices.items():
        text = text.replace(phrase, f"{phrase} ({setting})")
    return text
