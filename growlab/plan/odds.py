"""Odds of a smaller, a grown and a full network from one number that is known before training.

That number is r, the training samples (tokens of text) for each parameter of the full network in the whole budget.
*Cases* are finished runs of the three networks at equal cost: `cases.csv`, and the user's own. What each network is
expected to lose against the best of the three, and the odds that one ends better than another, are means over cases
with weights that fall with the distance between their ln r and the asked one (a Nadaraya-Watson estimate).
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from math import exp, expm1, isfinite, log
from pathlib import Path
from typing import Literal

from torch import nn

from growlab.base.errors import UserError

Size = Literal["any", "full"]
Arm = Literal["smaller", "grown", "full"]
# Parameters of the smaller network relative to the full one's where nothing else is known: half the width.
_SMALLER = 0.25
# Standard deviation of the weights over ln r, and the weight of the mean over all cases.
_WIDTH, _PRIOR = 0.7, 1.0
_NAMES: dict[Arm, str] = {"smaller": "a smaller network", "grown": "growing", "full": "the full network"}


@dataclass(frozen=True)
class Case:
    """Test errors that a full, a smaller and a grown network reached at equal cost.

    Attributes:
        case: name of the runs.
        family: network and data; cases of one family are left out together where advice is checked.
        kind: "classes" (images and the like, one label a sample) or "language".
        params: parameters of the full network.
        smaller_params: of the smaller one.
        samples: training samples, of text tokens, that the full network saw.
        full: test error of the full network, from 0 to 1; of text, loss or bits per byte.
        smaller: of the smaller network, which saw more samples at the same cost.
        grown: of the network that was grown to full size; None: not trained.
    """

    case: str
    family: str
    kind: str
    params: int
    smaller_params: int
    samples: int
    full: float
    smaller: float
    grown: float | None = None

    @property
    def ratio(self) -> float:
        """Samples per parameter of the full network."""
        return self.samples / self.params

    def error(self, arm: Arm) -> float | None:
        """Test error of a network, above 0; None: not trained."""
        value: float | None = getattr(self, arm)
        return None if value is None else max(value, 1e-4)

    def lost(self, arms: Iterable[Arm]) -> dict[Arm, float]:
        """Logarithm of each trained network's error over that of the best among `arms`."""
        found = {arm: error for arm in arms if (error := self.error(arm)) is not None}
        return {arm: log(error / min(found.values())) for arm, error in found.items()}


@dataclass(frozen=True)
class Check:
    """Agreement of advice with cases, each judged by the cases of other families.

    Attributes:
        right: cases whose chosen network was the best one.
        cases: number of cases.
        brier: mean squared difference between the odds of the choice against each other network and the outcome;
            0.25 is a coin's.
        expected: test error above the best network's, relative to it, that the choices were expected to have.
        realised: that they had.
        choices: the network chosen in each case, in order.
    """

    right: int
    cases: int
    brier: float
    expected: float
    realised: float
    choices: Sequence[Arm]


@dataclass(frozen=True)
class Advice:
    """The network to train for a budget, and odds; `str` prints them in at most seven lines.

    Attributes:
        choice: network with the least expected error: "smaller", "grown" or "full".
        odds: probability that the choice ends better than each other network.
        regret: expected test error of each network above the best one's, relative to it.
        points: the same in percentage points of accuracy, in cases of images like these; None for text.
        ratio: training samples, of text tokens, per parameter of the full network.
        params: parameters of the full network.
        smaller_params: parameters of the smaller one.
        seen: range of ratios in the cases.
        check: the same advice for the cases themselves.
    """

    choice: Arm
    odds: Mapping[Arm, float]
    regret: Mapping[Arm, float]
    points: Mapping[Arm, float] | None
    ratio: float
    params: int
    smaller_params: int
    seen: tuple[float, float]
    check: Check

    @property
    def line(self) -> str:
        """The advice in one line."""
        odds = " and ".join(f"{_NAMES[arm]} ({100 * value:.0f} %)" for arm, value in self.odds.items())
        return f"{_NAMES[self.choice]} is likely to end better than {odds}; {self.ratio:.2g} samples a parameter"

    def __str__(self) -> str:
        title = {"smaller": "Train a smaller network", "grown": "Grow it", "full": "Train the full network"}
        lines = [f"{title[self.choice]}: {self.ratio:.3g} samples for each of {self.params:,} parameters."]
        for arm in sorted(self.regret, key=lambda arm: (arm != self.choice, self.regret[arm])):
            points = "" if self.points is None else f" ({self.points[arm]:.1f} points)"
            odds = f"; {100 * self.odds[arm]:.0f} % likely to be worse" if arm in self.odds else " than the best"
            lines.append(f"  {_NAMES[arm]:<18}{100 * self.regret[arm]:3.0f} % more test error{points}{odds}")
        smaller = f"Smaller: {100 * self.smaller_params / self.params:.0f} % of the parameters, trained for longer."
        lines.append(f"{smaller} Grow at 20 to 40 % of the cost.")
        cost = f"choices cost {100 * self.check.realised:.1f} % (expected: {100 * self.check.expected:.1f} %)"
        lines.append(f"{self.check.cases} cases: with their families left out, {cost}.")
        low, high = self.seen
        if not low / 2 <= self.ratio <= 2 * high:
            lines.append(f"No case is near: they have {low:.2g} to {high:.2g} samples a parameter.")
        return "\n".join(lines)


def read_cases(*paths: Path | str) -> list[Case]:
    """Cases of the package, and of CSV files with the same columns.

    Raises:
        UserError: a file has no such cases.
    """
    shipped = files("growlab.plan").joinpath("cases.csv").read_text(encoding="utf-8")
    found = _parsed(shipped.splitlines(), "cases.csv")
    for path in paths:
        try:
            found += _parsed(Path(path).read_text(encoding="utf-8").splitlines(), str(path))
        except OSError as error:
            raise UserError(f"cannot read the cases of {path}: {error.strerror}.") from error
    return found


def _parsed(lines: Iterable[str], name: str) -> list[Case]:
    whole, number = ("params", "smaller_params", "samples"), ("full", "smaller")
    try:
        return [
            Case(
                **{key: row[key] for key in ("case", "family", "kind")},
                **{key: int(row[key]) for key in whole},
                **{key: float(row[key]) for key in number},
                grown=float(row["grown"]) if row["grown"] else None,
            )
            for row in csv.DictReader(lines)
        ]
    except (KeyError, TypeError, ValueError) as error:
        columns = ", ".join(field.name for field in fields(Case))
        raise UserError(f"{name} has no cases ({error}): its columns must be {columns}.") from error


def advise(
    network: nn.Module | int,
    samples: float,
    *,
    smaller: nn.Module | int | float = _SMALLER,
    size: Size = "any",
    kind: str | None = None,
    cases: Sequence[Case] | None = None,
) -> Advice:
    """Which of a smaller, a grown and the full network ends best at equal cost, with odds and what each is behind.

    Args:
        network: at full size, or its number of parameters.
        samples: training samples that the full network would see for the whole budget; of text, tokens.
        smaller: the network to compare with, its parameters, or these as a fraction of the full network's. The cases'
            smaller networks have between an eighth and a half of the parameters.
        size: "full": the full network is wanted in any case, and the question is to grow it or not.
        kind: "classes" or "language"; None: language if the network has an embedding.
        cases: to learn from; None: those of the package, see `read_cases`.

    Raises:
        UserError: a number is impossible, or there are no cases.

    Examples:
        >>> from growlab.plan import advise
        >>> advise(270_000, samples=60_000).choice
        'smaller'
        >>> advise(10_000, samples=1_000_000).choice
        'full'
    """
    params, smaller_params = _count(network), _count(smaller, network)
    if not (isfinite(samples) and samples > 0):
        raise UserError(f"samples={samples} must be a number above 0.")
    if not 0 < smaller_params < params:
        raise UserError(f"the smaller network has {smaller_params:,} parameters, the full one {params:,}.")
    if kind is None:
        embeds = isinstance(network, nn.Module) and any(isinstance(m, nn.Embedding) for m in network.modules())
        kind = "language" if embeds else "classes"
    arms: tuple[Arm, ...] = ("grown", "full") if size == "full" else ("smaller", "grown", "full")
    known = [case for case in (read_cases() if cases is None else cases) if len(case.lost(arms)) > 1]
    if len(known) < 2:
        raise UserError("advice needs at least two cases to learn from.")
    ratio, classes = samples / params, [case for case in known if case.kind == "classes"]
    regret, points = _regret(known, arms, ratio), None
    choice = min(regret, key=lambda arm: regret[arm])
    if kind == "classes" and classes:
        points = _mean_by_arm(classes, ratio, lambda case: _points(case, arms))
    ratios = [case.ratio for case in known]
    return Advice(
        choice,
        _odds(known, arms, choice, ratio),
        {arm: expm1(lost) for arm, lost in regret.items()},
        points,
        ratio,
        params,
        smaller_params,
        (min(ratios), max(ratios)),
        check(known, size),
    )


def check(cases: Sequence[Case], size: Size = "any") -> Check:
    """Advice for each case by the cases of other families.

    Args:
        cases: with the errors of at least two networks.
        size: see `advise`.
    """
    arms: tuple[Arm, ...] = ("grown", "full") if size == "full" else ("smaller", "grown", "full")
    expected, realised, squares, right, choices = 0.0, 0.0, list[float](), 0, list[Arm]()
    cases = [case for case in cases if len(case.lost(arms)) > 1]
    for case in cases:
        lost, others = case.lost(arms), [one for one in cases if one.family != case.family] or cases
        regret = {arm: value for arm, value in _regret(others, arms, case.ratio).items() if arm in lost}
        choices.append(choice := min(regret, key=lambda arm: regret[arm]))
        expected, realised, right = expected + regret[choice], realised + lost[choice], right + (lost[choice] == 0)
        odds = _odds(others, arms, choice, case.ratio)
        squares += [(odds[arm] - _better(lost, choice, arm)) ** 2 for arm in lost if arm in odds]
    number = len(cases)
    brier = sum(squares) / max(1, len(squares))
    return Check(right, number, brier, expm1(expected / number), expm1(realised / number), choices)


def _regret(cases: Sequence[Case], arms: tuple[Arm, ...], ratio: float) -> dict[Arm, float]:
    return _mean_by_arm(cases, ratio, lambda case: case.lost(arms))


def _odds(cases: Sequence[Case], arms: tuple[Arm, ...], choice: Arm, ratio: float) -> dict[Arm, float]:
    """Probability that the choice ends better than each other network, never surer than the number of cases allows."""

    def better(case: Case) -> dict[Arm, float]:
        lost = case.lost(arms)
        return {arm: _better(lost, choice, arm) for arm in lost if arm != choice} if choice in lost else {}

    least = 1 / (len(cases) + 2)
    return {arm: min(max(p, least), 1 - least) for arm, p in _mean_by_arm(cases, ratio, better).items()}


def _better(lost: Mapping[Arm, float], one: Arm, other: Arm) -> float:
    return 0.5 if lost[one] == lost[other] else float(lost[one] < lost[other])


def _points(case: Case, arms: tuple[Arm, ...]) -> dict[Arm, float]:
    errors = {arm: error for arm in arms if (error := case.error(arm)) is not None}
    return {arm: 100 * (error - min(errors.values())) for arm, error in errors.items()}


def _mean_by_arm(
    cases: Sequence[Case], ratio: float, values: Callable[[Case], Mapping[Arm, float]]
) -> dict[Arm, float]:
    """Mean over the cases that have a value, by their distance in ln r, and over all with the weight of the prior."""
    ratios = [case.ratio for case in cases]
    ratio = min(max(ratio, min(ratios)), max(ratios))
    found: dict[Arm, list[tuple[float, float]]] = {}
    for case in cases:
        weight = exp(-((log(case.ratio / ratio) / _WIDTH) ** 2) / 2)
        for arm, value in values(case).items():
            found.setdefault(arm, []).append((weight, value))
    return {
        arm: sum((weight + _PRIOR / len(pairs)) * value for weight, value in pairs)
        / (sum(weight for weight, _ in pairs) + _PRIOR)
        for arm, pairs in found.items()
    }


def _count(network: nn.Module | int | float, whole: nn.Module | int | None = None) -> int:
    if isinstance(network, nn.Module):
        return sum(parameter.numel() for parameter in network.parameters())
    if not (isfinite(network) and network > 0):
        raise UserError(f"{network} is no number of parameters.")
    if whole is not None and network < 1:
        return max(1, round(network * _count(whole)))
    return round(network)
