"""Train newborn entries separately: warm up their learning rate after an event, or freeze all older entries."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import as_user_errors
from growlab.base.settings import one_of, whole
from growlab.grower.part import Part
from growlab.grower.trained import Newborn, newborn
from growlab.grower.triggers import GrowingNetwork
from growlab.growth import GrowthEvent


class _SinceEvent(Part):
    """Base of parts that act for some optimizer steps after each event.

    Events without a step between them count as one.
    """

    # Stage of the oldest newborn entries (0: none yet), and optimizer steps since then.
    saved: ClassVar[Mapping[str, str]] = {"since": "_since", "done": "_done"}

    def __init__(self) -> None:
        self._since, self._done = 0, 0
        # Saved entries by the `id` of their parameter, with the optimizer that they are saved for.
        self._saved: dict[int, tuple[Optimizer, Tensor]] = {}
        self._cached: tuple[tuple[int, ...], Newborn] | None = None

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        if self._done or not self._since:
            self._since = event.stage
        self._done, self._saved = 0, {}
        return {}

    def after_step(self, grower: GrowingNetwork) -> None:
        self._done += 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._saved = {}

    def _newborn(self, grower: GrowingNetwork) -> Newborn:
        """Newborn parameters and masks, cached for a stage."""
        stage = (self._since, grower.state.stage, *grower.state.widths.values())
        if self._cached is None or self._cached[0] != stage:
            self._cached = stage, newborn(grower, self._since)
        return self._cached[1]

    def _named(self, grower: GrowingNetwork, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """An optimizer's parameters, except those that an optimizer wrapping it has saved already."""
        unsaved = {id(p) for group in optimizer.param_groups for p in group["params"]} - self._saved.keys()
        return {name: p for name, p in grower.network.named_parameters() if id(p) in unsaved}


class Warmup(_SinceEvent):
    """Warm up the learning rate of newborn entries linearly after each event, with any optimizer.

    In step t = 1, 2, ... after an event, newborn entries move by a fraction of the optimizer's update d, which includes
    decoupled weight decay:

        w <- w + min(1, t / steps) d

    Newborn entries are copied before each of these steps.

    Source: SPARKLING (arXiv 2602.02472), which warms up the rate of newborn channels alone.

    Args:
        steps: optimizer steps from an event to the full rate.
        who: "newborn": entries added by the last event; "all": all entries, by the groups' rates.

    Raises:
        UserError: `steps` is not a whole number from 1 on, or there is no such `who`.
    """

    name = "warmup"

    def __init__(self, steps: int, who: Literal["newborn", "all"] = "newborn") -> None:
        with as_user_errors():
            whole(1, steps=steps)
            one_of(("newborn", "all"), who=who)
        self._steps, self._who = steps, who
        super().__init__()
        # Full rates of groups by their `id`, with the optimizer that lowered them.
        self._rates: dict[int, tuple[Optimizer, Any]] = {}

    def before_update(self, grower: GrowingNetwork, optimizer: Optimizer) -> None:
        """Save newborn entries, or lower the rates."""
        if not self._since or self._done + 1 >= self._steps:
            return
        if self._who == "all":
            for group in optimizer.param_groups:
                # An optimizer that wraps another shares its groups.
                if "lr" in group and id(group) not in self._rates:
                    self._rates[id(group)] = optimizer, group["lr"]
                    group["lr"] = group["lr"] * self._fraction
            return
        new = self._newborn(grower)
        for name, parameter in self._named(grower, optimizer).items():
            if parameter.grad is not None and (name in new.parameters or name in new.masks):
                mask = new.masks.get(name)
                kept = parameter.detach().clone() if mask is None else parameter.detach()[mask]
                self._saved[id(parameter)] = optimizer, kept

    @property
    def _fraction(self) -> float:
        return (self._done + 1) / self._steps

    @torch.no_grad()
    def after_update(self, grower: GrowingNetwork, optimizer: Optimizer) -> None:
        """Shorten the step of newborn entries, or restore the rates."""
        for group in optimizer.param_groups:
            if self._rates.get(id(group), (None, None))[0] is optimizer:
                group["lr"] = self._rates.pop(id(group))[1]
        if not self._saved:
            return
        masks = self._newborn(grower).masks
        for name, parameter in grower.network.named_parameters():
            saver, kept = self._saved.get(id(parameter), (None, None))
            if saver is not optimizer or kept is None:
                continue
            del self._saved[id(parameter)]
            if name in masks:
                parameter[masks[name]] = torch.lerp(kept, parameter[masks[name]], self._fraction)
            else:
                parameter.copy_(torch.lerp(kept, parameter, self._fraction))


class Freeze(_SinceEvent):
    """Freeze all entries that are older than an event, bit for bit, with any optimizer, while newborn entries train.

    Before each step, gradients of old parameters are dropped, so that optimizers skip them. In parameters that grew,
    gradients of old entries are zeroed, and the entries are restored after the step. Gradients are still computed, and
    clipping by norm counts them; to avoid that, switch off `requires_grad` of what `Grower.newborn` does not name.
    Buffers such as running statistics are not frozen.

    Source: only new blocks train in LLaMA-Pro (Wu et al. 2024, arXiv 2401.02415).

    Args:
        steps: optimizer steps after an event that old entries stay for; None: until the next event or the end.

    Raises:
        UserError: `steps` is not a whole number from 1 on.
    """

    name = "freeze"

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None:
            with as_user_errors():
                whole(1, steps=steps)
        self._steps = steps
        super().__init__()

    def _acts(self) -> bool:
        return self._since > 0 and (self._steps is None or self._done < self._steps)

    def before_update(self, grower: GrowingNetwork, optimizer: Optimizer) -> None:
        """Drop the gradients of old entries."""
        if not self._acts():
            self._saved = {}
            return
        new = self._newborn(grower)
        for name, parameter in self._named(grower, optimizer).items():
            if name in new.masks:
                self._saved[id(parameter)] = optimizer, parameter.detach()[~new.masks[name]]
        for name, parameter in grower.network.named_parameters():
            if parameter.grad is not None and name in new.masks:
                parameter.grad = parameter.grad.to_dense() * new.masks[name]
            elif name not in new.parameters:
                parameter.grad = None

    @torch.no_grad()
    def after_update(self, grower: GrowingNetwork, optimizer: Optimizer) -> None:
        """Restore old entries."""
        if self._acts() and self._saved:
            for name, mask in self._newborn(grower).masks.items():
                parameter = grower.network.get_parameter(name)
                saver, kept = self._saved.get(id(parameter), (None, None))
                if saver is optimizer and kept is not None:
                    parameter[~mask] = kept
