"""Sharded networks (FSDP2, tensor parallelism): the user's sharding function, undone and redone around growth events.

While sharding is undone, modules are the plain ones that growlab traced, with DTensors as parameters. New tensors are
computed in full and sharded one at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state

from growlab.base import ranks
from growlab.base.errors import UserError
from growlab.base.pieces import is_piece, same_placement
from growlab.grower.part import BlockPart, Part, WidthPart
from growlab.growth import GrowthMethod
from growlab.optim.regional import Regional

#: Shards a network in place: `fully_shard` on its blocks and itself, `parallelize_module`, wrappers around blocks.
Shard = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class ShardWithin:
    """A `Shard` that also changes a module around the network, as Lightning's `configure_model` does."""

    module: nn.Module
    shard: Callable[[], Any]

    def __call__(self, network: nn.Module) -> Any:
        """Shard the module."""
        return self.shard()


# torch's record of the modules that `fully_shard` has changed; it has no public undo.
_KNOWN: Any = _composable_state._module_state_mapping


class Sharding:
    """Shard a network by the user's function, undo that for a growth event, and shard it again.

    The function is called in the constructor and after each event. It may only change modules and shard parameters.

    Raises:
        UserError: processes have different networks, or the function returns another network or shards no parameter.
    """

    def __init__(self, network: nn.Module, shard: Shard, seed: int) -> None:
        network = shard.module if isinstance(shard, ShardWithin) else network
        self._network, self._shard = network, shard
        # Each module before and after the function.
        self._changes: list[tuple[nn.Module, _ModuleState, _ModuleState]] = []
        if ranks.several():
            state = ((name, t) for name, t in ranks.network_state(network, ()) if not t.is_meta)
            ranks.compare((("seed=", seed), *state), "before it was sharded", ", and give all processes the same seed")
        self._put_on()
        if not any(is_piece(parameter) for parameter in network.parameters()):
            raise UserError(
                "shard= has sharded no parameter: give a function that calls fully_shard or parallelize_module on the "
                "network's modules."
            )

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Context in which modules are plain and their parameters can be replaced."""
        for module in list(self._network.modules()):
            _KNOWN.pop(module, None)
        for module, before, after in self._changes:
            before.restore(module, after)
        try:
            yield
        finally:
            self._put_on()

    def _put_on(self) -> None:
        network = self._network
        before = {module: _ModuleState(module) for module in network.modules()}
        pieces = [(parameter, owners) for parameter, owners in _owners(network) if is_piece(parameter)]
        for parameter, owners in pieces:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            _set(owners, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        other = self._shard(network)
        if isinstance(other, nn.Module) and other is not network:
            raise UserError(
                f"shard= returned a {type(other).__name__} in place of the network: it has to shard the network's own "
                "modules, as fully_shard does."
            )
        self._changes = [(module, state, _ModuleState(module)) for module, state in before.items()]
        for parameter, owners in pieces:
            module, attribute = owners[0]
            now = module._parameters[attribute]
            if now is None or not same_placement(now, parameter):
                raise UserError(
                    f"shard= shards {attribute} of {type(module).__name__} differently than before the growth event: "
                    "let it decide by names, not by sizes."
                )
            _set(owners, parameter)


def known_sharding(networks: Iterable[nn.Module]) -> Callable[[], None]:
    """Return a function that restores the present classes of networks' modules, and torch's record of them."""
    networks = list(networks)
    present = [(m, type(m), _KNOWN.get(m)) for network in networks for m in network.modules()]

    def restore() -> None:
        for module in (m for network in networks for m in network.modules()):
            _KNOWN.pop(module, None)
        for module, kind, state in present:
            if type(module) is not kind:
                module.__class__ = kind
            if state is not None:
                _KNOWN[module] = state

    return restore


class _ModuleState:
    """Class, attributes, children and hooks of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.kind, self.attributes = type(module), dict(vars(module))
        self.children, self.hooks = dict(module._modules), {key: dict(d) for key, d in _hooks(module).items()}

    def restore(self, module: nn.Module, after: "_ModuleState") -> None:
        """Undo a module's changes from this state to the later one `after`, and remove torch's hooks added since."""
        module.__class__ = self.kind
        own = vars(module)
        for key in after.attributes.keys() - self.attributes.keys():
            own.pop(key, None)
        for key, value in self.attributes.items():
            if after.attributes.get(key) is not value:
                own[key] = value
        for key, child in self.children.items():
            if after.children.get(key) is not child:
                module._modules[key] = child
        for key, hooks in _hooks(module).items():
            known = self.hooks.get(key, {})
            for number, hook in list(hooks.items()):
                added = number in after.hooks.get(key, {}) or _origin(hook).startswith("torch.distributed")
                if added and number not in known:
                    del hooks[number]


def _hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    return {key: value for key, value in vars(module).items() if "_hooks" in key and isinstance(value, dict)}


def _origin(hook: Any) -> str:
    """Name of the Python module that defines a hook."""
    while (inner := hook.func if isinstance(hook, partial) else getattr(hook, "hook", None)) is not None:
        hook = inner
    return getattr(hook, "__module__", None) or ""


def _owners(network: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Each parameter with the modules and attributes that have it."""
    by_id: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for module in network.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                by_id.setdefault(id(parameter), (parameter, []))[1].append((module, attribute))
    return list(by_id.values())


def _set(owners: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for module, attribute in owners:
        module._parameters[attribute] = parameter


def check_sharding(shard: Any, method: GrowthMethod, parts: Sequence[Part]) -> None:
    """Refuse methods and parts that do not support sharded networks.

    Raises:
        UserError: `shard` is not a function; the method measures data or gradients; or a part changes tensors.
    """
    if shard is None:
        return
    if not callable(shard):
        raise UserError(f"shard={shard!r} must be a function that shards the network in place.")
    measures = method.batches or method.wants_gradients or type(method).observe is not GrowthMethod.observe
    if measures or type(method).prepare is not GrowthMethod.prepare:
        raise UserError(
            f"{method.name} computes new weights from data or gradients of the whole network, which is not supported "
            "for a sharded one: grow it with VarianceTransfer, PairGrowth, Net2Net, HyperCloning, Lemon, Bert2Bert or "
            "RandomGrowth."
        )
    for part in parts:
        changes = isinstance(part, (WidthPart, BlockPart)) or part.num_copies or part.grows
        if changes and not part.shards:
            raise UserError(f"{part.name} changes or copies whole tensors, which is not supported with shard=.")


def check_follower(follower: Any, sharding: Sharding | None) -> None:
    """Raise a UserError for averages of a sharded network, and optimizers whose rates depend on regions of tensors."""
    if sharding is None:
        return
    if isinstance(follower, nn.Module):
        raise UserError(
            "averages of a sharded network cannot grow along: torch cannot copy such a network; leave them out."
        )
    if isinstance(follower, Regional):
        raise UserError(
            f"growlab's {type(follower).__name__} has rates for regions of a tensor, which is not supported for "
            "sharded networks: use torch's optimizer."
        )
