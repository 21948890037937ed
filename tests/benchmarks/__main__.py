"""Run with `make bench` or `python -m tests.benchmarks`."""

import argparse
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name

import torch

from growlab.base.files import write_json
from tests.benchmarks import ratios
from tests.benchmarks.ratios import Ratio, Setting, table

#: Measures that are imported when they are chosen.
ELSEWHERE = {
    **{"gromo": "tests.benchmarks.gromo:events", "ranks": "tests.benchmarks.runner:events"},
    **{"runner": "tests.benchmarks.runner:epochs", "scale": "tests.benchmarks.scale:scales"},
}
MEASURES = {**ratios.MEASURES, **ELSEWHERE}


def _chosen(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in MEASURES]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; choose among {', '.join(MEASURES)}")
    return names


def main() -> None:
    """Measure, print a table as it goes, and write it after each measure."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Print what growlab costs, as ratios to the same work without it; a star: above its target.",
    )
    add, every = parser.add_argument, ",".join(MEASURES)
    add("-k", type=_chosen, default=every, metavar="NAMES", help=f"measures: {every.replace(',', ', ')}")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--small", action="store_true", help="tiny networks, to test the measures")
    add("--repeats", type=int, default=0, help="of each timing (5; 1 with --small)")
    add("--write", type=Path, metavar="FILE", help="a JSON file for the ratios")
    given = parser.parse_args()
    setting = Setting(given.device, given.small, given.repeats or (1 if given.small else 5))
    machine = platform.processor() or platform.machine()
    if given.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
    found: list[Ratio] = []

    def measured() -> Iterator[Ratio]:
        for name in given.k:
            measure = resolve_name(ELSEWHERE[name]) if name in ELSEWHERE else ratios.MEASURES[name]
            for one in measure(setting):
                found.append(one)
                yield one

    about = {"machine": machine, "torch": torch.__version__, "small": given.small}
    for line in table(measured()):
        print(line, flush=True)
        if given.write is not None and found:
            given.write.parent.mkdir(parents=True, exist_ok=True)
            write_json(given.write, {**about, "ratios": [asdict(row) for row in found]})


if __name__ == "__main__":
    main()
