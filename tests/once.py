"""Work that is the same in many runs, done once: what Hydra reads and what `growlab.widths.trace` finds."""

import hashlib
import inspect
import os
import pickle
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import InputDefault
from hydra.core.plugins import Plugins
from omegaconf import base
from torch import Tensor, nn

from growlab.widths import WidthGraph


def read_conf_once() -> None:
    """Keep in this process's memory what Hydra reads from files, and leave out what it makes for nothing."""
    # Hydra loads its own sources anew when it looks for plugins.
    Plugins.instance()
    known: dict[Any, bytes] = {}
    for scheme in ("file", "pkg"):
        _load_once(SourcesRegistry.instance().resolve(scheme), known)
    # Read alone: trees of the interpolations that stand in configurations.
    base.parse = cache(base.parse)
    make = defaults_list._create_interpolation_map

    def made_if_used(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        used = any(isinstance(d, InputDefault) and d.is_interpolation() for d in defaults)
        return make(overrides, defaults, self_added) if used else None

    defaults_list._create_interpolation_map = made_if_used


def _load_once(source: Any, known: dict[Any, bytes]) -> None:
    load = source.load_config

    def load_once(self: Any, config_path: str) -> Any:
        place = (self.path, config_path)
        if place not in known:
            known[place] = pickle.dumps(load(self, config_path))
        return pickle.loads(known[place])

    source.load_config = load_once


def traced_once(trace: Callable[..., WidthGraph], folder: Path) -> Callable[..., WidthGraph]:
    """The same function, which keeps in a folder what it finds in networks of libraries alone."""

    def trace_once(model: nn.Module, example: Any, *settings: Any) -> WidthGraph:
        key = _key(model, example, settings)
        if key is None:
            return trace(model, example, *settings)
        place = folder / key
        if not place.exists():
            own = folder / f"{key}.{os.getpid()}"
            own.write_bytes(pickle.dumps(trace(model, example, *settings)))
            os.rename(own, place)
        return pickle.loads(place.read_bytes())

    return trace_once


_LIBRARIES = ("torch", "growlab", "transformers", "fairseq")


def _told(value: Any) -> Any:
    return f"{value.__module__}.{value.__qualname__}" if inspect.isfunction(value) else value


def _key(model: nn.Module, example: Any, settings: Any) -> str | None:
    """One for all that a trace depends on; None where that is more than classes that are known and plain values."""
    modules = list(model.named_modules())
    known = all(type(each).__module__.partition(".")[0] in _LIBRARIES for _, each in modules)
    inputs = example if isinstance(example, tuple) else (example,)
    if not known or not all(isinstance(x, Tensor) for x in inputs):
        return None
    attributes = [
        (name, type(each).__qualname__, {k: _told(v) for k, v in vars(each).items() if k[0] != "_"})
        for name, each in modules
    ]
    tensors = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    numbers: dict[int, int] = {}
    shapes = [(name, numbers.setdefault(id(t), len(numbers)), t.shape, t.dtype) for name, t in tensors]
    text = repr((attributes, shapes, [(x.shape, x.dtype) for x in inputs], settings))
    return None if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()
