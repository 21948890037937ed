"""Read tensors of saved models one at a time, by their names in a model, and write them as safetensors.

transformers stores some tensors under other names or in parts, such as the experts of a mixture.
"""

import importlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, first_line
from growlab.base.files import write_atomically, write_json
from growlab.inspect.hub import read_weights

#: Rows of a tensor's first dimension, or all of it.
Rows = slice | EllipsisType
#: Returns a tensor by its name, or some of its rows.
Source = Callable[[str, Rows], Tensor]
# Files in the order in which transformers searches for them.
_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_FILES = (_SAFE, f"{_SAFE}.index.json", _PICKLED, f"{_PICKLED}.index.json")
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Saved:
    """The tensors in a folder that `save_pretrained` wrote, by the keys of its files.

    Attributes:
        files: key -> the file and the tensor's offset in it, or the tensors of a pickled file.
        shard_bytes: size of the largest file if an index lists several, else None.
    """

    files: Mapping[str, tuple[Path, int] | Mapping[str, Tensor]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    shard_bytes: int | None

    def __call__(self, key: str, rows: Rows = ...) -> Tensor:
        """Read a tensor, or some of its rows, from its file."""
        source = self.files[key]
        if isinstance(source, Mapping):
            return source[key][rows]
        path, offset = source
        shape, dtype = self.shapes[key], self.dtypes[key]
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(shape[0])
            offset += start * _numel(shape[1:]) * dtype.itemsize
            shape = (stop - start, *shape[1:])
        tensor = torch.empty(shape, dtype=dtype)
        # Not memory-mapped, because pages that were read would stay in memory.
        with path.open("rb") as file:
            file.seek(offset)
            if file.readinto(_bytes(tensor)) != tensor.nbytes:
                raise UserError(f"{path} ends in the middle of {key}; save the model again.")
        return tensor


def read_folder(folder: Path) -> Saved:
    """Find the tensors that `save_pretrained` wrote to a folder, without reading them."""
    main = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if main is None:
        raise UserError(f"{folder} has a configuration but no weights ({_SAFE}); save the model there.")
    names = [main.name]
    if main.suffix == ".json":
        try:
            names = sorted(set(json.loads(main.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{main} is no index of weights; save the model again.") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{main} names {name}, which is not in {folder}; save the model again.")
    files, shapes, dtypes = {}, {}, {}
    for path in (folder / name for name in names):
        if path.suffix == ".safetensors":
            for key, (offset, shapes[key], dtypes[key]) in _header(path).items():
                files[key] = (path, offset)
        else:
            for key, tensor in (tensors := read_weights(str(path), str(path))).items():
                files[key], shapes[key], dtypes[key] = tensors, tuple(tensor.shape), tensor.dtype
    sizes = [(folder / name).stat().st_size for name in names]
    return Saved(files, shapes, dtypes, max(sizes) if main.suffix == ".json" else None)


def _header(path: Path) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    """Return the offset, shape and dtype of each tensor in a safetensors file."""
    types = {name: dtype for dtype, name in _TYPES.items()}
    tensors = {}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for key, entry in header.items():
            if entry["dtype"] not in types:
                raise UserError(
                    f"{path} contains tensors of dtype {entry['dtype']}, which cannot be widened exactly; save the "
                    "model in bfloat16 or float32."
                )
            shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
            dtype = types[entry["dtype"]]
            if stop - start != _numel(shape) * dtype.itemsize or 8 + length + stop > path.stat().st_size:
                raise ValueError(f"it ends in the middle of {key}")
            tensors[key] = (8 + length + start, shape, dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise UserError(f"cannot read {path} ({reason}); save the model again.") from error
    return tensors


def write_folder(
    folder: Path,
    units: Sequence[Mapping[str, tuple[int, ...]]],
    dtypes: Mapping[str, torch.dtype],
    made: Iterable[Mapping[str, Tensor]],
    shard_bytes: int | None,
) -> None:
    """Write tensors to the files that `from_pretrained` reads, with one unit in memory at a time.

    `units` are shapes by key, and `made` yields the tensors of one unit after the other. A file has at most
    `shard_bytes`; None: write a single file.
    """
    sizes = [sum(dtypes[key].itemsize * _numel(shape) for key, shape in unit.items()) for unit in units]
    shards: list[list[Mapping[str, tuple[int, ...]]]] = [[]]
    total = 0
    for unit, size in zip(units, sizes, strict=True):
        if shard_bytes is not None and shards[-1] and total + size > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(unit)
        total += size
    names = [_SAFE]
    if shard_bytes is not None:
        names = [f"model-{shard:05}-of-{len(shards):05}.safetensors" for shard in range(1, len(shards) + 1)]
    tensors, weight_map = iter(made), dict[str, str]()
    for name, shard in zip(names, shards, strict=True):
        shapes = {key: shape for unit in shard for key, shape in unit.items()}

        def write(file: BinaryIO, shapes: Any = shapes, number: int = len(shard)) -> None:
            offsets = _write_header(file, shapes, dtypes)
            start = file.tell()
            for _ in range(number):
                for key, tensor in next(tensors).items():
                    file.seek(start + offsets[key])
                    file.write(_bytes(tensor.contiguous()))

        write_atomically(folder / name, write)
        weight_map |= dict.fromkeys(shapes, name)
    if shard_bytes is not None:
        write_json(folder / _FILES[1], {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})


def _write_header(
    file: BinaryIO, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, int]:
    """Write the header of a safetensors file; return the offset of each tensor in the data after it.

    Tensors are sorted by itemsize, the largest first, so that all are aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for key in sorted(shapes, key=lambda key: -dtypes[key].itemsize):
        offsets[key], size = end, dtypes[key].itemsize * _numel(shapes[key])
        header[key] = {
            "dtype": _TYPES[dtypes[key]],
            "shape": list(shapes[key]),
            "data_offsets": [end, end := end + size],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return offsets


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Unit:
    """Smallest set of a model's tensors that are converted together: their names, and shapes by key in the file."""

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
    converted: dict[str, Tensor] = loading.revert_weight_conversion(model, dict(tensors))
    return converted


def units(model: nn.Module) -> list[Unit]:
    """Split a model's tensors into the smallest units that can be computed one by one."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = model.state_dict(keep_vars=True)
    names = [name for name, first in first_names(model).items() if name == first and name not in ignored]
    tensors = {name: torch.empty(state[name].shape, device="meta") for name in names}
    shapes = {key: tuple(tensor.shape) for key, tensor in reverted(model, tensors).items()}
    separate, rest = [], []
    for name in names:
        own_shapes = {key: tuple(t.shape) for key, t in reverted(model, {name: tensors[name]}).items()}
        if own_shapes.items() <= shapes.items():
            separate.append(Unit((name,), own_shapes))
        else:
            rest.append(name)
    if rest:
        known = {key for unit in separate for key in unit.shapes}
        separate.append(Unit(tuple(rest), {key: shape for key, shape in shapes.items() if key not in known}))
    return separate


class Checkpoint:
    """Read the tensors of a saved model one at a time, by their names in a model of the same class and sizes.

    If the files store tensors in another form than the class, transformers loads all of them at once.

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
        renamed = {unit.names[0]: next(iter(unit.shapes)) for unit in units(model) if len(unit.shapes) == 1}
        self._keys: dict[str, str] = {}
        for name, first in self._first.items():
            for key in (name, renamed.get(name, name)):
                if saved.shapes.get(key) == tuple(state[name].shape):
                    self._keys.setdefault(first, key)
        parameters = {self._first[name] for name, _ in model.named_parameters()}
        if parameters <= self._keys.keys():
            self._read: Source = saved
            self.dtypes = {name: saved.dtypes[key] for name, key in self._keys.items()}
            return
        tensors = loaded(folder, type(model)).state_dict()
        self._keys = {first: name for name, first in self._first.items() if name in tensors}
        self._read = lambda name, rows: tensors[name][rows]
        self.dtypes = {first: tensors[key].dtype for first, key in self._keys.items()}

    def __contains__(self, name: str) -> bool:
        return self._first.get(name) in self._keys

    def __call__(self, name: str, rows: Rows = ...) -> Tensor:
        """Read a tensor by its name in the model, or some of its rows."""
        return self._read(self._keys[self._first[name]], rows)


def loaded(folder: Path, kind: Any) -> nn.Module:
    """Load a saved model in eval mode; raise a UserError if the weights do not fit its configuration."""
    try:
        model: nn.Module
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # weights that do not fit may raise anything
        raise UserError(f"the weights in {folder} do not fit its configuration: {first_line(error)}") from error
    missing = sorted([*info["missing_keys"], *info["mismatched_keys"]], key=str)
    if missing:
        raise UserError(
            f"the weights in {folder} do not fit its configuration: {len(missing)} tensors are missing or have another "
            f"shape, the first is {missing[0]}."
        )
    return model.eval()
