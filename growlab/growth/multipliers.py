"""Multipliers on the rows of weights, for layers whose scale nothing else in the network undoes.

Variance transfer rescales an old row W_i by c. Batch normalisation undoes that; elsewhere the forward multiplies the
row by m_i = 1 / c again, so that the layer computes

    y_i = m_i W_i x + b_i

Stored weights then have the variance of their fan-in, and activations stay the same. Rows that an event adds have
m_i = 1. Multipliers are not part of the network's parameters, buffers or classes: hooks on the modules that apply the
weights multiply them, and `fold_multipliers` writes m_i W_i into the weights permanently. They are entries of the
`state_dict`, so that an unfinished network cannot be loaded into a plain one unnoticed.

**Gradient.** A step of gradient descent on W_i moves the product m_i W_i m_i^2 times as far as a step on the product
itself. The gradient that reaches W_i is therefore divided by m_i^2: optimizers whose step is proportional to the
gradient (SGD) move the product as if there were no multiplier, at any rate, momentum and weight decay. Optimizers that
normalise the gradient (Adam) cancel the division and move the product m_i times as far; their weights are not
multiplied by default, see `multipliers` of `growlab.growth.VarianceTransfer`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from growlab.base.pieces import replicated
from growlab.growth.hooks import ModuleHook, check_reached
from growlab.widths import Carry, Layer, WidthGraph

# Attribute of a module in which the multipliers that it applies are stored.
_ATTRIBUTE = "_row_multipliers"
# Attributes of a tensor that are views of its data.
_TRANSPOSES = ("T", "mT", "H", "mH")
# Modules whose forward reads `weight` once, as an attribute.
_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Suffix of the weight's name for their entry in the state_dict, an unexpected key for a plain network.
_KEY = "_unfinished_growth_multipliers"


def carried_multipliers(
    graph: WidthGraph,
    multipliers: Mapping[str, Sequence[float]],
    factors: Mapping[str, float],
    carry: Carry,
    before: Mapping[str, int],
    after: Mapping[str, int],
) -> dict[str, list[float]]:
    """Multipliers of the rows of weights after an event.

    Args:
        graph: the network's width graph.
        multipliers: multipliers before, by the weight's name; 1 for weights that are left out.
        factors: factor on the multipliers of old rows, by the weight's name; 1 for weights that are left out.
        carry: rule of the event: a row that is a copy takes the multiplier of its source.
        before: width of each group before.
        after: width of each group after.

    Returns:
        Multipliers of weights where they are not all 1. New rows have 1.
    """
    layers = {layer.weight: layer for layer in graph.layers}
    result = {name: list(rows) for name, rows in multipliers.items() if name not in layers}
    for name in dict.fromkeys((*multipliers, *factors)):
        if name not in layers:
            continue
        axis = graph.axes[name][_rows(layers[name])]
        old = torch.tensor(multipliers.get(name, [1.0] * axis.length(before)), dtype=torch.float64)
        maps = {group: carry.source(group, before, after) for group in axis.groups}
        source = axis.lift(maps, after, before)
        rows = torch.where(source >= 0, old[source.clamp(min=0)] * factors.get(name, 1.0), 1.0)
        if not bool((rows == 1).all()):
            result[name] = rows.tolist()
    return result


def multiply(model: nn.Module, graph: WidthGraph, multipliers: Mapping[str, Sequence[float]]) -> None:
    """Set the row multipliers of a network, replacing previous ones.

    Args:
        model: the network; its parameters, buffers and classes do not change.
        graph: its width graph.
        multipliers: multipliers of the rows of each weight, by name; 1 for weights that are left out.
    """
    for hook in _attached(model).values():
        hook.remove()
    modules = dict(model.named_modules())
    chosen: dict[str, list[_Weight]] = {}
    for layer in graph.layers:
        if layer.weight in multipliers:
            path, _, attribute = layer.weight.rpartition(".")
            weight = _Weight(modules[path], attribute, multipliers[layer.weight], _rows(layer))
            for caller in dict.fromkeys((path, *layer.callers)):
                chosen.setdefault(caller, []).append(weight)
    for path, weights in chosen.items():
        _Multiplying(modules[path], weights)


def row_multipliers(model: nn.Module) -> dict[str, Tensor]:
    """Return the row multipliers of weights, by the parameter's name: float64, broadcast with the weight."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(weight.parameter)]: weight.rows for hook in _attached(model).values() for weight in hook.weights}


def multiplied_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights whose rows the network multiplies, multiplied, by the parameter's name."""
    with torch.no_grad():
        weights = ((name, rows, model.get_parameter(name)) for name, rows in row_multipliers(model).items())
        return {name: weight * replicated(rows, weight) for name, rows, weight in weights}


def fold_multipliers(model: nn.Module) -> None:
    """Multiply the rows of a network's weights by their multipliers permanently, in place."""
    with torch.no_grad():
        for name, product in multiplied_weights(model).items():
            model.get_parameter(name).copy_(product)
    for hook in _attached(model).values():
        hook.remove()


def is_multipliers(name: str) -> bool:
    """Return True if an entry of a state_dict contains multipliers."""
    return name.endswith(_KEY)


def saved_multipliers(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return the row multipliers in a network's state_dict, by the weight's name."""
    return {name.removesuffix(_KEY): t.tolist() for name, t in tensors.items() if is_multipliers(name)}


def _rows(layer: Layer) -> int:
    return 1 if layer.transposed else 0


def _attached(model: nn.Module) -> dict[nn.Module, "_Multiplying"]:
    return {module: module.__dict__[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in module.__dict__}


class _Weight:
    """A weight and the multipliers of its rows."""

    def __init__(self, owner: nn.Module, attribute: str, rows: Sequence[float], dim: int) -> None:
        self.owner, self.attribute = owner, attribute
        self._other_dims = self.parameter.dim() - 1 - dim
        self.set(torch.tensor(list(rows), dtype=torch.float64))

    def set(self, rows: Tensor) -> None:
        with torch.inference_mode(False):
            # A clone, since a tensor made in inference mode stays an inference tensor.
            self.rows = rows.detach().clone().double().cpu().view(-1, *[1] * self._other_dims)
        # 1 / m and m - 1 / m, on the weight's device and in its dtype.
        self._ready: tuple[Tensor, ...] = ()

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.owner, self.attribute)

    def prepare(self) -> nn.Parameter:
        """Move the multipliers to the weight's device and dtype, and return the weight."""
        parameter, ready = self.parameter, self._ready
        if not ready or ready[0].device != parameter.device or ready[0].dtype != parameter.dtype:
            with torch.inference_mode(False):
                inverse = 1.0 / self.rows
                self._ready = replicated(inverse, parameter), replicated(self.rows - inverse, parameter)
        return parameter

    def multiplied(self) -> Tensor:
        """Return m W as W / m + (m - 1 / m) W, where the second term is detached: this divides the gradient by m^2."""
        (inverse, rest), parameter = self._ready, self.parameter
        # Without the mode of a module around this one, which may multiply the same weight.
        with torch._C.DisableTorchFunction():
            return torch.addcmul((parameter * rest).detach(), parameter, inverse)


class _Multiplying(ModuleHook):
    """Makes a module's forward use multiplied weights."""

    attribute = _ATTRIBUTE

    def __init__(self, module: nn.Module, weights: Sequence[_Weight]) -> None:
        self.weights = list(weights)
        # The weights that are the module's own parameters.
        self.own = [weight for weight in weights if weight.owner is module]
        super().__init__(module)

    def entries(self) -> dict[str, tuple[Tensor, Callable[[Tensor], Any]]]:
        return {weight.attribute + _KEY: (weight.rows.flatten(), weight.set) for weight in self.own}

    def mode(self, inputs: tuple[Any, ...]) -> "TorchFunctionMode | _Replaced":
        weights = [(weight.prepare(), weight) for weight in self.weights]
        module = self.module
        if (
            type(module) in _PLAIN
            and len(self.own) == len(self.weights) == 1
            # Other hooks would find the product in place of the parameter.
            and len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
            and not ("forward" in module.__dict__ or torch.compiler.is_compiling())
        ):
            return _Replaced(module, self.own[0])
        return _Multiplied(module, weights)


class _Replaced:
    """Context in which a module has the multiplied weight, as in `functional_call`: half the cost of a mode."""

    def __init__(self, module: nn.Module, weight: _Weight) -> None:
        self._parameters: dict[str, Any] = module._parameters
        self._weight = weight

    def __enter__(self) -> None:
        self._parameter = self._weight.parameter
        self._parameters[self._weight.attribute] = self._weight.multiplied()

    def __exit__(self, *_: object) -> None:
        self._parameters[self._weight.attribute] = self._parameter


class _Multiplied(TorchFunctionMode):
    """Replaces weights in the arguments of operations by multiplied ones.

    The product is another tensor than the weight, so that the mode of a module around this one does not multiply again.
    """

    def __init__(self, module: nn.Module, weights: Sequence[tuple[nn.Parameter, _Weight]]) -> None:
        super().__init__()
        self._module, self._weights = module, weights

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if getattr(func, "__name__", "") == "__get__" and attribute not in _TRANSPOSES:
            # Reads an attribute such as a shape or a device.
            return func(*args, **kwargs)
        if any(value is factor for value in args for _, weight in self._weights for factor in weight._ready):
            # A compiled forward includes the multiplication already; backends such as "eager" run it under this mode.
            return func(*args, **kwargs)
        return func(*map(self._multiplied, args), **{name: self._multiplied(value) for name, value in kwargs.items()})

    def _multiplied(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
            return [self._multiplied(item) for item in value]
        for parameter, weight in self._weights:
            if value is parameter:
                check_reached(self._module, weight.attribute)
                return weight.multiplied()
        return value
