"""Files in conf/ compose and instantiate; wrong types and settings without effect are refused."""

import copy
from functools import cache
from inspect import Parameter
from itertools import product, zip_longest
from math import prod
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from growlab.base.errors import UserError
from growlab.base.settings import parameters
from growlab.growth import make_schedule
from growlab.lab.data import ImageData
from growlab.lab.training.build import check_settings
from growlab.lab.training.checks import check_effects
from growlab.lab.training.configuration import PRIMARY, config_dir

pytestmark = pytest.mark.usefixtures("hydra_started")
CONF = config_dir()
GROUPS = sorted({path.parent.name for path in CONF.glob("*/*.yaml")} - {"hydra"})
OPTIONS = [
    (group, path.relative_to(CONF / group).with_suffix("").as_posix())
    for group in GROUPS
    for path in sorted((CONF / group).rglob("*.yaml"))
]
EXPERIMENTS = [option for group, option in OPTIONS if group == "experiment"]
PARTS = [option for group, option in OPTIONS if group == "parts"]
TOP = set(yaml.safe_load((CONF / "config.yaml").read_text())) - {"defaults", "hydra"} | {*GROUPS, *PARTS}
TOP -= {"debug", "experiment", "method"}


@cache
def composed(*overrides: str) -> DictConfig:
    """Compose a configuration, shared by tests: do not modify it."""
    return compose(PRIMARY, overrides=list(overrides))


# Methods, which choose other options, one by one; of other groups without experiments, one option each together.
WHOLE = [f"{group}={name}" for group, name in OPTIONS if group == "method"]
SINGLE = [[f"{own}={name}" for own, name in OPTIONS if own == group] for group in GROUPS if group != "experiment"]
TOGETHER = zip_longest(*(options for options in SINGLE if options[0] not in WHOLE))
COMPOSED = [(one,) for one in WHOLE] + [tuple(filter(None, options)) for options in TOGETHER]


@pytest.mark.parametrize("overrides", COMPOSED, ids=",".join)
def test_every_option_composes(overrides: tuple[str, ...]) -> None:
    assert TOP - {*PARTS} <= set(composed(*overrides, "name=given")) <= TOP


def test_files_of_growth_rates_and_optimizers_instantiate() -> None:
    for group, option in OPTIONS:
        if group in ("growth", "lr_adapt", "optimizer"):
            given = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
            if "defaults" not in given:
                settings = OmegaConf.create({**given, **({"gain": 2.0} if "gain" in given else {})})
                assert hydra.utils.instantiate(settings) is not None
            if group == "growth" and "defaults" not in given:
                # All arguments are in the file, since Hydra refuses other keys.
                known = parameters(hydra.utils.get_class(given["_target_"]))
                assert set(given) - {"_target_"} == {n for n, p in known.items() if p.kind is not Parameter.VAR_KEYWORD}


# Arguments of ImageData that only data=folder has.
OF_FOLDERS = {"on_error", "test_fraction"}
DATA_SETS = [name for group, name in OPTIONS if group == "data" and name not in ("custom", "folder")]


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_data_set_has_every_argument_of_its_class(name: str) -> None:
    """tests/runs/test_own_data.py tests users' data."""
    config = OmegaConf.to_container(composed(f"data={name}", "seed=7", "name=given"), resolve=True)["data"]
    data = hydra.utils.instantiate(config)
    assert data.seed == 7 and (getattr(data, "name", None) or name) == name.removesuffix("_incremental")
    own = OF_FOLDERS if isinstance(data, ImageData) else set()
    assert set(config) - {"_target_"} == set(parameters(type(data))) - own


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_complete_and_opens_with_its_purpose(experiment: str) -> None:
    """Comments give its command and the expected result; its lists of stages are consistent."""
    cfg = composed(f"experiment={experiment}", "name=given")  # the name is unknown outside of a run
    assert set(cfg) == TOP
    assert OmegaConf.missing_keys(cfg) == set()
    check_settings(cfg)
    if cfg.schedule.get("epochs") is not None:
        assert sum(cfg.schedule.epochs) == cfg.schedule.total_epochs
    lines = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    comments = "\n".join(line for line in lines if line.startswith("#"))
    assert "# Command:  python -m growlab" in comments and "# Expect:" in comments


@pytest.mark.parametrize("experiment", ["resnet20_cifar10", "testbed_cifar10"])
def test_an_option_on_the_command_line_wins_over_the_experiment(experiment: str) -> None:
    own = composed(f"experiment={experiment}", "name=given").growth
    growth = "net2net" if own._target_.endswith(".FixedSize") else "none"
    cfg = composed(f"experiment={experiment}", f"growth={growth}", "schedule.total_epochs=7", "optimizer.lr=3")
    # The gain depends on the network.
    assert cfg.growth == composed(f"growth={growth}", f"gain={cfg.gain}").growth
    assert (cfg.schedule.total_epochs, cfg.optimizer.lr) == (7, 3)


SWEEPS = [e for e in EXPERIMENTS if "sweeper:" in (CONF / "experiment" / f"{e}.yaml").read_text()]


@pytest.mark.parametrize("experiment", SWEEPS)
def test_jobs_of_a_sweep_are_all_different(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All values of a preset are different, and its folder does not depend on the time."""
    cfg = compose(PRIMARY, overrides=[f"experiment={experiment}", "name=given"], return_hydra_config=True)
    params = {key: str(values).split(",") for key, values in cfg.hydra.sweeper.params.items()}
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
    # Values cached from an earlier composition.
    OmegaConf.clear_cache(cfg)
    assert cfg.hydra.sweep.dir == f"runs/{experiment.removeprefix('papers/')}"
    assert 6 <= int(prod(map(len, params.values()))) <= 77
    job = composed(f"experiment={experiment}", "name=given")
    for key, values in params.items():
        if (CONF / key).is_dir():
            # `test_every_option_composes` composes them.
            distinct = {(CONF / key / f"{value}.yaml").read_text() for value in values}
        else:
            changed, distinct = copy.deepcopy(job), set()
            for value in values:
                OmegaConf.update(changed, key, yaml.safe_load(value), force_add=key.startswith("+"))
                distinct.add(repr(OmegaConf.select(changed, key.lstrip("+"))))
        assert len(distinct) == len(values)


def test_schedules_of_figure_6_are_possible_and_include_the_papers() -> None:
    """Schedules of the sweep and of the commands in the comments of the file."""
    keys = ("schedule.initial_epochs", "schedule.epoch_growth_rate", "schedule.width_growth_rate")
    cfg = compose(PRIMARY, overrides=["experiment=papers/figure6"], return_hydra_config=True)
    swept = {key: str(cfg.hydra.sweeper.params[key]) for key in keys}
    head = (CONF / "experiment" / "papers" / "figure6.yaml").read_text().split("defaults:")[0]
    commands = [line.split() for line in head.splitlines() if "-m experiment=papers/figure6" in line]
    sweeps, settings = [], OmegaConf.to_container(cfg.schedule)
    for command in commands:
        if "method=fixed_size" not in command:
            own = dict(word.split("=") for word in command if word.startswith("schedule."))
            assert set(own) <= set(keys)
            values = [({**swept, **own})[key].split(",") for key in keys]
            sweeps.append([tuple(map(float, chosen)) for chosen in product(*values)])
    assert [len(sweep) for sweep in sweeps] == [48, 12, 12, 16]
    assert (8, 0.2, 0.2) in sweeps[0]
    for initial, epoch_rate, width_rate in (chosen for sweep in sweeps for chosen in sweep):
        rates = {"epoch_growth_rate": epoch_rate, "width_growth_rate": width_rate}
        schedule = make_schedule(160, 128, num_stages=settings["num_stages"], initial_epochs=initial, **rates)
        assert schedule.num_stages == 9 and min(schedule.epochs) >= 1


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("growth=net2net", "data.batch_size=3", "seed=1"), "digits"),
        (("model=mlp8", "data=mnist"), "mlp8_on_mnist"),
        (("model=custom", "model._target_=my.package.Network"), "Network_on_digits"),
        (("model=timm", "model.name=resnet50.a1_in1k"), "resnet50_a1_in1k_on_digits"),
        (("experiment=resnet20_cifar10",), "resnet20_cifar10"),
        (("experiment=papers/figure6", "model=vgg11", "data=mnist"), "figure6_with_vgg11_on_mnist"),
        # It sweeps over networks.
        (("experiment=papers/table3", "model=vgg19"), "table3"),
        (("model=mlp8", "data=mnist", "name=mine"), "mine"),
    ],
)
def test_a_run_is_named_after_its_network_and_data(
    overrides: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose(PRIMARY, overrides=list(overrides), return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
    assert cfg.name == name
    assert Path(cfg.hydra.run.dir).parent == Path("runs") / name


@pytest.mark.parametrize(
    ("method", "growth", "adapts"),
    [("net2net", "Net2Net", False), ("growing_ra", "PairGrowth", True), ("ours", "VarianceTransfer", True)],
)
def test_a_method_wins_over_the_experiment(method: str, growth: str, adapts: bool) -> None:
    cfg = composed("experiment=papers/resnet20_cifar10_lars", f"method={method}")
    assert cfg.growth._target_ == f"growlab.growth.{growth}"
    assert (cfg.lr_adapt.rule is not None) == adapts


# Wrong keys and types ---------------------------------------------------------------------------------------


def test_a_value_of_another_type_is_caught_before_the_run() -> None:
    cfg = copy.deepcopy(composed("name=given"))
    for name, value in {
        **{"growth.noise_std": "low", "growth.rule": "rato", "growth.output_multiplier": 2.5},
        **{"growth.gain": [1], "lr_adapt.divide_output_lr_by_fan_in": "often", "schedule.total_epochs": 1.5},
        **{"schedule.epochs": 3, "schedule.widths": ["wide"], "schedule.equal_flops": "x"},
        **{"schedule.batch_size": "most", "schedule.learning_rate.shape": "cosin", "schedule.budget": "x"},
        **{"checkpoint.every_minutes": "x", "depth.start": 3, "checkpoint.signals": 3, "probe_size": "x"},
        **{"compile": "maybe", "optimizer_state": "keep", "keep_full": "all", "norm_anneal_fraction": "x"},
        **{"seed": 2**32, "probe_size": 1, "num_threads": 0, "norm_anneal_fraction": 1, "log_every_n_steps": 0},
        **{"schedule.budget": 0, "schedule.total_steps": 0, "schedule.max_memory_gib_per_device": 0.0},
        **{"checkpoint.every_n_steps": 0, "batch_norm_samples": -1},
    }.items():
        before = OmegaConf.select(cfg, name)
        OmegaConf.update(cfg, name, value)
        OmegaConf.update(cfg, "depth.blocks", "auto")
        with pytest.raises(UserError, match=rf"^{name}(\[0\])? must be .*, not "):
            check_settings(cfg)
        OmegaConf.update(cfg, name, before)


def test_integers_become_the_floats_that_a_run_records() -> None:
    cfg = copy.deepcopy(composed("name=given", "schedule.widths=[0.5,1]", "schedule.epochs=[1,1]"))
    OmegaConf.update(cfg, "schedule.learning_rate.warmup_epochs", 1)
    OmegaConf.update(cfg, "growth.noise_std", 0)
    check_settings(cfg)
    found: Any = (cfg.schedule.widths, cfg.schedule.epochs, cfg.growth.noise_std, cfg.schedule.total_epochs)
    assert repr(found) == f"([0.5, 1.0], [1, 1], 0.0, {cfg.schedule.total_epochs})"
    assert repr(cfg.schedule.learning_rate.warmup_epochs) == "1.0"


# Settings without effect ------------------------------------------------------------------------------------


def check(*overrides: str, is_sweep: bool = False) -> None:
    settings: Any = OmegaConf.to_container(composed(*overrides, "name=given"), resolve=True)
    check_effects(settings, overrides, is_sweep)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("experiment=papers/mlp8_cifar10", "schedule.total_epochs=3"),
            "schedule.total_epochs=3 has no effect with schedule.epochs=[5,5,5,5,5,5,5,5,5,5], which the experiment "
            "sets: set that, or add schedule.epochs=null.",
        ),
        (
            ("experiment=testbed_cifar10", "schedule.total_epochs=3"),
            "schedule.total_epochs=3 has no effect with schedule.budget=3.6",
        ),
        (("experiment=papers/convnet4_cifar10", "schedule.num_stages=2"), "with schedule.epochs=[10,10,10]"),
        (("experiment=papers/convnet4_cifar10", "schedule.initial_fraction=0.5"), "with schedule.epochs=[10,10,10]"),
        (
            ("schedule.eval_every_n_steps=9",),
            "no effect, since the run's length is in epochs: set schedule.total_steps, without schedule.budget.",
        ),
        (
            ("experiment=llama_text", "schedule.budget=2", "schedule.repeat_batches=2"),
            "schedule.repeat_batches=2 has no",
        ),
        (("experiment=transformer_multi30k", "schedule.initial_width=0.5"), "with schedule.widths=[0.25,0.5,1.0]"),
    ],
)
def test_a_setting_without_effect_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check(*overrides)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule.total_epochs=3", "schedule.initial_fraction=0.3", "schedule.num_stages=2"),
        ("experiment=papers/mlp8_cifar10", "schedule.total_epochs=50", "schedule.num_stages=10"),
        (
            "experiment=papers/mlp8_cifar10",
            *("schedule.total_epochs=3", "schedule.epochs=null", "schedule.widths=null"),
        ),
        ("experiment=testbed_cifar10", "schedule.total_epochs=3", "schedule.budget=null"),
        ("schedule.total_epochs=3", "schedule.budget=2", "schedule.learning_rate.decay_fraction=0.3"),
        ("schedule.learning_rate.shape=steps", "schedule.learning_rate.milestones=[1]"),
        ("data.validation=split", "data.validation_fraction=0.3", "data.split_seed=1"),
        ("data=tokens", "data.validation_fraction=0.3"),
        ("experiment=llama_text", "data.path=text", "schedule.eval_every_n_steps=9"),
    ],
)
def test_a_setting_with_an_effect_passes(overrides: tuple[str, ...]) -> None:
    check(*overrides, *(("schedule.learning_rate.shape=wsd",) if "schedule.budget=2" in overrides else ()))


@pytest.mark.parametrize("part", PARTS)
def test_a_setting_of_a_part_that_is_left_out_is_refused(part: str) -> None:
    cfg = composed("name=given")
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    switch = next(key for key in cfg.parts[part] if key != "_target_")
    for key, value in cfg[part].items():
        if key not in (switch, "_target_") and value is not None:
            typed = f"{part}.{key}={value}"
            expected = f"^{part}.{key}=.* has no effect: {part} is left out while {part}.{switch}=null"
            with pytest.raises(UserError, match=expected):
                check_effects(settings, [typed])
            check_effects(settings, [typed], is_sweep=True)
    check_effects(settings, [f"{part}.{switch}=null"])
