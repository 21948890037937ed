"""Derive the verdict (grow, smaller or full) from the candidates' laws and a trial growth.

A grown run follows the small network's curve up to a cost `s`, then the full network's curve from the cost `m(s)` at
which that has the same loss, minus a transfer penalty. At the end of the budget `T` it has the loss of the full
network after `m(s) - penalty + T - s`, so growing gains `m(s) - penalty - s`. Without a penalty the best `s` is where
both curves have the same slope at equal loss. The penalty is measured by a trial growth. One trial cannot show how it
scales with `m(s)`, so each draw assumes a power between 0 and 1.

Evidence for growing or a smaller network is trusted up to a multiple of the probed cost (`Curves.loss`), while the
curve that it is compared with is extrapolated further (`Curves.law`), so that ignorance never counts as a gain.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from growlab.lab.planner.fit import Curves, interval

Kind = Literal["grow", "smaller", "full"]
_SWITCHES = 48
# Times the cost up to which the full network's law is trusted, for a guess.
_FARTHEST = 8.0
# Relative to the full network's last loss: half of what no fitted curve is known better than.
_LEAST_GAIN = 0.002
#: Relative to the same: by how much the laws' draws miss what comes, with its decaying rate and seeds. Wider by so much
#: on each side, nine of ten ranges contained it (`notebooks/results/plan`).
MISSED = 0.11


@dataclass(frozen=True)
class Trial:
    """A trial growth from a small probe's last checkpoint.

    Attributes:
        cost: training cost of the small network before the event.
        loss_before: held-out loss there.
        loss_after: held-out loss after the event.
        further: cost of the short continuation as the full network.
        loss: held-out loss after it.
    """

    cost: float
    loss_before: float
    loss_after: float
    further: float
    loss: float


@dataclass(frozen=True)
class Gain:
    """A predicted gain: the median of the draws and their central 90 %, widened by a margin if given."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray, margin: float = 0.0) -> "Gain":
        """Median and range of draws.

        Args:
            draws: [draws].
            margin: widens the range on each side.
        """
        low, high = interval(draws)
        return cls(float(np.median(draws)), low - margin, high + margin)


@dataclass(frozen=True)
class Growing:
    """The best way to grow from one candidate.

    Attributes:
        candidate: its name.
        switch: best cost to grow at within the trusted range, in parts of the budget; gains are those of this switch.
        guess: best cost by the median laws, beyond the trusted range too, usually later: the experiments grow there.
        loss: final loss of the best run without growth minus the grown run's, with margin `MISSED`.
        cost: FLOPs saved on the way to the full network's last loss, in parts of its run.
        seconds: likewise, in this machine's seconds.
        kept: fraction of the small network's progress kept by the trial growth, in costs of the full network.
        beyond: the full network's law reaches the small one's loss only beyond its trusted range, so savings are
            lower bounds.
    """

    candidate: str
    switch: float
    guess: float
    loss: Gain
    cost: Gain
    seconds: Gain
    kept: Gain
    beyond: bool = False

    def saved(self) -> str:
        """Format the FLOPs and seconds saved."""
        if self.beyond:
            least = f"{self.cost.low:.0%} of the full run's FLOPs and {self.seconds.low:.0%}"
            return f"at least {least} of its seconds here"
        cost, seconds = (
            f"{one.median:.0%} ({one.low:.0%} to {one.high:.0%})" for one in (self.cost, self.seconds)
        )
        return f"{cost} of the full run's FLOPs and {seconds} of its seconds here"


@dataclass(frozen=True)
class Smaller:
    """A candidate that never grows.

    Attributes:
        candidate: its name.
        loss: final loss of the full network minus its own, within the trusted range, with margin `MISSED`.
        likely: median of the same difference by the laws, beyond the trusted range too.
        lead: the full network's loss minus its own at the largest cost that both were probed for.
        shared: that cost, in parts of the budget.
    """

    candidate: str
    loss: Gain
    likely: float
    lead: float
    shared: float


@dataclass(frozen=True)
class Verdict:
    """The answer of a plan.

    Attributes:
        kind: "grow", "smaller" or "full".
        decided: True if the gain exceeds the laws' usual error ("grow", "smaller"), or the laws exclude a gain
            ("full"); else the verdict is only a fallback.
        candidate: the one that grows or stays small; None with "full".
        reason: one sentence.
        growing: best way to grow from each candidate tried, the best first.
        smaller: each candidate without growing, the best first.
    """

    kind: Kind
    decided: bool
    candidate: str | None
    reason: str
    growing: tuple[Growing, ...]
    smaller: tuple[Smaller, ...]


def judge(
    curves: Mapping[str, Curves],
    trials: Mapping[str, Trial],
    whole: str,
    seconds: Mapping[str, float],
    budget: float = 1.0,
    size: Literal["any", "full"] = "any",
    latest: float = 0.75,
    seed: int = 0,
    alone: Collection[str] | None = None,
) -> Verdict:
    """Judge the laws and trials of all candidates.

    Args:
        curves: of each candidate, the draws of all in step.
        trials: trial growths, by candidate.
        whole: name of the full network.
        seconds: seconds that training takes for each unit of cost, by candidate.
        budget: cost available to the run.
        size: "full": the full network is required.
        latest: latest growth, as a fraction of the budget.
        seed: of random draws.
        alone: candidates that could be trained without growing; None: all.
    """
    full, rng = curves[whole], np.random.default_rng(seed)
    stay = [name for name in curves if name != whole and (alone is None or name in alone)]
    small = stay if size == "any" else []
    rivals = np.min([curves[name].law(budget) for name in (whole, *small)], axis=0)
    growing = [
        _growing(name, full, curves[name], trial, rivals, budget, latest, seconds[name] / seconds[whole], rng)
        for name, trial in trials.items()
    ]
    growing.sort(key=lambda one: -one.loss.low)
    end = full.law(budget)
    margin = MISSED * float(np.median(end))
    smaller = [_staying(name, full, curves[name], budget) for name in stay]
    smaller.sort(key=lambda one: -one.likely)
    ways = tuple(growing), tuple(smaller)
    known = full.reach >= budget and full.steady
    # A gain below the least error of a curve does not count.
    least = _LEAST_GAIN * float(np.median(end))
    if known and growing and growing[0].loss.low + margin > least and curves[growing[0].candidate].steady:
        # The laws say so; whether that is more than they miss by is another matter.
        decided = growing[0].loss.low > least
        return Verdict("grow", decided, growing[0].candidate, _why_grow(growing[0], size), *ways)
    best = smaller[0] if small else None
    if best is not None and best.loss.low > least and known:
        reason = f"{best.candidate} without growing ends {_gain(best.loss)} below the full network"
        return Verdict("smaller", True, best.candidate, reason, *ways)
    # As the laws have it: growing at once is as good as not at all, never worse by more than they miss.
    hopeless = bool(growing) and all(one.loss.high - margin <= 0 for one in growing)
    worse = [np.quantile(end - curves[name].law(budget), 0.95) <= 0 for name in small]
    if known and hopeless and all(worse) and all(one.steady for one in curves.values()):
        return Verdict("full", True, None, "neither growing nor a smaller network gains anything", *ways)
    limits = _limits(curves, [whole, *([best.candidate] if best else [])], budget)
    if best is not None and best.likely > 0:
        reason = f"{best.candidate} ends {best.likely:.3f} below the full network by the median laws{limits}"
        return Verdict("smaller", False, best.candidate, reason, *ways)
    leading = [one for one in smaller if small and one.lead > 0 and curves[one.candidate].reach < budget]
    if leading:
        # Where no law reaches, what was seen speaks.
        best = max(leading, key=lambda one: one.lead)
        reason = (
            f"{best.candidate} was {best.lead:.3f} below the full network at {best.shared:.1%} of the budget"
        )
        return Verdict("smaller", False, best.candidate, reason + limits, *ways)
    what = f"growing gains {_gain(growing[0].loss)}" if growing else "no growth could be tried"
    return Verdict("full", False, None, what + limits, *ways)


def _staying(name: str, full: Curves, small: Curves, budget: float) -> Smaller:
    """Gains of a candidate that never grows."""
    end, shared = full.law(budget), min(full.probed, small.probed)
    likely = float(np.median(end - small.law(budget)))
    lead = float(np.median(full.law(shared) - small.law(shared)))
    margin = MISSED * float(np.median(end))
    return Smaller(name, Gain.of(end - small.loss(budget), margin), likely, lead, shared / budget)


def _limits(curves: Mapping[str, Curves], names: Sequence[str], budget: float) -> str:
    """Describe how far curves are trusted."""
    short = [
        f"{name} is trusted to {curves[name].reach / budget:.0%}"
        for name in names
        if curves[name].reach < budget
    ]
    return (
        f", but the curve of {' and of '.join(short)} of the budget only" if short else ", within the error"
    )


def _growing(
    name: str,
    full: Curves,
    small: Curves,
    trial: Trial,
    rivals: np.ndarray,
    budget: float,
    latest: float,
    slower: float,
    rng: np.random.Generator,
) -> Growing:
    """Find the switch with the best lower quartile of gains over `rivals`, [draws] of losses without growing.

    `slower` is the ratio of seconds per FLOP, small network over full one.
    """
    draws = len(full.a)
    last = max(trial.cost, min(latest * budget, small.reach))
    switches = np.geomspace(trial.cost, last, _SWITCHES)[:, None]
    penalty, kept = _penalty(full, small, trial, rng)
    start = np.minimum(full.cost_at(small.loss(trial.cost)), full.reach)
    unlimited = full.cost_at(small.loss(switches))
    reached = np.minimum(unlimited, full.reach)
    power = rng.random(draws)

    def placed(reached: np.ndarray) -> np.ndarray:
        growth = (np.maximum(reached, start) / np.maximum(start, 1e-12)) ** power
        return np.maximum(reached - penalty * growth, 1e-12) + budget - switches

    place = placed(reached)
    gains = rivals - full.law(place)
    # Not the best median: where one knows less, a little less is the better switch.
    best = int(np.argmax(np.quantile(gains, 0.25, axis=1)))
    switch, saved = float(switches[best, 0]), place[best] - budget
    guess = switch
    if full.steady and small.steady:
        # A small network may be where the full one never comes within the budget; what that is worth is seen beyond it.
        beyond = np.minimum(full.cost_at(small.loss(switches)), _FARTHEST * full.reach)
        likely = np.median(rivals - full.law(placed(beyond)), axis=1)
        guess = max(switch, float(switches[int(np.argmax(likely)), 0]))
    in_seconds = (switch + saved - switch * slower) / budget
    return Growing(
        name,
        switch / budget,
        guess / budget,
        Gain.of(gains[best], MISSED * float(np.median(full.law(budget)))),
        Gain.of(saved / budget),
        Gain.of(in_seconds),
        Gain.of(kept),
        beyond=bool(np.median(unlimited[best]) > full.reach),
    )


def _penalty(
    full: Curves, small: Curves, trial: Trial, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cost lost by a growth, on the full network's scale, and the fraction of `m` that it kept."""
    start = np.minimum(full.cost_at(small.loss(trial.cost)), full.reach)
    seen = trial.loss + full.error * rng.standard_normal(len(full.a))
    end = np.minimum(full.cost_at(seen), full.reach)
    # That growing itself trained the network is an error of the curves, not a gain.
    penalty = np.clip(start + trial.further - end, 0.0, start)
    return penalty, 1 - penalty / np.maximum(start, 1e-12)


def _gain(gain: Gain) -> str:
    return f"{gain.median:.3f} ({gain.low:.3f} to {gain.high:.3f})"


def _why_grow(best: Growing, size: str) -> str:
    than = "the full network" if size == "full" else "the best network that does not grow"
    return (
        f"growing from {best.candidate} at {best.switch:.0%} of the budget ends {_gain(best.loss)} below {than}, "
        f"and saves {best.saved()}"
    )
