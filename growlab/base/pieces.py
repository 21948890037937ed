"""Sharded tensors (torch's DTensor), and tensors that are computed one at a time."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch import Tensor, nn


def is_piece(tensor: Any) -> bool:
    """Return True for a DTensor, which has a shard on each process."""
    return hasattr(tensor, "device_mesh")


def nobody_else_has(tensor: Tensor) -> bool:
    """Return True for a shard that only this process has, as with FSDP2 without replicas."""
    return is_piece(tensor) and not any(placement.is_replicate() for placement in tensor.placements)  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, without gradient; a collective operation for sharded tensors."""
    if not is_piece(tensor):
        return tensor
    piece = _local(tensor).untyped_storage()
    restored = _aside is not None and _aside.bring_back(piece)
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    if restored:
        # Without shards elsewhere, torch returns the local tensor itself.
        full = full.clone() if full.untyped_storage() is piece else full
        set_aside(tensor)
    return full


def device_of_pieces(network: nn.Module) -> torch.device | None:
    """Device of a network's shards on this process, even if they are on meta; None without shards."""
    pieces: Iterator[Any] = filter(is_piece, network.parameters())
    return next((torch.device(piece.device_mesh.device_type) for piece in pieces), None)


def reshard(network: nn.Module) -> None:
    """Reshard the parameters of FSDP2's modules that a forward pass has left unsharded."""
    for module in network.modules():
        if hasattr(type(module), "reshard"):
            module.reshard()  # type: ignore[operator]


def placed(content: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that every process has in full like another one, in its dtype, without communication."""
    content = _to_device_of(content, like)
    if not is_piece(like):
        return content
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    piece = replicated(content, like).redistribute(mesh, placements).to_local()  # type: ignore[attr-defined]
    if piece.untyped_storage().nbytes() > piece.nbytes or piece.data_ptr() == content.data_ptr():
        # Otherwise the shard would keep the whole tensor alive.
        piece = piece.contiguous().clone()
    shape, stride = content.shape, content.stride()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def replicated(content: Tensor, like: Tensor) -> Tensor:
    """Move a factor to a tensor's device and dtype; if that is a DTensor, replicate it on the same mesh."""
    content = _to_device_of(content, like)
    if not is_piece(like):
        return content
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(content, mesh, [Replicate()] * mesh.ndim, run_check=False)


def laid_out(result: Tensor, like: Tensor) -> Tensor:
    """Shard an operation's result like another tensor; torch replicates it if processes outnumber the rows."""
    if not is_piece(like):
        return result
    sharded: Tensor = result.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]
    return sharded


def _to_device_of(content: Tensor, like: Tensor) -> Tensor:
    """Convert a tensor to another one's device and dtype, but not to the meta device."""
    device = content.device if like.is_meta else like.device
    return content.detach().to(device=device, dtype=like.dtype)


class _Aside:
    """Offloads the bytes of old shards: from an accelerator to the host's memory, from the host to a file."""

    def __init__(self, file: IO[bytes]) -> None:
        # Number of bytes, and a copy or an offset in the file.
        self._kept, self._file = dict[torch.UntypedStorage, tuple[int, Tensor | int]](), file

    def take(self, piece: torch.UntypedStorage) -> None:
        if piece not in self._kept:
            # A copy even for the file, since storage shared with numpy cannot be resized.
            content = _bytes(piece).to("cpu", copy=True)
            saved: Tensor | int = content
            if piece.device.type == "cpu":
                self._file.seek(0, os.SEEK_END)
                saved = self._file.tell()
                self._file.write(content.numpy().data)
            self._kept[piece] = piece.nbytes(), saved
        piece.resize_(0)

    def bring_back(self, piece: torch.UntypedStorage) -> bool:
        """Restore a shard's bytes; return False if they were not offloaded."""
        if piece not in self._kept:
            return False
        size, saved = self._kept[piece]
        piece.resize_(size)
        if isinstance(saved, int):
            self._file.seek(saved)
            saved = torch.frombuffer(bytearray(self._file.read(size)), dtype=torch.uint8)
        _bytes(piece).copy_(saved)
        return True

    def bring_all_back(self) -> None:
        for piece in self._kept:
            self.bring_back(piece)


_aside: _Aside | None = None


@contextmanager
def old_pieces_aside() -> Iterator[None]:
    """Context in which `set_aside` offloads old shards; they are restored after an error."""
    global _aside
    # The file is only created with the first shard.
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
    """Offload a shard during an event, if it can be restored; `whole` can still read it."""
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
    """Tensors by name, each computed on lookup, so that few are in memory at a time.

    The last tensor is cached: a second lookup of the same name returns the same object.

    Args:
        names: names of the tensors, in order.
        compute: returns the tensor of a name, the same values each time.
        like: by name, a tensor with the same dtype and device, for lookups of these without computing tensors.
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
    """Replace shards by full tensors; those with two or more dimensions are gathered on lookup."""
    if not any(map(is_piece, tensors.values())):
        return tensors
    small = {name: whole(tensor) for name, tensor in tensors.items() if tensor.dim() < 2}
    return OneByOne(tensors, lambda name: small[name] if name in small else whole(tensors[name]), tensors)


def dtype_of(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    """Return a tensor's dtype, if possible without computing the tensor."""
    return _like(tensors)[name].dtype


def _like(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return tensors if not isinstance(tensors, OneByOne) or tensors.like is None else tensors.like


def scalars(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A scalar 1 of each tensor's dtype, on its device."""
    like = _like(tensors)
    return {name: torch.ones((), dtype=like[name].dtype, device=like[name].device) for name in tensors}


def same_placement(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are sharded in the same way, or neither is."""
    return all(getattr(one, name, None) == getattr(other, name, None) for name in ("device_mesh", "placements"))
