"""Errors of what a configuration makes name the settings that one types, where Python's name arguments."""

from collections.abc import Iterator

import hydra
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from growlab.base.errors import UserError
from growlab.grower.triggers import Never
from growlab.growth import GradMax, VarianceTransfer, make_schedule
from growlab.lab.training.build import make_parts
from growlab.lab.training.configuration import PRIMARY, config_dir, register_schemas
from growlab.lab.training.setting_names import named_as_settings
from tests.parts_here import needs


@pytest.fixture(autouse=True)
def composing() -> Iterator[None]:
    register_schemas()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    return compose(PRIMARY, overrides=["name=given", *overrides])


@pytest.mark.parametrize(
    ("overrides", "path", "told"),
    [
        (("growth=gradmax", "growth.batches=0"), "growth", "growth.batches must be at least 1, not 0."),
        (("growth.gain=0",), "growth", "growth.gain must be above 0, not 0.0."),
        # It is the run's, which the method takes its own from.
        (("gain=0",), "growth", "gain must be above 0, not 0.0."),
        (
            ("schedule=gradient", "schedule.demand.ratio=2"),
            "schedule.demand",
            "schedule.demand.ratio must lie in (0, 1], not 2.",
        ),
    ],
)
def test_a_constructors_argument_is_the_setting(overrides: tuple[str, ...], path: str, told: str) -> None:
    cfg = composed(*overrides)
    with pytest.raises(UserError) as raised, named_as_settings(cfg):
        hydra.utils.instantiate(cfg.growth if path == "growth" else cfg.schedule.demand)
    assert str(raised.value) == told


def test_the_same_errors_name_arguments_in_python() -> None:
    with pytest.raises(ValueError, match=r"^batches must be at least 1, not 0\.$"):
        GradMax(batches=0)
    with pytest.raises(ValueError, match=r"^fallback must be None or pairs, not 'x'\.$"):
        GradMax(fallback="x")
    with pytest.raises(ValueError, match=r"^gain must be above 0, not 0\.$"):
        VarianceTransfer(gain=0)
    with pytest.raises(ValueError, match=r"raise total_epochs or lower num_stages\.$"):
        make_schedule(2, 32, num_stages=3)


@needs("averages")
def test_arguments_of_parts_are_the_settings_that_they_come_from() -> None:
    cfg = composed("ema.decay=2")
    with (
        pytest.raises(UserError, match=r"^ema\.decay must lie between 0 and 1, not 2\.0\.$"),
        named_as_settings(cfg),
    ):
        make_parts(cfg.parts, None, Never())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("set fallback='pairs' to", "set growth.fallback='pairs' to"),
        ("or set output_multiplier=False.", "or set output_multiplier=False."),
        (
            "raise total_epochs or lower num_stages.",
            "raise schedule.total_epochs or lower schedule.num_stages.",
        ),
        ("take other epochs and a smaller batch_size.", "take other epochs and a smaller data.batch_size."),
        ("train it at a fixed size.", "train it at a fixed size (growth=none)."),
        ("leave OldGradient out.", "leave OldGradient out (osgd.anneal=null)."),
        ("start='zero', where depth is", "depth.start='zero', where depth is"),
        # Both growth and the demand have it.
        ("batches=0 of both", "batches=0 of both"),
        # Named in full already.
        ("schedule.num_stages=0 and data.batch_size", "schedule.num_stages=0 and data.batch_size"),
    ],
)
@needs("osgd")
@needs("depth")
def test_what_is_told_while_training_is_told_in_settings(said: str, told: str) -> None:
    cfg = composed("growth=gradmax", "schedule=expressivity")
    with pytest.raises(UserError) as raised, named_as_settings(cfg):
        raise UserError(said)
    assert str(raised.value) == told
