"""The part that leaves blocks out at first and brings them in with the stages."""

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
from growlab.optim.exchanging import order_parameters
from growlab.optim.followers import copy_state
from growlab.parts.depth.blocks import Blocks
from growlab.parts.depth.describe import describe
from growlab.parts.depth.starts import STARTS
from growlab.widths import WidthGraph


class Depth(BlockPart):
    """Lets blocks come in evenly with the fraction of growth that is done, before each event's widening.

    Args:
        blocks: names of blocks in the order in which they come in; "auto": all that follow another of their kind in a
            sequence and put out what goes in.
        start: how a block begins, see `growlab.parts.depth.starts`: "zero" adds nothing, "identity" is Net2Deeper,
            "stack" a copy of the block before that adds nothing yet, "gstack" a whole copy, which changes outputs.
        state: optimizer state that copied parameters begin with: "zero", or "copy", that of what they are copies of
            (those that are set to zero begin without). Behind it the event's own rule holds, as for all parameters.

    Raises:
        UserError: the blocks are no names, or there is no such state.
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
        """Chains of blocks of one kind: which may come in later, how exactly, and why others stay."""
        return describe(network, example)

    @property
    def depth(self) -> Blocks:
        """The blocks of the network that it was prepared for."""
        assert self._depth is not None
        return self._depth

    def applies(self, trigger: Trigger) -> bool:
        """A network that does not grow has all blocks, unless it is a smaller one."""
        return not isinstance(trigger, Never) or trigger.depth < 1

    def prepare(
        self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]
    ) -> WidthGraph:
        """Find the blocks; the network keeps them for now.

        Raises:
            UserError: they cannot be left out.
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
        """Take out the blocks that a whole network does not have yet."""
        present = self.depth.present_at(fraction_grown)
        self.depth.leave_out(network, [name for name in self.depth.blocks if name not in present])
        return self.depth.graph(present, graph)

    def check(self, grower: GrowingNetwork) -> None:
        """Refuse a trigger that does not know how far growth has come."""
        if grower.trigger.fraction_grown(0, grower.seed_widths) is None:
            raise UserError(
                "blocks that come in later need a trigger that knows how far growth has come: take a schedule of "
                "stages or a demand, and a growth method that follows it."
            )

    def begin(self, grower: GrowingNetwork) -> None:
        """Note the blocks that the seed has: none where it grows, a part of them in a smaller network."""
        fraction = grower.trigger.fraction_grown(0, grower.seed_widths)
        assert fraction is not None
        grower.state.blocks |= dict.fromkeys(self.depth.present_at(fraction), 0)
        grower.state.constants |= self.depth.constants

    def births(self, state: GrowthState) -> Mapping[str, int]:
        """Stage that the blocks' tensors came with."""
        return self.depth.births(state.blocks)

    def before_growth(self, grower: GrowingNetwork, widths: Widths) -> Mapping[str, Any]:
        """Put in the blocks that come with the next stage; optimizers and averages follow.

        Returns:
            What came in, each with its own parity; empty where nothing did.

        Raises:
            ParityError: a block changed the outputs; it was taken out again.
            UserError: a block cannot begin as configured, or an optimizer has several groups of parameters.
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
                # The average of what has only just begun is what it begins as.
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
        """The width graph with a state's blocks."""
        return self.depth.graph(state.blocks, graph)

    def state_from_keys(self, names: Collection[str], state: GrowthState) -> GrowthState:
        """Read off the blocks whose tensors are there."""
        present = [name for name in self.depth.blocks if set(self.depth.tensors(name)) <= set(names)]
        return replace(state, blocks={name: state.blocks.get(name, state.stage) for name in present})

    def restore(self, network: nn.Module, state: GrowthState) -> None:
        """Put in the blocks that a state has, and take out the others."""
        self.depth.restore(network, state.blocks, state.widths)
