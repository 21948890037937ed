from collections.abc import Iterator

import pytest
from hydra import initialize_config_dir

from growlab.lab.training.configuration import config_dir, set_plugin_defaults


@pytest.fixture(scope="module")
def hydra_started() -> Iterator[None]:
    """Let `hydra.compose` read the files in `conf/`."""
    set_plugin_defaults()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield
