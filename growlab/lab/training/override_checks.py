"""Choices of the command line that Hydra lets pass: parts that do not exist, and runs without what they need."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from growlab.base.errors import UserError
from growlab.base.wording import did_you_mean, then
from growlab.lab.training.configuration import PRIMARY, SEARCHPATH

# Groups that a run does without.
_SPARED = ("experiment", "method", "plan", "callbacks")
# Groups of which a run takes one option.
_SINGLE = {"model", "data", "growth", "lr_adapt", "optimizer", "objective", "schedule", "trainer"}
# The group whose options may be missing, since a part's file may be taken away.
_OPTIONAL = "parts"


def check_choices(overrides: Sequence[str], conf: Path, more: str | None = None) -> None:
    """Refuse parts that do not exist, and the deletion of a group or value of `config.yaml` that a run needs.

    Args:
        overrides: of the command line; those that cannot be read are left to Hydra.
        conf: the folder of configurations.
        more: a folder of the user's own beside it.

    Raises:
        UserError: naming the nearest valid names, or what to write instead.
    """
    given = list(_read(overrides))
    searched = [one for one in given if one.key_or_group == SEARCHPATH and not one.is_delete()]
    folders = [conf, *([] if more is None else [Path(more)])]
    folders += [found for one in searched for place in _words(one.value()) for found in _folders_of(place)]
    for override in given:
        name = override.key_or_group
        if override.is_delete():
            _check_deletion(name, conf)
        elif name in _SINGLE and isinstance(override.value(), list | Mapping):
            raise UserError(f"{name}={override.get_value_element_as_str()} is no choice: write {name}=NAME.")
        elif name == _OPTIONAL:
            _check_parts(_words(override.value()), folders)


def check_parts_of_job() -> None:
    """Refuse parts that do not exist and are asked for behind the command line: by a sweep, or in an experiment's file.

    Raises:
        UserError: naming the file, and the nearest valid name.
    """
    job = HydraConfig.get()
    sources = [one for one in job.runtime.config_sources if one.path not in ("", "hydra.conf")]
    places = [f"{one.schema}://{one.path}" for one in sources if one.schema in ("file", "pkg")]
    folders = [folder for place in places for folder in _folders_of(place)]
    for override in _read(job.overrides.task):
        if override.key_or_group == _OPTIONAL and not override.is_delete():
            _check_parts(_words(override.value()), folders)
    for group in ("experiment", "method"):
        for file, parts in _parts_in_files(group, job.runtime.choices.get(group), folders):
            _check_parts(parts, folders, f"{file}: ")


def _folders_of(place: str) -> list[Path]:
    """The folders of configurations that an entry of the search path means, such as `pkg://mine.conf`.

    Raises:
        UserError: there is no such folder or package, of which Hydra would only warn.
    """
    schema, _, path = place.rpartition("://")
    if schema == "pkg":
        folders = _folders_of_package(path)
        if not folders:
            raise UserError(
                f"{SEARCHPATH} names {place}, but Python finds no package {path}: install it, or start growlab in the "
                "folder that holds it"
            )
        return folders
    if schema not in ("", "file"):
        return []  # of a plugin of Hydra's
    if not Path(path).is_dir():
        raise UserError(f"{SEARCHPATH} names {place}, which is no folder: {Path(path).absolute()}")
    return [Path(path)]


def _folders_of_package(name: str) -> list[Path]:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    if folders and not any((folder / "__init__.py").is_file() for folder in folders):
        # Hydra reads such a package all the same.
        warnings.filterwarnings(
            "ignore", rf"provider=hydra\.searchpath.*, path={re.escape(name)} is not available"
        )
    return folders


def _check_parts(parts: Iterable[str], folders: Sequence[Path], where: str = "") -> None:
    options = sorted({file.stem for folder in folders for file in (folder / _OPTIONAL).glob("*.yaml")})
    for part in parts:
        if part not in options:
            told = f"{where}there is no part '{part}'{did_you_mean(part, options)}"
            raise UserError(then(told, "Choices", options))


def _parts_in_files(
    group: str, choice: str | None, folders: Sequence[Path]
) -> Iterator[tuple[Path, list[str]]]:
    """The parts that a choice's file asks for, and the files that it begins with: of each its path and names."""
    found = (folder / group / f"{choice}.yaml" for folder in folders)
    file = next((path for path in found if path.is_file()), None)
    if file is None:
        return
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    for entry in content.get("defaults", []) if isinstance(content, Mapping) else []:
        if isinstance(entry, str) and entry != "_self_":
            yield from _parts_in_files(group, entry, folders)
        elif isinstance(entry, Mapping):
            for key, value in entry.items():
                if str(key).removeprefix("override ").removeprefix("optional ") == f"/{_OPTIONAL}":
                    yield file, list(_words(value))


def _read(overrides: Sequence[str]) -> Iterator[Override]:
    parser = OverridesParser.create()
    for text in overrides:
        try:
            yield parser.parse_override(text)
        except HydraException:
            continue


def _words(value: Any) -> Iterator[str]:
    """The names in a choice, in a list of them, and in all that a sweep goes through."""
    if isinstance(value, ChoiceSweep):
        value = value.list
    if isinstance(value, list):
        for one in value:
            yield from _words(one)
    elif value is not None and not isinstance(value, Mapping):
        yield str(getattr(value, "text", value))


def _check_deletion(name: str, conf: Path) -> None:
    content = yaml.safe_load((conf / f"{PRIMARY}.yaml").read_text(encoding="utf-8"))
    groups = {
        str(key).removeprefix("optional ")
        for entry in content.pop("defaults")
        if isinstance(entry, Mapping)
        for key in entry
    } - set(_SPARED)
    if name == _OPTIONAL and name in groups:
        raise UserError(f"~{name} takes away what a run needs: write {name}=[] for a run without parts")
    if name in groups:
        options = [file.stem for file in (conf / name).glob("*.yaml")]
        told = f"~{name} takes away what a run needs: choose with {name}=NAME"
        raise UserError(then(told, "Choices", options))
    if name in content and name not in ("hydra", *_SPARED):
        raise UserError(f"~{name} takes away what a run needs: {_instead(name, content[name])}")


def _instead(name: str, default: Any) -> str:
    """How a value is set that was to be deleted."""
    if isinstance(default, Mapping) and default:
        return f"set its values instead: {', '.join(f'{name}.{key}' for key in default)}"
    if default is None:
        return f"write {name}=null instead"
    return f"give {name}=VALUE instead, or leave it as it is"
