"""growlab grows neural networks while they train: from a narrow seed to the ordinary full-width network."""

# isort: off
# `python -m growlab` puts the working directory first, where a `torch.py` would run in the place of torch.
import os
import sys

if (
    # sys.argv is so while Python searches for the module to run.
    sys.argv[:1] == ["-m"]
    and {"growlab", "-mgrowlab"} & {argument.partition(".")[0] for argument in sys.orig_argv}
    and sys.path[:1] in ([""], [os.getcwd()])
    and not sys.flags.safe_path
):
    sys.path.append(sys.path.pop(0))
# isort: on

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from growlab.base.errors import how_to_install, needs

if TYPE_CHECKING:
    from growlab.base.errors import UserError
    from growlab.frontends.lightning import Growth
    from growlab.grower import Grower
    from growlab.grower.prune import prune
    from growlab.grower.triggers import At, ByMethod, Controller, Never, Scheduled, Trigger
    from growlab.growth import (
        Bert2Bert,
        FireFly,
        GradMax,
        HyperCloning,
        Lemon,
        Net2Net,
        PairGrowth,
        ParityError,
        RandomGrowth,
        Splitting,
        Tiny,
        VarianceTransfer,
        make_schedule,
    )
    from growlab.parts import Part
    from growlab.widen.enlarge import enlarge
    from growlab.widths import trace

__all__ = [
    "At",
    "Bert2Bert",
    "ByMethod",
    "Controller",
    "FireFly",
    "GradMax",
    "Grower",
    "Growth",
    "HyperCloning",
    "Lemon",
    "Net2Net",
    "Never",
    "PairGrowth",
    "ParityError",
    "Part",
    "RandomGrowth",
    "Scheduled",
    "Splitting",
    "Tiny",
    "Trigger",
    "UserError",
    "VarianceTransfer",
    "enlarge",
    "make_schedule",
    "optim",
    "plan",
    "prune",
    "trace",
]

# Nothing is imported before it is used: torch and Lightning take seconds.
_MODULES = {
    "growlab.base.errors": "UserError",
    "growlab.frontends.lightning": "Growth",
    "growlab.grower": "Grower",
    "growlab.grower.prune": "prune",
    "growlab.growth": "Bert2Bert FireFly GradMax HyperCloning Lemon Net2Net PairGrowth ParityError RandomGrowth "
    "Splitting Tiny VarianceTransfer make_schedule",
    "growlab.parts": "Averages Isotropic Part",
    "growlab.grower.triggers": "At ByMethod Controller Never Scheduled Trigger",
    "growlab.widen.enlarge": "enlarge",
    "growlab.widths": "trace",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("growlab")
    if name in ("optim", "plan"):
        return importlib.import_module(f"growlab.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'growlab' has no attribute {name!r}")
    with needs(f"growlab.{name}", how_to_install("lab")):
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
