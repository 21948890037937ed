"""Common base of the front ends: argument checks, warnings, metrics, and the end of training."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import Described
from growlab.grower import Grower
from growlab.grower.network import as_method, check_arguments
from growlab.grower.part import Part, checked_parts
from growlab.grower.sharding import Shard
from growlab.grower.trained import Once, is_adapted, with_small
from growlab.grower.triggers import At, Trigger, as_trigger
from growlab.growth import GrowthEvent, GrowthMethod, Schedule
from growlab.optim import Inheritance
from growlab.optim.carry import check_inheritance, rescale_state
from growlab.widths import Example

log = logging.getLogger(__name__)


class GrowthCallback(Described):
    """Base of the callbacks that drive a `growlab.Grower` in another library's training loop."""

    grower: Grower | None = None
    _trained_optimizer: Mapping[str, Any] | None = None

    def _set(
        self,
        loop: str,
        method: GrowthMethod | str | None,
        trigger: Trigger | Schedule | Mapping[float, Any] | None,
        parts: Sequence[Part],
        seed: int,
        optimizer_state: Inheritance,
        anneal_steps: int | None,
        verbose: bool,
        start: nn.Module | Mapping[str, Tensor] | str | Path | None = None,
    ) -> None:
        """Check and store the arguments of the Grower, which is created once there is a network.

        `loop` names the training loop in messages. `start` is a small trained network to start from, its state_dict, or
        the path of a checkpoint (from `save_pretrained` or the loop). See `growlab.Grower` for the others.

        Raises:
            UserError: an argument is invalid, or the trigger's unit is "cost".
        """
        self._start, self._first_trigger = start, trigger
        if start is not None:
            if trigger is None:
                trigger = Once({})
            elif isinstance(trigger, Mapping):
                # Check the rest: the small network's widths are known later.
                trigger = with_small(trigger, {})
        check_arguments(seed, anneal_steps)
        with as_user_errors():
            check_inheritance(optimizer_state)
        self._trigger = as_trigger(Grower.DEFAULT_TRIGGER if trigger is None else trigger)
        if self._trigger.unit == "cost":
            raise UserError(
                f"{loop} knows only epochs and steps, so a trigger with unit='cost' would never grow; give it "
                "unit='step', or pass costs to a growlab.Grower in your own loop."
            )
        self._optimizer_state = optimizer_state
        self._settings = {"parts": checked_parts(parts), "seed": seed, "anneal_steps": anneal_steps, "verbose": verbose}
        self._method = None if method is None else as_method(method)

    def _make(
        self,
        network: nn.Module,
        example: Example,
        trigger: Trigger,
        prefix: str,
        trains: bool = True,
        shard: Shard | None = None,
    ) -> Grower:
        """Create the Grower of a network; `prefix` precedes the network's names in its module's state_dict.

        Ignores `start` if the network is only evaluated (`trains` is False).
        """
        settings = {**self._settings, "shard": shard}
        if self._start is None or not trains:
            return Grower(network, example, method=self._method, trigger=trigger, **settings)
        small, self._trained_optimizer = trained(self._start, network, prefix)
        settings |= {"method": self._method, "trigger": self._first_trigger}
        return Grower.from_trained(small, network, example, **settings)

    @property
    def events(self) -> list[GrowthEvent]:
        """All growth events so far."""
        return [] if self.grower is None else self.grower.events

    def _announce(self, grower: Grower, epochs: float, steps: float) -> None:
        """Provide the total number of steps, and warn of stages after the last epoch or step; `inf`: unknown."""
        trigger = grower.trigger
        sizes = trigger.batch_sizes if isinstance(trigger, At) else None
        # Changing batch sizes change the number of steps.
        if isfinite(steps) and len(set(sizes or ())) <= 1:
            grower.provide(total_steps=int(steps))
        if not isinstance(trigger, At) or trigger.unit is None:
            return
        end = epochs if trigger.unit == "epoch" else steps
        if late := [start for start in trigger.starts if start >= end]:
            log.warning(
                "growth is due at %s %g, but training ends after %g: the network will not reach the width of its last "
                "stage",
                trigger.unit,
                late[0],
                end,
            )

    def _provide_steps(self, grower: Grower, loader: Callable[[], Any], step_loss: Callable[[Any], Tensor]) -> None:
        if grower.trigger.wants_steps and grower.training.batches is None:
            grower.provide(batches=lambda number: batches_of(loader(), number), step_loss=step_loss)

    def _finish(self, grower: Grower, at_any_stage: bool = False) -> None:
        """Turn the network into an ordinary one, or warn why that is not possible."""
        try:
            grower.finish(at_any_stage)
        except UserError as error:
            # Not raised: training is done, and can be continued from its checkpoints.
            log.warning("%s", error)


def trained(
    start: nn.Module | Mapping[str, Tensor] | str | Path, network: nn.Module, prefix: str
) -> tuple[nn.Module | Mapping[str, Tensor], Mapping[str, Any] | None]:
    """Load the small network that training starts from, and its optimizer's state if it was saved.

    `start` is a module, its state_dict, a folder written by `save_pretrained` or the Trainer, or a checkpoint file in
    which `prefix` precedes the network's names.
    """
    if isinstance(start, (nn.Module, Mapping)):
        return start, None
    path = Path(start)
    if path.is_dir():
        if not hasattr(type(network), "from_pretrained") or is_adapted(network):
            raise UserError(f"{type(network).__name__} cannot be loaded from {path} alone; give a network.")
        optimizer = path / "optimizer.pt"
        state = torch.load(optimizer, "cpu", weights_only=True) if optimizer.is_file() else None
        return type(network).from_pretrained(path), state
    if not path.is_file():
        raise UserError(f"start={str(start)!r} does not exist; give a checkpoint file or a folder.")
    content = torch.load(path, "cpu", weights_only=True)
    states = content.get("optimizer_states") or [None]
    tensors = {n.removeprefix(prefix): t for n, t in content.get("state_dict", content).items() if n.startswith(prefix)}
    if not tensors:
        raise UserError(f"{path} contains no weights whose names begin with {prefix!r}.")
    return tensors, states[0] if len(states) == 1 else None


def continue_optimizer(optimizer: Optimizer, saved: Mapping[str, Any] | None, grower: Grower) -> None:
    """Load the state of a small network's optimizer into one with the same groups, which keeps its hyperparameters.

    Moments are rescaled by the factors that the grower moved into the weights as it loaded them.
    """
    if saved is None:
        return
    sizes = [[len(group["params"]) for group in each] for each in (saved["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the saved optimizer has groups of {sizes[0]} parameters, but this one of {sizes[1]}: its state cannot be "
            "loaded."
        )
    hyperparameters = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(saved))
    named = dict(grower.network.named_parameters())
    rescale_state(optimizer, {named[name]: factor for name, factor in grower.moved_factors.items()})
    for group, settings in zip(optimizer.param_groups, hyperparameters, strict=True):
        group.update(settings)


def metrics(grower: Grower) -> dict[str, float]:
    """Return the stage, the number of parameters and the width of each group, to log."""
    num_params = sum(p.numel() for p in grower.network.parameters())
    widths = {f"width/{group}": float(width) for group, width in grower.state.widths.items()}
    return {"growth/stage": float(grower.state.stage), "growth/num_params": float(num_params), **widths}


def batches_of(loader: Any, number: int) -> list[Any]:
    """Read the first batches of a training loader whose dataset is map-style, without advancing the loader itself."""
    map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not map_style or loader.batch_sampler is None:
        raise UserError(
            "extra training steps need a DataLoader of a map-style dataset, which this training does not have: give "
            "batches by grower.provide(batches=..., step_loss=...)."
        )
    # A copy, because the training loop iterates over the sampler itself.
    sampler = deepcopy(loader.batch_sampler, {id(loader.dataset): loader.dataset})
    copy = DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn)
    return list(islice(copy, number))
