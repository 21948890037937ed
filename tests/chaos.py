"""`make chaos`: kill a small grown training repeatedly and check that it ends as the undisturbed one, bit for bit.

SIGKILL is sent at a random step, before or inside a growth event, while a file is written, or at a random time, and
the next process resumes. A finished run is compared with an undisturbed one: weights, optimizer, metrics, growth
events, results. Then the next run starts, until the number of kills is reached.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.command_line import CommandLine
from tests.faults import WRITE_MOMENTS
from tests.whole_runs import MLP, NUM_STEPS, STEPWISE, Left, whole_run

SIGKILL = int(signal.SIGKILL)
# At most this many files are written in one of the six epochs; without a hit the process ends normally.
_FILES = 8
_SECONDS = 2.0


def fault(draw: random.Random) -> tuple[Any, ...]:
    """Draw the fault of the next process."""
    kind = draw.choice(("at_step", "before_growth", "in_growth", "at_write", "at_write", "after"))
    if kind == "at_step":
        return kind, draw.randint(1, NUM_STEPS), SIGKILL
    if kind in ("before_growth", "in_growth"):
        return kind, draw.randint(1, 2), SIGKILL
    if kind == "at_write":
        return kind, draw.randint(1, _FILES), draw.choice(WRITE_MOMENTS), SIGKILL
    return kind, draw.uniform(0, _SECONDS), SIGKILL


def chaos(
    cli: CommandLine, folder: Path, undisturbed: Left, kills: int, seed: int
) -> tuple[Counter[str], int, list[str]]:
    """Kill and resume runs until the number of kills is reached or a run differs, which then stays in the folder.

    Returns the number of kills by kind and moment, the number of runs, and all differences from the undisturbed run.
    """
    command = (*MLP, STEPWISE)
    draw, struck, runs = random.Random(seed), Counter[str](), 0
    wrong: list[str] = []
    while struck.total() < kills and not wrong:
        run = f"run_{runs}"
        runs += 1
        resume: list[str] = []
        while True:
            enough = struck.total() >= kills
            strike = None if enough else fault(draw)
            outcome = cli(*command, f"hydra.run.dir={run}", *resume, cwd=folder, fault=strike)
            resume = ["ckpt_path=last"]
            if outcome.code != -SIGKILL:
                break
            struck[" ".join(str(part) for part in (strike[0], *strike[2:-1]))] += 1
        if outcome.code != 0:
            wrong.append(f"{run} ended with code {outcome.code}: {outcome.err}")
        else:
            wrong += [f"{run}: {name} differ" for name in Left.by(folder / run).differences(undisturbed)]
            litter = [path.name for path in (folder / run).rglob(".*.unfinished")]
            wrong += [f"{run} left {name} behind" for name in litter]
        if not wrong:
            shutil.rmtree(folder / run)
    return struck, runs, wrong


def main() -> int:
    """Run and print a summary; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    cli = CommandLine()
    try:
        undisturbed = whole_run(cli, *MLP).left
        struck, runs, wrong = chaos(cli, folder, undisturbed, arguments.kills, arguments.seed)
    finally:
        cli.close()
    for kind, number in sorted(struck.items()):
        print(f"{number:4}  {kind}")
    print(f"{struck.total()} kills in {runs} runs of {NUM_STEPS} steps, seed {arguments.seed}")
    for sentence in wrong:
        print(f"LOST: {sentence}; see {folder}")
    if not wrong:
        print("nothing lost: every run ended bit for bit as the undisturbed one")
        shutil.rmtree(folder)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
