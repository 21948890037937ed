"""Hypernetworks that emit a network's weights: parametrisation, initialisation, and growth by them."""

from growlab.parts.hypernets.growth import Hyperfan, emitted_graph
from growlab.parts.hypernets.initialisations import INITIALISATIONS, Emission, Initialisation
from growlab.parts.hypernets.parametrise import (
    Chunks,
    Embedding,
    Emitted,
    Hypernet,
    MonteCarlo,
    emitted,
    hypernetwork,
    materialize,
    parametrise,
)

__all__ = [
    "INITIALISATIONS",
    "Chunks",
    "Embedding",
    "Emission",
    "Emitted",
    "Hyperfan",
    "Hypernet",
    "Initialisation",
    "MonteCarlo",
    "emitted",
    "emitted_graph",
    "hypernetwork",
    "materialize",
    "parametrise",
]
