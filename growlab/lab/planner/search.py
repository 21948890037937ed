"""Search for the verdict within a cost: learning rates first, then candidates at equal cost, then trial growth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from growlab.base.errors import UserError
from growlab.lab.planner.fit import MIN_POINTS, Measured, fit
from growlab.lab.planner.probes import FULL, Account, Candidate, Probe, Problem, Settings, Start
from growlab.lab.planner.verdict import Trial, Verdict, judge

# Parts of what may be spent. What is left over goes to the small candidate that grows.
_FOR_RATES, _FOR_EACH_OTHER, _FOR_TRIAL = 0.06, 0.06, 0.09
# Steps that a grown network trains on for, at least.
_LEAST_TRIAL = 4
# The least that a plan can be made from, in steps of the full network.
_LEAST_STEPS = 40
# A rate has to be better by so much of the loss to be taken in place of one before it.
_MARGIN = 0.01
_MOST_SAMPLES, _LEAST_SAMPLES, _LEAST_BATCHES = 2000, 96, 2
# Part of the full network's probe that its evaluations may cost, and how many these are.
_FOR_EVALUATIONS, _EVALUATIONS = 0.08, 8
# Steps of the full network that may be spent before two, and all, rates are tried for every candidate; with two,
# candidates that can only grow are probed as well.
_TWO_RATES, _ALL_RATES = 150, 400


@dataclass(frozen=True)
class Planned:
    """Result of a plan.

    Attributes:
        settings: of the plan.
        measured: each candidate's curve, the full network's first.
        rates: multiple of the usual rate that is best for each.
        trials: trial growths.
        verdict: the answer.
        account: the cost of probing.
        tried: every probe: candidate, multiple of the rate, steps, cost and last loss.
        left_out: candidates that could not be probed, with the reason.
        flops: forward FLOPs of a sample relative to the full network's, by candidate.
        budget: of the run, in parts of the whole budget.
        starts: each candidate's last weights and optimizer state at the best rate, before growth.
        alone: candidates that could be trained without growing.
    """

    settings: Settings
    measured: Mapping[str, Measured]
    rates: Mapping[str, float]
    trials: Mapping[str, Trial]
    verdict: Verdict
    account: Account
    tried: Sequence[Mapping[str, float | str]]
    left_out: Mapping[str, str]
    flops: Mapping[str, float]
    budget: float
    starts: Mapping[str, Start]
    alone: Sequence[str]


def plan(
    problem: Problem, settings: Settings | None = None, say: Callable[[str], None] = lambda line: None
) -> Planned:
    """Predict whether growing pays for a training and its budget.

    Args:
        problem: the training.
        settings: of the plan; None: the defaults.
        say: called with lines of progress.

    Raises:
        UserError: the budget is too small to probe, or there is nothing to probe.
    """
    search = _Search(problem, settings or Settings(), say)
    search.choose_rates()
    best = search.compare()
    search.refine_rates(best)
    search.extend(best)
    search.try_growth(best)
    return search.conclude()


class _Search:
    def __init__(self, problem: Problem, settings: Settings, say: Callable[[str], None]) -> None:
        self.problem, self.settings, self.say = problem, settings, say
        if not problem.held_out:
            raise UserError("a plan needs held-out batches, and not the test set's.")
        self.account = Account(settings.max_cost, 1.0)
        self.account.total_flops = self._total_flops()
        self.tried: list[Probe] = []
        self.trials: dict[str, Trial] = {}
        self.curve_of: dict[str, Measured] = {}
        self.left_out: dict[str, str] = {}
        self.starts: dict[str, Start] = {}
        self.best: dict[str, Probe] = {}
        self.full = self._probe(None, settings.rates[0])
        step = 3 * self.full.forward_cost * self._batch_size()
        self.steps = settings.max_cost / step
        self._check()
        self.candidates = self._possible()
        self.flops = {
            name: probe.forward_cost / self.full.forward_cost for name, probe in self.candidates.items()
        }

    def _total_flops(self) -> float:
        # Measured relative to the full network: with a total of 1, `forward_cost` is in FLOPs.
        self.samples = _LEAST_SAMPLES
        flops = self._probe(None, 1.0).forward_cost
        if not flops:
            raise UserError("no FLOPs are counted in this network: there is nothing to compare costs by.")
        return 3 * flops * self.problem.budget_samples

    def _probe(self, candidate: Candidate | None, rate: float) -> Probe:
        return Probe(self.problem, candidate, rate, self.account, self.samples)

    def _batch_size(self) -> int:
        first = next(iter(self.problem.batches(0)), None)
        if first is None:
            raise UserError("there are no training batches to probe with.")
        return self.problem.accumulate * len(first[-1])

    def _check(self) -> None:
        settings, needed = self.settings, 1.0 / self.settings.multiple
        if self.steps < _LEAST_STEPS:
            raise UserError(
                f"the budget is too small to probe: {settings.max_cost:.0%} of it are {self.steps:.0f} steps of the "
                f"full network, and a plan needs {_LEAST_STEPS}; raise schedule.budget or plan.max_cost."
            )
        if needed > 0.6 * settings.max_cost:
            raise UserError(
                f"to be trusted up to the whole budget the full network has to be probed for {needed:.1%} of it, which "
                f"leaves too little of plan.max_cost={settings.max_cost:g}: raise that, or plan.multiple."
            )
        steps = needed / settings.max_cost * self.steps
        affordable = _FOR_EVALUATIONS * 3 * steps * self._batch_size() / _EVALUATIONS
        least = max(_LEAST_SAMPLES, _LEAST_BATCHES * self._batch_size())
        self.samples = int(min(_MOST_SAMPLES, max(least, affordable)))
        self.full.samples = self.samples

    def _possible(self) -> dict[str, Probe]:
        """Make a probe at the first rate of each possible candidate, the cheapest first."""
        found: dict[str, Probe] = {}
        for candidate in self.problem.candidates:
            if candidate.name in found or candidate.name == FULL:
                raise UserError(f"plan: two candidates are called {candidate.name}.")
            try:
                probe = self._probe(candidate, self.settings.rates[0])
            except UserError as error:
                self.left_out[candidate.name] = str(error)
                continue
            if not candidate.alone and self.steps < _TWO_RATES:
                self.left_out[candidate.name] = (
                    "it can only grow, and the budget is too small to probe it too."
                )
                continue
            if probe.forward_cost > 0.9 * self.full.forward_cost:
                self.left_out[candidate.name] = "it costs nearly as much as the full network."
                continue
            found[candidate.name] = probe
        if not found:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            raise UserError(f"no candidate can be probed ({reasons})")
        return dict(sorted(found.items(), key=lambda item: item[1].forward_cost))

    # Rates -------------------------------------------------------------------------------------------------

    def choose_rates(self) -> None:
        """Try all rates on the cheapest candidate; the others take the best."""
        cheapest, *others = self.candidates
        self.ranked = self._halving(cheapest, self.settings.rates, self._part_of_a_rate())
        for name in (*others, FULL):
            self._halving(name, self.ranked[:1], 0.0)

    def refine_rates(self, best: str) -> None:
        """As far as the account allows, try the best rates again on the leading candidate and the full network."""
        number = 1 + (self.steps >= _TWO_RATES) + (self.steps >= _ALL_RATES) * len(self.settings.rates)
        cheapest = next(iter(self.candidates))
        for name in (best, FULL):
            if number > 1 and name != cheapest:
                self._halving(name, self.ranked[:number], max(self._part_of_a_rate(), self.best[name].spent))

    def _part_of_a_rate(self) -> float:
        return _FOR_RATES * self.settings.max_cost / max(1, len(self.settings.rates) - 1)

    def _halving(self, name: str, rates: Sequence[float], part: float) -> list[float]:
        """Train at every rate at equal cost and keep the best; returns the rates, best first."""
        probes = [self._at(name, rate) for rate in rates]
        self.tried += [probe for probe in probes if not any(probe is one for one in self.tried)]
        if len(probes) > 1:
            for probe in probes:
                probe.train(spend=part)
                self._report(name, probe)
        # In the order that was given: in doubt the earlier one.
        if len(probes) > 1 and all(probe.broken for probe in probes):
            self._breaks_down(name, rates)
        order = sorted(range(len(probes)), key=lambda i: (probes[i].loss, i))
        if probes[order[0]].loss > (1 - _MARGIN) * probes[0].loss:
            order.remove(0)
            order.insert(0, 0)
        self.best[name] = probes[order[0]]
        return [rates[i] for i in order]

    def _breaks_down(self, name: str, rates: Sequence[float]) -> None:
        listed = ", ".join(f"{rate:g}" for rate in rates)
        raise UserError(
            f"training {name} breaks down at every rate ({listed} times optimizer.lr): lower that, or plan.rates."
        )

    def _at(self, name: str, rate: float) -> Probe:
        first = self.full if name == FULL else self.candidates[name]
        first.samples = self.samples
        begun = [first, *([self.best[name]] if name in self.best else [])]
        same = [probe for probe in begun if probe.rate == rate]
        return same[-1] if same else self._probe(first.candidate, rate)

    def _report(self, name: str, probe: Probe) -> None:
        self.say(
            f"{name:>14}  rate x{probe.rate:<4g} {probe.steps:5d} steps  {100 * probe.cost:6.2f} % of the budget  "
            f"held-out loss {probe.loss:.3f}   (spent {100 * self.account.spent:.2f} %)"
        )

    # Candidates --------------------------------------------------------------------------------------------

    def _has_curve(self, name: str) -> bool:
        return name in self.curve_of or len(self.best[name].finite) >= MIN_POINTS

    def compare(self) -> str:
        """Train every candidate at equal cost; return the one with the lowest predicted loss."""
        cost = _FOR_EACH_OTHER * self.settings.max_cost
        for name in self.candidates:
            self._train(name, more=max(0.0, cost - self.best[name].spent))
        if all(self._has_curve(name) for name in self.candidates):
            measured = {name: self.best[name].measured() for name in self.candidates}
            curves = fit(measured, next(iter(measured)), self.settings.multiple)
            ahead = 1 / self.settings.multiple
            return min(curves, key=lambda name: float(np.median(curves[name].loss(ahead))))
        return min(self.candidates, key=lambda name: self.best[name].loss)

    def _train(self, name: str, cost: float = inf, more: float = inf) -> None:
        """Continue at the best rate to a cost, or until an amount is spent.

        If the loss rises at a rate above the usual one, the next lower rate replaces it if it does better.
        """
        probe, usual = self.best[name], self.settings.rates[0]
        lower = [rate for rate in self.settings.rates if usual <= rate < probe.rate]
        more += probe.spent
        probe.train(cost=cost, spend=more, wary=bool(lower))
        self._report(name, probe)
        if not (lower and probe.rises):
            return
        other = self._at(name, max(lower))
        self.tried += [other] * (not any(other is one for one in self.tried))
        other.train(cost=cost, spend=other.spent + more - probe.spent)
        self._report(name, other)
        if other.loss < probe.loss:
            self.best[name] = other

    def extend(self, best: str) -> None:
        """Extend the full network's probe as far as its law is needed, then the best candidate's with the rest."""
        settings = self.settings
        self._train(FULL, cost=1.001 / settings.multiple)
        if self.best[FULL].broken:
            self._breaks_down(FULL, [self.best[FULL].rate])
        step = 3 * self._batch_size() * self.full.forward_cost
        trial = 2 * self.samples * self.full.forward_cost + _LEAST_TRIAL * step
        left = self.account.limit - self.account.spent - max(_FOR_TRIAL * settings.max_cost, trial)
        cost = 1.001 / settings.multiple
        self._train(best, cost=cost, more=max(0.0, left))

    def try_growth(self, name: str) -> None:
        """Grow the best candidate's network, and spend the rest on training it as the full one."""
        small = self.best[name]
        if not self._has_curve(name):
            return
        kept = small.measured()
        before, cost, steps = small.evaluate(), small.cost, small.steps
        points = list(small.points)
        self.curve_of[name], self.starts[name] = kept, small.start()
        after = small.grow()
        if after is None:
            return
        small.train(spend=small.spent + self.account.limit - self.account.spent)
        further = small.cost - cost
        if small.steps > steps and small.loss < float("inf"):
            self.trials[name] = Trial(cost, before, after, further, small.loss)
            losses = f"{before:.3f} -> {after:.3f} -> {small.loss:.3f}"
            self.say(
                f"{name:>14}  grown      {small.steps - steps:5d} steps  {100 * further:6.2f} % of the budget  "
                f"held-out loss {losses}   (spent {100 * self.account.spent:.2f} %)"
            )
        small.points, small.cost, small.steps = points, cost, steps

    def conclude(self) -> Planned:
        """Fit the laws and judge."""
        settings = self.settings
        names = (FULL, *(name for name in self.candidates if self._has_curve(name)))
        for name in self.candidates:
            if name not in names:
                probe = self.best[name]
                self.left_out[name] = (
                    f"given up at {100 * probe.cost:.2f} % of the budget, with a held-out loss of {probe.loss:.3f}."
                )
        measured = {name: self.curve_of.get(name) or self.best[name].measured() for name in names}
        budget = 1.0 - (self.account.spent if settings.charge else 0.0)
        curves = fit(measured, FULL, settings.multiple, seed=settings.seed)
        seconds = {name: one.seconds_per_cost for name, one in measured.items()}
        alone = [one.name for one in self.problem.candidates if one.alone]
        limits = (budget, settings.size, settings.latest, settings.seed)
        verdict = judge(curves, self.trials, FULL, seconds, *limits, alone=alone)
        tried = [
            {"candidate": probe.candidate.name if probe.candidate else FULL}
            | {key: getattr(probe, key) for key in ("rate", "steps", "cost", "loss")}
            for probe in self.tried
        ]
        rates = {name: self.best[name].rate for name in names}
        starts = {name: self.best[name].start() for name in names if name not in self.starts} | self.starts
        return Planned(
            *(settings, measured, rates, self.trials, verdict, self.account, tried, self.left_out),
            *({FULL: 1.0, **self.flops}, budget, starts, alone),
        )
