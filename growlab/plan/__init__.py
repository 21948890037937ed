"""Odds before training: is a smaller network better for a budget, and does growing pay for a full one?

The log-odds that another network ends better than the full one are `a + b ln r + c ln f`, plus `d` for language, fitted
to finished runs: `cases.csv` and the user's own. Here r is the number of training samples (for text, tokens) per
parameter of the full network in the whole budget, and f its parameters over the smaller network's.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from math import exp, isfinite, log, log1p
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import at_least, one_of

__all__ = ["Advice", "Case", "Check", "advise", "check", "read_cases"]

Arm = Literal["smaller", "grown"]
Odds = Callable[["Case"], float]  # maps a case to its log-odds
# Ridge penalties of a, b, c and d: without them a fit to few cases is overconfident.
_RIDGE = (0.0, 0.3, 1.0, 1.0)


@dataclass(frozen=True)
class Case:
    """Test errors that a full, a smaller and a grown network reached at equal cost.

    Attributes:
        case: name of the runs.
        family: network and data; cases of one family are left out together when a fit is checked.
        kind: "classes" (such as images, with one label per sample) or "language".
        params: parameters of the full network.
        smaller_params: parameters of the smaller network.
        samples: training samples (for text, tokens) of the full network.
        full: test error of the full network, from 0 to 1; for text, the loss or bits per byte.
        smaller: test error of the smaller network, which saw more samples at the same cost.
        grown: test error of the network that was grown to full size; None: not trained.
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

    def __post_init__(self) -> None:
        at_least(1, params=self.params, smaller_params=self.smaller_params, samples=self.samples)

    @property
    def ratio(self) -> float:
        """Samples per parameter of the full network."""
        return self.samples / self.params

    def gain(self, arm: str) -> float | None:
        """Logarithm of the full network's error over another's; positive if the other was better."""
        error = getattr(self, arm)
        return None if error is None else log(max(self.full, 1e-4) / max(error, 1e-4))


@dataclass(frozen=True)
class Check:
    """Cross-validation of the odds: each case is predicted by a fit without its family.

    Attributes:
        right: number of cases in which the likelier network was better.
        cases: number of cases.
        brier: mean squared difference between predicted probability and outcome; a coin's is 0.25.
        expected: predicted cost of wrong choices, as mean relative error.
        realised: actual cost of wrong choices.
        odds: predicted probability of the other network in each case, in order.
    """

    right: int
    cases: int
    brier: float
    expected: float
    realised: float
    odds: Sequence[float] = field(repr=False)


@dataclass(frozen=True)
class Advice:
    """Odds for a network and a budget; `str` prints them in at most nine lines.

    Attributes:
        choice: "smaller", "grow" or "full".
        odds: probability that the choice ends no worse than the alternative.
        instead: the alternative.
        ratio: training samples (for text, tokens) per parameter of the full network.
        params: parameters of the full network.
        smaller_params: parameters of the smaller network.
        if_wrong: expected relative excess of the test error over the alternative's, if the choice is wrong.
        points: the same in percentage points of accuracy, from the cases with classes; None for text.
        regret: expected relative excess over the better of the two, `(1 - odds) * if_wrong`.
        even: ratio at which both are equally likely to end better; None if no budget changes the choice.
        seen: range of ratios in the cases.
        check: cross-validation on the cases.
    """

    choice: Literal["smaller", "grow", "full"]
    odds: float
    instead: str
    ratio: float
    params: int
    smaller_params: int
    if_wrong: float
    points: float | None
    regret: float
    even: float | None
    seen: tuple[float, float]
    check: Check

    @property
    def line(self) -> str:
        """The odds in one line."""
        name, other = _NAMES[self.choice], _NAMES[self.instead]
        odds = f"{100 * self.odds:.0f} % likely to end better than {other}"
        turns = "" if self.even is None else f", even at {self.even:.2g}"
        return f"{name} is {odds} ({self.ratio:.2g} samples a parameter{turns})"

    def __str__(self) -> str:
        name, other = _NAMES[self.choice].capitalize(), _NAMES[self.instead]
        points = "" if self.points is None else f", {self.points:.1f} points in such cases"
        lines = [
            f"{name} is {100 * self.odds:.0f} % likely to end better than {other}.",
            f"If wrong: {100 * self.if_wrong:.0f} % more test error{points}; expected: {100 * self.regret:.1f} %.",
            f"The full network: {self.params:,} parameters; it sees {self.ratio:.3g} samples for each.",
        ]
        if self.even is not None:
            times = self.even / self.ratio
            budget = f"{times:,.0f}" if times >= 10 else f"{times:.2g}"
            lines.append(f"Even odds: at {self.even:.2g} samples a parameter, {budget} times this budget.")
        if "smaller" in (self.choice, self.instead):
            part = 100 * self.smaller_params / self.params
            lines.append(f"The smaller one has {part:.0f} % of these and trains for longer, at equal cost.")
        if self.choice == "grow":
            lines.append("Grow in depth between 20 and 40 % of the cost, before the rate decays.")
        right = f"{self.check.right} right with their family left out"
        lines.append(f"{self.check.cases} cases: {right}, Brier {self.check.brier:.2f} (a coin: 0.25).")
        low, high = self.seen
        if not low / 2 <= self.ratio <= 2 * high:
            lines.append(f"No case is near: they have {low:.2g} to {high:.2g} samples a parameter.")
        return "\n".join(lines)


_NAMES = {"smaller": "a smaller network", "grow": "growing", "full": "the full network"}


def read_cases(*paths: Path | str) -> list[Case]:
    """Read the package's cases, and those in CSV files with the same columns.

    Raises:
        UserError: a file cannot be read, or has other columns.
    """
    shipped = files("growlab.plan").joinpath("cases.csv").read_text(encoding="utf-8")
    cases = _parsed(shipped.splitlines(), "cases.csv")
    for path in paths:
        try:
            # Spreadsheets write a byte order mark.
            cases += _parsed(Path(path).read_text(encoding="utf-8-sig").splitlines(), str(path))
        except (OSError, UnicodeError) as error:
            raise UserError(f"cannot read the cases of {path}: {getattr(error, 'strerror', error)}.") from error
    return cases


def _parsed(lines: Iterable[str], name: str) -> list[Case]:
    rows, columns = csv.DictReader(lines, restval=""), [field.name for field in fields(Case)]
    if missing := [column for column in columns if column not in (rows.fieldnames or ())]:
        raise UserError(f"{name} has no column {missing[0]}: its columns must be {', '.join(columns)}.")
    cases, integers, floats = list[Case](), ("params", "smaller_params", "samples"), ("full", "smaller")
    for row in rows:
        try:
            cases.append(
                Case(
                    **{key: row[key] for key in ("case", "family", "kind")},
                    **{key: int(row[key]) for key in integers},
                    **{key: float(row[key]) for key in floats},
                    grown=float(row["grown"]) if row["grown"] else None,
                )
            )
        except ValueError as error:
            raise UserError(f"line {rows.line_num} of {name} is not a case: {str(error).rstrip('.')}.") from error
    return cases


def advise(
    network: nn.Module | int,
    samples: float,
    *,
    smaller: nn.Module | int | float = 0.25,
    size: Literal["any", "full"] = "any",
    kind: str | None = None,
    cases: Sequence[Case] | None = None,
) -> Advice:
    """Odds that a smaller network ends better than the full one at equal cost, and the cost of being wrong.

    Args:
        network: the network at full size, or its number of parameters.
        samples: training samples (for text, tokens) of the full network in the whole budget.
        smaller: the network to compare with, its number of parameters, or a fraction of the full one's.
        size: "any": compare with a smaller network; "full": compare growing with training at full size.
        kind: "classes" or "language"; None: language if the network has an embedding.
        cases: cases to fit; None: those of the package, see `read_cases`.

    Raises:
        UserError: a number is impossible, `size` or `kind` is unknown, or there are fewer than two cases.

    Examples:
        >>> from growlab.plan import advise
        >>> advise(270_000, samples=60_000).choice
        'smaller'
        >>> advise(10_000, samples=1_000_000).choice
        'full'
    """
    with as_user_errors():
        one_of(("any", "full"), size=size)
        one_of((None, "classes", "language"), kind=kind)
    params, smaller_params = _count(network), _count(smaller, network)
    if not (isfinite(samples) and samples > 0):
        raise UserError(f"samples={samples} must be a number above 0.")
    if not 0 < smaller_params < params:
        raise UserError(f"the smaller network has {smaller_params:,} parameters, the full one {params:,}.")
    modules = network.modules() if isinstance(network, nn.Module) else ()
    kind = kind or ("language" if any(isinstance(m, nn.Embedding) for m in modules) else "classes")
    arm: Arm = "grown" if size == "full" else "smaller"
    cases = [case for case in (read_cases() if cases is None else cases) if case.gain(arm) is not None]
    if len(cases) < 2:
        raise UserError("odds need at least two cases to learn from.")
    query = Case("", "", kind, params, smaller_params, round(samples) or 1, 1.0, 1.0)
    log_odds = _fitted(cases, arm)
    prediction = log_odds(query)
    other: Literal["grow", "smaller"] = "grow" if size == "full" else "smaller"
    choice, instead = (other, "full") if prediction >= 0 else ("full", other)
    wrong = 1 / (1 + exp(abs(prediction)))
    if_wrong = _softplus(-abs(prediction)) / wrong
    classes = [case for case in cases if case.kind == "classes"]
    points = None
    if kind == "classes" and classes:
        points = if_wrong * _scale(classes, lambda case: 100 * abs(case.full - getattr(case, arm)), log_odds)
    if_wrong *= _scale(cases, _relative(arm), log_odds)
    ratios = [case.ratio for case in cases]
    return Advice(
        choice,
        1 - wrong,
        instead,
        query.ratio,
        params,
        smaller_params,
        if_wrong,
        points,
        wrong * if_wrong,
        _even(query, log_odds),
        (min(ratios), max(ratios)),
        check(cases, arm),
    )


def check(cases: Sequence[Case], arm: Arm = "smaller") -> Check:
    """Predict each case by a fit to all other families.

    Args:
        cases: finished runs; those without an error of `arm` are left out.
        arm: network that is compared with the full one.
    """
    odds, expected, realised, right, brier = list[float](), 0.0, 0.0, 0, 0.0
    cases = [case for case in cases if case.gain(arm) is not None]
    for case in cases:
        others = [other for other in cases if other.family != case.family]
        log_odds = _fitted(others, arm) if others else lambda case: 0.0
        prediction, gain = log_odds(case), _gain(case, arm)
        odds.append(1 / (1 + exp(-prediction)))
        if others:
            expected += _softplus(-abs(prediction)) * _scale(others, _relative(arm), log_odds)
        agrees = (prediction >= 0) == (gain > 0)
        realised += 0.0 if agrees else _relative(arm)(case)
        right += agrees
        brier += (odds[-1] - (gain > 0)) ** 2
    number = len(cases)
    return Check(right, number, brier / number, expected / number, realised / number, odds)


def _gain(case: Case, arm: str) -> float:
    gain = case.gain(arm)
    assert gain is not None
    return gain


def _features(case: Case) -> np.ndarray:
    language = float(case.kind == "language")
    return np.array([1.0, log(case.ratio), log(case.params / case.smaller_params / 4), language])


def _fitted(cases: Sequence[Case], arm: str) -> Odds:
    """Fit log-odds by logistic regression (Newton's method), with a weak Gaussian prior on the slopes."""
    x = np.array([_features(case) for case in cases])
    y = np.array([float(_gain(case, arm) > 0) for case in cases])
    ridge, weights = np.array(_RIDGE) + 1e-3, np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ weights))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.diag(ridge)
        step = np.linalg.solve(hessian, x.T @ (y - p) - ridge * weights)
        weights = weights + np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-9:
            break
    limit = log(len(cases) + 1)  # No probability is surer than the number of cases allows.
    return lambda case: float(np.clip(_features(case) @ weights, -limit, limit))


def _even(case: Case, odds: Odds) -> float | None:
    """Samples per parameter at which a case's odds are even, by bisection between 1e-6 and 1e6, or None."""
    low, high = -6.0, 6.0

    def odds_at(power: float) -> float:
        return odds(replace(case, samples=round(10**power * case.params) or 1))

    if odds_at(low) * odds_at(high) >= 0:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if odds_at(low) * odds_at(middle) > 0 else (low, middle)
    return float(10**low)


def _scale(cases: Sequence[Case], sizes: Callable[[Case], float], odds: Odds) -> float:
    """Size of a gain per unit of log-odds.

    A logistic model says that the gain `scale * (l + e)` is positive, with the log-odds `l` and `e` from a standard
    logistic distribution. Its mean absolute value is `scale * (softplus(l) + softplus(-l))`.
    """
    return sum(map(sizes, cases)) / sum(_softplus(odds(case)) + _softplus(-odds(case)) for case in cases)


def _softplus(x: float) -> float:
    return max(x, 0.0) + log1p(exp(-abs(x)))


def _relative(arm: str) -> Callable[[Case], float]:
    return lambda case: exp(abs(_gain(case, arm))) - 1


def _count(network: nn.Module | int | float, whole: nn.Module | int | None = None) -> int:
    if isinstance(network, nn.Module):
        return sum(parameter.numel() for parameter in network.parameters())
    if not (isfinite(network) and network > 0):
        raise UserError(f"{network} is no number of parameters.")
    if whole is not None and network < 1:
        return max(1, round(network * _count(whole)))
    return round(network)
