"""Import fairseq and its companions, with a helpful error if the extra `translation` is not installed."""

import importlib
import logging
import warnings
from types import ModuleType

from hydra.core.config_store import ConfigStore

from growlab.base.errors import UserError, how_to_install

EXTRA = f"needs a package that is not installed: {how_to_install('translation')}"


def fairseq_module(name: str) -> ModuleType:
    """Import a module of fairseq, such as `fairseq.data`.

    On its first import fairseq registers configurations in Hydra's store under names of growlab's groups (`model`,
    `optimizer`). They are removed, so that a sweep's later jobs are composed as the first. Its messages about
    optional packages are suppressed.
    """
    store = ConfigStore.instance()
    before = _copied(store.repo)
    root = logging.getLogger()
    handlers = list(root.handlers)
    quiet = logging.NullHandler()
    # With a handler present, logging adds none.
    root.addHandler(quiet)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"translation with fairseq {EXTRA} ({error}).") from error
    finally:
        store.repo, root.handlers = before, handlers


def extra_module(name: str) -> ModuleType:
    """Import a module of another package of the extra `translation`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"translation {EXTRA} ({error}).") from error


def _copied(repository: dict) -> dict:
    # Folders are dictionaries; their entries stay.
    return {name: _copied(node) if isinstance(node, dict) else node for name, node in repository.items()}
