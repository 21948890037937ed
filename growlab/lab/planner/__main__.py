"""`python -m growlab plan experiment=... schedule.budget=...`: does growing pay for this network and budget?

It prints the odds of growing, a smaller network and the full one, and what being wrong costs. Overrides are those of
`python -m growlab` and `plan.*`; exit codes are the same. `--cases` prints the cases that the odds are learned from, or
those of folders of finished runs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from growlab.base.errors import UserError
from growlab.lab.cli.app import JobFailed
from growlab.lab.cli.app import main as composed
from growlab.lab.training.processes import announce, name_of

# By pairs unless asked otherwise: that seed begins as its constructor drew it, as a smaller network that stays does.
_BY_PAIRS = ("growth=pairs", "lr_adapt=none")
_MORE = ("plan=default", "hydra/help=plan", "hydra.run.dir=runs/${name}_plan/${now:%Y-%m-%d_%H-%M-%S_%f}")


def _job(cfg: DictConfig) -> None:
    announce("importing PyTorch and Lightning")
    from growlab.lab.planner.run import run

    try:
        run(cfg)
    except Exception as error:
        raise JobFailed(error) from None


def _print_cases(folders: Sequence[str]) -> int:
    from growlab.lab.planner.cases import cases_of, written
    from growlab.plan import read_cases

    try:
        found = [case for folder in folders for case in cases_of(Path(folder))]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(written(found if folders else read_cases()), end="")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan what the command line says and return the exit code."""
    if arguments is not None:
        sys.argv[1:] = arguments
    if sys.argv[1:2] == ["--cases"]:
        return _print_cases(sys.argv[2:])
    if any(name_of(argument) == "ckpt_path" and argument != "ckpt_path=null" for argument in sys.argv[1:]):
        # Before a run's folder is looked for, which a plan would write into.
        print("error: ckpt_path is of runs: a plan is of networks from their beginning.", file=sys.stderr)
        return 2
    # A method on the command line says how to grow, too.
    chosen = any(argument.startswith("method=") for argument in sys.argv[1:])
    return composed(_job, _MORE if chosen else (*_MORE, *_BY_PAIRS))


if __name__ == "__main__":
    sys.exit(main())
