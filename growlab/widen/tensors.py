"""Tensors of saved models by name, read one at a time, and written one at a time as safetensors."""

import json
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from growlab.errors import UserError
from growlab.files import write_atomically, write_json

#: Rows of a tensor's first dimension, or all of it.
Rows = slice | EllipsisType
#: Gives a tensor by its name, or some of its rows.
Source = Callable[[str, Rows], Tensor]
# In the order in which transformers looks for them.
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
        files: for each key its safetensors file, or the tensors of its pickled one.
        shapes: of each tensor.
        dtypes: of each tensor.
        shard_bytes: size of the largest file where there are several by an index, else None.
    """

    files: Mapping[str, Path | Mapping[str, Tensor]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    shard_bytes: int | None

    def __call__(self, key: str, rows: Rows = ...) -> Tensor:
        """A tensor, or some of its rows, read from its file."""
        file = self.files[key]
        if not isinstance(file, Path):
            return file[key][rows]
        # Opened each time: what has been read of a file stays in memory for as long as it is open.
        with _opened(file) as content:
            return content.get_tensor(key) if rows is ... else content.get_slice(key)[rows]


def read_folder(folder: Path) -> Saved:
    """Find the tensors that `save_pretrained` left in a folder, without reading them.

    Raises:
        UserError: there are none, or a file is missing, damaged, or holds objects other than tensors.
    """
    main = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if main is None:
        raise UserError(f"{folder} has a configuration and no weights ({_SAFE}); save the model there.")
    names = [main.name]
    if main.suffix == ".json":
        try:
            names = sorted(set(json.loads(main.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{main} is no index of weights; save the model again.") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{main} names {name}, which is no file in {folder}; save the model again.")
    files, shapes, dtypes = {}, {}, {}
    for path in (folder / name for name in names):
        if path.suffix == ".safetensors":
            with _opened(path) as content:
                for key in content.keys():  # noqa: SIM118 - no mapping
                    piece = content.get_slice(key)
                    files[key], shapes[key] = path, tuple(piece.get_shape())
                    dtypes[key] = _type_named(piece.get_dtype(), path)
        else:
            for key, tensor in (tensors := _unpickled(path)).items():
                files[key], shapes[key], dtypes[key] = tensors, tuple(tensor.shape), tensor.dtype
    sizes = [(folder / name).stat().st_size for name in names]
    return Saved(files, shapes, dtypes, max(sizes) if main.suffix == ".json" else None)


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path} ({error}); save the model again.") from error


def _type_named(name: str, path: Path) -> torch.dtype:
    known = next((dtype for dtype, own in _TYPES.items() if own == name), None)
    if known is None:
        raise UserError(f"{path} holds numbers of the type {name}, which cannot be widened exactly.")
    return known


def _unpickled(path: Path) -> Mapping[str, Tensor]:
    content: Any = None
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files of the oldest kind cannot be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is damaged or holds objects other than tensors, which growlab does not load: loading them could "
            "run code; save the model as safetensors."
        ) from error
    except Exception as error:  # what damaged files raise is not one family
        raise UserError(
            f"cannot read {path} ({getattr(error, 'strerror', None) or 'it is damaged'}); save the model again."
        ) from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path} holds no state_dict; save the model again.")
    return content


def write_folder(
    folder: Path,
    units: Sequence[Mapping[str, tuple[int, ...]]],
    dtypes: Mapping[str, torch.dtype],
    made: Iterable[Mapping[str, Tensor]],
    shard_bytes: int | None,
) -> None:
    """Write tensors as they are made, as `from_pretrained` reads them.

    Args:
        folder: to write to.
        units: shapes by key, of those tensors together that are made together.
        dtypes: by key.
        made: the tensors of one unit after the other.
        shard_bytes: begin another file rather than write more than this into one; None: one file.

    Raises:
        WriteError: the disk is full, or the folder cannot be written.
    """
    sizes = [sum(dtypes[key].itemsize * _numel(shape) for key, shape in unit.items()) for unit in units]
    shards: list[list[int]] = [[]]
    total = 0
    for place, size in enumerate(sizes):
        if shard_bytes is not None and shards[-1] and total + size > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(place)
        total += size
    number = len(shards)
    names = (
        [_SAFE]
        if shard_bytes is None
        else [f"model-{shard:05}-of-{number:05}.safetensors" for shard in range(1, number + 1)]
    )
    tensors = iter(made)
    for name, places in zip(names, shards, strict=True):
        keys = {key: shape for place in places for key, shape in units[place].items()}

        def write(file: BinaryIO, keys: Any = keys, places: Any = places) -> None:
            offsets = _write_header(file, keys, dtypes)
            start = file.tell()
            for _ in places:
                for key, tensor in next(tensors).items():
                    file.seek(start + offsets[key])
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

        write_atomically(folder / name, write)
    if shard_bytes is not None:
        index = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": {
                key: name
                for name, places in zip(names, shards, strict=True)
                for place in places
                for key in units[place]
            },
        }
        write_json(folder / _FILES[1], index)


def _write_header(
    file: BinaryIO, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, int]:
    """Write where each tensor will be; returns their offsets behind the header.

    The largest numbers first, so that all are aligned.
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
