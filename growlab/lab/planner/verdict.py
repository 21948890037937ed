"""Does growing pay? From the laws of the candidates and a trial growth to one of three verdicts.

A grown run follows the small network's curve to some cost `s`, and from there the full one's, beginning at the cost
`m(s)` at which that has the small one's loss, less a transfer penalty. At the end of the budget `T` it stands where the
full network stands after `m(s) - penalty + T - s`: growing pays by `m(s) - penalty - s`. Without a penalty the best
`s` is where both curves fall equally steeply at equal loss. The penalty is what a trial growth lost; whether it stays
as it is or grows with `m(s)` one trial does not tell, so each draw takes a power between 0 and 1 of it.

What speaks for growing, or for a smaller network, is trusted up to a multiple of what was probed (`Curves.loss`); what
it is compared with counts also beyond it (`Curves.law`), so that nothing is gained by knowing little.
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
        cost: what the small network had been trained for.
        loss_before: held-out loss there.
        loss_after: the same behind the event.
        further: cost of the short continuation as the full network.
        loss: held-out loss behind it.
    """

    cost: float
    loss_before: float
    loss_after: float
    further: float
    loss: float


@dataclass(frozen=True)
class Gain:
    """A predicted gain: the median of the draws and their middle 90 %, widened where a margin is said."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray, margin: float = 0.0) -> "Gain":
        """Median and range of draws.

        Args:
            draws: [draws].
            margin: by how much the range is wider on each side.
        """
        low, high = interval(draws)
        return cls(float(np.median(draws)), low - margin, high + margin)


@dataclass(frozen=True)
class Growing:
    """The best way to grow from one candidate.

    Attributes:
        candidate: its name.
        switch: cost at which growing gains most as far as curves are trusted, in parts of the budget; gains are those
            of this switch.
        guess: the same by the median laws, however far they are trusted: where an experiment grows. Late, as a rule.
        loss: by how much the loss at the end of the budget is below that of the best that does not grow, wider by
            `MISSED`.
        cost: FLOPs saved on the way to the full network's last loss, in parts of its run.
        seconds: the same of this machine's seconds.
        kept: part of the small network's progress that the trial growth has kept, in costs of the full network.
        beyond: the full network's law has the small one's loss only behind where it is trusted: what is saved is a
            least.
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
        """The FLOPs and seconds saved, in words."""
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
        loss: by how much its last loss is below the full network's, counting as far as its curve is trusted, wider by
            `MISSED`.
        likely: the median of the same by the law, however far that is trusted.
        lead: by how much its loss was below the full network's at the largest cost that both were probed for.
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
        decided: True if a gain is more than what laws miss by ("grow", "smaller"), or the laws themselves leave none
            ("full"); else it is what to fall back to.
        candidate: the one that grows or stays small; None with "full".
        reason: one sentence.
        growing: the best way to grow of each candidate that was tried, the best first.
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
    """Give the verdict on the laws and trials of all candidates.

    Args:
        curves: of each candidate, the draws of all in step.
        trials: of the candidates that a growth was tried from.
        whole: name of the full network.
        seconds: seconds that training takes for each unit of cost, by candidate.
        budget: cost that is there for the run.
        size: "full": the full network is wanted in any case.
        latest: part of the budget behind which there is no growing.
        seed: of what is drawn here.
        alone: candidates that could be trained to the end as they are; None: all.
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
    """Words on how far curves are trusted."""
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
    """The switch with the best lower quartile of gains over `rivals`, [draws] of losses without growing.

    `slower` is seconds of a FLOP in the small network over those in the full one.
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
    """Cost that a growth has lost, in the full network's, and the part of `m` that it has kept."""
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
