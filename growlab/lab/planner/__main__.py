"""`python -m growlab plan experiment=... schedule.budget=...`: does growing pay for this network and budget?

Prints the odds of growing, a smaller network and the full one, and the cost of being wrong. Overrides are those of
`python -m growlab` and `plan.*`; exit codes are the same. `--cases` prints the cases that the odds are fitted to, or
those in folders of finished runs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from growlab.base.errors import UserError
from growlab.lab.cli.app import JobFailed
from growlab.lab.cli.app import main as composed
from growlab.lab.training.processes import announce, name_of

# By pairs unless overridden: that seed starts with its constructor's weights, like a smaller network that never grows.
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
        cases = [case for folder in folders for case in cases_of(Path(folder))] if folders else read_cases()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(written(cases), end="")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    if arguments is not None:
        sys.argv[1:] = arguments
    if sys.argv[1:2] == ["--cases"]:
        return _print_cases(sys.argv[2:])
    if any(name_of(argument) == "ckpt_path" and argument != "ckpt_path=null" for argument in sys.argv[1:]):
        # Before Hydra resolves it to a run's folder, which the plan would write into.
        print("error: ckpt_path is of runs: a plan is of networks from their beginning.", file=sys.stderr)
        return 2
    # A method on the command line sets the growth too.
    has_method = any(argument.startswith("method=") for argument in sys.argv[1:])
    return composed(_job, _MORE if has_method else (*_MORE, *_BY_PAIRS))


if __name__ == "__main__":
    sys.exit(main())
