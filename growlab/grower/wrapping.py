"""torch's wrapper of distributed training, renewed where it is: for loops that keep it to themselves."""

import gc

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from growlab.errors import UserError


def renew(wrapper: DistributedDataParallel) -> None:
    """Let a wrapper reduce the gradients of the parameters that its module has now.

    It is what `DistributedDataParallel` does when it is unpickled, in place: settings and communication hooks stay, and
    whoever holds the wrapper goes on with it. Call it on all processes, after an event and before the next forward
    pass. Nothing is sent: parameters and buffers must be alike already, as they are after an event.

    Args:
        wrapper: of the default process group.

    Raises:
        UserError: it is of another one.
    """
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
    del wrapper.reducer, wrapper.logger
    wrapper.__setstate__(state)
    for hook, its_state in hooks:
        wrapper.register_comm_hook(its_state, hook)


def wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """The wrapper around a module that a library has made and tells nobody of; None: there is none.

    It looks through all objects of this process: a fraction of a second.
    """
    found = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return next((each for each in found if each.module is module), None)
