"""Parts: optional features that plug into a Grower, independent of each other and unknown to the engine."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from growlab.grower.part import Part

if TYPE_CHECKING:
    from growlab.parts.averages import Averages as Averages
    from growlab.parts.classes import Classes as Classes
    from growlab.parts.depth import Depth as Depth
    from growlab.parts.features import Features as Features
    from growlab.parts.hypernets import Hyperfan as Hyperfan
    from growlab.parts.isotropic import GainWeights as GainWeights
    from growlab.parts.isotropic import Isotropic as Isotropic
    from growlab.parts.isotropic import IsotropicLayers as IsotropicLayers
    from growlab.parts.newborn import Freeze as Freeze
    from growlab.parts.newborn import Warmup as Warmup
    from growlab.parts.osgd import OldGradient as OldGradient
    from growlab.parts.patch_size import PatchSize as PatchSize
    from growlab.parts.resolution import Resolution as Resolution
    from growlab.parts.setting import Setting as Setting

# Imported on first use, so that a part's file may be deleted.
_HOMES = {
    "Averages": "averages",
    "Classes": "classes",
    "Depth": "depth",
    "Features": "features",
    "Freeze": "newborn",
    "GainWeights": "isotropic",
    "Hyperfan": "hypernets",
    "Isotropic": "isotropic",
    "IsotropicLayers": "isotropic",
    "OldGradient": "osgd",
    "PatchSize": "patch_size",
    "Resolution": "resolution",
    "Setting": "setting",
    "Warmup": "newborn",
}
__all__ = [*_HOMES, "Part", "available"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'growlab.parts' has no attribute {name!r}")
    return getattr(importlib.import_module(f"growlab.parts.{_HOMES[name]}"), name)


def available() -> Iterator[type[Part]]:
    """Iterate over the part classes that are installed."""
    for name, home in _HOMES.items():
        if importlib.util.find_spec(f"growlab.parts.{home}") is not None:
            kind = getattr(importlib.import_module(f"growlab.parts.{home}"), name)
            if isinstance(kind, type) and issubclass(kind, Part):
                yield kind
