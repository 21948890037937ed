"""Inputs of a network or submodule: a tuple of positional inputs, or `Inputs` if some are passed by keyword."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from growlab.base.devices import as_given
from growlab.widths.program import UnsupportedOperation
from growlab.widths.unchanged import draws_restored

#: A single input, a tuple of positional inputs, or inputs by name.
Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


class Inputs(tuple[Any, ...]):
    """Positional inputs of a forward as a tuple, with its keyword inputs in `named`."""

    named: dict[str, Any]

    def __new__(cls, positional: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> "Inputs":
        """Create the tuple of positional inputs and attach the keyword inputs."""
        inputs = super().__new__(cls, positional)
        inputs.named = dict(named or {})
        return inputs


pytree.register_pytree_node(
    Inputs,
    lambda inputs: ([tuple(inputs), inputs.named], None),
    lambda children, _: Inputs(*children),
    serialized_type_name=f"{__name__}.Inputs",
)


def inputs_of(example: Any, network: nn.Module) -> tuple[Any, ...]:
    """Convert an example into the positional inputs of a forward; `Inputs` if some can only be passed by keyword.

    A mapping whose keys are names of the forward's arguments has inputs by name; any other mapping is a single input.
    """
    if isinstance(example, Mapping) and _are_names(network, example):
        return arguments(network, (), example)
    # A packed sequence is a tuple too.
    return example if isinstance(example, tuple) and not isinstance(example, PackedSequence) else (example,)


def arguments(network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Convert a forward's arguments to positional ones where possible, with the defaults between; see `inputs_of`."""
    values, keywords = list(args), dict(named)
    for parameter in list(inspect.signature(network.forward).parameters.values())[len(args) :]:
        missing = parameter.name not in keywords and parameter.default is parameter.empty
        if not keywords or missing or parameter.kind not in _POSITIONAL:
            break
        values.append(keywords.pop(parameter.name, parameter.default))
    return Inputs(tuple(values), keywords) if keywords else tuple(values)


def keyword_only(network: nn.Module) -> list[str]:
    """Return the names of a forward's required keyword-only arguments."""
    return [
        parameter.name
        for parameter in inspect.signature(network.forward).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]


def named_in(inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Return the keyword inputs by name; an empty dict if there are none."""
    return inputs.named if isinstance(inputs, Inputs) else {}


def call_with(network: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Call a network with positional and keyword inputs and return its output."""
    with as_given():
        return network(*inputs, **named_in(inputs))


def call_on(network: nn.Module, batch: Sequence[Any]) -> Any:
    """Call a network with the inputs of a batch: positional ones, or a single mapping of inputs by name."""
    by_name = len(batch) == 1 and isinstance(batch[0], Mapping)
    return call_with(network, inputs_of(batch[0], network) if by_name else tuple(batch))


def values_of(inputs: tuple[Any, ...]) -> list[Any]:
    """List all inputs, keyword inputs last."""
    return [*inputs, *named_in(inputs).values()]


def listed(inputs: tuple[Any, ...]) -> str:
    """Format the shapes or types of inputs for messages."""

    def described(x: Any) -> str:
        return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__

    return ", ".join([*map(described, inputs), *(f"{name} {described(x)}" for name, x in named_in(inputs).items())])


def changed(change: Callable[[Any], Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a function to every input, including keyword inputs."""
    values, named = tuple(map(change, inputs)), named_in(inputs)
    return Inputs(values, {name: change(value) for name, value in named.items()}) if named else values


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _are_names(network: nn.Module, example: Mapping[Any, Any]) -> bool:
    """Return True if the keys of a mapping are argument names of the network's forward."""
    signature = inspect.signature(network.forward)
    names = {name for name, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_POSITIONAL}
    try:
        return example.keys() <= names or signature.bind(**example) is not None
    except TypeError:
        return False


def tensors_in(outputs: Any) -> list[Tensor]:
    """List all tensors in a network's output, also in containers, dataclasses and other pytree nodes."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        outputs = [getattr(outputs, each.name) for each in fields(outputs)]
    if not isinstance(outputs, (list, tuple)):
        leaves = pytree.tree_leaves(outputs)
        outputs = [] if len(leaves) == 1 and leaves[0] is outputs else leaves
    return [tensor for output in outputs for tensor in tensors_in(output)]


class _Captured(BaseException):
    """Raised to end a call once the inputs are known; not an Exception, which user code may catch."""


def captured(call: Callable[[], Any], network: nn.Module, whole: nn.Module) -> tuple[Any, ...] | None:
    """Run `call` until it calls a submodule, and return the submodule's inputs, detached; None if it does not.

    The whole network is in eval mode meanwhile. Errors of the call are raised.
    """
    inputs: list[tuple[Any, ...]] = []

    def capture(module: nn.Module, args: Any, named: Any) -> None:
        inputs.append(as_example(module, args, named))
        raise _Captured

    modes = {module: module.training for module in whole.modules()}
    handle = network.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        whole.eval()
        with torch.no_grad(), draws_restored(whole):
            call()
    except _Captured:
        pass
    finally:
        handle.remove()
        for module, training in modes.items():
            module.training = training
    return inputs[0] if inputs else None


def as_example(network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Convert the arguments of a call into example inputs of the network, detached."""
    return changed(lambda x: x.detach() if isinstance(x, Tensor) else x, arguments(network, args, named))


class Alone(nn.Module):
    """Wrapper that calls a single submodule; its modules, parameters and their names are those of the whole network."""

    def __init__(self, whole: nn.Module, path: str) -> None:
        super().__init__()
        vars(self).update({name: vars(whole)[name] for name in ("_modules", "_parameters", "_buffers", "training")})
        part = whole.get_submodule(path)
        # With the submodule's class name, for messages, and its forward's signature.
        self.__class__ = type(type(part).__name__, (Alone,), {})
        vars(self)["forward"] = wraps(part.forward)(lambda *args, **named: part(*args, **named))


def path_of(whole: nn.Module, submodule: "str | nn.Module") -> str:
    """Return the first name of a submodule, given any of its names or the module itself."""
    for path, module in whole.named_modules(remove_duplicate=False):
        if submodule in (path, module) and module is not whole:
            return next(first for first, same in whole.named_modules() if same is module)
    name = submodule if isinstance(submodule, str) else type(submodule).__name__
    raise UnsupportedOperation(
        f"{type(whole).__name__} has no submodule {name!r} to trace: give the name of a submodule, or the module."
    )


def inputs_to(whole: nn.Module, path: str, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of a submodule's first call when the network is called with the given inputs."""
    submodule_inputs = captured(lambda: call_with(whole, inputs), whole.get_submodule(path), whole)
    if submodule_inputs is None:
        raise UnsupportedOperation(f"{type(whole).__name__} does not call its submodule {path} with this example.")
    return submodule_inputs
