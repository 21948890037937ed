"""Growth in depth: leave blocks of a network out, and insert them while it trains.

A run starts from the network at full depth, as it does at full width, and leaves blocks out at first. Each is inserted
at its original place, so in the end the network has its original class, shapes and state_dict keys.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from growlab.base import ranks
from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import one_of
from growlab.grower.part import BlockPart, check_fraction_known
from growlab.grower.triggers import GrowingNetwork, Never, Trigger, Widths
from growlab.growth import GrowthState, constants
from growlab.growth.constants import as_applied, as_stored
from growlab.growth.event import Rebuilding
from growlab.growth.method import GrowthContext, GrowthMethod
from growlab.growth.outputs import observe, placing, positional
from growlab.growth.parity import compare
from growlab.growth.state import ParityError
from growlab.optim.followers import copy_state, order_parameters
from growlab.parts.depth.finding import Block, SkippedBlock, same_draws
from growlab.parts.depth.search import Search, describe, same_shaped_before
from growlab.parts.depth.starts import COPYING, START_PRESERVES, STARTS, ZEROING, Insertion
from growlab.widths import Axis, WidthGraph, replace_tensors, resize, tensors_of
from growlab.widths.meta import copied

log = logging.getLogger(__name__)


class Blocks:
    """Blocks of a network that are left out at first and inserted later.

    Args:
        network: the network at full width and depth; unchanged until `leave_out`.
        graph: its width graph.
        blocks: names of blocks in the order of insertion; None for all that follow another of their kind and keep the
            shape of their input: the second of each chain, then the third, and so on.
        start: initialisation of inserted blocks, a name in `growlab.parts.depth.starts.STARTS`.
        example: positional inputs of the network.

    Raises:
        UserError: a block cannot be left out, or none is found.
    """

    def __init__(
        self, network: nn.Module, graph: WidthGraph, blocks: Sequence[str] | None, start: str, example: tuple[Any, ...]
    ) -> None:
        self.full, self.start = graph, start
        self.constants = constants.kept(graph, tensors_of(network, graph))
        # Resolved first, so that wrong names raise an error before the network runs.
        named = None if blocks is None else [(name, _paths(network, name)) for name in blocks]
        search, reasons = Search(network, example, start), dict[str, str]()
        if named is None:
            candidates, chains = search.all()
            reasons = {name: reason for chain in chains for name, reason in chain.reasons.items()}
        else:
            candidates = [search.named(name, paths) for name, paths in named]
        self.blocks: dict[str, Block] = {}
        self._aliases: dict[str, dict[str, str]] = {}
        # Per block, parameters that are shared with the rest of the network, mapped to their names there.
        self._tied: dict[str, dict[str, str]] = {}
        for block in candidates:
            try:
                self._aliases[block.name] = self._alias(block)
                self._tied[block.name] = self._shared(network, block)
            except UserError as error:
                if named is not None:
                    raise
                reasons[block.name] = str(error)
                continue
            self.blocks[block.name] = block
        if not self.blocks:
            raise UserError(_none_found(start, reasons))
        modules = dict(network.named_modules())
        self._modules = {
            name: [copied(modules[path]).cpu() for path in block.paths] for name, block in self.blocks.items()
        }

    def present_at(self, fraction_grown: float) -> list[str]:
        """Names of the blocks present at a fraction of growth: they are inserted evenly, all by the end."""
        return list(self.blocks)[: round(fraction_grown * len(self.blocks))]

    def tensors(self, name: str) -> list[str]:
        """Names of a block's tensors in a `state_dict`."""
        modules = zip(self.blocks[name].paths, self._modules[name], strict=True)
        return [f"{path}.{tensor}" for path, module in modules for tensor in module.state_dict()]

    def leave_out(self, network: nn.Module, names: Collection[str] | None = None) -> None:
        """Replace blocks by placeholders in a network, in place: all of them, or the named ones."""
        for name in self.blocks if names is None else names:
            self.blocks[name].leave_out(network)

    def graph(self, present: Collection[str], full: WidthGraph | None = None) -> WidthGraph:
        """Return the width graph of the network with only the named blocks: the same groups, fewer tensors.

        If a left-out block maps the channels of one group to another, its consumers read the first group. `full` is the
        width graph with all blocks; None: the one from construction.
        """
        absent = [block for name, block in self.blocks.items() if name not in present]
        graph = _kept(full or self.full, lambda name: not any(block.contains(name) for block in absent))
        aliases: dict[str, str] = {}
        for name in self.blocks:
            if name not in present and self._aliases[name]:
                (inside,) = self._aliases[name].keys()
                aliases[inside] = aliases.get(self._aliases[name][inside], self._aliases[name][inside])
        if not aliases:
            return graph
        # A block may read the output of another left-out block.
        while any(target in aliases for target in aliases.values()):
            aliases = {inside: aliases.get(target, target) for inside, target in aliases.items()}
        return replace(
            graph,
            axes={name: tuple(_renamed(a, aliases) for a in axes) for name, axes in graph.axes.items()},
            written={place: _renamed(axis, aliases) for place, axis in graph.written.items()},
            channel_norms=tuple(replace(n, axis=_renamed(n.axis, aliases)) for n in graph.channel_norms),
            attentions=tuple(replace(a, axis=_renamed(a.axis, aliases)) for a in graph.attentions),
        )

    def only(self, name: str) -> WidthGraph:
        """Return the width graph of one block's tensors."""
        return _kept(self.full, self.blocks[name].contains)

    def put_in(self, network: nn.Module, name: str, widths: Widths, source: nn.Module | None = None) -> list[nn.Module]:
        """Insert a block in place, at the given widths; return the modules that it replaces.

        The block is copied from `source`, a network at these widths; None: as initialised by its constructor.
        """
        block = self.blocks[name]
        replaced = [network.get_submodule(path) for path in block.paths]
        modules = (
            list(copied(nn.ModuleList(self._modules[name])).children())
            if source is None
            else [copied(source.get_submodule(path)) for path in block.paths]
        )
        for path, module in zip(block.paths, modules, strict=True):
            network.set_submodule(path, module._apply(placing(network)).train(network.training))
        for inside, outside in self._tied[name].items():
            owner, _, attribute = inside.rpartition(".")
            setattr(network.get_submodule(owner), attribute, network.get_parameter(outside))
        if source is None:
            resize(network, self.only(name), self.full.full_widths, widths)
        return replaced

    def restore(self, network: nn.Module, names: Collection[str], widths: Widths) -> None:
        """Insert the blocks of a checkpoint's network and leave out the others, in place."""
        for name, block in self.blocks.items():
            present = not any(isinstance(network.get_submodule(path), SkippedBlock) for path in block.paths)
            if name in names and not present:
                self.put_in(network, name, widths)
            elif name not in names and present:
                self.leave_out(network, [name])

    def insert(
        self,
        network: nn.Module,
        name: str,
        method: GrowthMethod,
        widths: Widths,
        seed: int,
        stage: int,
        probe: tuple[Any, ...],
        agree: Callable[[list[float]], list[float]] = list,
        rebuilding: Rebuilding = nullcontext,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Insert and initialise a block during training, and check that the outputs are preserved.

        Its weights are drawn as for a seed network, or at full width kept from its constructor; then the start is
        applied. See `growlab.growth.grow` for the arguments.

        Returns:
            The block's entry in the event's receipt, and the originals of its copied parameters, by name.

        Raises:
            ParityError: the outputs changed; the block is removed again.
            UserError: the start does not fit the block.
        """
        probe = positional(probe)
        with same_draws():
            before = observe(network, probe)
        block, graph, placeholders = self.blocks[name], self.only(name), list[nn.Module]()
        try:
            with rebuilding():
                placeholders = self.put_in(network, name, widths)
                if dict(widths) != self.full.full_widths:
                    tensors = as_applied(graph, tensors_of(network, graph))
                    kept = {key: self.constants[key] for key in tensors.keys() & self.constants.keys()}
                    context = GrowthContext(graph, tensors, widths, widths, seed, stage, constants=kept)
                    replace_tensors(network, graph, as_stored(graph, method.initialise(context)))
                fixed = self._tied[name].keys() | self.constants.keys()
                insertion = Insertion(network, block, probe, same_shaped_before(network, block), fixed)
                with torch.no_grad():
                    STARTS[self.start](insertion)
            with same_draws():
                after = observe(network, probe)
            allowed = 0.0 if self.start in START_PRESERVES else None
            parity = compare(network, probe, before, after, agree, allowed=allowed)
            errors, tolerance = parity.errors, max(parity.tolerances) if parity.tolerances else None
            if not parity.kept:
                raise ParityError(
                    f"the block {name} with start={self.start!r} changed the output by {errors[0]:.2e} in eval "
                    f"mode and {errors[1]:.2e} in train mode, more than {tolerance:.2e}; it was taken out again."
                )
        except BaseException:
            with rebuilding():
                # Empty if `put_in` failed.
                for path, module in zip(block.paths, placeholders, strict=False):
                    network.set_submodule(path, module)
            raise
        copied = insertion.copied if self.start in COPYING else {}
        receipt = {
            "block": name,
            "start": self.start,
            "copied_from": list(insertion.twin) if copied else None,
            "parity_error_eval": errors[0],
            "parity_error_train": errors[1],
            "parity_tolerance": tolerance,
        }
        return receipt, {new: old for new, old in copied.items() if new not in self._zeroed(block)}

    def _zeroed(self, block: Block) -> frozenset[str]:
        return frozenset(block.zeroed or ()) if self.start in ZEROING else frozenset()

    def warn_of_frozen(self, blocks: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> None:
        """Log a warning if branches of blocks begin at zero and are frozen, without a trained adapter."""
        zeroed = [name for block in blocks for name in self._zeroed(self.blocks[block])]
        trained = [name for name in zeroed if parameters[name].requires_grad]

        def learns(name: str) -> bool:
            # A bias, or an adapter of the same layer.
            return any(other.startswith(name.rsplit(".", 2)[0] + ".") for other in trained)

        if frozen := [name for name in zeroed if name not in trained and not learns(name)]:
            log.warning(
                "%s begins at zero and is frozen, so its branch of the inserted layer never contributes: train it, or "
                "give it an adapter%s",
                frozen[0],
                f" (and {len(frozen) - 1} more)" if len(frozen) > 1 else "",
            )

    def _shared(self, network: nn.Module, block: Block) -> dict[str, str]:
        """Map names of a block's parameters that are shared with other modules to their names there."""
        first: dict[int, str] = {}
        shared = {}
        for name, parameter in network.named_parameters(remove_duplicate=False):
            other = first.setdefault(id(parameter), name)
            if block.contains(name) and not block.contains(other):
                shared[name] = other
        overwritten = [name for name in self._zeroed(block) if not block.contains(name)]
        overwritten += shared.values() if self.start == "identity" else ()
        if overwritten:
            raise UserError(
                f"the block {block.name} would begin with other values of {overwritten[0]}, which other modules share."
            )
        return shared

    def _stream(self, block: Block) -> frozenset[str]:
        """Groups with tensors both inside and outside of a block."""
        groups: dict[bool, set[str]] = {True: set(), False: set()}
        for name, axes in self.full.axes.items():
            groups[block.contains(name)].update(group for axis in axes for group in axis.groups)
        return frozenset(groups[True] & groups[False])

    def _alias(self, block: Block) -> dict[str, str]:
        """Map the block's output group to the group that replaces it while left out; empty for a residual block."""
        block_axes = [axis for name, axes in self.full.axes.items() if block.contains(name) for axis in axes]
        stream = self._stream(block)
        inputs, outputs = (
            {g for axis in block_axes if axis.role == role for g in axis.groups} & stream for role in ("in", "out")
        )
        new = outputs - inputs
        if not new:
            return {}
        if len(new) != 1 or len(inputs) != 1 or outputs & inputs:
            raise UserError(
                f"the block {block.name} outputs the channels {', '.join(sorted(new))} instead of "
                f"{', '.join(sorted(inputs)) or 'fixed ones'}, which cannot be passed on without it."
            )
        (inside,), (source,) = new, inputs
        if self.full.groups[inside].full_width != self.full.groups[source].full_width:
            raise UserError(f"the block {block.name} changes the number of channels and cannot be left out.")
        return {inside: source}


def _kept(graph: WidthGraph, keep: Callable[[str], bool]) -> WidthGraph:
    """Restrict a width graph to the tensors, layers and norms for which `keep` is True; groups stay."""
    return replace(
        graph,
        axes={name: axes for name, axes in graph.axes.items() if keep(name)},
        layers=tuple(layer for layer in graph.layers if keep(layer.weight)),
        norms=tuple(norm for norm in graph.norms if keep(norm.name)),
        radii=tuple(radius for radius in graph.radii if keep(radius.name)),
        channel_norms=tuple(norm for norm in graph.channel_norms if keep(norm.name)),
        attentions=tuple(attention for attention in graph.attentions if any(map(keep, attention.queries))),
        written={place: axis for place, axis in graph.written.items() if keep(place.module)},
    )


def _renamed(axis: Axis, aliases: Mapping[str, str]) -> Axis:
    parts = tuple(
        replace(part, group=aliases.get(part.group, part.group)) if part.group else part for part in axis.parts
    )
    return Axis(parts, axis.role)


def _paths(network: nn.Module, name: str) -> tuple[str, ...]:
    """Resolve a block's name to paths of modules."""
    parent, _, last = name.rpartition(".")
    first, colon, end = last.partition(":")
    modules = dict(network.named_modules())
    paths = [name]
    if colon and first.isdigit() and end.isdigit():
        paths = [f"{parent}.{i}".lstrip(".") for i in range(int(first), int(end))]
    missing = [path for path in paths if path not in modules or not path]
    if missing or not paths:
        raise UserError(
            f"blocks names {name}, but the network has no {missing[0] if missing else 'such modules'}; name "
            "modules such as layers.0.1, or neighbours in a sequence such as hidden.3:6."
        )
    return tuple(paths)


def _none_found(start: str, reasons: Mapping[str, str]) -> str:
    if not reasons:
        return "blocks='auto' finds no modules of one kind in a row that keep the shape of their input; name blocks."
    name, reason = next(iter(reasons.items()))
    others = len(reasons) - 1
    more = f", and {others} other block{'s' if others > 1 else ''}" if others else ""
    return (
        f"blocks='auto' finds no block that start={start!r} fits ({name}: {reason}{more}); name blocks, or choose "
        "another start: identity for layers without a residual, gstack for copies that change the outputs."
    )


class Depth(BlockPart):
    """Inserts blocks evenly as growth proceeds, before the widening of each event.

    Args:
        blocks: names of blocks in the order of insertion; "auto": all that follow another of their kind in a sequence
            and keep the shape of their input.
        start: initialisation of inserted blocks, see `growlab.parts.depth.starts`: "zero" zeroes the residual branch,
            "identity" is Net2Deeper, "stack" copies the previous block, if it has the same shapes, with its branch
            zeroed, "gstack" copies it entirely, which changes outputs.
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
        with as_user_errors():
            one_of(STARTS, start=start)
            one_of(("zero", "copy"), state=state)
        self._start, self._state = str(start), str(state)
        # `identity` runs the network with the new block before it is resharded.
        self.shards = start != "identity"
        #: Blocks of the network; set by `prepare`.
        self.depth: Blocks

    @classmethod
    def examine(cls, network: nn.Module, example: tuple[Any, ...]) -> list[str]:
        """Describe chains of blocks: which may be inserted later, by which starts, and why others may not."""
        return describe(network, example)

    def applies(self, trigger: Trigger) -> bool:
        """Return True if the network grows, or is a baseline of reduced depth."""
        return not isinstance(trigger, Never) or trigger.depth < 1

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Find the blocks; the network is not changed yet."""
        for path, module in network.named_modules():
            computed: Any = module.parametrizations if is_parametrized(module) else {}
            # Weights inside of the parametrisations may be shared by all blocks.
            originals = [
                f"{name}.{key}" for name in computed for key, _ in computed[name].named_parameters(recurse=False)
            ]
            if any(f"{path}.parametrizations.{name}".lstrip(".") not in graph.axes for name in originals):
                raise UserError(
                    f"inserted blocks need plain weights, but those of {path} are computed from others: choose another "
                    "growth method or model."
                )
        self.depth = Blocks(network, graph, self._names, self._start, example)
        return graph

    def shrink_to(self, network: nn.Module, graph: WidthGraph, fraction_grown: float) -> WidthGraph:
        """Leave out the blocks that are not present at a fraction of growth."""
        present = self.depth.present_at(fraction_grown)
        self.depth.leave_out(network, [name for name in self.depth.blocks if name not in present])
        return self.depth.graph(present, graph)

    def check(self, grower: GrowingNetwork) -> None:
        """Check that the trigger knows the fraction of growth at each stage."""
        check_fraction_known(grower, "inserted blocks")

    def begin(self, grower: GrowingNetwork) -> None:
        """Record the blocks of the seed network: none if it grows, some in a baseline of reduced depth."""
        fraction = grower.trigger.fraction_grown(0, grower.seed_widths)
        assert fraction is not None
        grower.state.blocks |= dict.fromkeys(self.depth.present_at(fraction), 0)
        grower.state.constants |= self.depth.constants

    def births(self, state: GrowthState) -> Mapping[str, int]:
        """Return the birth stages of the blocks' tensors, by name."""
        return {name: stage for block, stage in state.blocks.items() for name in self.depth.tensors(block)}

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
            receipt, sources = self.depth.insert(
                *(grower.network, name, grower.method, state.widths, grower.seed, stage),
                *(grower.probe(), ranks.agreed, grower.rebuilding),
            )
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
        self.depth.warn_of_frozen([receipt["block"] for receipt in inserted], parameters)
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
