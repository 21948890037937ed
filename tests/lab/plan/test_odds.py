"""`growlab.plan.advise`: odds, what being wrong costs, cases of one's own, and refusals."""

from dataclasses import asdict, replace
from math import isclose, log

import numpy as np
import pytest
from torch import nn

import growlab
from growlab.base.errors import UserError
from growlab.plan import Case, advise, check, read_cases

ARMS = ("smaller", "grown", "full")


def made(number: int = 60, seed: int = 0, slope: float = 2.0) -> list[Case]:
    """Cases in which a smaller network is better below one sample a parameter, by chance; growing never is best."""
    rng, found = np.random.default_rng(seed), []
    for index in range(number):
        ratio = float(np.exp(rng.uniform(-3, 3)))
        gain = 0.1 * (-slope * log(ratio) + rng.logistic())
        smaller, samples = 0.1 / np.exp(gain), round(ratio * 10**6)
        one = Case(str(index), f"family {index % 10}", "classes", 10**6, 250_000, samples, 0.1, smaller, 9.0)
        found.append(one)
    return found


def lost(case: Case) -> dict[str, float]:
    errors = {arm: max(getattr(case, arm), 1e-4) for arm in ARMS}
    return {arm: log(error / min(errors.values())) for arm, error in errors.items()}


def test_few_samples_a_parameter_want_a_small_network_some_growth_and_many_the_full_one() -> None:
    chosen = [advise(10**6, samples=ratio * 10**6).choice for ratio in (0.1, 0.5, 3, 6)]
    assert chosen == ["smaller", "smaller", "grown", "grown"]
    found = check(read_cases())
    assert found.brier < 0.2 and found.expected / found.realised < 3
    for arm in ARMS:
        assert found.realised < 0.5 * np.expm1(np.mean([lost(case)[arm] for case in read_cases()]))


def test_odds_and_regrets_are_those_that_made_the_cases() -> None:
    cases, fresh = made(300), made(3000, seed=1)
    for ratio in (0.2, 0.7, 2.0):
        advice = advise(10**6, ratio * 10**6, cases=cases)
        other = "full" if advice.choice == "smaller" else "smaller"
        near = [lost(one) for one in fresh if abs(log(one.ratio / ratio)) < 0.25]
        won = np.mean([each[advice.choice] < each[other] for each in near])
        assert isclose(advice.odds[other], won, abs_tol=0.12) and advice.odds["grown"] > 0.98
        for arm in (advice.choice, other):
            realised = np.expm1(np.mean([each[arm] for each in near]))
            assert isclose(advice.regret[arm], realised, abs_tol=0.04)
            assert advice.points is not None and advice.points[arm] >= 0
    found = check(cases)
    assert found.brier < 0.15 and 0.5 < found.expected / found.realised < 3


def test_samples_beyond_all_cases_are_judged_like_the_farthest_case() -> None:
    cases = [replace(one, samples=round(one.params * ratio)) for one, ratio in zip(made(3), (1, 2, 4), strict=True)]
    ends, beyond = [advise(10**6, ratio * 10**6, cases=cases) for ratio in (1, 4)], (1e-3, 1e3)
    for end, ratio in zip(ends, beyond, strict=True):
        far = advise(10**6, ratio * 10**6, cases=cases)
        assert far.regret == end.regret and far.odds == end.odds and far.ratio == pytest.approx(ratio)


def test_a_family_is_judged_without_its_own_cases() -> None:
    cases = made()
    turned = [replace(one, smaller=one.full**2 / one.smaller) if one.family == "family 3" else one for one in cases]
    before, after = check(cases).choices, check(turned).choices
    own = [index for index, one in enumerate(cases) if one.family == "family 3"]
    assert [before[index] for index in own] == [after[index] for index in own]
    assert advise(10**6, 10**6, cases=cases).regret != advise(10**6, 10**6, cases=turned).regret


def test_a_case_without_a_grown_network_counts_for_the_others() -> None:
    cases = [replace(one, grown=None) for one in made()]
    advice = advise(10**6, 10**5, cases=cases)
    assert set(advice.regret) == {"smaller", "full"} and advice.choice == "smaller"
    with pytest.raises(UserError, match="at least two cases"):
        advise(10**6, 10**5, cases=cases, size="full")
    assert check([*cases, *made(5)]).cases == 65


@pytest.mark.parametrize("size", ["any", "full"])
@pytest.mark.parametrize("ratio", [1e-3, 0.5, 3, 1e3])
def test_advice_is_seven_lines_of_eighty_columns_with_odds_and_costs(size: str, ratio: float) -> None:
    advice = advise(123_456_789_012, samples=ratio * 123_456_789_012, size=size)
    lines = str(advice).splitlines()
    assert len(lines) <= 7 and max(map(len, lines)) <= 80 and len(advice.line) <= 105
    assert "than the best" in lines[1] and all("likely to be worse" in line for line in lines[2 : len(advice.regret)])
    assert advice.regret[advice.choice] == min(advice.regret.values()) > 0
    assert ("No case is near" in str(advice)) == (ratio in (1e-3, 1e3))


def test_networks_are_counted_and_embeddings_mean_text() -> None:
    dense = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    advice = growlab.plan.advise(dense, 1000, smaller=nn.Linear(10, 10))
    assert (advice.params, advice.smaller_params) == (11_110, 110) and advice.points is not None
    text = advise(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)), 1000)
    assert text.points is None and text.smaller_params == round(text.params / 4)


def test_a_users_cases_are_used(tmp_path) -> None:
    more = made(400, slope=-4.0)
    lines = [",".join(asdict(more[0]))]
    lines += [",".join("" if value is None else str(value) for value in asdict(one).values()) for one in more]
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(lines))
    cases = read_cases(file)
    assert cases[33:] == more
    assert advise(10**6, 1e7, cases=cases).choice == "smaller" != advise(10**6, 1e7).choice
    file.write_text("case,family\na,b\n")
    with pytest.raises(UserError, match=r"mine\.csv has no cases"):
        read_cases(file)
    with pytest.raises(UserError, match="cannot read"):
        read_cases(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples=0 must"),
        ({"samples": float("nan")}, "samples=nan must"),
        ({"smaller": 2e6}, "the smaller network has 2,000,000"),
        ({"smaller": -1}, "-1 is no number"),
        ({"cases": []}, "at least two cases"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        advise(**{"network": 10**6, "samples": 10**6, **arguments})
