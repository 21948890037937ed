"""A few samples of what Lightning's trainer is about to train on."""

from itertools import islice
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

_PROBE = 8  # samples that growth is checked on


def few_samples(loaders: Any) -> Any:
    """A batch of a few samples; a loader's sampler and workers are left alone where it has a dataset to index."""
    if isinstance(loaders, DataLoader) and loaders.batch_sampler is not None:
        batch = _indexed(loaders)
        if batch is not None:
            return batch
    # Resumable loaders know where they are, and are not to begin later for it.
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    places = [
        (loader, loader.state_dict()) for loader in combined.flattened if hasattr(loader, "load_state_dict")
    ]
    batch = next(islice(combined, 1))[0]
    combined.reset()
    for loader, place in places:
        loader.load_state_dict(place)
    return batch


def _indexed(loader: DataLoader[Any]) -> Any:
    """The first samples of a dataset by their numbers; None: it has no such, and its sampler gives other keys."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        number = min(_PROBE, len(loader.dataset))  # type: ignore[arg-type]
        return loader.collate_fn([loader.dataset[index] for index in range(number)])
    except Exception:
        # What is wrong with the data themselves shows when the loader is read.
        return None
