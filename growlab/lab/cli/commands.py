"""Commands of `growlab`: the first word of a command line, and the module that implements it."""

import importlib
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from growlab.base.command_parser import whole_words
from growlab.base.errors import how_to_install


class Command(NamedTuple):
    """Command of `growlab`.

    Attributes:
        module: module whose `main` takes the arguments and returns the exit code.
        first: arguments before the user's.
        does: description for the help.
        imports: packages whose import takes seconds, to print on a terminal while the user waits.
    """

    module: str
    first: tuple[str, ...]
    does: str
    imports: str = ""


COMMANDS = {
    "widths": Command(
        "growlab.inspect.__main__", (), "which parts of a network can grow, and why others cannot", "PyTorch"
    ),
    "plan": Command(
        "growlab.lab.planner.__main__", (), "odds that growing, or a smaller network, pays for this budget"
    ),
    "widen": Command(
        "growlab.widen.__main__", (), "widen a saved network past its size, function-preserving", "PyTorch"
    ),
    "upcycle": Command("growlab.widen.upcycle", (), "a mixture of experts from a saved dense model", "PyTorch"),
    "prune": Command("growlab.widen.prune", (), "remove heads and channels of a saved model", "PyTorch"),
    "table": Command("growlab.lab.analysis.__main__", (), "a table of finished runs over seeds"),
    "resume": Command("growlab.lab.cli.runs", ("resume",), "continue an interrupted run or sweep"),
    "show": Command("growlab.lab.cli.runs", ("show",), "a run's stages, result and growth events"),
    "eval": Command("growlab.lab.cli.runs", ("eval",), "test a run's weights on any data", "PyTorch"),
    "paper": Command("growlab.recipes.papers.paper_table", (), "the same with published values next to ours"),
    "paired": Command("growlab.lab.analysis.__main__", ("paired",), "differences between methods over equal seeds"),
    "time": Command("growlab.lab.analysis.__main__", ("time",), "cost and seconds to a test score"),
    "figure": Command("growlab.lab.analysis.__main__", ("figure",), "a figure of finished runs"),
    "report": Command("growlab.lab.analysis.report", (), "a page about runs that opens in any browser, offline"),
    "reproduce": Command("growlab.recipes.papers.__main__", (), "a table or figure of the papers, resumable"),
    "dashboard": Command("growlab.lab.analysis.dashboard", (), "a workspace and a report in Weights & Biases"),
}


# Commands at the top of the help.
_FIRST = ("widths", "plan", "table", "resume")


def run_command(arguments: Sequence[str]) -> int | None:
    """Run a command line that begins with a command and return the exit code; None if it does not."""
    if not arguments or arguments[0] not in COMMANDS:
        return None
    command = COMMANDS[arguments[0]]
    arguments = [arguments[0], *command.first, *arguments[1:]]
    # Help and errors show the command as it was typed, with the script's path so that it can be copied.
    script = sys.argv[0] if os.path.basename(sys.argv[0]) == "growlab" else "growlab"
    sys.argv = [f"{script} {arguments[0]}", *arguments[1:]]
    if command.imports and sys.stderr.isatty():
        print(f"importing {command.imports} ...", file=sys.stderr, flush=True)
    return importlib.import_module(command.module).main(arguments[1:])


def described(short: bool = False) -> str:
    """Describe the commands, one per line; `short`: only names of those not at the top of the help."""
    if short:
        names = ", ".join(name for name in COMMANDS if name not in _FIRST)
        return textwrap.fill(names, 79, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(f"    growlab {name:<11}{command.does}" for name, command in COMMANDS.items())


def experiments(folder: Path) -> str:
    """Describe the experiments in a folder, one per line, with the first words of their files."""
    lines = []
    for path in sorted(folder.glob("*.yaml")):
        comment = path.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ")
        purpose = textwrap.shorten(re.split(r":|[(;]|[.] ", comment)[0], 54, placeholder="").strip(".")
        lines.append(f"  {path.stem:<22} {purpose}")
    return "\n".join(lines)


def settings_of_plan(file: Path) -> str:
    """List the settings of a plan as overrides, one per line with value and comment."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines()[1:] if line]
    return "\n".join(re.sub(r"^([a-z_]+): ?", r"plan.\1=", line) for line in lines)


def import_from_here() -> None:
    """Add the current folder to the end of the import path, so that it hides no installed package."""
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.append(os.getcwd())


def run_without(missing: ModuleNotFoundError) -> int:
    """Run a command without the packages of experiments, which are not installed; return the exit code."""
    with whole_words():
        return _without(missing)


def _without(missing: ModuleNotFoundError) -> int:
    import_from_here()
    if sys.argv[1:] == ["--version"]:
        print(f"growlab {version('growlab')}")
        return 0
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(f"Experiments need {missing.name}, which is not installed: {how_to_install('lab')}.\n")
        print(f"Commands (each with --help)\n{described()}")
        return 0
    try:
        code = run_command(sys.argv[1:])
    except ModuleNotFoundError as error:
        code, missing = None, error
    if code is None:
        print(f"error: this needs {missing.name}, which is not installed: {how_to_install('lab')}.", file=sys.stderr)
        return 2
    return code


def complete(line: str) -> tuple[list[str], str | None]:
    """Complete a command line: return candidates for its command, and the line for Hydra to complete, or None.

    Examples:
        >>> complete("growlab wid")
        (['widths', 'widen'], 'growlab wid')
        >>> complete("growlab plan model=re")
        ([], 'growlab model=re')
        >>> complete("growlab table ru")
        ([], None)
    """
    program, _, rest = line.lstrip().partition(" ")
    first, space, more = rest.lstrip().partition(" ")
    if not space:
        return [name for name in ("run", *COMMANDS) if name.startswith(first)], line
    if first in ("run", "plan"):
        return [], f"{program} {more}"
    return [], None if first in COMMANDS else line
