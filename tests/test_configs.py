"""What stands in conf/ composes, and the schemas in growlab.lab.training.configs catch what does not belong there."""

import copy
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import product, zip_longest
from math import prod
from pathlib import Path
from typing import Literal, get_args, get_origin

import hydra
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from growlab.base.settings import parameters
from growlab.growth import make_schedule
from growlab.lab.training import configs, signatures
from growlab.lab.training.configuration import PRIMARY, config_dir, register_schemas
from growlab.optim import carry

CONF = config_dir()
GROUPS = sorted({path.parent.name for path in CONF.glob("*/*.yaml")} - {"hydra"})
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
EXPERIMENTS = [option for group, option in OPTIONS if group == "experiment"]


@pytest.fixture(autouse=True, scope="module")
def hydra_started() -> Iterator[None]:
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@cache
def composed(*overrides: str) -> DictConfig:
    """What nobody changes, so that several tests share it."""
    return compose(PRIMARY, overrides=list(overrides))


# Experiments and methods, which choose other options, alone; of the other groups one option each at once.
WHOLE = [f"{group}={name}" for group, name in OPTIONS if group in ("experiment", "method")]
SINGLE = [[f"{own}={name}" for own, name in OPTIONS if own == group] for group in GROUPS]
TOGETHER = zip_longest(*(options for options in SINGLE if options[0] not in WHOLE))
COMPOSED = [(one,) for one in WHOLE] + [tuple(filter(None, options)) for options in TOGETHER]


@pytest.mark.parametrize("overrides", COMPOSED, ids=",".join)
def test_every_option_composes(overrides: tuple[str, ...]) -> None:
    cfg = composed(*overrides, "name=given")
    parts = {path.stem for path in (CONF / "parts").glob("*.yaml")}
    assert set(cfg) == {field.name for field in fields(configs.MainConfig)} | parts


@pytest.mark.parametrize(
    ("group", "option"), [o for o in OPTIONS if o[0] in ("growth", "lr_adapt", "optimizer")], ids=lambda v: v
)
def test_growth_rates_and_optimizers_instantiate(group: str, option: str) -> None:
    """With exactly the arguments that their files give."""
    assert hydra.utils.instantiate(composed(f"{group}={option}")[group]) is not None


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_option_on_the_command_line_wins_over_the_experiment(experiment: str) -> None:
    own = composed(f"experiment={experiment}", "name=given").growth
    growth = "net2net" if own._target_.endswith(".FixedSize") else "none"
    cfg = composed(
        f"experiment={experiment}", f"growth={growth}", "schedule.total_epochs=7", "optimizer.lr=3"
    )
    # The gain is the network's rather than the method's.
    assert cfg.growth == composed(f"growth={growth}", f"gain={cfg.gain}").growth
    assert (cfg.schedule.total_epochs, cfg.optimizer.lr) == (7, 3)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_value_is_left_open(experiment: str) -> None:
    cfg = composed(f"experiment={experiment}", "name=given")  # the name is known in a run alone
    assert OmegaConf.missing_keys(cfg) == set()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_opens_with_what_it_is(experiment: str) -> None:
    """Its source or purpose, its command and what to expect, as comments."""
    lines = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    comments = "\n".join(line for line in lines if line.startswith("#"))
    assert "# Command:  python -m growlab" in comments and "# Expect:" in comments


SWEEPS = [e for e in EXPERIMENTS if "sweeper:" in (CONF / "experiment" / f"{e}.yaml").read_text()]


@pytest.mark.parametrize("experiment", SWEEPS)
def test_every_job_of_a_sweep_is_an_experiment_of_its_own(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All values of a preset compose, no two jobs are the same, and their folder is the same each time."""
    cfg = compose(PRIMARY, overrides=[f"experiment={experiment}", "name=given"], return_hydra_config=True)
    params = {key: str(values).split(",") for key, values in cfg.hydra.sweeper.params.items()}
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
    assert cfg.hydra.sweep.dir == f"runs/{experiment}"
    expected = int(prod(map(len, params.values())))
    assert 6 <= expected <= 77
    job = composed(f"experiment={experiment}", "name=given")
    for key, values in params.items():
        if (CONF / key).is_dir():
            jobs = [composed(f"experiment={experiment}", "name=given", f"{key}={value}") for value in values]
            distinct = {repr(OmegaConf.to_container(each)) for each in jobs}
        else:
            changed, distinct = copy.deepcopy(job), set()
            for value in values:
                OmegaConf.update(changed, key, yaml.safe_load(value), force_add=key.startswith("+"))
                distinct.add(repr(OmegaConf.select(changed, key.lstrip("+"))))
        assert len(distinct) == len(values)


def test_every_schedule_of_figure_6_is_possible_and_the_papers_own_is_among_them() -> None:
    """Those of the sweep and of each further command in the file's head."""
    keys = ("schedule.initial_epochs", "schedule.epoch_growth_rate", "schedule.width_growth_rate")
    cfg = compose(PRIMARY, overrides=["experiment=figure6"], return_hydra_config=True)
    swept = {key: str(cfg.hydra.sweeper.params[key]) for key in keys}
    head = (CONF / "experiment" / "figure6.yaml").read_text().split("defaults:")[0]
    commands = [line.split() for line in head.splitlines() if "-m experiment=figure6" in line]
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
        ((), "digits"),
        (("growth=net2net", "data.batch_size=3", "seed=1"), "digits"),
        (("data=cifar10",), "resnet20_on_cifar10"),
        (("model=mlp8", "data=mnist"), "mlp8_on_mnist"),
        (("model=custom", "model._target_=my.package.Network"), "Network_on_digits"),
        (("model=timm", "model.name=resnet50.a1_in1k"), "resnet50_a1_in1k_on_digits"),
        (("experiment=resnet20_cifar10",), "resnet20_cifar10"),
        (("experiment=resnet20_cifar10", "data=cifar100"), "resnet20_cifar10_on_cifar100"),
        (("experiment=figure6", "model=vgg11", "data=mnist"), "figure6_with_vgg11_on_mnist"),
        # Its own sweep is over networks.
        (("experiment=table3", "model=vgg19"), "table3"),
        (("model=mlp8", "data=mnist", "name=mine"), "mine"),
    ],
)
def test_a_run_is_named_after_what_it_runs(
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
    cfg = composed("experiment=resnet20_cifar10_lars", f"method={method}")
    assert cfg.growth._target_ == f"growlab.growth.{growth}"
    assert (cfg.lr_adapt.rule is not None) == adapts


@pytest.mark.parametrize(
    "override",
    [
        *(
            "sed=1",
            "seed=x",
            "seed=1.5",
            "seed=null",
            "compile=maybe",
            "probe_size=a",
            "optimizer_state=keep",
        ),
        *("growth.nois_std=0", "growth.noise_std=low", "growth.rule=rato", "growth.output_multiplier=2.5"),
        *("growth.gain=[1]", "lr_adapt.ruel=null", "lr_adapt.output_fan_in=often", "schedule.totl_epochs=3"),
        *("schedule.total_epochs=x", "schedule.total_epochs=1.5", "schedule.epochs=3", "schedule.epochs=[a]"),
        *("schedule.widths=[wide]", "schedule.equal_flops=x", "schedule.initial_width=x"),
        *("schedule.learning_rate.shape=cosin", "schedule.learning_rate.restarts=epoch"),
        *("schedule.learning_rate.batch_rule=cube", "schedule.learning_rate.warmup=1"),
        *(
            "model.widht=1",
            "data.batch=1",
            "optimizer.lrr=1",
            "trainer.precison=32",
            "log_rates_every_n_steps=x",
        ),
    ],
)
def test_a_wrong_key_or_type_is_caught_when_composing(override: str) -> None:
    with pytest.raises(ConfigCompositionException):
        composed(override)


@pytest.mark.parametrize("path", sorted((CONF / "growth").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_schema_has_the_arguments_of_its_class(path: Path) -> None:
    """Read from the source alone, it says what Python's own signature says."""
    target = composed(f"growth={path.stem}").growth._target_
    made, known = signatures.schema(target), parameters(hydra.utils.get_class(target))
    types = {field.name: field.type for field in fields(made) if field.name != "_target_"}
    assert list(types) == list(known)
    for name, parameter in known.items():
        if parameter.annotation in (int, float, str, bool):
            assert types[name] is parameter.annotation
        if get_origin(parameter.annotation) is Literal:
            # A member is the plain word that the class takes.
            assert tuple(map(str, types[name])) == get_args(parameter.annotation)


def test_a_type_of_a_signature_becomes_one_of_a_configuration() -> None:
    types = {field.name: field.type for field in fields(signatures.schema("growlab.growth.make_schedule"))}
    assert types["epochs"] == list[int] | None and types["initial_epochs"] == float | None
    assert types["widths"] == list[float] | None and types["total_epochs"] is int
    assert [str(word) for word in types["batch_size_of"]] == ["last", "first"]
    assert set(configs.OptimizerState) == set(get_args(carry.Inheritance))
    with pytest.raises(LookupError, match=r"no growlab\.growth\.Nothing"):
        signatures.schema("growlab.growth.Nothing")


def test_a_default_lives_in_conf_alone() -> None:
    """Schemas give types; what they do not leave open is only which class a choice stands for."""
    store = ConfigStore.instance().repo["hydra"]["schema"]
    nodes = {**store, **store["growth"]}
    for name, node in nodes.items():
        if isinstance(node, dict) or name in ("lr_adapt.yaml", "schedule.yaml"):
            continue
        given = set(node.node) - {str(key) for key in OmegaConf.missing_keys(node.node)}
        assert given <= {"_target_"}, name


def test_help_names_no_group_of_schemas() -> None:
    assert "schema" not in GROUPS
    assert not [path for path in Path(CONF).rglob("*.yaml") if "/schema/" in path.as_posix()]
