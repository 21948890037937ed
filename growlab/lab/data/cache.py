"""Decoded images kept in the user's cache folder, so that only the first run pays for decoding."""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from growlab.base.errors import UserError
from growlab.base.files import write_atomically
from growlab.lab.data.arguments import cores
from growlab.lab.data.image_sets import EncodedImages, ImageArray, Images

log = logging.getLogger(__name__)

# Below this many images decoding is as quick as reading a cache.
_WORTH_CACHING = 2000
# Decoded images up to this many bytes are kept in memory by default.
_IN_MEMORY_BYTES = 2 << 30


def cache_dir() -> Path:
    """Return growlab's folder in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "growlab"


def files_fingerprint(paths: Sequence[Path]) -> str:
    """Return a text that changes when one of the files does: absolute names, sizes, times of change."""
    lines = []
    for path in paths:
        try:
            stat = path.stat()
            state = f"{stat.st_size}\t{stat.st_mtime_ns}"
        except FileNotFoundError:
            # A link to nowhere, which reading it will report.
            state = "missing"
        lines.append(f"{path.resolve()}\t{state}")
    return "\n".join(lines)


def held(images: Images, in_memory: bool | None) -> Images:
    """Images in memory, if that is asked for or, with None, if they are few enough; else as they are."""
    frame = images.frame
    size = len(images) * frame.height * frame.width * frame.channels
    wanted = size <= _IN_MEMORY_BYTES if in_memory is None else in_memory
    return decoded(images) if wanted and isinstance(images, EncodedImages) else images


def decoded(images: EncodedImages) -> ImageArray:
    """Return the images decoded, from the cache if they are there.

    A few images of a large set are decoded alone; else the whole set is decoded once and cached. A cache that
    is torn, foreign or unwritable costs time, never the run.

    Raises:
        UserError: an image cannot be read, or images differ in size.
    """
    labels_N = torch.from_numpy(images.labels)
    total = len(images.payloads)
    if total < _WORTH_CACHING:
        return ImageArray(_decode(images), labels_N, images.classes)
    frame = images.frame
    key = f"{images.payloads.fingerprint()}\n{images.fit} {frame}"
    if images.levels is not None:
        key += f" {images.levels}"
    path = _path(key, ".npz")
    shape = (total, frame.height, frame.width, frame.channels)
    array = _load(path, shape)
    if array is None and len(images) < total // 4:
        return ImageArray(_decode(images), labels_N, images.classes)
    if array is None:
        with locked(path):
            # Another process may have written it while this one waited.
            array = _load(path, shape)
            if array is None:
                array = _decode(images.everything()).numpy()
                _store(path, array)
    everything = ImageArray(torch.from_numpy(array), torch.zeros(total, dtype=torch.int64), images.classes)
    return ImageArray(everything.select(images.positions).images_NHWC, labels_N, images.classes)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time in, where the cache folder can be written; else everyone."""
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(path.name + ".lock"))
        lock.acquire(timeout=3600)
    # A folder that cannot be written, a system without locks, a holder that hangs: to do the work twice is no harm.
    except (OSError, NotImplementedError, Timeout):
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _path(key: str, suffix: str) -> Path:
    return cache_dir() / "decoded" / (hashlib.sha256(key.encode()).hexdigest()[:24] + suffix)


def _decode(images: EncodedImages) -> torch.Tensor:
    chunks = np.array_split(np.arange(len(images)), max(1, len(images) // 512))
    # The first one alone: it opens the files that all share.
    parts = [images.read(chunks[0])]
    # Threads: PIL decodes without holding the interpreter's lock.
    with ThreadPoolExecutor(max_workers=min(8, cores())) as pool:
        parts += pool.map(images.read, chunks[1:])
    return torch.cat(parts)


def _load(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    try:
        # Opened here, because numpy leaves a torn archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            array = archive["images"]
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged archive raises almost anything
        log.warning("ignoring the unreadable cache %s (%s)", path, error)
        return None
    if array.dtype != np.uint8 or array.shape != shape:
        log.warning("ignoring the cache %s: it is not what was written for these images", path)
        return None
    return array


def _store(path: Path, array: np.ndarray) -> None:
    def write(file: Any) -> None:
        # Not compressed, but an archive: it carries a checksum, which reading verifies.
        np.savez(file, images=array)

    try:
        write_atomically(path, write)
    except UserError as error:
        log.warning("decoded images are not kept for the next run: %s", error)
