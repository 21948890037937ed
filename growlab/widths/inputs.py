"""Inputs of a network: a tuple of positional inputs, or `Inputs` if some are passed by keyword."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

#: An input, the tuple of positional inputs, or inputs by name.
Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


class Inputs(tuple[Any, ...]):
    """Positional inputs of a forward as a tuple, with its keyword inputs in `named`.

    Attributes:
        named: inputs by name.
    """

    named: dict[str, Any]

    def __new__(cls, positional: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> "Inputs":
        """Create the tuple of positional inputs and attach the keyword inputs."""
        made = super().__new__(cls, positional)
        made.named = dict(named or {})
        return made


pytree.register_pytree_node(
    Inputs,
    lambda inputs: ([tuple(inputs), inputs.named], None),
    lambda children, _: Inputs(*children),
    serialized_type_name=f"{__name__}.Inputs",
)


def inputs_of(example: Any, network: nn.Module) -> tuple[Any, ...]:
    """Convert an example into the inputs of a forward.

    Args:
        example: an input, the tuple of positional inputs, or a mapping. A mapping whose keys are names of the forward's
            arguments gives inputs by name, any other one is a single input.
        network: network that is called with them.

    Returns:
        A tuple of positional inputs; `Inputs` if some can only be passed by keyword.
    """
    if isinstance(example, Mapping) and _are_names(network, example):
        return arguments(network, (), example)
    # A packed sequence is a tuple too.
    return example if isinstance(example, tuple) and not isinstance(example, PackedSequence) else (example,)


def arguments(network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Convert the arguments of a forward to positional ones where possible, filling in the defaults between them.

    Args:
        network: network whose forward is called.
        args: its positional arguments.
        named: its keyword arguments.

    Returns:
        A tuple; `Inputs` if keyword arguments remain.
    """
    values, left = list(args), dict(named)
    for parameter in list(inspect.signature(network.forward).parameters.values())[len(args) :]:
        absent = parameter.name not in left and parameter.default is parameter.empty
        if not left or absent or parameter.kind not in _POSITIONAL:
            break
        values.append(left.pop(parameter.name, parameter.default))
    return Inputs(tuple(values), left) if left else tuple(values)


def by_name_alone(network: nn.Module) -> list[str]:
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
    return network(*inputs, **named_in(inputs))


def call_on(network: nn.Module, given: Sequence[Any]) -> Any:
    """Call a network with the inputs of a batch: positional ones, or a single mapping of inputs by name."""
    by_name = len(given) == 1 and isinstance(given[0], Mapping)
    return call_with(network, inputs_of(given[0], network) if by_name else tuple(given))


def values_of(inputs: tuple[Any, ...]) -> list[Any]:
    """List all inputs, keyword inputs last."""
    return [*inputs, *named_in(inputs).values()]


def listed(inputs: tuple[Any, ...]) -> str:
    """Format the shapes or types of inputs for messages."""

    def told(x: Any) -> str:
        return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__

    return ", ".join([*map(told, inputs), *(f"{name} {told(x)}" for name, x in named_in(inputs).items())])


def changed(change: Callable[[Any], Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a function to every input, including keyword inputs."""
    values, named = tuple(map(change, inputs)), named_in(inputs)
    return Inputs(values, {name: change(value) for name, value in named.items()}) if named else values


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _are_names(network: nn.Module, example: Mapping[Any, Any]) -> bool:
    """Return True if the keys of a mapping are argument names of the network's forward."""
    taken = inspect.signature(network.forward).parameters.values()
    names = {parameter.name for parameter in taken if parameter.kind is not parameter.VAR_POSITIONAL}
    try:
        return example.keys() <= names or inspect.signature(network.forward).bind(**example) is not None
    except TypeError:
        return False
