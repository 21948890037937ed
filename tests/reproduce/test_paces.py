"""How long runs take: what is measured, for how long at most, and what is kept of it."""

import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from growlab.recipes.papers import paces
from growlab.recipes.papers.__main__ import _told, main
from growlab.recipes.papers.paces import Forecast, Network, forecast
from growlab.recipes.papers.registry import Job, registry
from growlab.recipes.papers.slices import Place
from growlab.recipes.papers.stopping import Ended, EndingSignals

REGISTRY = registry()
# Two networks, of which the first is that of two jobs.
JOBS = [
    Job("digits", ("seed=0",), 2, "digits", False),
    Job("digits", ("model=vgg11",), 3, "digits", False),
    Job("digits", ("seed=1",), 5, "digits", False),
]
SAMPLES = 1437


def far() -> float:
    return time.monotonic() + 60


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Network]:
    """The networks that are measured, each at another pace."""
    measured: list[Network] = []

    def pace(job: Job, network: Network, *about: object) -> float:
        measured.append(network)
        return 1.0 if network == ("digits",) else 10.0

    monkeypatch.setattr(paces, "_samples_per_sec", pace)
    return measured


def test_each_network_is_measured_once_and_kept(
    tmp_path: Path, measured: list[Network], capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path, None, ("trainer=cpu",))
    for _ in range(2):
        found = forecast(JOBS, place, REGISTRY, 1, far(), EndingSignals())
        assert found.seconds == pytest.approx(SAMPLES * (2 / 1 + 3 / 10 + 5 / 1))
        assert (found.num_known, found.unknown) == (3, ())
    assert measured == [("digits",), ("digits", "model=vgg11")]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "measuring a few steps of digits, 1 of 2",
        "measuring a few steps of digits model=vgg11, 2 of 2",
    ]
    # On another device and with another number of runs at once it is another pace.
    forecast(JOBS, place, REGISTRY, 2, far(), EndingSignals())
    forecast(JOBS, replace(place, device=("trainer=gpu",)), REGISTRY, 1, far(), EndingSignals())
    assert len(measured) == 6
    (tmp_path / "paces.json").write_text("{")
    forecast(JOBS, place, REGISTRY, 1, far(), EndingSignals())
    assert len(measured) == 8 and len(json.loads((tmp_path / "paces.json").read_text())) == 2


def test_steps_that_are_the_same_are_measured_once(tmp_path: Path, measured: list[Network]) -> None:
    """Table 2's two experiments train the same three networks; those of Table 10 have optimizers of their own."""
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train.parquet").touch()
    place = Place(tmp_path / "runs", tmp_path, ())
    for name, networks in (
        ("table2", [("table2", f"model={model}") for model in ("resnet20", "vgg11", "mobilenetv1")]),
        ("table10", [("table10_adam",), ("table10_avagrad",)]),
        # As ResNet-20 in Table 2.
        ("table7", []),
    ):
        measured.clear()
        found = forecast(REGISTRY.items[name].jobs(), place, REGISTRY, 1, far(), EndingSignals())
        assert measured == networks and found.num_known == len(REGISTRY.items[name].jobs())


def test_time_that_is_too_short_leaves_networks_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Network] = []

    def pace(job: Job, network: Network, *about: object) -> float | None:
        asked.append(network)
        return None if network == ("digits",) else 10.0

    monkeypatch.setattr(paces, "_samples_per_sec", pace)
    found = forecast(JOBS, Place(tmp_path, None, ()), REGISTRY, 1, far(), EndingSignals())
    assert asked == [("digits",)]
    assert (found.seconds, found.num_known) == (0, 0) and len(found.unknown) == 2


def test_steps_that_take_longer_than_the_time_are_ended(tmp_path: Path) -> None:
    quick, slow = ([sys.executable, "-c", f"import time; time.sleep({seconds})"] for seconds in (0, 300))
    said = [tmp_path / "first.txt", tmp_path / "second.txt"]
    assert paces._codes([quick, quick], said, far(), EndingSignals()) == [0, 0]
    assert paces._codes([slow, slow], said, time.monotonic(), EndingSignals()) == [None, None]


def test_a_signal_ends_the_steps_that_are_measured(tmp_path: Path) -> None:
    signals = EndingSignals()
    signals.received.append(signal.SIGTERM)
    with pytest.raises(Ended):
        forecast(JOBS, Place(tmp_path, None, ("trainer=cpu",)), REGISTRY, 2, far(), signals)
    assert not (tmp_path / "paces.json").exists()


@pytest.mark.parametrize(
    ("at_most", "told"),
    [
        (Forecast(20.0, 2, ()), "1 minute here at most, by a few steps at full width"),
        (Forecast(150.0, 2, ()), "2 minutes here at most, by a few steps at full width"),
        (
            Forecast(5400.0, 2, (("a", "model=b"),)),
            "1.5 hours here at most, by a few steps at full width, for 2 of",
        ),
        (Forecast(0.0, 0, (("a",), ("b",))), "the time was too short to measure a few steps of a; b"),
    ],
)
def test_a_forecast_says_what_is_known(at_most: Forecast, told: str) -> None:
    assert _told(at_most).startswith(told)


def test_measuring_is_part_of_the_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most half of the time goes into steps that are never done; the rest is left to train."""
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train.parquet").touch()
    measured_sec: list[float] = []
    left: list[float] = []

    def never_done(lines: list[list[str]], said: list[Path], end: float, signals: object) -> list[None]:
        measured_sec.append(end - time.monotonic())
        time.sleep(0.6)
        return [None]

    def trained(jobs: object, place: object, known: object, minutes: float, *about: object):
        left.append(minutes)
        return 0, [], []

    monkeypatch.setattr(paces, "_codes", never_done)
    monkeypatch.setattr("growlab.recipes.papers.__main__.train", trained)
    words = ["table7", "--minutes", "60", "--data", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    assert 0 < measured_sec[0] <= 30 * 60 and left[0] <= 60 - 0.01
    told = capsys.readouterr()
    assert "9 runs to go: the time was too short to measure a few steps of table7\n" in told.out
    assert told.err == "measuring a few steps of table7, 1 of 1\n"
    assert main([*words, "--dry-run"]) == 0
    assert measured_sec[1] > 30 * 60 and len(left) == 1
