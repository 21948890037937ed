"""`import growlab`: the names that people use, and nothing that takes long."""

import inspect
import logging
import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import growlab
from growlab.growth import GrowthMethod
from growlab.lab.cli.explain import explain
from growlab.lab.training.run import quiet_libraries


def test_every_exported_name_exists() -> None:
    assert {name for name in growlab.__all__ if getattr(growlab, name) is None} == set()
    assert set(growlab.__all__) == set(dir(growlab))
    assert growlab.__all__ == sorted(growlab.__all__, key=lambda name: (name.islower(), name))


def test_importing_growlab_and_the_planner_does_not_import_torch() -> None:
    program = "import sys, time; began = time.process_time(); import growlab; took = time.process_time() - began\n"
    program += "print(took, *sorted({'torch', 'lightning', 'hydra'} & set(sys.modules)))\n"
    program += "import growlab.lab.planner.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (seconds, *imported), plan = map(str.split, done.stdout.splitlines())
    assert float(seconds) < 0.3 and imported == [] and plan == ["False"]


def test_info_messages_of_libraries_are_not_logged() -> None:
    with quiet_libraries():
        assert not logging.getLogger("matplotlib.font_manager").isEnabledFor(logging.INFO)


def test_growlab_warnings_are_printed_as_one_sentence() -> None:
    ours, theirs = growlab.__file__, logging.__file__
    with quiet_libraries():
        assert warnings.formatwarning("It is so.", UserWarning, ours, 3) == "warning: It is so.\n"
        assert warnings.formatwarning("It is so.", UserWarning, theirs, 3).startswith(f"{theirs}:3: ")
    assert warnings.formatwarning("It is so.", UserWarning, ours, 3).startswith(f"{ours}:3: ")


def test_batch_norm_on_one_sample_is_explained_in_one_sentence() -> None:
    with pytest.raises(ValueError) as raised:
        nn.BatchNorm1d(4)(torch.zeros(1, 4))
    sentence = explain(raised.value)
    assert sentence is not None and "a single value per channel" in sentence and "change data.batch_size" in sentence


NAMED = [getattr(growlab, name) for name in growlab.__all__]
METHODS = [one for one in NAMED if isinstance(one, type) and issubclass(one, GrowthMethod)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_methods_reject_arguments_that_are_not_numbers(method) -> None:
    kinds = {name: one.annotation for name, one in inspect.signature(method).parameters.items()}
    kinds = {name: kind for name, kind in kinds.items() if kind in (int, float)}
    assert "gain" in kinds and len(METHODS) >= 11
    for name, kind in kinds.items():
        method(**{name: kind(0.5) or 1})
        for wrong in ("x", math.nan, math.inf, True, [], -1, *([1.5] if kind is int else [])):
            with pytest.raises(ValueError, match=rf"^{name} must be ") as raised:
                method(**{name: wrong})
            assert str(raised.value).endswith(f"not {wrong!r}.")


@pytest.mark.parametrize("amplitudes", ["x", None, 1.0, [], [1.0, "x"], [0.0], [math.nan]])
def test_amplitudes_must_be_positive_numbers(amplitudes) -> None:
    with pytest.raises(ValueError, match=r"^amplitudes must be "):
        growlab.Tiny(amplitudes=amplitudes)
