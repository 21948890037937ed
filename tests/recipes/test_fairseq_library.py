"""Without fairseq, the error says how to install it; importing it does not change Hydra's store or the log."""

import copy
import logging
import sys

import pytest
from hydra.core.config_store import ConfigStore

from growlab.base.errors import UserError
from growlab.recipes.translation.sentence_pairs import Preparation, extra_module, fairseq_module, open_pairs


@pytest.fixture
def without_fairseq(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fairseq"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fairseq", None)


def test_a_missing_package_is_one_line(without_fairseq, tmp_path):
    preparation = Preparation("de", "en", "none", 100, False, True, 0)
    with pytest.raises(UserError, match=r"pip install 'fairseq-fixed"):
        open_pairs(tmp_path / "missing", "iwslt14", preparation)
    with pytest.raises(UserError, match=r"pip install 'fairseq-fixed"):
        extra_module("no_such_package_of_translation")


def test_imports_change_neither_hydras_store_nor_the_log(monkeypatch):
    """fairseq registers a `model` option and configures logging when it is imported."""
    store = ConfigStore.instance()
    before, handlers = copy.copy(store.repo), list(logging.root.handlers)
    models = set(store.repo.get("model", {}))

    def imported(name: str) -> str:
        store.store(group="model", name="transformer", node={"layers": 6})
        logging.info("a package could be installed")
        return name

    monkeypatch.setattr("growlab.recipes.translation.sentence_pairs.importlib.import_module", imported)
    assert fairseq_module("fairseq.data") == "fairseq.data"
    assert store.repo.keys() == before.keys()
    assert set(store.repo.get("model", {})) == models
    assert logging.root.handlers == handlers
