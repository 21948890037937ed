"""Tensors that processes share out in pieces (torch's DTensor), and tensors that are computed one at a time."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch import Tensor, nn


def is_piece(tensor: Any) -> bool:
    """Return True for a DTensor, of which each process has a piece."""
    return hasattr(tensor, "device_mesh")


def nobody_else_has(tensor: Tensor) -> bool:
    """Return True for a shard that only this process has, as with FSDP2 without replicas."""
    return is_piece(tensor) and not any(placement.is_replicate() for placement in tensor.placements)  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, without gradient; the processes that share it out call this together."""
    if not is_piece(tensor):
        return tensor
    piece = _local(tensor).untyped_storage()
    away = _aside is not None and _aside.bring_back(piece)
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    if away:
        # A process that has all of a tensor returns its own.
        full = full.clone() if full.untyped_storage() is piece else full
        set_aside(tensor)
    return full


def device_of_pieces(network: nn.Module) -> torch.device | None:
    """Device on which this process has its pieces of a network's tensors, also if they are on meta; None without."""
    pieces: Iterator[Any] = filter(is_piece, network.parameters())
    return next((torch.device(piece.device_mesh.device_type) for piece in pieces), None)


def reshard(network: nn.Module) -> None:
    """Let modules of FSDP2 have pieces again where a forward has left them whole parameters."""
    for module in network.modules():
        if hasattr(type(module), "reshard"):
            module.reshard()  # type: ignore[operator]


def placed(content: Tensor, like: Tensor) -> Tensor:
    """Share out a tensor that every process has in full as another one is, in its dtype; nothing is sent."""
    content = _beside(content, like)
    if not is_piece(like):
        return content
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    piece = replicated(content, like).redistribute(mesh, placements).to_local()  # type: ignore[attr-defined]
    if piece.untyped_storage().nbytes() > piece.nbytes or piece.data_ptr() == content.data_ptr():
        # Else it would keep the whole tensor.
        piece = piece.contiguous().clone()
    shape, stride = content.shape, content.stride()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def replicated(content: Tensor, like: Tensor) -> Tensor:
    """Bring a factor to where a tensor is, in its dtype; for a DTensor, in full to each process."""
    content = _beside(content, like)
    if not is_piece(like):
        return content
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(content, mesh, [Replicate()] * mesh.ndim, run_check=False)


def laid_out(result: Tensor, like: Tensor) -> Tensor:
    """Share out an operation's result as another tensor is; torch leaves it in full if processes outnumber the rows."""
    if not is_piece(like):
        return result
    shared: Tensor = result.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]
    return shared


def _beside(content: Tensor, like: Tensor) -> Tensor:
    """Bring a tensor to another one's device and dtype; next to one on meta it keeps its values."""
    device = content.device if like.is_meta else like.device
    return content.detach().to(device=device, dtype=like.dtype)


class _Aside:
    """Bytes of old pieces: an accelerator's in the host's memory, the host's in a file."""

    def __init__(self, file: IO[bytes]) -> None:
        # Number of bytes, and a copy or a place in the file.
        self._kept, self._file = dict[torch.UntypedStorage, tuple[int, Tensor | int]](), file

    def take(self, piece: torch.UntypedStorage) -> None:
        if piece not in self._kept:
            # A copy also where it goes to the file: memory that numpy has seen cannot be resized.
            copied = _bytes(piece).to("cpu", copy=True)
            place: Tensor | int = copied
            if piece.device.type == "cpu":
                self._file.seek(0, os.SEEK_END)
                place = self._file.tell()
                self._file.write(copied.numpy().data)
            self._kept[piece] = piece.nbytes(), place
        piece.resize_(0)

    def bring_back(self, piece: torch.UntypedStorage) -> bool:
        """Return True if a piece's bytes were away, and are back now."""
        if piece not in self._kept:
            return False
        size, place = self._kept[piece]
        piece.resize_(size)
        if isinstance(place, int):
            self._file.seek(place)
            place = torch.frombuffer(bytearray(self._file.read(size)), dtype=torch.uint8)
        _bytes(piece).copy_(place)
        return True

    def bring_all_back(self) -> None:
        for piece in self._kept:
            self.bring_back(piece)


_aside: _Aside | None = None


@contextmanager
def old_pieces_aside() -> Iterator[None]:
    """Context in which `set_aside` frees memory of old pieces; an error brings them back."""
    global _aside
    # The file exists from the first piece on.
    with tempfile.SpooledTemporaryFile(max_size=1) as file:
        aside = _aside = _Aside(file)
        try:
            yield
        except BaseException:
            aside.bring_all_back()
            raise
        finally:
            _aside = None


def set_aside(old: Tensor) -> None:
    """Free a piece's memory during an event, if the piece can be brought back; until its end `whole` still reads it."""
    if _aside is None or not is_piece(old):
        return
    local = _local(old)
    piece = local.untyped_storage()
    alone = type(local) is Tensor and not local.is_meta and piece.resizable() and local.nbytes > 0
    if alone and piece.nbytes() in (0, local.nbytes):
        _aside.take(piece)


def _local(piece: Tensor) -> Tensor:
    with torch.no_grad():
        return piece.detach().to_local()  # type: ignore[attr-defined]


def _bytes(memory: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


class OneByOne(Mapping[str, Tensor]):
    """Tensors by name, each computed whenever it is asked for, so that few are in memory at a time.

    Asked for the same name twice in a row it returns the same object.

    Args:
        names: of the tensors, in order.
        compute: returns the tensor of a name, the same values each time.
        like: a tensor of each one's dtype and device, by name, if that is wanted without computing them.
    """

    def __init__(
        self, names: Iterable[str], compute: Callable[[str], Tensor], like: Mapping[str, Tensor] | None = None
    ) -> None:
        self._names, self._compute, self.like = dict.fromkeys(names), compute, like
        self._given = dict[str, Tensor]()
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name in self._given:
            return self._given[name]
        if name not in self._names:
            raise KeyError(name)
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._compute(name)
        return self._last[1]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._names[name], self._given[name] = None, tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def gathered(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Whole tensors in the place of pieces; those of two and more dimensions one at a time, whenever asked for."""
    if not any(map(is_piece, tensors.values())):
        return tensors
    small = {name: whole(tensor) for name, tensor in tensors.items() if tensor.dim() < 2}
    return OneByOne(tensors, lambda name: small[name] if name in small else whole(tensors[name]), tensors)


def scalars(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A single 1 of each tensor's dtype, on its device."""
    like = tensors if not isinstance(tensors, OneByOne) or tensors.like is None else tensors.like
    return {name: torch.ones((), dtype=like[name].dtype, device=like[name].device) for name in tensors}


def same_placement(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are shared out in the same way, or both are not."""
    about = [(getattr(each, "device_mesh", None), getattr(each, "placements", None)) for each in (one, other)]
    return about[0] == about[1]
