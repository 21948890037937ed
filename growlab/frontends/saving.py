"""Save plain networks in Lightning's checkpoints, and find averages of the network that callbacks keep."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch import callbacks as lightnings
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.network import make_plain, put_back

# The second came with Lightning 2.6.
_NAMES = ("StochasticWeightAveraging", "WeightAveraging")
_LIGHTNINGS = tuple(getattr(lightnings, name) for name in _NAMES if hasattr(lightnings, name))

#: By network and name: the original value of each entry that was replaced by a plain one, to resume with.
Kept = dict[str, dict[str, Tensor]]


class Saving:
    """Wraps a module's `on_save_checkpoint`, the last hook before a checkpoint is written, to call `then` before it.

    Needed because Lightning does not call callbacks' hooks for weights-only checkpoints, and because callbacks that
    keep an average add it in their own hook.
    """

    def __init__(self, module: LightningModule, then: Callable[[dict[str, Any]], None]) -> None:
        self._module, self._next = module, module.on_save_checkpoint
        self._then: Callable[[dict[str, Any]], None] | None = then
        self._own = vars(module).get("on_save_checkpoint")
        module.on_save_checkpoint = self  # type: ignore[method-assign]

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        """Change the checkpoint, then call the module's hook."""
        if self._then is not None:
            self._then(checkpoint)
        self._next(checkpoint)

    def __reduce__(self) -> Any:
        # A copy of the module is not trained.
        return getattr, (self._module, "on_save_checkpoint")

    def remove(self) -> None:
        """Restore the module's hook."""
        self._then = None
        # Of two networks that grow, the one that stands in front may go first.
        while isinstance(first := vars(self._module).get("on_save_checkpoint"), Saving) and first._then is None:
            if first._own is None:
                del self._module.on_save_checkpoint
            else:
                self._module.on_save_checkpoint = first._own


def hold_plain_networks(grower: Grower, module: LightningModule, checkpoint: dict[str, Any]) -> Kept:
    """Replace networks in a checkpoint by plain ones, which `load_from_checkpoint` loads at full width.

    While normalisations over channels are being annealed, the checkpoint stays unchanged, with entries that a plain
    network rejects.

    Returns:
        The original values of changed entries, for `put_back_networks`.
    """
    kept: Kept = {}
    for key, path, name, network in list(_networks_in(grower, module, checkpoint)):
        try:
            plain, kept[name] = grower.plain_tensors(network)
        except UserError:
            return {}
        prefix = path and f"{path}."
        state = checkpoint[key] = _with_metadata(checkpoint[key], path, network)
        for entry in network.state_dict().keys() - plain.keys():
            state.pop(prefix + entry, None)
        # A module may leave entries out of its state_dict.
        state.update({prefix + entry: plain[entry] for entry in kept[name] if prefix + entry in state})
        make_plain(vars(state)["_metadata"].get(path, {}))
    return kept


def put_back_networks(grower: Grower, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore the growing networks' own values after plain weights were loaded into them."""
    for name, network in _networks(grower).items():
        put_back(network, kept.get(name, {}))


def _networks(grower: Grower) -> dict[str, nn.Module]:
    return {"": grower.network, **grower.copies()}


def _networks_in(
    grower: Grower, module: LightningModule, checkpoint: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, nn.Module]]:
    """Yield each growing network in a checkpoint: the entry, the path in it, the network's name, and itself.

    Averages of the module contain networks at the module's paths.
    """
    networks = _networks(grower)
    paths = {path for path, part in module.named_modules() if any(part is own for own in networks.values())}
    for key, state in checkpoint.items():
        if not isinstance(state, Mapping):
            continue
        for path in sorted(paths):
            for name, network in networks.items():
                if _is_of(state, path, network):
                    yield key, path, name, network


def _is_of(state: Mapping[str, Any], path: str, network: nn.Module) -> bool:
    """Return True if a state_dict has exactly this network's parameters at a path."""
    own = {f"{path}.{name}" if path else name: p for name, p in network.named_parameters() if p.numel()}
    found = ((state.get(name), p) for name, p in own.items() if name in state)
    return any(isinstance(t, Tensor) and t.data_ptr() == p.data_ptr() for t, p in found)


def _with_metadata(state: Any, path: str, network: nn.Module) -> Any:
    """Return the state_dict with the network's metadata, if a callback has dropped it."""
    if not hasattr(state, "_metadata"):
        state = OrderedDict(state)
        vars(state)["_metadata"] = OrderedDict()
    about = vars(network.state_dict())["_metadata"].get("", {})
    vars(state)["_metadata"].setdefault(path, dict(about))
    return state


def shapes_of(network: nn.Module) -> dict[str, torch.Size]:
    """Shapes of a network's parameters and buffers, by name."""
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


def averages(
    callbacks: Iterable[Callback], network: nn.Module, shapes: Mapping[str, torch.Size], known: Iterable[nn.Module]
) -> Iterator[nn.Module]:
    """Find copies of the network in modules of callbacks, such as Lightning's weight averages.

    `shapes` are the network's at the time of the callbacks' `setup`; `known` are the trained module and copies found
    before, which callbacks may reference too.

    Raises:
        UserError: Lightning made an average before the network became a seed.
    """
    seen = {id(module) for each in known for module in each.modules()}
    for callback in callbacks:
        kept_modules = [value for value in vars(callback).values() if isinstance(value, nn.Module)]
        for copy in (module for value in kept_modules for module in value.modules() if id(module) not in seen):
            theirs = shapes_of(copy) if type(copy) is type(network) else {}
            if theirs == shapes:
                yield copy
            elif theirs.keys() == shapes.keys() and isinstance(callback, _LIGHTNINGS):
                name = type(callback).__name__
                raise UserError(
                    f"{name} has copied the network before it became a seed: put Growth before it, "
                    f"Trainer(callbacks=[Growth(...), {name}(...)])."
                )
