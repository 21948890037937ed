"""Odds of a smaller, a grown and a full network from one number that is known before training.

That number is r, the training samples (tokens of text) for each parameter of the full network in the whole budget.
*Cases* are finished runs of the three networks at equal cost: `cases.csv`, and the user's own. What each network is
expected to lose against the best of the three, and the odds that one ends better than another, are means over cases
with weights that fall with the distance between their ln r and the asked one (a Nadaraya-Watson estimate).
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from math import expm1, isfinite, isnan, log, nan
from pathlib import Path
from typing import Literal

import numpy as np
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
        """The choice and its odds in one line."""
        odds = ", ".join(f"{100 * value:.0f} % against {_NAMES[arm]}" for arm, value in self.odds.items())
        return f"{_NAMES[self.choice]}: {odds} ({self.ratio:.2g} samples a parameter)"

    def __str__(self) -> str:
        title = {"smaller": "Train a smaller network", "grown": "Grow it", "full": "Train the full network"}
        lines = [f"{title[self.choice]}: {self.ratio:.3g} samples for each of {self.params:,} parameters."]
        for arm in sorted(self.regret, key=lambda arm: (arm != self.choice, self.regret[arm])):
            points = "" if self.points is None else f" ({self.points[arm]:.1f} points)"
            odds = f"; {100 * self.odds[arm]:.0f} % likely to be worse" if arm in self.odds else " than the best"
            lines.append(f"  {_NAMES[arm]:<18}{100 * self.regret[arm]:3.0f} % more test error{points}{odds}")
        smaller = f"Smaller: {100 * self.smaller_params / self.params:.0f} % of the parameters, for longer."
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
        >>> advise(100_000, samples=500_000).choice
        'grown'
    """
    params, smaller_params = _count(network), _count(smaller, network)
    if not (isfinite(samples) and samples > 0):
        raise UserError(f"samples={samples} must be a number above 0.")
    if not 0 < smaller_params < params:
        raise UserError(f"the smaller network has {smaller_params:,} parameters, the full one {params:,}.")
    if kind is None:
        embeds = isinstance(network, nn.Module) and any(isinstance(m, nn.Embedding) for m in network.modules())
        kind = "language" if embeds else "classes"
    arms = _arms(size)
    known = [case for case in (read_cases() if cases is None else cases) if _trained(case, arms) > 1]
    if len(known) < 2:
        raise UserError("advice needs at least two cases to learn from.")
    table, ratios = _Table(known, arms), [case.ratio for case in known]
    regret = table.mean(table.lost, samples / params)
    best = int(np.nanargmin(regret))
    odds = table.odds(best, samples / params)
    trained = [index for index, value in enumerate(regret) if not isnan(value)]
    classes = [case for case in known if case.kind == "classes"] if kind == "classes" else []
    if classes:
        likes = _Table(classes, arms)
        points = likes.mean(100 * likes.behind, samples / params)
    return Advice(
        choice=arms[best],
        odds={arms[index]: float(odds[index]) for index in trained if index != best},
        regret={arms[index]: expm1(regret[index]) for index in trained},
        points={arms[index]: float(points[index]) for index in trained} if classes else None,
        ratio=samples / params,
        params=params,
        smaller_params=smaller_params,
        seen=(min(ratios), max(ratios)),
        check=check(known, size),
    )


def check(cases: Sequence[Case], size: Size = "any") -> Check:
    """Advice for each case by the cases of other families.

    Args:
        cases: those with the error of one network are left out.
        size: see `advise`.
    """
    arms = _arms(size)
    cases = [case for case in cases if _trained(case, arms) > 1]
    expected, realised, squares, choices = list[float](), list[float](), list[float](), list[Arm]()
    whole = _Table(cases, arms)
    for case, lost in zip(cases, whole.lost, strict=True):
        table = _Table([one for one in cases if one.family != case.family] or cases, arms)
        regret = np.where(np.isnan(lost), nan, table.mean(table.lost, case.ratio))
        best = int(np.nanargmin(regret))
        choices.append(arms[best])
        expected.append(regret[best])
        realised.append(lost[best])
        missed = (table.odds(best, case.ratio) - _better(lost[None], best)[0]) ** 2
        squares += [one for index, one in enumerate(missed) if index != best and not isnan(one)]
    right, brier = sum(lost < 1e-12 for lost in realised), float(np.mean(squares))
    return Check(int(right), len(cases), brier, expm1(np.mean(expected)), expm1(np.mean(realised)), choices)


class _Table:
    """Errors of cases, as arrays [cases, networks] with nan where a network was not trained.

    Attributes:
        lost: logarithm of a network's error over the best one's.
        behind: error above the best one's.
    """

    def __init__(self, cases: Sequence[Case], arms: Sequence[Arm]) -> None:
        self._logs = np.log([case.ratio for case in cases])
        errors = np.array([[getattr(case, arm) for arm in arms] for case in cases], dtype=float)
        self.behind = errors - np.nanmin(errors, 1, keepdims=True)
        logs = np.log(np.maximum(errors, 1e-4))
        self.lost = logs - np.nanmin(logs, 1, keepdims=True)

    def mean(self, values: np.ndarray, ratio: float) -> np.ndarray:
        """Mean of each network's values, weighted by the distance in ln r, and of all with the weight of the prior.

        Ratios beyond those of all cases count as the farthest case's.
        """
        at = np.clip(log(ratio), self._logs.min(), self._logs.max())
        known = ~np.isnan(values)
        near = np.exp(-(((self._logs - at) / _WIDTH) ** 2) / 2)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = known * (near + _PRIOR / known.sum(0))
            mean: np.ndarray = (weights * np.nan_to_num(values)).sum(0) / weights.sum(0)
        return mean

    def odds(self, best: int, ratio: float) -> np.ndarray:
        """Probability that a network ends better than each other one, never surer than the number of cases allows."""
        least = 1 / (len(self.lost) + 2)
        return np.clip(self.mean(_better(self.lost, best), ratio), least, 1 - least)


def _better(lost: np.ndarray, best: int) -> np.ndarray:
    """1 where network `best` lost less than another one, 1/2 where as much, 0 where more; nan where unknown."""
    return (np.sign(lost - lost[:, [best]]) + 1) / 2


def _arms(size: Size) -> tuple[Arm, ...]:
    return ("grown", "full") if size == "full" else ("smaller", "grown", "full")


def _trained(case: Case, arms: Iterable[Arm]) -> int:
    return sum(getattr(case, arm) is not None for arm in arms)


def _count(network: nn.Module | int | float, whole: nn.Module | int | None = None) -> int:
    if isinstance(network, nn.Module):
        return sum(parameter.numel() for parameter in network.parameters())
    if not (isfinite(network) and network > 0):
        raise UserError(f"{network} is no number of parameters.")
    if whole is not None and network < 1:
        return max(1, round(network * _count(whole)))
    return round(network)
