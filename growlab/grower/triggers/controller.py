"""Growth decided by a trial: train the grown and the smaller network for a short branch, and keep the better one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import ceil, sqrt
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from growlab.base import ranks
from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import finite, not_none, whole
from growlab.grower.cost import forward_flops
from growlab.grower.triggers.at import At
from growlab.grower.triggers.trigger import Declined, GrowingNetwork, Trigger, Widths
from growlab.growth.outputs import main_output, network_inputs
from growlab.plan import advise
from growlab.widths import WidthGraph
from growlab.widths.inputs import call_on, changed, tensors_in
from growlab.widths.unchanged import states_of_draws

log = logging.getLogger(__name__)

# Least number of steps of a branch; with fewer nothing grows.
_LEAST_STEPS = 4


class Controller(Trigger):
    """Train a smaller network, and grow it once if a short branch shows that this is better.

    At one step, before the rate decays, the network trains on for a short branch. Then, from where it was, it grows and
    trains on the same batches for as many FLOPs. Both networks are measured on batches that neither was trained on. If
    the grown network's loss is lower by more than its standard error, it is kept, else the smaller one. The branch of
    the winner counts as training; that of the loser is undone, with the growth event. If the odds of the full network
    are below `min_odds`, or a branch would have fewer than four steps, nothing is compared: the smaller network trains
    on, at no cost.

    The loop's batches and loss are needed, which `growlab.Growth` and the Trainer's callback provide; in your own loop
    call `Grower.provide(batches=..., loss=...)`. The branch's steps do not move the loop's clock or learning rate, and
    neither clip nor accumulate gradients: each takes one batch.

    Args:
        width: width of every group of the smaller network, as a fraction; parts may leave out blocks as well.
        at: fraction of the training's steps at which it branches, from 0.25 to 0.45.
        branch: fraction of the training's cost that each branch takes, above 0 and at most 0.03.
        total_steps: optimizer steps of the whole training; None: as given to `Grower.provide`.
        min_odds: least odds of the full network against the smaller one, by `growlab.plan.advise`, for a comparison.
        batches: number of batches that both are measured on, at least 2.
        max_steps: most steps of a branch; its batches are kept in memory.

    Attributes:
        decision: receipt of the branch, None before it: "grown", "gap" (loss of the continued network minus that of the
            grown one) and its standard error "gap_error", both losses, "steps" of both branches, "odds" of the full
            network, and "paid", the fraction of the training's cost that both branches took. Gap and losses are None if
            nothing was compared, odds if nothing was grown.

    Raises:
        UserError: a value is out of range.
    """

    unit = "step"
    wants_steps = True

    def __init__(
        self,
        width: float = 0.5,
        *,
        at: float = 0.35,
        branch: float = 0.02,
        total_steps: int | None = None,
        min_odds: float = 0.2,
        batches: int = 8,
        max_steps: int = 500,
    ) -> None:
        with as_user_errors():
            finite(at=at, branch=branch, min_odds=min_odds)
            whole(2, batches=batches)
            whole(_LEAST_STEPS, max_steps=max_steps)
            whole(1, **not_none(total_steps=total_steps))
        if not 0.25 <= at <= 0.45:
            raise UserError(f"at={at} of a Controller must be from 0.25 to 0.45, before the learning rate decays.")
        if not 0 < branch <= 0.03:
            raise UserError(f"branch={branch} of a Controller must be above 0 and at most 0.03.")
        self._sizes = At({0: width, 1: 1.0})
        self.resizes = self._sizes.resizes
        self.at, self.branch, self.total_steps, self.min_odds = at, branch, total_steps, min_odds
        self.batches, self.max_steps = batches, max_steps
        self.decision: dict[str, Any] | None = None
        self.auxiliary_passes: list[dict[str, Any]] = []
        # While the grown network is on trial: batches, and the state and losses of the other one.
        self._trial: dict[str, Any] | None = None

    def steps(self, graph: WidthGraph) -> list[Widths]:
        """Widths of the smaller network, and full widths."""
        return self._sizes.forecast(graph)

    def fraction_grown(self, stage: int, widths: Widths) -> float:
        """Return the fraction of all growth done: 0 or 1."""
        return float(stage > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the decision and its cost."""
        return {"decision": self.decision, "passes": list(self.auxiliary_passes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.decision, self.auxiliary_passes = state["decision"], list(state["passes"])

    def next(self, grower: GrowingNetwork) -> Widths | None:
        """Return full widths at the step of the branch, once; after that event, decide on it.

        Raises:
            UserError: the loop has provided no batches, loss or number of steps.
            Declined: the grown network was not better.
        """
        if self._trial is not None:
            self._judge(grower, self._trial)
        if self._trial is not None or self.decision is not None or grower.clock.step < 1:
            self._trial = None
            return None
        total = self.total_steps or grower.training.total_steps
        if total is None:
            raise UserError("a Controller needs the number of the training's steps: give it total_steps=N.")
        steps = min(self.max_steps, round(self.branch * total))
        if steps >= _LEAST_STEPS:
            _check_provided(grower)
        if grower.clock.step < ceil(self.at * total):
            return None
        if steps < _LEAST_STEPS:
            self._decide(_not_compared(0, 0.0))
            return None
        self._begin(grower, total, steps)
        return self.steps(grower.graph)[-1]

    def _begin(self, grower: GrowingNetwork, total: int, steps: int) -> None:
        """Train the smaller network for a branch, and restore its state before."""
        restore_draws = states_of_draws(grower.network)
        batches = self._batches(grower, steps + self.batches)
        draws_of_branch = states_of_draws(grower.network)
        before, flops = grower.checkpoint(), _flops(grower)
        draws_of_branch()
        try:
            losses = self._train(grower, batches, steps)
            after = grower.checkpoint()
        finally:
            grower.put_back(before)
            restore_draws()
        self._trial = {"batches": batches, "losses": losses, "after": after, "draws": draws_of_branch}
        self._trial |= {"steps": steps, "flops": flops, "total": total}

    def _judge(self, grower: GrowingNetwork, trial: Mapping[str, Any]) -> None:
        """Train the grown network for as many FLOPs, and keep it or raise `Declined`."""
        steps, small, total = (trial[key] for key in ("steps", "flops", "total"))
        flops, batches = _flops(grower), trial["batches"]
        grown_steps = round(steps * small / flops)
        processes, event = torch.distributed.get_world_size() if ranks.several() else 1, grower.events[-1]
        samples, tokens = (processes * count for count in _samples(batches[0]))
        embeds = any(isinstance(module, nn.Embedding) for module in grower.network.modules())
        seen = total * small / flops * ((embeds and tokens) or samples)
        odds = _odds(event.num_params, event.num_params_before, seen)
        entries = {"stage": grower.state.stage - 1, "epoch": grower.clock.epoch}
        if grown_steps < _LEAST_STEPS or (odds is not None and odds < self.min_odds):
            entries |= {"auxiliary_flops": samples * steps * small, "auxiliary_samples": samples * steps}
            raise Declined({"decision": _not_compared(steps, steps / total, odds), "passes": entries})
        restore_draws = states_of_draws(grower.network)
        trial["draws"]()
        losses = self._train(grower, batches, grown_steps, first=steps)
        restore_draws()
        gaps = [continued - grown for continued, grown in zip(trial["losses"], losses, strict=True)]
        gap, error = fmean(gaps), stdev(gaps) / sqrt(len(gaps))
        receipt = {
            "grown": gap > error,
            "gap": gap,
            "gap_error": error,
            "loss_continued": fmean(trial["losses"]),
            "loss_grown": fmean(losses),
            "steps": [steps, grown_steps],
            "odds": odds,
            "paid": (steps * small + grown_steps * flops) / (total * small),
        }
        entries |= {
            "auxiliary_flops": samples * (steps * small + grown_steps * flops),
            "auxiliary_samples": samples * (steps + grown_steps),
        }
        if not receipt["grown"]:
            raise Declined({"decision": receipt, "passes": entries})
        event.notes["controller"] = receipt
        self._decide(receipt, entries)

    def declined(self, grower: GrowingNetwork, declined: Declined) -> None:
        """Train on with the smaller network, from the end of its branch."""
        assert self._trial is not None
        grower.put_back(self._trial["after"])
        self._trial = None
        self._decide(declined.receipt["decision"], declined.receipt["passes"])

    def _decide(self, decision: dict[str, Any], *passes: dict[str, Any]) -> None:
        self.decision, self.auxiliary_passes = decision, [*self.auxiliary_passes, *passes]
        if decision["gap"] is None:
            odds = decision["odds"]
            few = f"a branch of {100 * self.branch:.1f} % of the training has fewer than {_LEAST_STEPS} steps"
            unlikely = odds is not None and odds < self.min_odds
            log.info("no growth: %s", f"the odds of the full network are {100 * odds:.0f} %" if unlikely else few)
            return
        log.info(
            "growth %s: loss %.4g continued, %.4g grown; both branches took %.1f %% of the training's cost",
            "is kept" if decision["grown"] else "is undone",
            decision["loss_continued"],
            decision["loss_grown"],
            100 * decision["paid"],
        )

    def _batches(self, grower: GrowingNetwork, number: int) -> list[Any]:
        batches = list(_check_provided(grower)(number))
        if not batches:
            raise UserError("a Controller trains branches, but there is not a single batch of training data.")
        return [batches[index % len(batches)] for index in range(number)]

    def _train(
        self, grower: GrowingNetwork, batches: Sequence[Any], steps: int, first: int | None = None
    ) -> list[float]:
        """Train on the first `steps` batches; return losses on those from `first` (default: the next) to the last."""
        network, optimizers = grower.network, grower.stepping()
        training = network.training
        network.train()
        with torch.enable_grad():
            for batch in batches[:steps]:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                self._loss(grower, batch).backward()
                if ranks.several():
                    for parameter in network.parameters():
                        if parameter.grad is not None:
                            parameter.grad.copy_(ranks.averaged(parameter.grad))
                for optimizer in optimizers:
                    grower.followers.before_step(optimizer)
                    optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.no_grad():
            held_out = batches[steps if first is None else first :]
            losses = [float(ranks.averaged(self._loss(grower, batch).detach())) for batch in held_out]
        network.train(training)
        return losses

    def _loss(self, grower: GrowingNetwork, batch: Any) -> Tensor:
        training, device = grower.training, next(grower.network.parameters()).device
        if training.step_loss is not None:
            if hasattr(batch, "to"):  # A tensor, or a library's own collection of them.
                return training.step_loss(batch.to(device))
            return training.step_loss(tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch))
        assert training.loss is not None
        *inputs, target = network_inputs(tuple(batch), grower.network)
        return training.loss(main_output(call_on(grower.network, inputs)), target)


def _check_provided(grower: GrowingNetwork) -> Callable[[int], Sequence[Any]]:
    """Return the loop's function for batches; raise a UserError if that or the loss is missing."""
    training = grower.training
    if training.batches is None or (training.loss is None and training.step_loss is None):
        raise UserError(
            "a Controller trains branches with the loop's batches and loss: call "
            "Grower.provide(batches=..., loss=...) before the first step."
        )
    return training.batches


def _not_compared(steps: int, paid: float, odds: float | None = None) -> dict[str, Any]:
    """Receipt where nothing was compared."""
    nothing = dict.fromkeys(("gap", "gap_error", "loss_continued", "loss_grown"))
    return {"grown": False, **nothing, "odds": odds, "steps": [steps, 0], "paid": paid}


def _flops(grower: GrowingNetwork) -> int:
    one = changed(lambda x: x[:1] if isinstance(x, Tensor) else x, grower.probe())
    return max(1, forward_flops(grower.network, one))


def _samples(batch: Any) -> tuple[int, int]:
    """Samples of a batch, and tokens, if it has any."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    tokens = [tensor.numel() for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()]
    return (len(tensors[0]) if tensors else 1), max(tokens, default=0)


def _odds(params: int, smaller: int, samples: float) -> float | None:
    """Probability that the full network ends better than the smaller one, before anything was measured."""
    if not 0 < smaller < params:
        return None
    advice = advise(params, samples, smaller=smaller)
    return advice.odds if advice.choice == "full" else 1 - advice.odds
