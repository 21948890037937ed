"""Find the parameters to zero so that a residual block is the identity, from the autograd graph.

The graph is walked from the block's output back through sums: one side leads to the block's input, the others are
residual branches. In each branch the last operation with parameters has to output zeros.
"""

import re
from collections.abc import Mapping

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

#: An output of an operation: the operation, and the index of the output.
Edge = tuple[Node, int]

# Operations that pass their input on, and activations that may be the identity on it, such as a ReLU after another,
# which is measured later.
_HAND_ON = re.compile(
    "View|UnsafeView|ReshapeAlias|Permute|Transpose|T|Clone|Alias|ToCopy|Expand|Slice|Roll|NativeDropout|Unsqueeze|"
    "Squeeze|AsStrided|Relu|Hardtanh|Threshold|Clamp|ClampMin|Copy"
)
# Further operations that map zeros to zeros.
_ZERO_AT_ZERO = re.compile(
    "LeakyRelu|PreluKernel|Gelu|Silu|Mish|Tanh|Elu|Hardswish|Neg|Mean|Sum|ConstantPadNd|Index|Select|Split|"
    "SplitWithSizes|Unbind|AvgPool2D|AdaptiveAvgPool2D|MaxPool2DWithIndices|UpsampleNearest2D|Cat|Stack|Pow|Add|Sub"
)
# Operations with the arguments input, weight, bias.
_AFFINE = re.compile(
    "Addmm|Linear|Convolution|(Native|Cudnn|Miopen)BatchNorm|NativeLayerNorm|NativeGroupNorm|FusedRmsNorm"
)
_PRODUCTS = re.compile("Mul|Mm|Bmm|GroupedMm|Baddbmm|Mv|Dot")


def operation(node: Node) -> str:
    """Return torch's name of an operation, such as `Addmm`."""
    return re.sub(r"Backward\d*$", "", node.name())


def edge_of(tensor: Tensor) -> Edge | None:
    """Return the operation that produced a tensor, or None if none is recorded."""
    if not tensor.requires_grad:
        return None
    edge: GradientEdge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def inputs_of(node: Node) -> list[Edge | None]:
    """Return the operations that produced an operation's inputs; None for inputs without gradient."""
    return [None if before is None else (before, number) for before, number in node.next_functions]


def ancestors(node: Node) -> set[Node]:
    """Return all operations that an operation depends on, including itself."""
    visited, pending = {node}, [node]
    while pending:
        for before, _ in pending.pop().next_functions:
            if before is not None and before not in visited:
                visited.add(before)
                pending.append(before)
    return visited


class Branches:
    """Searches the autograd graph from a block's output back to its input, the operation output `source`.

    `obstacle` is the operation at which the search failed, or "".
    """

    def __init__(self, source: Edge, names: Mapping[int, str]) -> None:
        self.obstacle = ""
        self._source, self._names = source, names

    def kept(self, edge: Edge | None) -> list[str] | None:
        """Parameters to zero so that a value equals the block's input; None if there are none."""
        if edge is None:
            return None
        if edge == self._source:
            return []
        node = edge[0]
        if operation(node) in ("Add", "Sub"):
            sides = inputs_of(node)
            for kept, other in zip(sides, reversed(sides), strict=True):
                if operation(node) == "Sub" and kept is sides[-1]:
                    continue
                through = self.kept(kept)
                zeroed = None if through is None else self.silenced(other)
                if through is not None and zeroed is not None:
                    return [*through, *zeroed]
        elif _HAND_ON.fullmatch(operation(node)):
            return self.kept(inputs_of(node)[0])
        self.obstacle = self.obstacle or operation(node)
        return None

    def silenced(self, edge: Edge | None) -> list[str] | None:
        """Parameters to zero so that a value is zero; None if there are none."""
        if edge is None or edge == self._source:
            return None
        node, name = edge[0], operation(edge[0])
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            parameter_name = self._names.get(id(parameter))
            return None if parameter_name is None else [parameter_name]
        inputs = inputs_of(node)
        if _AFFINE.fullmatch(name):
            return self._affine(name, inputs)
        if name == "WeightNormInterface":
            return self.silenced(inputs[1])
        if _PRODUCTS.fullmatch(name):
            # Prefer a scale or a weight to the factor that it multiplies.
            factors = [x for x in (inputs if name != "Baddbmm" else inputs[1:]) if x is not None]
            # In g / |v| v, another form of weight normalisation, v must not be zero.
            factors = [x for x in factors if not any(_divisor_depends(other, x) for other in factors)]
            for factor in sorted(factors, key=lambda x: not self._is_parameter(x)):
                if (zeroed := self.silenced(factor)) is not None:
                    return zeroed
        elif name == "Div":
            return self.silenced(inputs[0])
        elif name.startswith("ScaledDotProduct"):
            return self.silenced(inputs[2])
        elif _HAND_ON.fullmatch(name) or _ZERO_AT_ZERO.fullmatch(name):
            return self._all(inputs)
        self.obstacle = self.obstacle or name
        return None

    def _affine(self, name: str, inputs: list[Edge | None]) -> list[str] | None:
        if name == "Addmm":
            bias, *factors = inputs
            weights = [x for x in factors if x is not None and self._is_parameter(x)]
            weight = weights[-1] if weights else factors[-1]
        else:
            # A normalisation may have no bias, or neither; without a weight its input must be zero.
            _, weight, bias = [*inputs, None, None][:3]
            if weight is None:
                return self.silenced(inputs[0])
        zeroed, shift = self.silenced(weight), [] if bias is None else self.silenced(bias)
        return None if zeroed is None or shift is None else [*zeroed, *shift]

    def _all(self, inputs: list[Edge | None]) -> list[str] | None:
        names = list[str]()
        for x in inputs:
            if (zeroed := self.silenced(x)) is None:
                return None
            names += zeroed
        return names if inputs else None

    def _is_parameter(self, edge: Edge) -> bool:
        while _HAND_ON.fullmatch(operation(edge[0])):
            before = inputs_of(edge[0])[0]
            if before is None:
                return False
            edge = before
        return hasattr(edge[0], "variable")


def _divisor_depends(edge: Edge, other: Edge) -> bool:
    """Return True if a value is a quotient with a divisor that depends on another value."""
    divisor = inputs_of(edge[0])[1] if operation(edge[0]) == "Div" else None
    return divisor is not None and other[0] in ancestors(divisor[0])


class Consumers:
    """The consumers of each operation's output in the autograd graph of a network's output."""

    def __init__(self, output: Edge) -> None:
        self._consumers: dict[Edge, list[tuple[Node, int]]] = {}
        for node in ancestors(output[0]):
            for index, before in enumerate(inputs_of(node)):
                if before is not None:
                    self._consumers.setdefault(before, []).append((node, index))

    def added_to(self, edge: Edge) -> Edge | None:
        """Return the other summand if a value, up to shapes and scales, is only used in a sum; else None."""
        while len(consumers := self._consumers.get(edge, [])) == 1:
            ((node, index),) = consumers
            if operation(node) == "Add":
                return inputs_of(node)[1 - index]
            if operation(node) != "Mul" and not _HAND_ON.fullmatch(operation(node)):
                return None
            edge = node, 0
        return None
