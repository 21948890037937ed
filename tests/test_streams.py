"""Output that goes to a full disk, or nowhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT, CommandLine
from tests.runs import MLP

NO_ROOM = "No space left on device"
_GUARDED = "import sys; from growlab.base.streams import flushed, guard_streams; guard_streams(); "
# The program's standard error is a full disk from its first line on.
_FULL = """
import os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
sys.argv[1:] = {!r}
from growlab.lab.cli.app import main
sys.exit(main())
"""


def shell(program: str, redirected: str) -> subprocess.CompletedProcess[str]:
    """What a Python program says, with its streams as a shell's redirections have them."""
    command = f'"$0" -c "$1" {redirected}'
    arguments = ["sh", "-c", command, sys.executable, _GUARDED + program]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)


def test_messages_that_a_full_disk_does_not_take_are_lost() -> None:
    ended = shell("print('lost' * 9999, file=sys.stderr); print('done'); sys.exit(flushed(0))", "2>/dev/full")
    assert (ended.returncode, ended.stdout) == (0, "done\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("text", ["few", "many" * 9999])
def test_output_that_a_full_disk_does_not_take_is_told_once(
    text: str, unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    program = (
        f"\ntry:\n  print({text!r})\nexcept Exception as error:\n  sys.exit(str(error))\nsys.exit(flushed(0))"
    )
    ended = shell(program, ">/dev/full")
    assert ended.returncode in (1, 2)
    assert ended.stderr.removeprefix("error: ") == f"cannot write the output: {NO_ROOM}.\n"


def test_streams_that_are_closed_take_no_files_place() -> None:
    program = "file = open('README.md'); print('lost', file=sys.stderr); print(file.fileno() > 2, flush=True)"
    assert shell(program, "2>&-").stdout == "True\n"
    assert shell(f"{program}; print('said', file=sys.stderr)", ">&- <&-").stderr == "lost\nsaid\n"


def test_a_command_whose_output_finds_no_room_says_so(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "growlab", "--version"]
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (2, f"error: cannot write the output: {NO_ROOM}.\n")


def test_a_run_whose_messages_find_no_room_comes_to_its_end(cli: CommandLine, tmp_path: Path) -> None:
    assert cli(cwd=tmp_path, program=_FULL.format([*MLP, "hydra.run.dir=run"])).code == 0
    assert (tmp_path / "run" / "results.json").is_file()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_forked_process_does_not_write_a_message_again(
    unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import os, sys
from growlab.base.streams import guard_streams
guard_streams()
print("a message", file=sys.stderr)
if os.fork():
    os.wait()
"""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == "a message\n"
