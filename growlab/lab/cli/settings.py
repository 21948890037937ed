"""Readable configurations: `--cfg job` without settings that are off, `--cfg diff`, and `--help-config NAME`."""

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

# Values of unused settings.
_OFF: tuple[Any, ...] = (None, False, 0, "none", [], {})
_OF_HYDRA = ("_target_", "_partial_", "_convert_", "_recursive_")
_COLUMNS = 79


def in_short(cfg: DictConfig, default: DictConfig, typed: Collection[str] = ()) -> str:
    """Return a run's settings as YAML, without unused parts and settings.

    Settings that are used in the `default` run, or were `typed` on the command line, are always shown.
    """
    config = _plain(cfg)
    parts: Any = OmegaConf.to_container(cfg.parts, resolve=True)
    unused = [name for name, part in parts.items() if left_out(part)]
    hidden = ["parts", *unused]
    on = {name for name, value in _leaves(_plain(default)) if _is_on(name, value)}
    shown = _shown({key: value for key, value in config.items() if key not in hidden}, "", {*on, *typed})
    # growlab's own parts have their settings at the top level.
    if users := {name: part for name, part in parts.items() if name not in {*unused, *config}}:
        shown["parts"] = users
    more = len(list(_leaves(config))) - len(list(_leaves(shown)))
    return (
        OmegaConf.to_yaml(OmegaConf.create(shown))
        + f"# {more} more are not set or off: --cfg all prints them, --help-config NAME explains.\n"
    )


def difference(cfg: DictConfig, default: DictConfig) -> str:
    """Return the settings in which a run differs from the default run, one per line, followed by the default."""
    ours, theirs = dict(_leaves(_plain(cfg))), dict(_leaves(_plain(default)))
    lines = [
        f"{name}={_text(value)}" + (f"  # {_text(theirs[name])}" if name in theirs else "")
        for name, value in ours.items()
        if name not in theirs or theirs[name] != value
    ]
    return "\n".join([*lines, *(f"~{name}  # {_text(theirs[name])}" for name in theirs if name not in ours)])


def explanation(cfg: DictConfig, name: str, choices: Mapping[str, Any]) -> str:
    """Describe value, type and meaning of a setting, or of all in a group, from docstrings and configuration files."""
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
    names = [leaf for leaf in leaves if f"{leaf}.".startswith(f"{name}.") and not leaf.endswith(_OF_HYDRA)]
    names = names or [leaf for leaf in leaves if leaf.endswith(f".{name}")]
    if not names and options:
        return f"{listed}\n--help-config {name}=NAME explains one."
    if not names:
        near = get_close_matches(name, {*leaves, *(leaf.rpartition(".")[2] for leaf in leaves)}, n=3)
        raise UserError(f"there is no setting '{name}'" + (f"; near it: {', '.join(near)}" if near else ""))
    return "\n".join([listed] * bool(options) + [_entry(cfg, leaf, leaves[leaf], choices) for leaf in names])


def _head(file: Path) -> str:
    """Return the comment at the top of a file of settings."""
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
    meaning = _described(target or ("schedule" if parent == "schedule" else "")).get(key)
    meaning = meaning or _comment(key, parent.partition(".")[0], choices) or "see the documentation of its class."
    body = textwrap.fill(f"{kind}{meaning}", _COLUMNS, initial_indent="    ", subsequent_indent="    ")
    return f"{name}={_text(value)}\n{body}"


@cache
def _described(target: str) -> dict[str, str]:
    """Return descriptions of parameters from the docstrings of a class, its bases and its constructor."""
    if not target:
        return {}
    try:
        made = get_object("growlab.growth.make_schedule" if target == "schedule" else target)
    except Exception:  # raised again when the run calls it
        return {}
    owners = [*getattr(made, "__mro__", ()), made]
    for owner in owners:
        owners += getattr(owner, "SETTINGS", ()) if owner not in owners[: owners.index(owner)] else ()
    texts = [inspect.cleandoc(doc) for owner in owners if (doc := getattr(owner, "__doc__", None))]
    texts += [inspect.cleandoc(owner.__init__.__doc__ or "") for owner in owners if inspect.isclass(owner)]
    descriptions = {}
    for text in reversed(texts):
        for match in re.finditer(r"^ {4}(\w+)(?: \([^)]*\))?: (.+(?:\n {5,}.+)*)", text, re.MULTILINE):
            descriptions[match[1]] = " ".join(match[2].split())
    return descriptions


def _comment(key: str, group: str, choices: Mapping[str, Any]) -> str:
    """Return the comment on a setting in the file that sets it: on its line or the lines above."""
    if not group:
        # For a group without settings, such as logger=csv, use the first line of its file.
        path = config_dir() / key / f"{choices.get(key)}.yaml"
        if path.is_file():
            return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    files = (f"{group}/{choices.get(group)}.yaml", f"{group}/exponential.yaml", "hydra/data/images.yaml", "config.yaml")
    for path in (config_dir() / file for file in files):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found := re.search(rf"^ *{key}:[^#\n]*# (.+)$", text, re.MULTILINE):
            return found[1]
        if found := re.search(rf"((?:^#[^\n]*\n)+)^{key}:", text, re.MULTILINE):
            return found[1].replace("# ", "").replace("\n", " ").strip()
    return ""


def _shown(node: Mapping[str, Any], name: str, always: Collection[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in node.items():
        full = f"{name}.{key}" if name else key
        if isinstance(value, Mapping) and value and full not in always:
            if inner := _shown(value, full, always):
                kept[key] = inner
        elif full in always or key == "_target_" or _is_on(key, value):
            kept[key] = value
    return kept


def _is_on(name: str, value: Any) -> bool:
    """True for a setting that is used and not an interpolation of another one."""
    return not (value in _OFF or str(value).startswith("${") or name.endswith(_OF_HYDRA))


def _plain(cfg: DictConfig) -> dict[str, Any]:
    config: Any = OmegaConf.to_container(cfg)
    return {key: value for key, value in config.items() if key != "hydra"}


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
