"""Map the names of a transformers model's tensors to the keys in its files, and back.

transformers stores some tensors under other names or in pieces, such as the experts of a mixture.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, first_line
from growlab.widen.tensors import Rows, Saved, Source


@dataclass(frozen=True)
class Unit:
    """Smallest set of a model's tensors that are converted together: their names, and shapes in the file by key."""

    names: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name in a model's state_dict to the first name of the same tensor: tied weights have several."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def reverted(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a model's tensors to those that `save_pretrained` writes; transformers has no public function for it."""
    loading = importlib.import_module("transformers.core_model_loading")
    found: dict[str, Tensor] = loading.revert_weight_conversion(model, dict(tensors))
    return found


def units(model: nn.Module) -> list[Unit]:
    """Split a model's file into the smallest pieces that can be computed one by one."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = model.state_dict(keep_vars=True)
    names = [name for name, first in first_names(model).items() if name == first and name not in ignored]
    tensors = {name: torch.empty(state[name].shape, device="meta") for name in names}
    wanted = {key: tuple(tensor.shape) for key, tensor in reverted(model, tensors).items()}
    found, rest = [], []
    for name in names:
        alone = {key: tuple(t.shape) for key, t in reverted(model, {name: tensors[name]}).items()}
        if alone.items() <= wanted.items():
            found.append(Unit((name,), alone))
        else:
            rest.append(name)
    if rest:
        known = {key for unit in found for key in unit.shapes}
        found.append(Unit(tuple(rest), {key: shape for key, shape in wanted.items() if key not in known}))
    return found


class Checkpoint:
    """Read the tensors of a saved model one at a time, by their names in a model of the same class and sizes.

    If its files store them in another form than its class does, transformers loads all of them.

    Attributes:
        dtypes: dtype of each tensor in the file, by its name in the model.
        shard_bytes: size of the largest file if an index lists several, else None.

    Raises:
        UserError: the files cannot be read, or do not fit the model.
    """

    def __init__(self, folder: Path, saved: Saved, model: nn.Module) -> None:
        self.shard_bytes = saved.shard_bytes
        self._first = first_names(model)
        state = model.state_dict(keep_vars=True)
        alone = {unit.names[0]: next(iter(unit.shapes)) for unit in units(model) if len(unit.shapes) == 1}
        self._keys: dict[str, str] = {}
        for name, first in self._first.items():
            for key in (name, alone.get(name, name)):
                if saved.shapes.get(key) == tuple(state[name].shape):
                    self._keys.setdefault(first, key)
        parameters = {self._first[name] for name, _ in model.named_parameters()}
        if parameters <= self._keys.keys():
            self._read: Source = saved
            self.dtypes = {name: saved.dtypes[key] for name, key in self._keys.items()}
            return
        whole = loaded(folder, type(model)).state_dict()
        self._keys = {first: name for name, first in self._first.items() if name in whole}
        self._read = lambda name, rows: whole[name][rows]
        self.dtypes = {first: whole[key].dtype for first, key in self._keys.items()}

    def __contains__(self, name: str) -> bool:
        return self._first.get(name) in self._keys

    def __call__(self, name: str, rows: Rows = ...) -> Tensor:
        """Read a tensor by its name in the model, or some of its rows."""
        return self._read(self._keys[self._first[name]], rows)


def loaded(folder: Path, kind: Any) -> nn.Module:
    """Load a saved model whole, in eval mode; raise a UserError if the weights do not fit its configuration."""
    try:
        model: nn.Module
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # what files that do not fit raise is not one family
        reason = first_line(error)
        raise UserError(f"the weights in {folder} do not fit its configuration: {reason}") from error
    missing = sorted([*info["missing_keys"], *info["mismatched_keys"]], key=str)
    if missing:
        raise UserError(
            f"the weights in {folder} do not fit its configuration: {len(missing)} tensors are missing or of another "
            f"shape, the first is {missing[0]}."
        )
    return model.eval()
