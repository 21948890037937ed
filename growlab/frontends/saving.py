"""Lightning's checkpoints of a growing network, which hold plain ones; and averages of it that callbacks keep."""

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

#: Weights of each growing network, by its name and theirs, that training goes on with in place of plain ones.
Kept = dict[str, dict[str, Tensor]]


class Saving:
    """Stands in front of a module's `on_save_checkpoint`, the last hook before a checkpoint is written.

    Callbacks are not asked about checkpoints of weights alone, and those that keep an average put it into the
    checkpoint when they are asked.

    Args:
        module: what is trained.
        then: called with each checkpoint.
    """

    def __init__(self, module: LightningModule, then: Callable[[dict[str, Any]], None]) -> None:
        self._module, self._next = module, module.on_save_checkpoint
        self._then: Callable[[dict[str, Any]], None] | None = then
        self._own = vars(module).get("on_save_checkpoint")
        module.on_save_checkpoint = self  # type: ignore[method-assign]

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        """Change the checkpoint, then let the module do so."""
        if self._then is not None:
            self._then(checkpoint)
        self._next(checkpoint)

    def __reduce__(self) -> Any:
        # A copy of the module is not trained.
        return getattr, (self._module, "on_save_checkpoint")

    def remove(self) -> None:
        """Leave the module its own hook."""
        self._then = None
        # Of two networks that grow, the one that stands in front may go first.
        while (
            isinstance(first := vars(self._module).get("on_save_checkpoint"), Saving) and first._then is None
        ):
            if first._own is None:
                del self._module.on_save_checkpoint
            else:
                self._module.on_save_checkpoint = first._own


def hold_plain_networks(grower: Grower, module: LightningModule, checkpoint: dict[str, Any]) -> Kept:
    """Let a checkpoint hold plain networks, which `load_from_checkpoint` takes at full width.

    While normalisations over channels are no plain ones, it is left alone, and has entries that no plain network takes.

    Args:
        grower: of a network of the module.
        module: what is trained.
        checkpoint: whose `state_dict` is the module's or that of an average of it; other entries may be such too.

    Returns:
        What training goes on with in place of the plain weights, for `put_back_networks`.
    """
    kept: Kept = {}
    for key, path, name, network in list(_held(grower, module, checkpoint)):
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
    """Undo what plain weights have done to growing networks that loaded them.

    Raises:
        UserError: they are of a version that kept them in another form.
    """
    if any(isinstance(entry, Tensor) for entry in kept.values()):
        raise UserError(
            "the checkpoint was written by an earlier version of growlab: its weights can be loaded, its training goes "
            "on with that version alone."
        )
    for name, network in _networks(grower).items():
        put_back(network, kept.get(name, {}))


def _networks(grower: Grower) -> dict[str, nn.Module]:
    return {"": grower.network, **grower.copies()}


def _held(
    grower: Grower, module: LightningModule, checkpoint: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, nn.Module]]:
    """Each growing network in a checkpoint's state_dicts: the entry, the path in it, the network's name, and itself.

    An average of the module has networks at the same paths as the module.
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
    """Return True if a state_dict has this very network's parameters at a path."""
    own = {f"{path}.{name}" if path else name: p for name, p in network.named_parameters() if p.numel()}
    found = ((state.get(name), p) for name, p in own.items() if name in state)
    return any(isinstance(t, Tensor) and t.data_ptr() == p.data_ptr() for t, p in found)


def _with_metadata(state: Any, path: str, network: nn.Module) -> Any:
    """A state_dict that says of a network what the network's own says, where a callback has left that out."""
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
    callbacks: Iterable[Callback],
    network: nn.Module,
    shapes: Mapping[str, torch.Size],
    known: Iterable[nn.Module],
) -> Iterator[nn.Module]:
    """Copies of the network in modules that callbacks hold, such as Lightning's averages and other people's.

    Args:
        callbacks: the trainer's others.
        network: that grows.
        shapes: of the network as callbacks have found it in their `setup`.
        known: what is trained, and copies that were found before; callbacks may hold them too.

    Raises:
        UserError: an average of Lightning's was made before the network became a seed.
    """
    seen = {id(module) for each in known for module in each.modules()}
    for callback in callbacks:
        held = [value for value in vars(callback).values() if isinstance(value, nn.Module)]
        for copy in (module for value in held for module in value.modules() if id(module) not in seen):
            theirs = shapes_of(copy) if type(copy) is type(network) else {}
            if theirs == shapes:
                yield copy
            elif theirs.keys() == shapes.keys() and isinstance(callback, _LIGHTNINGS):
                name = type(callback).__name__
                raise UserError(
                    f"{name} has copied the network before it became a seed: put Growth before it, "
                    f"Trainer(callbacks=[Growth(...), {name}(...)])."
                )
