"""Hypernetworks that emit a network's weights: parametrisation, initialisation, and growth by them."""

from growlab.hypernets.initialisations import INITIALISATIONS, Emission, Initialisation
from growlab.hypernets.modules import Chunks, Embedding, Emitted
from growlab.hypernets.parametrise import Hypernet, emitted, materialize, parametrise

__all__ = [
    "INITIALISATIONS",
    "Chunks",
    "Embedding",
    "Emission",
    "Emitted",
    "Hypernet",
    "Initialisation",
    "emitted",
    "materialize",
    "parametrise",
]
