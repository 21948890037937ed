"""The generators that a network may draw from: torch's, Python's and numpy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def draws_kept(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Put the generators back to where they are now, whatever the network draws meanwhile.

    Args:
        model: whose devices' generators are meant, beside those of the CPU.
        seed: lets all of them begin from it; None: from where they are.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                for device in devices:
                    torch.cuda.default_generators[device].manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
