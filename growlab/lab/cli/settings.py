"""The configuration for readers: `--cfg job` without what is off, `--cfg diff`, and `--help-config NAME`."""

import inspect
import re
import textwrap
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from growlab.base.errors import UserError
from growlab.base.settings import left_out
from growlab.lab.analysis.identity import leaves as _leaves
from growlab.lab.training.configuration import config_dir

# Values of a setting that is not in use.
_OFF: tuple[Any, ...] = (None, False, 0, "none", [], {})
_OF_HYDRA = ("_target_", "_partial_", "_convert_", "_recursive_")
_COLUMNS = 79


def in_short(cfg: DictConfig, default: DictConfig, typed: Collection[str] = ()) -> str:
    """The settings of a run in YAML, without parts that are left out and settings that are not set or off.

    Those that are on in the `default` run, or were `typed` on the command line, are shown whatever their values.
    """
    config = _plain(cfg)
    parts: Any = OmegaConf.to_container(cfg.parts, resolve=True)
    left = [name for name, part in parts.items() if left_out(part)]
    hidden = ["parts", *left]
    on = {name for name, value in _leaves(_plain(default)) if _is_on(name, value)}
    shown = _shown({key: value for key, value in config.items() if key not in hidden}, "", {*on, *typed})
    # Growlab's own parts have their settings at the top.
    if own := {name: part for name, part in parts.items() if name not in {*left, *config}}:
        shown["parts"] = own
    more = len(list(_leaves(config))) - len(list(_leaves(shown)))
    return (
        OmegaConf.to_yaml(OmegaConf.create(shown))
        + f"# {more} more are not set or off: --cfg all prints them, --help-config NAME explains.\n"
    )


def difference(cfg: DictConfig, default: DictConfig) -> str:
    """The settings in which a run differs from the default one, a line each, with the default behind it."""
    ours, theirs = dict(_leaves(_plain(cfg))), dict(_leaves(_plain(default)))
    lines = [
        f"{name}={_text(value)}" + (f"  # {_text(theirs[name])}" if name in theirs else "")
        for name, value in ours.items()
        if name not in theirs or theirs[name] != value
    ]
    return "\n".join([*lines, *(f"~{name}  # {_text(theirs[name])}" for name in theirs if name not in ours)])


def explanation(cfg: DictConfig, name: str, choices: Mapping[str, Any]) -> str:
    """Value, type and meaning of a setting, or of every one in a group, from classes and the files of `choices`."""
    group, _, option = name.partition("=")
    if option and (file := config_dir() / group / f"{option}.yaml").is_file():
        return textwrap.fill(f"{name}: {_head(file)}", _COLUMNS, subsequent_indent="    ")
    options = sorted(path.relative_to(config_dir() / name) for path in (config_dir() / name).rglob("*.yaml"))
    listed = textwrap.fill(
        f"{name}: " + ", ".join(path.with_suffix("").as_posix() for path in options),
        _COLUMNS,
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
    leaves = dict(_leaves(_plain(cfg)))
    names = [one for one in leaves if f"{one}.".startswith(f"{name}.") and not one.endswith(_OF_HYDRA)]
    names = names or [one for one in leaves if one.endswith(f".{name}")]
    if not names and options:
        return f"{listed}\n--help-config {name}=NAME explains one."
    if not names:
        near = get_close_matches(name, {*leaves, *(one.rpartition(".")[2] for one in leaves)}, n=3)
        raise UserError(f"there is no setting '{name}'" + (f"; near it: {', '.join(near)}" if near else ""))
    return "\n".join([listed] * bool(options) + [_entry(cfg, one, leaves[one], choices) for one in names])


def _head(file: Path) -> str:
    """The remark at the top of a file of settings."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return " ".join(
        line.removeprefix("# ")
        for line in takewhile(lambda line: line.startswith("#"), lines)
        if "@package" not in line
    )


def _entry(cfg: DictConfig, name: str, value: Any, choices: Mapping[str, Any]) -> str:
    parent, _, key = name.rpartition(".")
    node = OmegaConf.select(cfg, f"parts.{name.partition('.')[0]}") or OmegaConf.select(cfg, parent)
    target = str(node.get("_target_") or "") if parent and isinstance(node, DictConfig) else ""
    from growlab.lab.training.checks import hints_of, in_words

    hint = hints_of(parent, target).get(key)
    kind = f"{in_words(hint)}. " if hint is not None else ""
    said = _described(target or ("schedule" if parent == "schedule" else "")).get(key)
    said = said or _remark(key, parent.partition(".")[0], choices) or "see the documentation of its class."
    body = textwrap.fill(f"{kind}{said}", _COLUMNS, initial_indent="    ", subsequent_indent="    ")
    return f"{name}={_text(value)}\n{body}"


@cache
def _described(target: str) -> dict[str, str]:
    """Descriptions of parameters in the docstrings of a class, those above it and its constructor."""
    if not target:
        return {}
    try:
        made = get_object("growlab.growth.make_schedule" if target == "schedule" else target)
    except Exception:  # Raised again, with its reason, when it is called.
        return {}
    owners = [*getattr(made, "__mro__", ()), made]
    for owner in owners:
        owners += getattr(owner, "SETTINGS", ()) if owner not in owners[: owners.index(owner)] else ()
    texts = [inspect.cleandoc(doc) for owner in owners if (doc := getattr(owner, "__doc__", None))]
    texts += [inspect.cleandoc(owner.__init__.__doc__ or "") for owner in owners if inspect.isclass(owner)]
    found = {}
    for text in reversed(texts):
        for match in re.finditer(r"^ {4}(\w+)(?: \([^)]*\))?: (.+(?:\n {5,}.+)*)", text, re.MULTILINE):
            found[match[1]] = " ".join(match[2].split())
    return found


def _remark(key: str, group: str, choices: Mapping[str, Any]) -> str:
    """The remark on a setting in the file that sets it: behind it, or in the lines above."""
    if not group:
        # A group without settings, such as logger=csv: the first line of its file.
        path = config_dir() / key / f"{choices.get(key)}.yaml"
        if path.is_file():
            return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    places = [
        f"{group}/{choices.get(group)}.yaml",
        f"{group}/exponential.yaml",
        "hydra/data/images.yaml",
        "config.yaml",
    ]
    for path in (config_dir() / place for place in places):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found := re.search(rf"^ *{key}:[^#\n]*# (.+)$", text, re.MULTILINE):
            return found[1]
        if found := re.search(rf"((?:^#[^\n]*\n)+)^{key}:", text, re.MULTILINE):
            return found[1].replace("# ", "").replace("\n", " ").strip()
    return ""


def _shown(node: Mapping[str, Any], name: str, wanted: Collection[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in node.items():
        full = f"{name}.{key}" if name else key
        if isinstance(value, Mapping) and value and full not in wanted:
            if inner := _shown(value, full, wanted):
                kept[key] = inner
            continue
        if full in wanted or key == "_target_" or _is_on(key, value):
            kept[key] = value
    return kept


def _is_on(name: str, value: Any) -> bool:
    """True for a setting that is in use and not taken from another one."""
    return not (value in _OFF or str(value).startswith("${") or name.endswith(_OF_HYDRA))


def _plain(cfg: DictConfig) -> dict[str, Any]:
    made: Any = OmegaConf.to_container(cfg)
    return {key: value for key, value in made.items() if key != "hydra"}


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
