from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from growlab.base.settings import parameters

CONF = Path(__file__).parents[3] / "conf"
# Images; text has a class of its own, and what a user brings is tried in tests/runs/test_own_data.py.
OTHERS = {"text", "tokens"}
OWN = {"custom", "folder"}
# Arguments of ImageData that data=folder alone gives.
OF_FOLDERS = {"on_error", "test_fraction"}
NAMES = sorted({path.stem for path in (CONF / "data").glob("*.yaml")} - OTHERS - OWN)


def test_every_data_set_has_a_file():
    once = [*("cifar10", "cifar100", "digits", "fashion_mnist", "imagenet", "iwslt14", "mnist", "multi30k")]
    assert sorted([*once, "cifar10_incremental", "cifar100_incremental", "digits_incremental"]) == NAMES


@pytest.mark.parametrize("name", [*NAMES, *sorted(OTHERS)])
def test_data_config_gives_every_argument_of_the_class(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose(overrides=[f"+data={name}", "+seed=7"]), resolve=True)["data"]
    data = instantiate(config)
    assert data.seed == 7 and (name in OTHERS or data.name == name.removesuffix("_incremental"))
    assert set(config) - {"_target_"} == set(parameters(type(data))) - (set() if name in OTHERS else OF_FOLDERS)
