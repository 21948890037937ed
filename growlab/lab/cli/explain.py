"""One sentence for a failure that the user can mend: what is wrong, and the nearest valid names.

Hydra and OmegaConf report such failures as several lines about their own insides. `explain` reads the
exception (and those it was raised from) and returns one sentence, or None for a failure that is not the
user's and deserves its traceback.
"""

import errno
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb

import yaml
from hydra.errors import (
    CompactHydraException,
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from growlab.base.errors import UserError, how_to_install
from growlab.base.settings import UnknownSetting, parameters
from growlab.base.wording import did_you_mean, first_lines, sentence, then
from growlab.lab.cli.commands import COMMANDS
from growlab.lab.training.trainer_options import INSTEAD, refused

_EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "tensorboardX": "tensorboard",
    "timm": "timm",
    "fairseq": "translation",
}
_TYPES = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}
# A path or disk that cannot be written to is the user's to mend; a missing file may well be our mistake.
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DISK = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, *_FULL}


def explain(error: BaseException, overrides: Sequence[str] = (), conf: Path | None = None) -> str | None:
    """The sentence to print after `error:`, without a line break; None if the failure deserves a traceback.

    Args:
        error: the exception; the exceptions that it was raised from are read too.
        overrides: what the user gave on the command line.
        conf: the configuration folder, to name groups that the composed configuration does not show.
    """
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, UserError):
            return sentence(str(link))
    for link in chain:
        told = _tell(link, overrides, conf)
        if told:
            return sentence(told)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those it was raised from; Hydra sometimes leaves that link implicit."""
    link: BaseException | None = error
    while link is not None:
        yield link
        implicit = link.__context__ if isinstance(link, CompactHydraException) else None
        link = link.__cause__ or implicit


def _tell(error: BaseException, overrides: Sequence[str], conf: Path | None) -> str | None:
    match error:
        case MissingConfigException():
            return _missing_option(error, overrides)
        case OverrideParseException():
            return _unreadable_override(error.override, overrides)
        case ConfigCompositionException():
            return _composition(error, overrides, conf)
        case InstantiationException():
            return _constructor(error, overrides)
        case OmegaConfBaseException():
            return _not_there(error, overrides, conf) or _value(error, overrides)
        case CompactHydraException():
            return str(error)
        case yaml.MarkedYAMLError():
            return _yaml(error, conf)
        case OSError() if error.errno in _DISK and error.filename is not None:
            return f"cannot use {error.filename}: {error.strerror}"
        case OSError() if error.errno in _FULL:
            return f"cannot write: {error.strerror}; free some space, or choose a folder with hydra.run.dir=FOLDER"
        case OSError() if error.filename is not None and _raised_by_hydra(error):
            return (
                f"cannot make {error.filename}: {error.strerror}; hydra.run.dir=FOLDER, of a sweep "
                "hydra.sweep.dir=FOLDER, chooses another folder"
            )
        case AssertionError() if any("hydra.sweeper.params." in one for one in overrides):
            # OmegaConf asserts that a value is not put inside what is null.
            return "the experiment sweeps over nothing that hydra.sweeper.params could change: write NAME=A,B with -m"
        case MemoryError():
            return f"there is not enough memory: {error}"
        case TypeError() if _raised_by_hydra(error):
            return first_lines(str(error))
        case ValueError() if _raised_by_hydra(error) and not isinstance(error.__cause__, OSError):
            return _hydra_value_error(error, overrides, conf)
    # Lightning's word for arguments that cannot work here, such as a GPU that is not there.
    if any(kind.__name__ == "MisconfigurationException" for kind in type(error).__mro__):
        return str(error)
    return None


def _missing_option(error: MissingConfigException, overrides: Sequence[str]) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return f"there is no configuration '{name}'; give --config-name the name of a file in conf/"
    asked = any(re.fullmatch(rf"\+*{re.escape(group)}(@.*)?=.*", override) for override in overrides)
    where = "" if asked else " (asked for by a configuration file)"
    options = list(error.options or ())
    text = then(f"there is no {group} '{name}'{where}{did_you_mean(name, options)}", "Choices", options)
    if group in ("hydra/launcher", "hydra/sweeper"):
        text += f"; more come with {how_to_install('ray' if name == 'ray' else 'sweeps')}"
    return text


def _unreadable_override(override: str, overrides: Sequence[str]) -> str:
    name, equals, value = override.partition("=")
    if not equals and not override.startswith("~"):
        near = did_you_mean(override, COMMANDS)
        if near and override == overrides[0]:
            return f"there is no command '{override}'{near}"
        return f"'{override}' is not of the form NAME=VALUE, such as seed=1"
    example = f"{name}=[1, 2]" if value.startswith("[") else f"{name}='some text'"
    if value.startswith("~/"):
        # Shells leave it as it is behind an equals sign.
        example = f"{name}=$HOME{value[1:]}"
    return (
        f"cannot read '{override}': write NAME=VALUE, close every bracket and quote, and put quotes around "
        f'what the shell would take apart, as in "{example}"'
    )


def _composition(
    error: ConfigCompositionException, overrides: Sequence[str], conf: Path | None
) -> str | None:
    inner = next((link for link in _chain(error) if isinstance(link, OmegaConfBaseException)), None)
    text = str(error)
    if isinstance(inner, ConfigAttributeError | ConfigKeyError):
        where = re.match(r"In '([^']+)':", text)
        return (f"in {where[1]}.yaml: " if where else "") + _unknown_name(inner, conf)
    if inner is not None:
        return _not_there(inner, overrides, conf) or _value(inner, overrides)
    if sweep := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'$", text.splitlines()[0]):
        name, values = sweep.groups()
        advice = f"add -m for a run with each, or write {name}=[{values}] for a list"
        return f"{name} takes one value, not '{values}': {advice}"
    if swept := re.match(r"Sweeping over Hydra's configuration is not supported : '([^=]+)=(.*)'$", text):
        return f"{swept[1]} takes its list in quotes: \"{swept[1]}='{swept[2]}'\""
    if there := re.search(r"An item is already at '([^']+)'", text):
        return f"{there[1]} exists already: leave out the + before it"
    if twice := re.match(r"(\S+) appears more than once", text):
        return f"{twice[1]} is chosen already: leave out the + before it"
    if choose := re.match(r"You must specify '([^']+)'", text):
        options = [line.strip() for line in text.splitlines() if line.startswith("\t")]
        return then(f"{choose[1]} must be chosen with {choose[1]}=OPTION", "Choices", options)
    if gone := re.match(r"Could not delete from config\. (.*)", text):
        # Hydra says so of what is null too.
        return f"nothing to delete: {gone[1].replace('does not exist', 'is null or does not exist')}"
    if group := re.match(r"Could not override '([^']+)'", text):
        return f"there is no '{group[1]}' to override{did_you_mean(group[1], _groups(conf))}"
    return first_lines(text)


def _unknown_name(error: OmegaConfBaseException, conf: Path | None) -> str:
    """A key that its parent does not have: name the nearest sibling, else where else the key exists."""
    parent, key = error.parent_node, str(error.key)
    full_key = error.full_key or key
    siblings = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
    where = full_key.removesuffix(key).rstrip(".")
    if where == "trainer" and key in INSTEAD:
        return refused(key)
    if where == "plan" and not siblings:
        return f"{full_key} is a setting of `growlab plan`, and a run has no plan"
    groups = [] if where else _groups(conf)
    near = did_you_mean(key, siblings + groups)
    if not near and isinstance(parent, DictConfig):
        near = _elsewhere(parent._get_root(), key)
    if where:
        text = then(f"{where} has no '{key}'{near}", "It has", siblings)
        addable = "_target_" in siblings and OmegaConf.get_type(parent) is dict
        return f"{text}; +{full_key}=... passes on one that is not listed" if addable else text
    values = [name for name in siblings if name not in groups and name != "hydra"]
    return then(then(f"there is no '{key}'{near}", "Groups", groups), "Values", values)


def _full_names(root: DictConfig, prefix: str = "") -> Iterator[str]:
    """Full names of all keys of the configuration, Hydra's own part aside."""
    for name in root:
        full_name = f"{prefix}{name}"
        if full_name == "hydra":
            continue
        yield full_name
        if OmegaConf.is_missing(root, name) or OmegaConf.is_interpolation(root, name):
            continue
        if isinstance(root[name], DictConfig):
            yield from _full_names(root[name], f"{full_name}.")


def _elsewhere(root: DictConfig, key: str) -> str:
    """`; did you mean 'x'?` for the key whose last part is nearest, wherever it stands."""
    by_last_part = {name.rpartition(".")[2]: name for name in reversed(list(_full_names(root)))}
    near = get_close_matches(key, by_last_part, n=1, cutoff=0.65)
    return f"; did you mean '{by_last_part[near[0]]}'?" if near else ""


def _groups(conf: Path | None) -> list[str]:
    if conf is None or not conf.is_dir():
        return []
    return sorted(entry.name for entry in conf.iterdir() if entry.is_dir() and entry.name != "hydra")


def _not_there(error: OmegaConfBaseException, overrides: Sequence[str], conf: Path | None) -> str | None:
    """A key that the command line has deleted, or whose part it has left out; None for others."""
    text = first_lines(str(error))
    if isinstance(error, InterpolationKeyError):
        missing = re.search(r"'([^']+)'", text)
        name = missing[1] if missing else ""
    elif isinstance(error, MissingMandatoryValue):
        name = error.full_key or text.rpartition(" ")[2]
    elif isinstance(error, ConfigAttributeError | ConfigKeyError):
        name = error.full_key or ""
    else:
        return None
    for override in overrides:
        deleted = override.removeprefix("~").partition("=")[0]
        if override.startswith("~") and f"{name}.".startswith(f"{deleted}."):
            return f"{name} is needed and has no value, for {override} takes it away: leave that out"
    part = name.partition(".")[0]
    if not isinstance(error, MissingMandatoryValue) or conf is None:
        return None
    if not (conf / "parts" / f"{part}.yaml").is_file():
        return None
    typed = next((o for o in overrides if o.startswith("parts=")), "the configuration's parts")
    return f"{part} is a part that {typed} leaves out: add it to that list"


def _value(error: OmegaConfBaseException, overrides: Sequence[str]) -> str | None:
    """A wrong type, a missing value or a reference to nothing; None for a key our own code got wrong."""
    text = first_lines(str(error))
    name = error.full_key or "a value"
    if isinstance(error, MissingMandatoryValue):
        name = error.full_key or text.rpartition(" ")[2]
        return f"{name} has no value: give {name}=VALUE"
    if isinstance(error, InterpolationKeyError):
        missing = re.search(r"'([^']+)'", text)
        return f"{name} refers to '{missing[1]}', which does not exist" if missing else f"{name}: {text}"
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return None
    if "does not support deletion" in text:
        return f"{name} cannot be left out: give {name}=VALUE instead of ~{name}"
    if isinstance(error, ValidationError):
        given = next((o for o in overrides if o.lstrip("+").startswith(f"{name}.")), None)
        if given:
            inside = given.lstrip("+").partition("=")[0].removeprefix(f"{name}.")
            return f"{name} is a single value and has no '{inside}'"
        if wrong := re.match(r"Value (.*) of type '\w+' could not be converted to (\w+)", text):
            return f"{name} must be {_TYPES.get(wrong[2], wrong[2])}, not {wrong[1]}"
        if wrong := re.match(r"Value (.*) \(\w+\) is not a valid input for <enum", text):
            return f"{name} must be a word, not {wrong[1]}"
        if wrong := re.match(r"Value (.*) is not a valid bool", text):
            return f"{name} must be true or false, not {wrong[1]}"
        if wrong := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", text):
            options = wrong[2].split(", ")
            near = did_you_mean(wrong[1], options)
            return then(f"{name} cannot be '{wrong[1]}'{near}", "Choices", options)
        if "is not Optional" in text:
            return f"{name} must not be null"
        if wrong := re.match(r"Invalid value assigned: (\w+) is not a ListConfig", text):
            return f"{name} must be a list such as [1,2,3], not {wrong[1]}"
    return f"{name}: {text}" if error.full_key else text


def _constructor(error: InstantiationException, overrides: Sequence[str]) -> str | None:
    """A `_target_` that cannot be found, or that does not accept what the configuration gives it."""
    text = str(error)
    cause = error.__cause__
    named = re.search(r"full_key: (\S+)", text)
    name = named[1] if named else ""
    target = re.search(r"target '([^']+)'", text)
    if isinstance(cause, ModuleNotFoundError | ImportError):
        extra = next((e for module, e in _EXTRAS.items() if re.search(rf"\b{module}\b", str(cause))), None)
        if extra:
            what = name or (target[1] if target else "this")
            return f"{what} needs a package that is not installed: {how_to_install(extra)}"
    if text.startswith("Error locating target") and target:
        reason = str(cause) if cause is not None else "no such name"
        return f"{name + '.' if name else ''}_target_ '{target[1]}' cannot be imported: {first_lines(reason)}"
    if cause is None:
        return first_lines(text)
    if isinstance(cause, InstantiationException):
        return None  # the next link of the chain says more
    what = name or (target[1] if target else "a constructor")
    # One frame (Hydra's own): the call itself failed, so the arguments do not fit the signature.
    at_the_call = cause.__traceback__ is not None and cause.__traceback__.tb_next is None
    if isinstance(cause, TypeError) and (at_the_call or isinstance(cause, UnknownSetting)) and target:
        return _signature(what, target[1], str(cause), overrides)
    if isinstance(cause, ValueError):
        said = first_lines(str(cause))
        # A constructor that knows the setting's full name has named it already.
        return said if said.startswith(f"{what}.") else f"{what}: {said}"
    # Deeper inside. With settings from the command line they are the likely reason, but in code of the user's own.
    given = [o.lstrip("+") for o in overrides if name and o.lstrip("+").startswith(f"{name}.")]
    if cause is not None and given and not any(o.startswith(f"{name}._target_=") for o in given):
        return (
            f"{what} cannot be made with {' '.join(given)}: {first_lines(str(cause)).rstrip('.')} "
            "(HYDRA_FULL_ERROR=1 shows where)"
        )
    return None


def _signature(what: str, target: str, message: str, overrides: Sequence[str]) -> str:
    unexpected = re.search(r"unexpected keyword argument '([^']+)'", message)
    if not unexpected:
        return f"{what}: {message}"
    known = parameters(get_object(target)).values()
    by_name = [p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [name for name in by_name if name != "self" and not name.startswith("_")]
    full_name = f"{what}.{unexpected[1]}"
    if any(override.lstrip("+").startswith(f"{full_name}=") for override in overrides):
        near = did_you_mean(unexpected[1], names)
    else:
        near = f", which a configuration file sets (such as the experiment's): leave it out with ~{full_name}"
    text = sentence(f"{what} has no '{unexpected[1]}'{near}")
    return f"{text} {target} takes: {', '.join(names)}"


def _yaml(error: yaml.MarkedYAMLError, conf: Path | None) -> str:
    mark = error.problem_mark
    if mark is None:
        return f"a configuration file is not valid YAML: {error.problem}"
    place = Path(mark.name)
    if conf is not None and place.is_relative_to(conf):
        place = conf.name / place.relative_to(conf)
    return f"{place}, line {mark.line + 1}, is not valid YAML: {error.problem}"


def _hydra_value_error(error: ValueError, overrides: Sequence[str], conf: Path | None) -> str:
    if "Config group override must be" not in str(error):
        return first_lines(str(error))
    for override in overrides:
        group, _, value = override.lstrip("+").partition("=")
        if not group:
            return f"'{override}' has no name before the ="
        if conf is not None and (conf / group).is_dir():
            options = [file.stem for file in (conf / group).glob("*.yaml")]
            if value not in options:
                return then(f"there is no {group} '{value}'", "Choices", options)
    return first_lines(str(error))


def _raised_by_hydra(error: BaseException) -> bool:
    """Whether Hydra's own code has failed, or a call of its to Python's library, and neither growlab nor a package."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    outside = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
    return bool(outside) and outside[-1].startswith("hydra.")
