"""The callback that grows the network between epochs."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor

from growlab.errors import UserError
from growlab.frontends.lightning import renew_wrapper
from growlab.growth import (
    CLASSES,
    GrowthEvent,
    GrowthState,
    ParityError,
    WidthDecision,
    grow,
    open_classes,
)
from growlab.optim import Inheritance, follow, running_gradients
from growlab.ranks import agreed, broadcast_buffers, gather
from growlab.training.climbing import Climber
from growlab.training.deepening import deepen
from growlab.training.looking import Batches, auxiliary, measurement
from growlab.training.objective import network_inputs
from growlab.training.orthogonal import OldGradient
from growlab.training.rank_check import RankCheck
from growlab.training.task import Task
from growlab.widths import tensors_of

log = logging.getLogger(__name__)


class GrowthCallback(Callback):
    """Brings the network to the stage of the current epoch before the epoch's first batch.

    It asks "is the network at the stage of this epoch?" whenever training or an epoch starts, so that a run
    resumed from just before an event grows as the uninterrupted run does. A method that decides widths by itself is
    asked before the first batch behind each of its boundaries, which may lie inside an epoch.

    Args:
        probe: inputs that parity is checked on, [B, ...] or a tuple of them.
        optimizer_state: what becomes of optimizer state at an event, see `growlab.optim.follow`.
        on_event: called with the receipt after each event.
        rank_check: compares ranks after each event.
        old_gradient: looks back at the old data before each event.
        climber: says at the beginning of each epoch whether the network grows, in place of the schedule.
        batches: the first training batches of the current epoch, so many, this rank's part: for methods that look at
            data.
    """

    def __init__(
        self,
        probe: Tensor | tuple[Any, ...],
        optimizer_state: Inheritance = "auto",
        on_event: Callable[[Trainer, dict[str, Any]], None] | None = None,
        rank_check: RankCheck | None = None,
        old_gradient: OldGradient | None = None,
        climber: Climber | None = None,
        batches: Batches | None = None,
    ) -> None:
        self._probe = probe
        self._optimizer_state = optimizer_state
        self._on_event = on_event
        self._rank_check = rank_check or RankCheck()
        self._old_gradient, self._climber = old_gradient, climber
        self._batches = batches

    def on_train_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Catch up if the run was resumed from a stage's last step."""
        self._bring_to_stage(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Task) -> None:
        """Grow if the epoch that begins belongs to the next stage."""
        self._bring_to_stage(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Task, batch: Any, batch_idx: int) -> None:
        """Ask a method that decides widths by itself, if a boundary lies before this batch."""
        if isinstance(pl_module.method, WidthDecision):
            self._ask(trainer, pl_module, pl_module.method)

    def _bring_to_stage(self, trainer: Trainer, task: Task) -> None:
        if self._climber is not None:
            self._climb(trainer, task, self._climber)
        if task.decides_widths:
            return
        wanted = task.schedule.stage_at(trainer.current_epoch)
        while task.growth_state.stage < wanted:
            self._grow(trainer, task, task.schedule.widths(task.graph)[task.growth_state.stage + 1])

    def _climb(self, trainer: Trainer, task: Task, climber: Climber) -> None:
        state = task.growth_state
        # Nothing is known before the first epoch, and an epoch that a run is resumed in has been asked about.
        if not state.asked < trainer.current_epoch < task.schedule.total_epochs or not trainer.current_epoch:
            return
        state.asked = trainer.current_epoch
        widths, reason = climber.decide(trainer, task)
        if widths != state.widths:
            self._grow(trainer, task, widths, {"demand": reason})

    def _ask(self, trainer: Trainer, task: Task, method: WidthDecision) -> None:
        state = task.growth_state
        boundary = method.boundary(trainer.current_epoch, trainer.global_step)
        if boundary is None or boundary <= state.asked:
            return
        state.asked = boundary
        tensors = tensors_of(task.network, task.graph)
        try:
            widths = method.decide(task.graph, tensors, state.widths, _gradients(trainer, task))
        except ValueError as error:
            raise UserError(str(error)) from error
        # Ranks compute alike; should one not, it follows rank 0, and the rank check tells.
        widths = gather(widths)[0]
        if widths != state.widths:
            self._grow(trainer, task, widths)

    def _grow(
        self, trainer: Trainer, task: Task, widths: dict[str, int], reason: dict[str, Any] | None = None
    ) -> None:
        before, stage = dict(task.growth_state.widths), task.growth_state.stage + 1
        state_before = GrowthState.from_dict(task.growth_state.as_dict())
        gradients = _gradients(trainer, task)
        probe = network_inputs(self._probe, task.network)
        # Statistics of normalisation, which ranks may still have their own of.
        broadcast_buffers(task.network)
        looked_back: dict[str, int] = {}
        if self._old_gradient is not None:
            looked_back = self._old_gradient.look_back(trainer, task, probe)
        num_params_before = sum(p.numel() for p in task.network.parameters())
        try:
            inserted = deepen(task, trainer.optimizers, probe)
            leader = tensors_of(task.network, task.graph)
            wanted = task.method.batches
            data = measurement(task, self._batches, wanted, task.method.name) if wanted else None
            event = grow(
                task.network,
                task.graph,
                task.method,
                task.growth_state,
                _but_classes(widths, before),
                task.seed,
                probe,
                agreed,
                gradients=gradients,
                data=data,
            )
        except ParityError as error:
            raise UserError(f"{error} Lower optimizer.lr or choose another growth method.") from error
        began = time.perf_counter()
        replaced, carry = event.replaced, event.carry
        if CLASSES in widths:
            opened = open_classes(
                task.network, task.graph, task.method, task.growth_state, widths[CLASSES], task.seed
            )
            # The event may have replaced the head already.
            opened = {name: (replaced.get(name, pair)[0], pair[1]) for name, pair in opened.items()}
            replaced, carry = {**replaced, **opened}, carry.extended(widths)
        if self._old_gradient is not None:
            self._old_gradient.follow(task.graph, before, widths)
        for optimizer in trainer.optimizers:
            try:
                follow(
                    optimizer,
                    replaced,
                    task.graph,
                    before,
                    widths,
                    self._optimizer_state,
                    carry,
                )
            except ValueError as error:
                raise UserError(str(error)) from error
            task.relabel_regions(optimizer)
        followed = time.perf_counter()
        average = self._grow_average(task, state_before, leader, gradients, probe, event)
        averaged = time.perf_counter()
        # Before the new wrapper, which would hide weights that differ by sending rank 0's to all.
        check_sec = self._rank_check.check(trainer, task, f"after growing in epoch {trainer.current_epoch}")
        checked = time.perf_counter()
        renew_wrapper(trainer)
        wrapped = time.perf_counter()
        if task.network._compiled_call_impl is not None:
            # Else the ninth width exceeds the compiler's recompile limit and it silently stops compiling.
            torch.compiler.reset()
        receipt = {
            "stage": stage,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "batch_size": task.schedule.batch_size_at(trainer.current_epoch),
            **event.receipt(),
            "widths_after": dict(widths),
            "num_params_before": num_params_before,
            "num_params": sum(p.numel() for p in task.network.parameters()),
            **average,
            **inserted,
            **auxiliary(data, looked_back),
            **(reason or {}),
            "seconds": event.seconds + wrapped - began,
            "seconds_by_part": {
                **({} if data is None else {"data": data.cost.seconds}),
                "grow": event.seconds - event.parity_sec - (0.0 if data is None else data.cost.seconds),
                "parity": event.parity_sec,
                "optimizer": followed - began,
                "average": averaged - followed,
                "rank_check": check_sec,
                "wrapper": wrapped - checked,
            },
        }
        task.events.append(receipt)
        if self._on_event is not None:
            self._on_event(trainer, receipt)

    def _grow_average(
        self,
        task: Task,
        state: GrowthState,
        leader: dict[str, Tensor],
        gradients: dict[str, Tensor],
        probe: tuple[Any, ...],
        leading: GrowthEvent,
    ) -> dict[str, float]:
        """Let the average of the weights go through the network's event; gives its part of the receipt."""
        if task.average is None:
            return {}
        network = task.average.module
        broadcast_buffers(network)
        widths = task.growth_state.widths
        narrow = _but_classes(widths, state.widths)
        try:
            event = grow(
                network,
                task.graph,
                task.method,
                state,
                narrow,
                task.seed,
                probe,
                agreed,
                leader,
                gradients,
                leading=leading,
            )
        except ParityError as error:
            raise UserError(f"the averaged weights: {error} Set ema.decay=null.") from error
        if CLASSES in widths:
            open_classes(network, task.graph, task.method, state, widths[CLASSES], task.seed)
        return {
            "average_parity_error_eval": event.parity_error_eval,
            "average_parity_error_train": event.parity_error_train,
        }


def _but_classes(widths: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Widths that a method brings a network to: it leaves the head's classes as they were."""
    return {**widths, CLASSES: before[CLASSES]} if CLASSES in widths else widths


def _gradients(trainer: Trainer, task: Task) -> dict[str, Tensor]:
    """Running means of gradients by parameter name, if the method wants them."""
    if not task.method.wants_gradients:
        return {}
    names = {parameter: name for name, parameter in task.network.named_parameters()}
    found = {p: mean for optimizer in trainer.optimizers for p, mean in running_gradients(optimizer).items()}
    return {names[parameter]: mean for parameter, mean in found.items() if parameter in names}
