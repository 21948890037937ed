"""Faults on one rank, and files by which a test compares ranks."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FAULTS: dict[str, Callable[..., None]] = {}


def fault(install: Callable[..., None]) -> Callable[..., None]:
    """Register a function that installs a fault, for `tests.command_line.CommandLine`."""
    FAULTS[install.__name__] = install
    return install


def after_step(step: int, strike: Callable[[Any, Any], None]) -> None:
    """Call `strike(trainer, task)` after an optimizer step."""
    from growlab.frontends.lightning import Growth

    def on_train_batch_end(self: Any, trainer: Any, task: Any, *rest: Any) -> None:
        if trainer.global_step == step:
            strike(trainer, task)

    Growth.on_train_batch_end = on_train_batch_end


@fault
def keep_ranks(folder: str) -> None:
    """Not a fault: save each rank's state in a folder after each growth event and epoch."""
    from growlab.grower import Grower
    from growlab.lab.training.checkpoints import SaveCheckpoints

    def keep(name: str, grower: Any) -> None:
        content = {name: value for name, value in grower.state_to_compare() if isinstance(value, torch.Tensor)}
        rank = torch.distributed.get_rank()
        torch.save(content, Path(folder) / f"{name}_rank{rank}.pt")

    grow_once, save = Grower._grow_once, SaveCheckpoints.on_train_epoch_end

    def grow_and_keep(grower: Any, *rest: Any) -> Any:
        event = grow_once(grower, *rest)
        keep(f"stage{grower.state.stage}", grower)
        return event

    def save_and_keep(self: Any, trainer: Any, task: Any) -> None:
        save(self, trainer, task)
        keep(f"epoch{trainer.current_epoch}", task.grower)

    Grower._grow_once, SaveCheckpoints.on_train_epoch_end = grow_and_keep, save_and_keep


def same_on_both_ranks(kept: Path) -> set[str]:
    """Assert that both ranks saved equal states, bit for bit; return the names of the events and epochs."""
    names = [{path.name.removesuffix(f"_rank{rank}.pt") for path in kept.glob(f"*_rank{rank}.pt")} for rank in (0, 1)]
    assert names[0] == names[1]
    for name in names[0]:
        one, other = (torch.load(kept / f"{name}_rank{rank}.pt", weights_only=True) for rank in (0, 1))
        assert list(one) == list(other)
        assert [key for key in one if not torch.equal(one[key], other[key])] == [], name
    return names[0]


@fault
def drift(what: str, step: int) -> None:
    """Change a "weight", "buffer", "average" or optimizer "state" of this rank after a step."""

    def change(trainer: Any, task: Any) -> None:
        weight = task.network.classifier.weight
        tensor = {
            "weight": lambda: weight,
            "average": lambda: task.grower.copies()["ema"].classifier.weight,
            "buffer": lambda: next(b for n, b in task.network.named_buffers() if "running_mean" in n),
            "state": lambda: trainer.optimizers[0].state[weight].get("momentum_buffer"),
        }[what]()
        with torch.no_grad():
            tensor.view(-1)[-1].add_(1e-6)

    after_step(step, change)


@fault
def other_draws() -> None:
    """Draw other new weights than the other ranks."""
    from growlab.grower import grower

    grow = grower.grow

    def grow_differently(*rest: Any, seed: int, **named: Any) -> Any:
        return grow(*rest, seed=seed + 1, **named)

    grower.grow = grow_differently


@fault
def parity_fails() -> None:
    """Report, on this rank only, that a growth event changed the outputs."""
    from growlab.growth import parity

    parity.relative_error = lambda *rest: 1.0
    parity.rounding_measured = lambda *rest: (1e-6, 1e-6)


@fault
def breaks(step: int) -> None:
    """Raise an unexpected exception on this rank only."""

    def strike(trainer: Any, task: Any) -> None:
        raise RuntimeError("our own mistake")

    after_step(step, strike)


@fault
def parent_dies(step: int, folder: str) -> None:
    """Kill the parent process after a step; this one writes its id and sleeps for a minute."""

    def strike(trainer: Any, task: Any) -> None:
        (Path(folder) / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
        if trainer.global_rank == 0:
            while not (Path(folder) / "pid1").exists():
                time.sleep(0.01)
            os.kill(os.getppid(), 9)
        time.sleep(60)

    after_step(step, strike)


@fault
def interrupt_parent(step: int) -> None:
    """Send SIGINT, as from Ctrl-C, to the parent process."""

    def strike(trainer: Any, task: Any) -> None:
        if trainer.global_rank == 0:
            os.kill(os.getppid(), 2)

    after_step(step, strike)


@fault
def signal_parent(number: int) -> None:
    """Send a signal to the parent process before this one handles signals."""
    from growlab.lab.training import checkpoints

    os.kill(os.getppid(), number)
    checkpoints.SaveCheckpoints.on_train_start = lambda *rest: time.sleep(60)


@fault
def no_names() -> None:
    """Let host names not be resolved."""

    def getfqdn(name: str = "") -> str:
        raise OSError("no name server")

    socket.getfqdn = getfqdn
