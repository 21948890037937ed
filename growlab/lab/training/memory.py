"""How much memory training takes: of a GPU, of this process, of tensors."""

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3), from malloc.h
_LARGEST_KEPT = 2**30  # bytes; mallopt takes an int
_RESET_PEAK = "5\n"  # what proc(5) has to be written into clear_refs


class PeakMemory:
    """The most memory that was taken since the last reset.

    On CUDA: bytes of tensors, from torch's allocator. On the CPU under Linux: what the process came to hold in RAM
    (VmHWM of proc(5)) beyond what it held when this object was made. That is pages, not tensors: it includes what
    libraries work with, and it is approximate by what the allocator keeps of memory that was freed.

    Args:
        device: where training runs.

    Attributes:
        measure: what is measured, in words; or why nothing is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0
        if device.type == "cuda":
            self.measure = "bytes of tensors on the GPU"
        elif device.type == "cpu":
            try:
                _return_freed()
                _clear_peak()
                self._before = _status("VmRSS")
                self.measure = (
                    "bytes that the process holds in RAM beyond those before training (Linux: VmHWM)"
                )
            except (OSError, LookupError) as error:
                self._device = torch.device("meta")
                self.measure = (
                    f"not measured: this system does not tell what a process held at most ({error})"
                )
        else:
            self.measure = (
                f"not measured: torch does not tell what a device of type {device.type} held at most"
            )

    def reset(self) -> None:
        """Begin to measure anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            _return_freed()
            _clear_peak()

    def bytes(self) -> int | None:
        """The most since the last reset; None if it is not measured."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _status("VmHWM") - self._before) if self._device.type == "cpu" else None


def _status(key: str) -> int:
    """A quantity of /proc/self/status in bytes.

    Raises:
        OSError: there is no such file, as on systems other than Linux.
        LookupError: it does not tell this.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(f"no {key}")


def _clear_peak() -> None:
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _return_freed() -> None:
    """Let the C library give freed memory back to the system, which would count as held; glibc alone can."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed() -> None:
    """Let the C library keep freed memory for the next step instead of handing it back to the system; glibc alone can.

    By default it maps every block above 32 MiB anew, and the system clears its pages at each first touch: half the
    time of a step where the gradients of large weights come and go. Settings of the environment (MALLOC_...,
    GLIBC_TUNABLES) stand.
    """
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_KEPT)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, on any device and the same every time.

    While it is active, what operations return is counted until it is freed, in the backward pass too. What an
    operation takes and frees by itself is not seen.

    Args:
        tensors: those that are there already.

    Attributes:
        bytes: of all that are alive.
        peak: the most since it was last set.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensor in tensors:
            self._count(tensor)

    def _count(self, tensor: Tensor) -> None:
        # Views share a storage, and torch keeps one Python object for it as long as it lives.
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def forget(_: Any) -> None:
            del self._alive[key]
            self.bytes -= size

        self._alive[key] = weakref.ref(storage, forget)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return out
