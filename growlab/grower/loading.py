"""Save and load checkpoints of a growing network, restoring structure and widths."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.devices import methods_on_cpu
from growlab.base.errors import UserError
from growlab.base.pieces import gathered
from growlab.grower.forecast import Forecast
from growlab.grower.network import plain_tensors, see_through, see_whole
from growlab.grower.part import BlockPart, Part
from growlab.grower.rows import (
    fit_experts,
    fit_vocabulary,
    multiply_experts,
    number_of_experts,
    resize_vocabulary,
    rows_of_tokens,
    tensors_of_experts,
    with_rows,
)
from growlab.grower.sharding import Sharding
from growlab.grower.triggers import Clock, GrowingNetwork, Widths
from growlab.growth import GrowthEvent, GrowthState, restore
from growlab.growth.constants import at_widths, unchanged
from growlab.growth.hooks import attach, detach, state_of
from growlab.growth.multipliers import saved_multipliers
from growlab.growth.outputs import forget_caches
from growlab.optim import Regions
from growlab.widths import Part as Rows
from growlab.widths import WidthGraph, replace_tensors, resized, tensors_of
from growlab.widths.meta import FAILURES


@methods_on_cpu("load_state_dict", "resize_vocabulary", "multiply_experts", "reattach_hooks", "resize_for_loading")
class LoadingNetwork(GrowingNetwork):
    """A growing network that loads checkpoints of any stage; `growlab.Grower` is one."""

    forecast: Forecast
    _units: set[str]
    _regions: dict[str, Regions] | None
    _vocabulary: int | None
    sharding: Sharding | None
    # Factors on parameters and on their gradients, by name, applied when trained weights were loaded.
    moved_factors: Mapping[str, tuple[Tensor, Tensor]] = {}

    @property
    def _experts(self) -> int | None:
        return number_of_experts(getattr(self.network, "config", None))

    @property
    def _block_parts(self) -> Iterator[BlockPart]:
        return (part for part in self.parts if isinstance(part, BlockPart))

    def _make_ready(self) -> list[Any]:
        return see_whole(self.network, self.full_graph, self.sharding is not None)

    @contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Make a context in which the network's parameters can be replaced, also if it is sharded."""
        try:
            with nullcontext() if self.sharding is None else self.sharding.taken_off():
                yield
        finally:
            see_through(self.network, self.full_graph)

    def births(self) -> dict[str, int]:
        """Stage at which tensors were inserted, by name, without those present from the start."""
        return {name: stage for part in self._block_parts for name, stage in part.births(self.state).items()}

    def graph_at(self, state: GrowthState) -> WidthGraph:
        """Width graph of the network in a state."""
        graph = self.full_graph
        for part in self._block_parts:
            graph = part.graph_at(graph, state)
        return graph

    def _state_from_keys(self, names: Collection[str], state: GrowthState) -> GrowthState:
        for part in self._block_parts:
            state = part.state_from_keys(names, state)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of growth, besides the network's and the optimizers', in plain containers."""
        return {
            "full_widths": self.full_graph.full_widths,
            "growth": self.state.as_dict(),
            "clock": asdict(self.clock),
            "events": [event.as_dict() for event in self.events],
            "annealing": list(self._annealing),
            "trigger": self.trigger.state_dict(),
            "parts": {part.name: part.state_dict() for part in self.parts},
            "vocabulary": self._vocabulary,
            "experts": self._experts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of growth, before or after the network and the optimizers load theirs.

        Raises:
            UserError: it belongs to another network, or a run with other parts or other widths at its stage.
        """
        self.forecast.check_state(state)
        if (size := state.get("vocabulary")) is not None:
            fit_vocabulary(self, size)
        if (number := state.get("experts")) != self._experts and number is not None:
            fit_experts(self, number)
        self._set_state(GrowthState.from_dict(state["growth"]))
        self._units, self._annealing = ({"epoch", "step", "cost"}, tuple(state.get("annealing", self._annealing)))
        self.clock = Clock(**state["clock"])
        self.events = [GrowthEvent.from_dict(event) for event in state["events"]]
        self.trigger.load_state_dict(state["trigger"])
        for part in self.parts:
            part.load_state_dict(state["parts"][part.name])

    def resize_vocabulary(self, size: int, *, multiple_of: int = 1) -> GrowthEvent:
        """Add tokens to a model of transformers while it trains, between two steps.

        Its embeddings, its output layer and the layer's bias get new rows, the mean of the old ones (Hewitt 2021,
        "Initializing New Word Embeddings"); tied tables stay tied. Outputs of old tokens stay the same. Optimizers and
        averages follow; state of new rows is zero. With DistributedDataParallel call `growlab.grower.renew` afterwards.

        Args:
            size: number of tokens, more than before.
            multiple_of: round up to a multiple of this, as padded vocabularies are.

        Returns:
            The receipt, also in `events`; its notes have the numbers of tokens. It begins a stage, which is the birth
            stage of the new rows for `newborn`, parts, and optimizers with rates by age.

        Raises:
            UserError: the network has no vocabulary or is sharded, `size` is not larger, or another tensor depends on
                the number of tokens.
        """
        return resize_vocabulary(self, size, multiple_of)

    def multiply_experts(self, by: int = 2, *, noise: float = 0.1) -> GrowthEvent:
        """Multiply the experts of a mixture of transformers while it trains, between two steps.

        Each expert and its router's row are copied, and `by` times as many experts compute each token, so outputs stay
        the same. Noise that sums to zero over the copies of an expert is added to their last layers, so that training
        separates them. Optimizers and averages follow: a copy's gradient is its expert's divided by `by`, and moments
        are mapped accordingly. With DistributedDataParallel call `growlab.grower.renew` afterwards.

        A loss that balances the load by the number of experts, as with `output_router_logits`, is `by` times as large.

        Args:
            by: copies of each expert.
            noise: standard deviation of the noise, relative to that of the weights.

        Returns:
            The receipt, also in `events`; its notes have the numbers of experts. It begins a stage, but copies of
            experts have the ages of their originals: they are not newborn.

        Raises:
            UserError: the network is not a mixture of experts that growlab knows, is sharded, or has layers still to be
                inserted; or its outputs would change.
        """
        return multiply_experts(self, by, noise)

    def plain_state_dict(self) -> dict[str, Tensor]:
        """State dict as `finish` would leave it: that of a plain network at the current widths.

        Raises:
            UserError: normalisations are not plain yet, or the method or a part changes the network until `finish`.
        """
        return self.plain_tensors(self.network)[0]

    def plain_tensors(self, network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """State dict of the network or a copy as `finish` would leave it, and the original value of changed entries.

        Raises a UserError as `plain_state_dict` does.
        """
        see_through(network, self.full_graph)
        if self.state.norm_weights:
            raise UserError("normalisations over channels that grew are not plain yet; train on first.")
        late = [part.name for part in self.parts if type(part).finish is not Part.finish]
        if self.method.changes_storage:
            late.append(self.method.name)
        if late:
            raise UserError(f"with {late[0]} there is a plain network only once growth is finished.")
        return plain_tensors(network, self.graph, self.state.output_factor)

    def set_rows(self, names: Sequence[str], size: int) -> None:
        """Record the number of rows of tensors, such as one per token."""
        self.full_graph, self.graph = (with_rows(g, names, Rows(None, size)) for g in (self.full_graph, self.graph))
        self._regions = None

    def reattach_hooks(self) -> None:
        """Reattach the hooks that `finish` removed, so that checkpoints of earlier stages can be loaded."""
        for network in (self.network, *self.copies().values()):
            self._hook(network)
        self._open = True

    def _hook(self, network: nn.Module) -> None:
        """Add the hooks of growth and of the parts to the network, or to a copy of it."""
        see_through(network, self.full_graph)
        for part in self.parts:
            part.attach(network)
        attach(network, self.graph, self.state, self.resize_for_loading, self.probe())

    def _unhook(self, network: nn.Module) -> None:
        detach(network)
        for part in self.parts:
            part.detach(network)

    def resize_for_loading(
        self, network: nn.Module, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None
    ) -> None:
        """Resize the network, or a copy of it, to the tensors that it is about to load.

        Unknown tensors are left to `load_state_dict`, which raises an error.
        """
        see_through(network, self.full_graph)
        tokens = rows_of_tokens(network, self.graph)
        if state is not None and tokens and tokens[0] in tensors:
            size = len(tensors[tokens[0]])
            if size != len(network.get_parameter(tokens[0])):
                fit_vocabulary(self, size)
        experts = tensors_of_experts(network, self.graph)
        number = len(tensors[experts[0]]) if experts and experts[0] in tensors else None
        if state is not None and number not in (None, self._experts):
            fit_experts(self, number)
        needed = self.graph.axes.keys() - self.graph.constants.keys()
        if self.method.changes_storage and not needed <= network.state_dict().keys():
            raise UserError(
                f"growth has ended, and {self.method.name} stored weights in another form until then: load checkpoints "
                f"saved during training into a new network with its own Grower (or callback)."
            )
        saved = None if state is None else GrowthState.from_dict(state)
        graph = self.graph_at(saved or self._state_from_keys(tensors, self.state))
        # Constants may be missing: their widths follow from the other tensors.
        if not graph.axes.keys() - graph.constants.keys() <= tensors.keys():
            return
        shapes = {name: tuple(tensors[name].shape) for name in graph.axes if name in tensors}
        # Groups of blocks that are not inserted yet have no tensors: the state has their widths.
        widths = {**(saved or self.state).widths, **graph.widths_of(shapes)}
        if any(graph.shape(name, widths) != shape for name, shape in shapes.items()):
            return
        new = saved if saved is not None and saved.widths == widths else None
        own = self.state if network is self.network else state_of(network)
        if new is None and own is not None:
            new = self._state_of_tensors(tensors, own, widths)
        if new is None or new is own:
            return
        if self.sharding is not None and not self._has_structure_of(new):
            raise UserError(
                "a sharded network cannot change its widths while it loads: call the Grower's load_state_dict before "
                "the network's."
            )
        if network is self.network:
            self._set_state(new)
        else:
            self.resize_to(network, new)
            if own is not self.state:
                vars(own).update(vars(new))
            restore(network, self.graph_at(new), new)

    def _state_of_tensors(self, tensors: Mapping[str, Tensor], own: GrowthState, widths: Widths) -> GrowthState:
        """Infer the state for tensors saved without one; if they fit the network it is `own`."""
        stage, births = self.forecast.stage_of(widths, self.state.stage)
        guess = GrowthState(stage, dict(widths), births, asked=self.state.asked)
        guess, multipliers = self._state_from_keys(tensors, guess), saved_multipliers(tensors)
        if (own.widths, set(own.blocks)) != (widths, set(guess.blocks)):
            return replace(guess, multipliers=multipliers)
        # The network may have been finished since, without multipliers.
        return replace(own, multipliers=multipliers) if multipliers.keys() - own.multipliers.keys() else own

    # Parameters made in inference mode could not be trained.
    @torch.inference_mode(False)
    def _set_state(self, state: GrowthState) -> None:
        """Change the network, its copies and optimizers to another state of growth."""
        past, graph = dict(self.network.named_parameters()), self.graph_at(state)
        state = replace(state, constants={**self.state.constants, **state.constants})
        for network in (self.network, *self.copies().values()):
            self.resize_to(network, state)
            restore(network, graph, state)
            forget_caches(network, self.probe(), FAILURES)
        self.graph = graph
        # The same object: hooks read it.
        vars(self.state).update(vars(state))
        self._regions = None
        self.followers.exchange(past)

    def _has_structure_of(self, state: GrowthState) -> bool:
        return (self.state.widths, set(self.state.blocks)) == (state.widths, set(state.blocks))

    @torch.inference_mode(False)
    def resize_to(self, network: nn.Module, state: GrowthState) -> None:
        """Resize the network, or a copy of it, to the structure and widths of a state."""
        tensors = gathered(tensors_of(network, self.graph))
        now = {**self.state.widths, **self.graph.widths_of({name: t.shape for name, t in tensors.items()})}
        constants = {**self.state.constants, **state.constants}
        still = unchanged(self.graph, self.state.constants, tensors, now)

        def changed() -> Iterator[tuple[str, Tensor]]:
            for name in tensors:
                if self.graph.changes(name, now, state.widths):
                    new = resized(tensors[name], self.graph.axes[name], now, state.widths)
                    if name in still:
                        new = at_widths(self.graph, name, constants[name], state.widths, new)
                    yield name, new

        with nullcontext() if self._has_structure_of(state) else self.rebuilding():
            replace_tensors(network, self.graph, changed())
            for part in self._block_parts:
                part.restore(network, state)
