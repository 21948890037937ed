"""Modules around a network or in it: wrappers of torch that growth has to know, and averages of the network."""

import gc
from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.parallel import DistributedDataParallel

from growlab.base import ranks
from growlab.base.errors import UserError
from growlab.widths import WidthGraph

# What PowerSGD's state keeps for each bucket of gradients: buckets are others afterwards.
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")

# Where torch's wrappers hold the module inside.
_INSIDE = "_checkpoint_wrapped_module"


def renew(module: nn.Module) -> None:
    """Rebuild DistributedDataParallel in place, to reduce the gradients of the parameters that its network has now.

    It is what `DistributedDataParallel` does when it is unpickled: settings and communication hooks stay, and
    references to the wrapper stay valid. Errors and factors that PowerSGD's hook keeps start again. Call it on all
    processes, after an event and before the next forward pass. Nothing is sent: parameters and buffers must be equal
    already, as they are after an event.

    Args:
        module: the wrapper, of the default process group, or the module that a library has put around it (accelerate's
            `prepare`, Fabric's `setup`). In a single process there may be none.

    Raises:
        UserError: several processes train, and it contains no wrapper, or one of another group.

    Whatever is raised, the wrapper is then as before.
    """
    wrappers = [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
    if not wrappers and ranks.several():
        raise UserError(
            f"{type(module).__name__} holds no DistributedDataParallel: give renew what the loop calls, not the "
            "network inside of it."
        )
    for wrapper in wrappers:
        _renew(wrapper)


def _renew(wrapper: DistributedDataParallel) -> None:
    hooks = list(getattr(wrapper, "_comm_hooks", ()))
    try:
        state = wrapper.__getstate__()
    except RuntimeError as error:
        raise UserError(
            "a wrapper of a process group of its own cannot be renewed: delete it and wrap the network anew."
        ) from error
    # The old parameters, and the old hooks on those that stay, go before the new ones are added.
    state["_module_parameters"] = [p for p in wrapper.module.parameters() if p.requires_grad]
    state["_comm_hooks"] = []
    # A static graph is learnt anew: without this the new reducer waits for the reduction at the end of its first step.
    state["_static_graph_delay_allreduce_enqueued"] = False
    before = dict(vars(wrapper))
    del wrapper.reducer, wrapper.logger
    try:
        wrapper.__setstate__(state)
        for hook, its_state in hooks:
            wrapper.register_comm_hook(its_state, hook)
    except BaseException:
        vars(wrapper).clear()
        vars(wrapper).update(before)
        raise
    for _, its_state in hooks:
        for name in _BY_BUCKET:
            if isinstance(known := getattr(its_state, name, None), dict):
                known.clear()


def wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """Find the wrapper that a library has made around a module, or None.

    It looks through all objects of this process: a fraction of a second.
    """
    found = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return next((each for each in found if each.module is module), None)


def see_through(network: nn.Module, graph: WidthGraph) -> None:
    """Give modules in torch's `checkpoint_wrapper` or `offload_wrapper` the names that they were traced by.

    Their entries of the state_dict have these names too, torch sees to that.

    Args:
        network: in which wrappers may stand that were not there when it was traced.
        graph: its width graph.
    """

    def is_new(path: str, module: nn.Module) -> bool:
        if not isinstance(module, ActivationWrapper) or "named_modules" in vars(module):
            return False
        inside = f"{path}.{_INSIDE}.".removeprefix(".")
        return not any(name.startswith(inside) for name in graph.axes)

    # One may stand in another, whose name it has then.
    while new := next((m for path, m in network.named_modules() if is_new(path, m)), None):
        # A method, whose copy is one of the wrapper's copy.
        vars(new)["named_modules"] = MethodType(named_modules, new)


def look_at_wrappers(network: nn.Module) -> None:
    """Undo `see_through`."""
    for module in list(network.modules()):
        if isinstance(module, ActivationWrapper):
            vars(module).pop("named_modules", None)


def named_modules(
    wrapper: ActivationWrapper,
    memo: set[nn.Module] | None = None,
    prefix: str = "",
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Module]]:
    """`nn.Module.named_modules` of a wrapper: it and what is inside of it have one name."""
    memo = set() if memo is None else memo
    if wrapper not in memo:
        if remove_duplicate:
            memo.add(wrapper)
        yield prefix, wrapper
        yield from getattr(wrapper, _INSIDE).named_modules(memo, prefix, remove_duplicate)


def copies_in(follower: nn.Module, network: nn.Module) -> list[nn.Module]:
    """Copies of the network in a module that averages it, which may have the network itself as a submodule too."""
    own, wanted, found = set(network.modules()), _shapes(network), list[nn.Module]()
    waiting = [follower]
    for module in waiting:
        if module not in own and _shapes(module) == wanted:
            found.append(module)
        elif module not in own:
            waiting += module.children()
    if not found:
        raise UserError(
            f"{type(follower).__name__} cannot grow along: its tensors are not those of the network as it "
            "is now; copy the network after the Grower was made."
        )
    return found


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(entry, "shape", None) for name, entry in module.state_dict().items()}
