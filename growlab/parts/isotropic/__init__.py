"""Isotropic layers, which adapt their widths during training by their singular values (G. Bird)."""

from growlab.parts.isotropic.activations import Blend, ChiNorm, IntrinsicLength, IsotropicActivation
from growlab.parts.isotropic.method import Isotropic
from growlab.parts.isotropic.networks import (
    IsotropicCNN,
    IsotropicMLP,
    NestedNetwork,
    change_inputs,
    deepen,
    isotropic_cnn,
    isotropic_mlp,
    isotropic_nested,
    nested,
    orthogonal_weights,
)
from growlab.parts.isotropic.part import GainWeights, IsotropicLayers
from growlab.parts.isotropic.resize import Choices, change_width
from growlab.parts.isotropic.spectrum import Diagonal, densify, diagonalise, diagonalise_partially, sparsify, spectra

__all__ = [
    "Blend",
    "ChiNorm",
    "Choices",
    "Diagonal",
    "GainWeights",
    "IntrinsicLength",
    "Isotropic",
    "IsotropicActivation",
    "IsotropicCNN",
    "IsotropicLayers",
    "IsotropicMLP",
    "NestedNetwork",
    "change_inputs",
    "change_width",
    "deepen",
    "densify",
    "diagonalise",
    "diagonalise_partially",
    "isotropic_cnn",
    "isotropic_mlp",
    "isotropic_nested",
    "nested",
    "orthogonal_weights",
    "sparsify",
    "spectra",
]
