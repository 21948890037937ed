"""What is typed has an effect, or is refused."""

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir

from growlab.base.errors import UserError
from growlab.lab.training.configuration import PRIMARY, config_dir, register_schemas
from growlab.lab.training.ineffective_settings import check_overruled

PARTS = sorted(path.stem for path in (config_dir() / "parts").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def hydra_started() -> Iterator[None]:
    register_schemas()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield


def check(*overrides: str) -> None:
    check_overruled(compose(PRIMARY, list(overrides)), overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("experiment=mlp8_cifar10", "schedule.total_epochs=3"),
            "schedule.total_epochs=3 has no effect with schedule.epochs=[5,5,5,5,5,5,5,5,5,5], which the experiment "
            "sets: set that, or add schedule.epochs=null.",
        ),
        (
            ("experiment=testbed_cifar10", "schedule.total_epochs=3"),
            "schedule.total_epochs=3 has no effect with schedule.budget=3.6",
        ),
        (("experiment=convnet4_cifar10", "schedule.num_stages=2"), "with schedule.epochs=[10,10,10]"),
        (
            ("experiment=convnet4_cifar10", "schedule.initial_fraction=0.5"),
            "with schedule.epochs=[10,10,10]",
        ),
        (
            ("experiment=transformer_multi30k", "schedule.initial_width=0.5"),
            "with schedule.widths=[0.25,0.5,1.0]",
        ),
        (
            ("schedule.learning_rate.shape=wsd", "schedule.learning_rate.milestones=[1,2]"),
            "schedule.learning_rate.milestones=[1,2] has no effect with schedule.learning_rate.shape=wsd: it is of "
            "schedule.learning_rate.shape=steps.",
        ),
        (
            ("schedule.learning_rate.shape=cosine", "schedule.learning_rate.decay_fraction=0.3"),
            "has no effect with schedule.learning_rate.shape=cosine: it is of schedule.learning_rate.shape=wsd.",
        ),
        (
            ("data.standardise=feature", "data.mean=[0.5]"),
            "data.mean=[0.5] has no effect with data.standardise=feature: it is of data.standardise=channel.",
        ),
        (
            ("schedule.max_memory_gib_per_device=2",),
            "schedule.max_memory_gib_per_device=2 has no effect with schedule.batch_size=null: it is of "
            "schedule.batch_size=auto.",
        ),
        (
            ("data.validation=none", "data.validation_fraction=0.3"),
            "data.validation_fraction=0.3 has no effect with data.validation=none: it is of data.validation=split.",
        ),
    ],
)
def test_what_was_typed_in_vain_is_told(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(UserError) as caught:
        check(*overrides)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.total_epochs=3", "schedule.initial_fraction=0.3", "schedule.num_stages=2"),
        ("experiment=mlp8_cifar10", "schedule.total_epochs=50", "schedule.num_stages=10"),
        (
            "experiment=mlp8_cifar10",
            "schedule.total_epochs=3",
            "schedule.epochs=null",
            "schedule.widths=null",
        ),
        ("experiment=testbed_cifar10", "schedule.total_epochs=3", "schedule.budget=null"),
        ("experiment=testbed_cifar10", "schedule.budget=3"),
        ("schedule.total_epochs=3", "schedule.budget=2"),
    ],
)
def test_what_counts_passes(overrides: tuple[str, ...]) -> None:
    check(*overrides)


@pytest.mark.parametrize("part", PARTS)
def test_a_setting_of_a_part_that_is_left_out_is_told(part: str) -> None:
    composed = compose(PRIMARY)
    switch = next(key for key in composed.parts[part] if key != "_target_")
    settings = {
        key: value
        for key, value in composed[part].items()
        if key not in (switch, "_target_") and value is not None
    }
    for key, value in settings.items():
        typed = f"{part}.{key}={value}"
        with pytest.raises(UserError) as caught:
            check(typed)
        assert str(caught.value).startswith(
            f"{typed} has no effect: {part} is left out while {part}.{switch}=null"
        )
        check_overruled(compose(PRIMARY, [typed]), [typed], is_sweep=True)
    check(f"{part}.{switch}=null")


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.learning_rate.shape=steps", "schedule.learning_rate.milestones=[1]"),
        ("schedule.learning_rate.shape=wsd", "schedule.learning_rate.decay_fraction=0.3"),
        ("data.validation=split", "data.validation_fraction=0.3", "data.split_seed=1"),
        ("data=tokens", "data.validation_fraction=0.3"),
    ],
)
def test_a_setting_of_the_shape_that_is_used_passes(overrides: tuple[str, ...]) -> None:
    check(*overrides)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_do_not_contradict_themselves(experiment: str) -> None:
    schedule = compose(PRIMARY, [f"experiment={experiment}"]).schedule
    if schedule.get("epochs") is not None:
        assert sum(schedule.epochs) == schedule.total_epochs
