"""Hypernetworks that emit a network's weights: parametrisation, initialisation, and growth by them."""

from growlab.hypernets.growth import Hyperfan
from growlab.hypernets.initialisations import INITIALISATIONS, Emission, Initialisation
from growlab.hypernets.modules import Chunks, Embedding, Emitted
from growlab.hypernets.networks import MonteCarlo, hypernetwork
from growlab.hypernets.parametrise import Hypernet, emitted, materialize, parametrise
from growlab.hypernets.width_graph import emitted_graph

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
