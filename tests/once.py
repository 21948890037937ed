"""Work that is the same in many runs, done once: what Hydra reads and what `growlab.widths.trace` finds."""

import copy
import hashlib
import importlib
import inspect
import os
import pickle
from collections import defaultdict
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

# The function of that name hides it.
tracing = importlib.import_module("growlab.widths.trace")


def read_conf_once() -> None:
    """Keep in this process's memory what Hydra reads from files, and skip what it makes without need."""
    # Hydra loads its own sources anew when it looks for plugins.
    Plugins.instance()
    known: dict[Any, bytes] = {}
    for scheme in ("file", "pkg"):
        _load_once(SourcesRegistry.instance().resolve(scheme), known)
    # Read alone: trees of the interpolations that stand in configurations.
    base.parse = cache(base.parse)
    base.Metadata.__deepcopy__ = _copied
    make = defaults_list._create_interpolation_map

    def made_if_used(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        used = any(isinstance(d, InputDefault) and d.is_interpolation() for d in defaults)
        return make(overrides, defaults, self_added) if used else None

    defaults_list._create_interpolation_map = made_if_used


def _copied(metadata: base.Metadata, memo: dict[int, Any]) -> base.Metadata:
    """Copy metadata with its dictionaries; everything else in it is a type or a plain value."""
    made = copy.copy(metadata)
    made.flags = copy.copy(metadata.flags)
    made.resolver_cache = defaultdict(dict, copy.deepcopy(dict(metadata.resolver_cache), memo))
    return made


def _load_once(source: Any, known: dict[Any, bytes]) -> None:
    load = source.load_config

    def load_once(self: Any, config_path: str) -> Any:
        place = (self.path, config_path)
        if place not in known:
            known[place] = pickle.dumps(load(self, config_path))
        return pickle.loads(known[place])

    source.load_config = load_once


def trace_once(folder: Path) -> None:
    """Let `growlab.widths.trace` keep in a folder, for all processes, what it finds in networks of known classes."""
    own = tracing._traced

    def traced(model: nn.Module, inputs: tuple[Any, ...], *settings: Any) -> WidthGraph:
        key = _key(model, inputs, settings)
        if key is None:
            return own(model, inputs, *settings)
        place = folder / key
        if not place.exists():
            written = folder / f"{key}.{os.getpid()}"
            written.write_bytes(pickle.dumps(own(model, inputs, *settings)))
            os.rename(written, place)
        return pickle.loads(place.read_bytes())

    tracing._traced = traced


# Their code is the same in all processes of a session.
_LIBRARIES = ("torch", "growlab", "torchvision", "timm", "transformers", "fairseq", "tests")
# Recurrent layers keep their parameters in lists too.
_OF_MODULES = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}


def _told(value: Any) -> Any:
    return f"{value.__module__}.{value.__qualname__}" if inspect.isfunction(value) else value


def _key(model: nn.Module, inputs: tuple[Any, ...], settings: tuple[Any, ...]) -> str | None:
    """Key of everything that a trace depends on; None if that is more than known classes and plain values."""
    modules = list(model.named_modules())
    known = all(type(each).__module__.partition(".")[0] in _LIBRARIES for _, each in modules)
    hooked = any(each._forward_hooks or each._forward_pre_hooks for _, each in modules)
    if hooked or not known or not all(isinstance(x, Tensor) for x in inputs):
        return None
    attributes = [
        (name, _told_class(each), {k: _told(v) for k, v in vars(each).items() if k not in _OF_MODULES})
        for name, each in modules
    ]
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    numbers: dict[int, int] = {}
    shapes = [(name, numbers.setdefault(id(t), len(numbers)), t.shape, t.dtype, t.requires_grad) for name, t in tensors]
    given = [(x.shape, x.dtype, None if x.is_floating_point() or x.is_meta else x.tolist()) for x in inputs]
    text = repr((attributes, shapes, given, settings))
    # An address, or a function or class that others may share its name with.
    unclear = any(word in text for word in (" at 0x", "<locals>", "<lambda>"))
    return None if unclear else hashlib.sha256(text.encode()).hexdigest()


def _told_class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
