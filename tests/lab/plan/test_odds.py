"""`growlab.plan.advise`: odds, expected costs, additional cases, and errors."""

from dataclasses import asdict, replace
from math import isclose, log

import numpy as np
import pytest
from torch import nn

import growlab
from growlab.base.errors import UserError
from growlab.plan import Case, advise, check, read_cases


def made(number: int = 60, seed: int = 0, slope: float = 2.0) -> list[Case]:
    """Draw cases from the model of the odds, with even odds at one sample per parameter."""
    rng, found = np.random.default_rng(seed), []
    for index in range(number):
        ratio = float(np.exp(rng.uniform(-3, 3)))
        gain = 0.1 * (-slope * log(ratio) + rng.logistic())
        found.append(
            Case(str(index), f"family {index % 10}", "classes", 10**6, 250_000, round(ratio * 10**6), 0.1, 0.1)
        )
        found[-1] = replace(found[-1], smaller=0.1 / np.exp(gain), grown=0.1)
    return found


def test_the_packages_cases_favour_small_networks_for_few_samples_and_full_ones_for_many() -> None:
    chosen = [advise(10**6, samples=ratio * 10**6).choice for ratio in (0.1, 0.5, 6, 20)]
    assert chosen == ["smaller", "smaller", "full", "full"]
    odds = [advise(10**6, samples=ratio * 10**6, smaller=0.3).odds for ratio in (0.05, 0.3, 1.0)]
    assert odds[0] >= odds[1] > odds[2] > 0.5
    known = read_cases()
    families = check(
        [case for case in known if not case.case.startswith(("blind_fourth", "blind_fifth", "blind_sixth"))]
    )
    assert families.cases == 61 and families.right >= 52 and families.brier < 0.11
    families = check(known)
    assert (families.cases, families.right, round(families.brier, 4)) == (121, 102, 0.1149)


def test_on_text_the_odds_are_even_at_more_samples_than_on_images() -> None:
    text, images = (advise(10**6, 10**6, kind=kind) for kind in ("language", "classes"))
    assert text.even is not None and images.even is not None and text.even > 2 * images.even


def test_odds_and_costs_are_those_of_the_model_that_drew_the_cases() -> None:
    cases, fresh = made(), made(2000, seed=1)
    for ratio in (0.2, 0.7, 2.0):
        advice = advise(10**6, ratio * 10**6, cases=cases)
        near = [one for one in fresh if abs(log(one.ratio / ratio)) < 0.25]
        gains = [one.gain("smaller") * (1 if advice.choice == "smaller" else -1) for one in near]
        assert isclose(advice.odds, np.mean(np.array(gains) > 0), abs_tol=0.15)
        realised = np.mean([np.exp(max(0.0, -gain)) - 1 for gain in gains])
        assert isclose(advice.regret, realised, abs_tol=0.03)
        assert isclose(advice.regret, (1 - advice.odds) * advice.if_wrong)
    assert check(cases).brier < 0.2 and 0.3 < check(cases).expected / check(cases).realised < 3


def test_a_family_is_judged_without_its_own_cases() -> None:
    cases = made()
    turned = [replace(one, smaller=one.full**2 / one.smaller) if one.family == "family 3" else one for one in cases]
    before, after = check(cases).odds, check(turned).odds
    own = [index for index, one in enumerate(cases) if one.family == "family 3"]
    assert [before[index] for index in own] == [after[index] for index in own] and before != after


@pytest.mark.parametrize("size", ["any", "full"])
@pytest.mark.parametrize("ratio", [1e-3, 0.5, 3, 1e3])
def test_advice_is_at_most_eight_lines_of_eighty_columns(size: str, ratio: float) -> None:
    advice = advise(123_456_789_012, samples=ratio * 123_456_789_012, size=size)
    lines = str(advice).splitlines()
    assert len(lines) <= 8 and max(map(len, lines)) <= 80 and len(advice.line) <= 110
    assert f"{100 * advice.odds:.0f} % likely" in lines[0] and "If wrong:" in lines[1]
    assert advice.odds >= 0.5 and advice.if_wrong > 0
    assert ("No case is near" in str(advice)) == (ratio in (1e-3, 1e3))


@pytest.mark.parametrize("size", ["any", "full"])
def test_the_choice_changes_at_the_stated_budget(size: str) -> None:
    short = advise(10_000, samples=10, size=size)
    assert short.even is not None and f"{short.even / short.ratio:,.0f} times this budget" in str(short)
    for factor, choice in ((0.98, short.choice), (1.02, "full")):
        assert advise(10_000, samples=factor * short.even * 10_000, size=size).choice == choice
    # The advice depends on the budget, also where the odds are capped.
    longer = advise(10_000, samples=30, size=size)
    assert str(longer) != str(short) and longer.line != short.line
    always = [replace(one, smaller=one.full / 2, grown=one.full / 2) for one in made()]
    assert advise(10_000, samples=10, size=size, cases=always).even is None


def test_parameters_are_counted_and_embeddings_mean_text() -> None:
    dense = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    advice = growlab.plan.advise(dense, 1000, smaller=nn.Linear(10, 10))
    assert (advice.params, advice.smaller_params) == (11_110, 110) and advice.points is not None
    text = advise(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)), 1000)
    assert text.points is None and text.smaller_params == round(text.params / 4)


def test_a_users_cases_are_used(tmp_path) -> None:
    more = made(100, slope=-4.0)
    lines = [",".join(asdict(more[0]))]
    lines += [",".join("" if value is None else str(value) for value in asdict(one).values()) for one in more]
    file = tmp_path / "mine.csv"
    # With a byte order mark, as spreadsheets save "CSV UTF-8".
    file.write_text("\n".join(lines), encoding="utf-8-sig")
    cases = read_cases(file)
    assert cases[len(read_cases()) :] == more
    assert advise(10**6, 2e7, cases=cases).choice == "smaller" != advise(10**6, 2e7).choice
    columns = "case, family, kind, params, smaller_params, samples, full, smaller, grown"
    for content, message in (
        ("case,family\na,b\n", rf"mine\.csv has no column kind: its columns must be {columns}\.$"),
        ("", r"mine\.csv has no column case: "),
        ("\n".join(lines).replace(",250000,", ",0,"), r"^line 2 of .*mine\.csv is not a case: .*at least 1"),
        ("\n".join([*lines[:2], "a,b,classes,many,1,1,0.5,0.5,"]), r"^line 3 of .*mine\.csv .*: invalid .* 'many'\.$"),
        ("\n".join([*lines[:2], "a,b,classes,9,1,1,0.5"]), r"^line 3 of .*mine\.csv .*: could not convert .* ''\.$"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            read_cases(file)
    with pytest.raises(UserError, match="cannot read"):
        read_cases(tmp_path / "none.csv")
    file.write_bytes("case,famille\nété,b\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"cannot read the cases of .*mine\.csv: 'utf-8' codec"):
        read_cases(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples=0 must"),
        ({"samples": float("nan")}, "samples=nan must"),
        ({"smaller": 2e6}, "the smaller network has 2,000,000"),
        ({"smaller": -1}, "-1 is no number"),
        ({"kind": "text"}, "kind must be None, classes or language, not 'text'"),
        ({"size": "small"}, "size must be any or full, not 'small'"),
        ({"cases": []}, "at least two cases"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        advise(**{"network": 10**6, "samples": 10**6, **arguments})
