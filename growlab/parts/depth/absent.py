"""Placeholder for a block that is not inserted yet."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

#: Output of a placeholder: the block's input ("stream"), or zeros for the network to add ("branch").
Kind = Literal["stream", "branch"]


class Absent(nn.Module):
    """Placeholder for a block: returns its input, or zeros if the network itself adds the input.

    Plain attributes of the block, which the network's code may read, are copied to it.

    Args:
        block: the block that is left out.
        kind: "stream": the block's main output is its main input; "branch": it is zeros.
        handover: composes its output from its inputs; None: it maps its first input to one tensor.
    """

    def __init__(self, block: nn.Module, kind: Kind = "stream", handover: "Handover | None" = None) -> None:
        super().__init__()
        own = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        vars(self).update({name: value for name, value in own.items() if not isinstance(value, Tensor)})
        self._kind, self._handover = kind, handover

    def forward(self, *args: Any, **named: Any) -> Any:
        """Map the block's inputs to an output of the block's structure."""
        if self._handover is None:
            return args[0] if self._kind == "stream" else torch.zeros_like(args[0])
        return self._handover.output((args, named), zeros=self._kind == "branch")


class Handover:
    """Composes a block's output from its inputs and constants, as observed in one call.

    Args:
        inputs: (positional, named) inputs of a call of the block.
        output: output of that call.

    Attributes:
        problem: reason why the output cannot be composed without the block, or "".

    Raises:
        ValueError: the block has no tensor among its inputs or outputs.
    """

    def __init__(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], output: Any) -> None:
        given, _ = pytree.tree_flatten_with_path(inputs)
        tensors = [(place, value) for place, value in given if isinstance(value, Tensor)]
        made, spec = pytree.tree_flatten(output)
        mains = [index for index, value in enumerate(made) if isinstance(value, Tensor)]
        if not tensors or not mains:
            raise ValueError("it maps no tensor to a tensor")
        self.place, self.main = tensors[0]
        self.main_output: Tensor = made[mains[0]]
        self.problem = ""
        # Paths of inputs (True), and constants (False).
        self._spec, self._entries = spec, list[tuple[bool, Any]]()
        for index, value in enumerate(made):
            if index == mains[0]:
                self._entries.append((True, self.place))
                continue
            same = [place for place, x in given if x is value and isinstance(x, Tensor)]
            if isinstance(value, Tensor) and not same:
                self.problem = "it puts out more than one tensor of its own"
            self._entries.append((True, same[0]) if same else (False, value))
        self._index = mains[0]

    @property
    def plain(self) -> bool:
        """True if the block maps its first input to one tensor."""
        first: tuple[Any, ...] = (pytree.SequenceKey(0), pytree.SequenceKey(0))
        return self._spec.is_leaf() and tuple(self.place) == first

    def taken(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        """Return the main tensor among the block's (positional, named) inputs."""
        main: Tensor = pytree.key_get(inputs, self.place)
        return main

    def released(self) -> "Handover":
        """Release the tensors of the call, and return self."""
        del self.main, self.main_output
        return self

    def output(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], zeros: bool) -> Any:
        """Compose the block's output from its inputs.

        Args:
            inputs: (positional, named) inputs.
            zeros: make the main output zeros.
        """
        values = [pytree.key_get(inputs, entry) if taken else entry for taken, entry in self._entries]
        if zeros:
            values[self._index] = torch.zeros_like(values[self._index])
        return pytree.tree_unflatten(values, self._spec)
