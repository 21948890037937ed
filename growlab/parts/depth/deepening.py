"""Part that leaves blocks of a network out at first and inserts them from stage to stage."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from growlab.base import ranks
from growlab.base.errors import UserError
from growlab.grower.part import BlockPart
from growlab.grower.triggers import GrowingNetwork, Never, Trigger, Widths
from growlab.growth import GrowthState
from growlab.optim.followers import copy_state, order_parameters
from growlab.parts.depth.blocks import Blocks
from growlab.parts.depth.describe import describe
from growlab.parts.depth.starts import STARTS
from growlab.widths import WidthGraph


class Depth(BlockPart):
    """Inserts blocks evenly as growth proceeds, before the widening of each event.

    Args:
        blocks: names of blocks in the order of insertion; "auto": all that follow another of their kind in a sequence
            and keep the shape of their input.
        start: initialisation of inserted blocks, see `growlab.parts.depth.starts`: "zero" zeroes the residual branch,
            "identity" is Net2Deeper, "stack" copies the previous block with its branch zeroed, "gstack" copies it
            entirely, which changes outputs.
        state: optimizer state of copied parameters: "zero", or "copy" for their original's state (zeroed parameters
            start without). The event's rule for optimizer state is applied afterwards, as for all parameters.

    Raises:
        UserError: `blocks` is not a list of names, or `start` or `state` is unknown.
    """

    name = "depth"
    grows = True
    one_group = True

    def __init__(
        self,
        blocks: str | Sequence[str] = "auto",
        start: Literal["zero", "identity", "stack", "gstack"] = "zero",
        state: Literal["zero", "copy"] = "zero",
    ) -> None:
        if not isinstance(blocks, str | Sequence):
            raise UserError(f"blocks must be auto or a list of names of modules, not {blocks!r}.")
        self._names = None if blocks == "auto" else [blocks] if isinstance(blocks, str) else list(blocks)
        if start not in tuple(STARTS):
            raise UserError(f"start must be {' or '.join(STARTS)}, not {start!r}.")
        if state not in ("zero", "copy"):
            raise UserError(f"state must be zero or copy, not {state!r}.")
        self._start, self._state = str(start), str(state)
        self._depth: Blocks | None = None

    @classmethod
    def examine(cls, network: nn.Module, example: tuple[Any, ...]) -> list[str]:
        """Describe chains of blocks: those that may be inserted later, by which starts, and why others stay."""
        return describe(network, example)

    @property
    def depth(self) -> Blocks:
        """Blocks of the network that the part was prepared for."""
        assert self._depth is not None
        return self._depth

    def applies(self, trigger: Trigger) -> bool:
        """Return True if the network grows, or is a baseline of reduced depth; others have all blocks."""
        return not isinstance(trigger, Never) or trigger.depth < 1

    def prepare(
        self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]
    ) -> WidthGraph:
        """Find the blocks; the network is not changed yet.

        Raises:
            UserError: blocks cannot be left out.
        """
        for path, module in network.named_modules():
            computed = module.parametrizations if is_parametrized(module) else ()
            if any(f"{path}.parametrizations.{name}.original" not in graph.axes for name in computed):
                raise UserError(
                    f"blocks that come in later need weights that are no functions of others, which those of {path} "
                    "are: choose another growth method or model."
                )
        self._depth = Blocks(network, graph, self._names, self._start, example)
        return graph

    def shrink_to(self, network: nn.Module, graph: WidthGraph, fraction_grown: float) -> WidthGraph:
        """Leave out the blocks that a full network does not have at a fraction of growth."""
        present = self.depth.present_at(fraction_grown)
        self.depth.leave_out(network, [name for name in self.depth.blocks if name not in present])
        return self.depth.graph(present, graph)

    def check(self, grower: GrowingNetwork) -> None:
        """Check that the trigger knows the fraction of growth at each stage."""
        if grower.trigger.fraction_grown(0, grower.seed_widths) is None:
            raise UserError(
                "blocks that come in later need a trigger that knows how far growth has come: take a schedule of "
                "stages or a demand, and a growth method that follows it."
            )

    def begin(self, grower: GrowingNetwork) -> None:
        """Record the blocks of the seed network: none if it grows, a fraction in a baseline of reduced depth."""
        fraction = grower.trigger.fraction_grown(0, grower.seed_widths)
        assert fraction is not None
        grower.state.blocks |= dict.fromkeys(self.depth.present_at(fraction), 0)
        grower.state.constants |= self.depth.constants

    def births(self, state: GrowthState) -> Mapping[str, int]:
        """Return the birth stages of the blocks' tensors, by name."""
        return self.depth.births(state.blocks)

    def before_growth(self, grower: GrowingNetwork, widths: Widths) -> Mapping[str, Any]:
        """Insert the blocks of the next stage, and add them to optimizers and averages.

        Returns:
            The inserted blocks with their parity errors, under "inserted"; empty if there are none.

        Raises:
            ParityError: a block changed the outputs; it is removed again.
            UserError: the start does not fit a block, or names do not determine its parameter group in an optimizer.
        """
        state, stage = grower.state, grower.state.stage + 1
        fraction = grower.trigger.fraction_grown(state.scheduled_stage + 1, widths)
        assert fraction is not None
        past, inserted, copied = dict(grower.network.named_parameters()), [], dict[str, str]()
        for name in self.depth.present_at(fraction):
            if name in state.blocks:
                continue
            now = (grower.method, state.widths, grower.seed, stage)
            receipt, sources = self.depth.insert(grower.network, name, *now, grower.probe(), ranks.agreed)
            inserted.append(receipt)
            copied |= sources
            for copy in grower.copies().values():
                # The average of a new block is its initial value.
                self.depth.put_in(copy, name, state.widths, grower.network)
                copy.requires_grad_(False)
            state.blocks[name] = stage
        if not inserted:
            return {}
        grower.graph = grower.graph_at(state)
        parameters = dict(grower.network.named_parameters())
        for optimizer in grower.optimizers:
            order_parameters(optimizer, past, parameters)
            if self._state == "copy":
                copy_state(optimizer, {parameters[new]: parameters[old] for new, old in copied.items()})
        return {"inserted": inserted}

    def graph_at(self, graph: WidthGraph, state: GrowthState) -> WidthGraph:
        """Return the width graph with the blocks of a growth state."""
        return self.depth.graph(state.blocks, graph)

    def state_from_keys(self, names: Collection[str], state: GrowthState) -> GrowthState:
        """Infer the present blocks from the names of a state_dict's tensors."""
        present = [name for name in self.depth.blocks if set(self.depth.tensors(name)) <= set(names)]
        return replace(state, blocks={name: state.blocks.get(name, state.stage) for name in present})

    def restore(self, network: nn.Module, state: GrowthState) -> None:
        """Insert the blocks of a growth state and leave out the others."""
        self.depth.restore(network, state.blocks, state.widths)
