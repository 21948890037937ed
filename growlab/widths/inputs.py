"""What a network is called with: a tuple of positional inputs, or one that holds inputs by name beside them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

#: An input, the tuple of positional inputs, or inputs by name.
Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


class Inputs(tuple[Any, ...]):
    """Positional inputs of a forward, and beside them those that it takes by name alone.

    Attributes:
        named: inputs by name.
    """

    named: dict[str, Any]

    def __new__(cls, positional: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> "Inputs":
        """Hold both."""
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
    """The inputs that an example stands for.

    Args:
        example: an input, the tuple of positional inputs, or a mapping. One whose keys are names that the forward takes
            is of inputs by name, any other one is an input.
        network: that is called with them.

    Returns:
        A tuple of positional inputs; `Inputs` where some can be given by name alone.
    """
    if isinstance(example, Mapping) and _are_names(network, example):
        return arguments(network, (), example)
    # A packed sequence is a tuple too.
    return example if isinstance(example, tuple) and not isinstance(example, PackedSequence) else (example,)


def arguments(network: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a forward, as many as can be as positional ones, defaults between them filled in.

    Args:
        network: whose forward is called.
        args: its positional arguments.
        named: its other arguments.
    """
    values, left = list(args), dict(named)
    for parameter in list(inspect.signature(network.forward).parameters.values())[len(args) :]:
        absent = parameter.name not in left and parameter.default is parameter.empty
        if not left or absent or parameter.kind not in _POSITIONAL:
            break
        values.append(left.pop(parameter.name, parameter.default))
    return Inputs(tuple(values), left) if left else tuple(values)


def by_name_alone(network: nn.Module) -> list[str]:
    """Names of the inputs that a forward takes by name alone, and not without."""
    return [
        parameter.name
        for parameter in inspect.signature(network.forward).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]


def named_in(inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Those of the inputs that are given by name."""
    return inputs.named if isinstance(inputs, Inputs) else {}


def call_with(network: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """What a network puts out."""
    return network(*inputs, **named_in(inputs))


def call_on(network: nn.Module, given: Sequence[Any]) -> Any:
    """What a network puts out for the inputs of a batch, given by position or as one mapping of those by name."""
    by_name = len(given) == 1 and isinstance(given[0], Mapping)
    return call_with(network, inputs_of(given[0], network) if by_name else tuple(given))


def values_of(inputs: tuple[Any, ...]) -> list[Any]:
    """All inputs, those by name last."""
    return [*inputs, *named_in(inputs).values()]


def listed(inputs: tuple[Any, ...]) -> str:
    """What inputs are, for messages."""

    def told(x: Any) -> str:
        return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__

    return ", ".join([*map(told, inputs), *(f"{name} {told(x)}" for name, x in named_in(inputs).items())])


def changed(change: Callable[[Any], Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs with each of them changed, those by name too."""
    values, named = tuple(map(change, inputs)), named_in(inputs)
    return Inputs(values, {name: change(value) for name, value in named.items()}) if named else values


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _are_names(network: nn.Module, example: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are names that a forward takes."""
    taken = inspect.signature(network.forward).parameters.values()
    names = {parameter.name for parameter in taken if parameter.kind is not parameter.VAR_POSITIONAL}
    try:
        return example.keys() <= names or inspect.signature(network.forward).bind(**example) is not None
    except TypeError:
        return False
