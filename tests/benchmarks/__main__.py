"""Run with `make bench` or `python -m tests.benchmarks`; see `tests.benchmarks.ratios`."""

import argparse
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from growlab.base.files import write_json
from tests.benchmarks import ratios
from tests.benchmarks.ratios import Ratio, Setting, table


def _gromo(setting: Setting) -> Iterator[Ratio]:
    from tests.benchmarks.gromo import events

    yield from events(setting)


def _ranks(setting: Setting) -> Iterator[Ratio]:
    from tests.benchmarks.runner import events

    yield from events(setting)


def _runner(setting: Setting) -> Iterator[Ratio]:
    from tests.benchmarks.runner import epochs

    yield from epochs(setting)


def _scales(setting: Setting) -> Iterator[Ratio]:
    from tests.benchmarks.scale import scales

    yield from scales(setting)


MEASURES: dict[str, Callable[[Setting], Iterator[Ratio]]] = {
    **ratios.MEASURES,
    "gromo": _gromo,
    "ranks": _ranks,
    "runner": _runner,
    "scale": _scales,
}


def main() -> None:
    """Measure, print a table, and write it after each measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("-k", default=",".join(MEASURES), help="measures, separated by commas: %(default)s")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the measures themselves")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--write", type=Path, metavar="FILE", help="a JSON file for the ratios")
    given = parser.parse_args()
    setting = Setting(given.device, given.small, given.repeats or (1 if given.small else 5))
    machine = platform.processor() or platform.machine()
    if given.device == "cuda":
        machine = torch.cuda.get_device_name()
    elif given.device == "cpu":
        torch.set_num_threads(1)
    found: list[Ratio] = []
    for name in given.k.split(","):
        for one in MEASURES[name](setting):
            found.append(one)
            print(list(table([one]))[-1], flush=True)
            if given.write is not None:
                rows = {
                    "machine": machine,
                    "torch": torch.__version__,
                    "small": given.small,
                    "ratios": [asdict(row) for row in found],
                }
                given.write.parent.mkdir(parents=True, exist_ok=True)
                write_json(given.write, rows)
    print("", *table(found), sep="\n")


if __name__ == "__main__":
    main()
