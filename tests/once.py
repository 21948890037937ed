"""Caches shared by tests and runs: files read by Hydra, and results of `growlab.widths.trace`."""

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

# `growlab.widths.trace` is the function.
tracing = importlib.import_module("growlab.widths.trace")


def read_conf_once() -> None:
    """Cache the files that Hydra reads and the expressions it parses; skip unused interpolation maps."""
    # Searching for plugins reloads the sources, so do that first.
    Plugins.instance()
    known: dict[Any, bytes] = {}
    for scheme in ("file", "pkg"):
        _load_once(SourcesRegistry.instance().resolve(scheme), known)
    # Parse trees of interpolations, which are never modified.
    base.parse = cache(base.parse)
    base.Metadata.__deepcopy__ = _copied
    make = defaults_list._create_interpolation_map

    def made_if_used(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        used = any(isinstance(d, InputDefault) and d.is_interpolation() for d in defaults)
        return make(overrides, defaults, self_added) if used else None

    defaults_list._create_interpolation_map = made_if_used


def _copied(metadata: base.Metadata, memo: dict[int, Any]) -> base.Metadata:
    """Copy metadata and its dictionaries; the other attributes are types or plain values."""
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
    """Cache results of `growlab.widths.trace` for networks of known classes, in a folder for all processes."""
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


# Libraries whose code is the same in all processes of a session.
_LIBRARIES = ("torch", "growlab", "torchvision", "timm", "transformers", "fairseq", "tests")
# Recurrent layers keep their parameters in lists too.
_OF_MODULES = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}


def _named(value: Any) -> Any:
    return f"{value.__module__}.{value.__qualname__}" if inspect.isfunction(value) else value


def _key(model: nn.Module, inputs: tuple[Any, ...], settings: tuple[Any, ...]) -> str | None:
    """Cache key of a trace; None if it depends on more than known classes and plain values."""
    modules = list(model.named_modules())
    known = all(type(each).__module__.partition(".")[0] in _LIBRARIES for _, each in modules)
    hooked = any(each._forward_hooks or each._forward_pre_hooks for _, each in modules)
    if hooked or not known or not all(isinstance(x, Tensor) for x in inputs):
        return None
    attributes = [
        (name, _class_name(each), {k: _named(v) for k, v in vars(each).items() if k not in _OF_MODULES})
        for name, each in modules
    ]
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    numbers: dict[int, int] = {}
    shapes = [(name, numbers.setdefault(id(t), len(numbers)), t.shape, t.dtype, t.requires_grad) for name, t in tensors]
    given = [(x.shape, x.dtype, None if x.is_floating_point() or x.is_meta else x.tolist()) for x in inputs]
    text = repr((attributes, shapes, given, settings))
    # Addresses, or names that are not unique.
    unclear = any(word in text for word in (" at 0x", "<locals>", "<lambda>"))
    return None if unclear else hashlib.sha256(text.encode()).hexdigest()


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
