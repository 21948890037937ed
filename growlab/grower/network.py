"""Trace and check a network, rebuild DistributedDataParallel, handle torch's wrappers, make plain state dicts."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, pairwise
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.parallel import DistributedDataParallel

from growlab import growth
from growlab.base import ranks
from growlab.base.devices import on_cpu
from growlab.base.errors import UserError, as_user_errors
from growlab.base.pieces import is_piece, reshard
from growlab.base.settings import whole
from growlab.grower.part import Part
from growlab.growth import GrowthMethod
from growlab.growth.hooks import METADATA, state_of
from growlab.growth.multipliers import is_multipliers
from growlab.growth.rescale import folded
from growlab.widths import Example, UnsupportedOperation, WidthGraph, trace
from growlab.widths.inputs import inputs_of, values_of

# Entries of PowerSGD's state for each bucket of gradients, which a rebuilt wrapper divides differently.
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")

# Attribute of torch's wrappers for the module inside.
_INSIDE = "_checkpoint_wrapped_module"

METHODS: dict[str, Callable[[], GrowthMethod]] = {
    "bert2bert": growth.Bert2Bert,
    "bert2bert_fpi": growth.Net2Net,
    "firefly": growth.FireFly,
    "firefly_split": partial(growth.FireFly, new_candidates=0.0),
    "gradmax": growth.GradMax,
    "hypercloning": partial(growth.HyperCloning, noise_std=0.001),
    "lemon": growth.Lemon,
    "net2net": partial(growth.Net2Net, noise_std=0.001),
    "none": growth.FixedSize,
    "ours": partial(growth.VarianceTransfer, noise_std=0.001),
    "pairs": partial(growth.PairGrowth, noise_std=0.001),
    "random": growth.RandomGrowth,
    "splitting": growth.Splitting,
    "tiny": growth.Tiny,
}
"""Methods with the settings that their names have on the command line (`growth=...`)."""


def as_method(method: GrowthMethod | str) -> GrowthMethod:
    """Return a growth method, given itself or its name on the command line; raise a UserError for anything else."""
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]()
    if not isinstance(method, GrowthMethod):
        raise UserError(
            f"method={method!r} must be a growth method, such as growlab.VarianceTransfer(), or the name of one: "
            f"{', '.join(METHODS)}."
        )
    return method


# Tracing and checks ------------------------------------------------------------------------------------------


def no_widths() -> WidthGraph:
    """Return a width graph without groups, for a network that keeps its widths."""
    return WidthGraph({}, {}, (), (), frozenset(), 0)


@on_cpu
def trace_for_growth(
    network: nn.Module,
    example: Example,
    method: GrowthMethod,
    parts: Sequence[Part] = (),
    seed: int = 0,
    keep_full: Sequence[str] = (),
    grows: bool = True,
    submodule: str | nn.Module | None = None,
) -> WidthGraph:
    """Trace a full-width network, and apply the `prepare` of method and parts, in place.

    Args:
        network: the network at full width.
        example: see `Grower`.
        method: the growth method.
        parts: features that accompany growth.
        seed: the run's random seed.
        keep_full: see `growlab.widths.trace`.
        grows: if False, a network that cannot be traced gets a graph without width groups.
        submodule: see `growlab.widths.trace`.

    Returns:
        The width graph to continue with.

    Raises:
        UnsupportedOperation: the network cannot be traced.
        UserError: it has no values, is wrapped or sharded, or two parameters share memory.
    """
    inputs = inputs_of(example, network)
    _check_values(inputs)
    check_whole(network)
    _check_memory(network)
    if (state := state_of(network)) is not None and state.widths:
        raise UserError("the network is growing already with another Grower: finish that, or build the network again.")
    try:
        follow_norms = method.follows_norms or any(part.follows_norms for part in parts)
        graph = trace(network, inputs, keep_full, follow_norms, submodule)
    except UnsupportedOperation:
        if grows:
            raise
        graph = no_widths()
    graph = method.prepare(network, graph, seed)
    for part in parts:
        graph = part.prepare(network, graph, seed, inputs)
    return graph


def check_arguments(seed: Any, anneal_steps: Any) -> None:
    """Raise a UserError for a seed or number of steps that would make a `Grower` fail later."""
    with as_user_errors():
        whole(-(2**64), seed=seed)
        if anneal_steps is not None and not callable(anneal_steps):
            whole(0, anneal_steps=anneal_steps)


def _check_values(inputs: tuple[Any, ...]) -> None:
    for value in values_of(inputs):
        if not isinstance(value, Tensor) or value.is_meta:
            continue
        if value.ndim and not len(value):
            raise UserError("the example has no samples: give a batch of at least two.")
        if value.is_floating_point() and bool(value.isnan().any()):
            raise UserError("the example contains NaN: outputs could not be compared on it.")


def check_whole(network: nn.Module) -> None:
    """Raise a UserError for wrappers of distributed training, sharded parameters, and replication in place."""
    if isinstance(network, (DistributedDataParallel, nn.DataParallel)):
        raise UserError(
            f"{type(network).__name__} is a wrapper: give the network inside it, and wrap that once the Grower is made."
        )
    for module in network.modules():
        kind: Any = type(module)
        reason = _distributed(kind)
        parameters = module._parameters.values()
        if not reason and any(map(is_piece, parameters)):
            reason = _SHARDED
        # The FSDP1 wrapper itself may be outside of the network.
        if not reason and _MARK in vars(module):
            reason = _FSDP1
        if any(hasattr(p, "ds_id") for p in parameters):
            reason = _ZERO
        if reason:
            raise UserError(f"{type(network).__name__} {reason}.")


_SHARDED = (
    "is sharded: give Grower the network before that, and the function that calls fully_shard or parallelize_module as "
    "shard=, since growth has to shard parameters again"
)
# Attribute that FSDP1 sets on all modules inside those that it shards.
_MARK = "_is_fsdp_managed_module"
_FSDP1 = (
    "is sharded by FSDP1, whose flat parameters growth cannot resize: use torch's fully_shard, see shard= of Grower"
)
_ZERO = (
    "is of DeepSpeed, whose ZeRO stages partition parameters in flat buffers, which growth cannot resize: shard it "
    "with torch's fully_shard, see shard= of Grower"
)
# Reasons to refuse modules whose classes have such names.
_REFUSED = {
    "fully_sharded_data_parallel.FullyShardedDataParallel": _FSDP1,
    "fsdp.FSDPModule": _SHARDED,
    "_fully_shard.FSDPModule": _SHARDED,
    "torch.distributed._composable.replicate": "is replicated by torch.distributed._composable.replicate, which keeps "
    "parameters that growth replaces: wrap it in DistributedDataParallel, and call growlab.grower.renew after events",
    "torch.distributed.pipelining": "is a stage of a pipeline, and growth has to see the whole network: shard it with "
    "torch's fully_shard, see shard= of Grower",
    "deepspeed.": _ZERO,
}


def same_classes(known: list[tuple[nn.Module, type, list[type]]]) -> bool:
    """Return True if modules and parameters still have the classes that `see_whole` returned; sharding changes them."""
    return bool(known) and all(type(module) is kind and _kinds(module) == kinds for module, kind, kinds in known)


def _kinds(module: nn.Module) -> list[type]:
    """Classes of a module's parameters, of their dictionary (which DeepSpeed replaces) and of FSDP's mark."""
    return [type(module._parameters), type(vars(module).get(_MARK)), *map(type, module._parameters.values())]


@cache
def _distributed(kind: Any) -> str:
    """Reason to refuse modules of a class of distributed training, else ""."""
    bases = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return next((reason for name, reason in _REFUSED.items() for base in bases if name in base), "")


def _check_memory(network: nn.Module) -> None:
    """Refuse distinct parameters that share memory: an event would separate them."""
    ranges = []
    for name, p in network.named_parameters():
        try:
            start = p.data_ptr()
        except (RuntimeError, ValueError):
            # Tensor subclasses that wrap others, and lazy parameters, which `trace` refuses, have no memory themselves.
            continue
        if start and p.numel():
            last = sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True))
            ranges.append((str(p.device), start, start + last * p.element_size(), name))
    ranges.sort()
    for (device, _, end, one), (other_device, start, _, other) in pairwise(ranges):
        if (
            device == other_device
            and start <= end
            and np.shares_memory(*(_Memory.of(network.get_parameter(name)) for name in (one, other)))
        ):
            raise UserError(
                f"{one} and {other} are two Parameters in the same memory, which growth would separate: tie them as "
                "one (assign the Parameter itself, not nn.Parameter of it)."
            )


class _Memory:
    """Addresses of a tensor's elements on any device, as a numpy array interface that is never read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        strides = tuple(step * size for step in tensor.stride())
        about = {"version": 3, "typestr": f"|V{size}", "shape": tuple(tensor.shape), "strides": strides}
        self.__array_interface__ = {**about, "data": (tensor.data_ptr(), True)}

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        return np.asarray(cls(tensor))


def not_fresh(network: nn.Module) -> str:
    """Return a sign that the network has been trained, or "".

    Constructors leave weights and biases of normalisations constant, running statistics at 0 and 1, and no gradients.
    """
    for name, module in network.named_modules():
        statistics = vars(module).get("_buffers", {})
        for key, value in (("running_mean", 0), ("running_var", 1)):
            tensor = statistics.get(key)
            if tensor is not None and not tensor.is_meta and bool((tensor != value).any()):
                return f"{name}.{key} is not {value}"
        if "norm" in type(module).__name__.lower():
            for key, p in module.named_parameters(recurse=False):
                if p.ndim == 1 and not p.is_meta and bool((p != p[:1]).any()):
                    return f"{name}.{key} has been trained"
    trained = next((name for name, p in network.named_parameters() if p.grad is not None), None)
    return "" if trained is None else f"{trained} has a gradient"


# Wrappers of torch -------------------------------------------------------------------------------------------


def renew(module: nn.Module) -> None:
    """Rebuild DistributedDataParallel in place, so that it reduces gradients of the network's new parameters.

    Settings and communication hooks are kept, and references to the wrapper stay valid; the state of PowerSGD's hook
    restarts. Call it on all processes, after an event and before the next forward pass. It does not communicate, since
    parameters and buffers are equal on all ranks after an event.

    Args:
        module: the wrapper, in the default process group, or a library's module around it (from accelerate's `prepare`
            or Fabric's `setup`). A single process needs no wrapper.

    Raises:
        UserError: several processes train, and the module contains no wrapper, or one with another process group.

    If anything is raised, the wrapper is unchanged.
    """
    wrappers = [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
    if not wrappers and ranks.several():
        raise UserError(
            f"{type(module).__name__} contains no DistributedDataParallel: pass renew the module that the loop "
            f"calls, not the network inside it."
        )
    for wrapper in wrappers:
        _renew(wrapper)


def _renew(wrapper: DistributedDataParallel) -> None:
    hooks = list(getattr(wrapper, "_comm_hooks", ()))
    try:
        state = wrapper.__getstate__()
    except RuntimeError as error:
        raise UserError(
            "a wrapper with its own process group cannot be rebuilt: delete it and wrap the network again."
        ) from error
    trained = [p for p in wrapper.module.parameters() if p.requires_grad]
    # A static graph is recorded again: without this the new reducer waits for a reduction at the end of its first step.
    state |= {"_module_parameters": trained, "_comm_hooks": [], "_static_graph_delay_allreduce_enqueued": False}
    before = dict(vars(wrapper))
    # The reducer's hooks on parameters that stay have to go before those of the new one are added.
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
    """Find the wrapper around a module, or None, among all Python objects (takes a fraction of a second)."""
    wrappers = (thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel))
    return next((wrapper for wrapper in wrappers if wrapper.module is module), None)


def see_through(network: nn.Module, graph: WidthGraph) -> None:
    """Restore the traced names of modules inside torch's `checkpoint_wrapper` or `offload_wrapper`.

    The wrappers may have been added after tracing. torch uses the traced names in the state_dict too.
    """

    def is_new(path: str, module: nn.Module) -> bool:
        if not isinstance(module, ActivationWrapper) or "named_modules" in vars(module):
            return False
        inside = f"{path}.{_INSIDE}.".removeprefix(".")
        return not any(name.startswith(inside) for name in graph.axes)

    # One at a time, since a wrapper inside another gets the name of the outer one.
    while new := next((m for path, m in network.named_modules() if is_new(path, m)), None):
        # A bound method: a deep copy is bound to the copied wrapper.
        vars(new)["named_modules"] = MethodType(named_modules, new)


def see_whole(network: nn.Module, graph: WidthGraph, sharded: bool = False) -> list[tuple[nn.Module, type, list[type]]]:
    """Restore traced names, and return the classes for `same_classes`; refuse networks sharded by others."""
    if not sharded:
        check_whole(network)
    reshard(network)
    see_through(network, graph)
    return [(module, type(module), _kinds(module)) for module in network.modules()]


def look_at_wrappers(network: nn.Module) -> None:
    """Undo `see_through`."""
    for module in list(network.modules()):
        if isinstance(module, ActivationWrapper):
            vars(module).pop("named_modules", None)


def named_modules(
    wrapper: ActivationWrapper, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """`nn.Module.named_modules` of a wrapper, with the wrapper's name for the module inside it."""
    memo = set() if memo is None else memo
    if wrapper not in memo:
        if remove_duplicate:
            memo.add(wrapper)
        yield prefix, wrapper
        yield from getattr(wrapper, _INSIDE).named_modules(memo, prefix, remove_duplicate)


def copies_in(follower: nn.Module, network: nn.Module) -> list[nn.Module]:
    """Find copies of the network in an averaging module, which may contain the network itself too."""
    own, shapes, copies = set(network.modules()), _shapes(network), list[nn.Module]()
    waiting = [follower]
    for module in waiting:
        if module not in own and _shapes(module) == shapes:
            copies.append(module)
        elif module not in own:
            waiting += module.children()
    if not copies:
        raise UserError(
            f"{type(follower).__name__} cannot grow along: its tensors are not those of the network as it "
            "is now; copy the network after the Grower was made."
        )
    return copies


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(entry, "shape", None) for name, entry in module.state_dict().items()}


# Plain networks ----------------------------------------------------------------------------------------------


def plain_tensors(
    network: nn.Module, graph: WidthGraph, output_factor: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State dict as `Grower.finish` would leave it, and the original value of every entry that differs."""
    new = folded(network, graph, output_factor)
    names = {id(t): name for name, t in (*network.named_parameters(), *network.named_buffers())}
    # A shared tensor has several keys, but one name.
    keys = {key: names.get(id(t)) for key, t in network.state_dict(keep_vars=True).items()}
    tensors, kept = network.state_dict(), dict[str, Tensor]()
    for key in list(tensors):
        if is_multipliers(key):
            del tensors[key]
        elif (name := keys[key]) in new:
            kept[key], tensors[key] = tensors[key], new[name]
    make_plain(vars(tensors)["_metadata"].get("", {}))
    return tensors, kept


def make_plain(metadata: dict[str, Any]) -> None:
    """Set a network's metadata in a state_dict to that of a plain network."""
    if METADATA in metadata:
        metadata[METADATA] = {**metadata[METADATA], "output_factor": 1.0, "multipliers": {}}


def put_back(network: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Restore the original values in a growing network, or a module around it, after plain ones were loaded."""
    own = dict(chain(network.named_parameters(remove_duplicate=False), network.named_buffers()))
    with torch.no_grad():
        for key, tensor in kept.items():
            own[key].copy_(tensor)
