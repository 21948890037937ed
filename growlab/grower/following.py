"""What follows a grower's network: which optimizers and copies of it, and which of its parts' names clash."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from growlab.errors import UserError, as_user_errors
from growlab.growth.attached import attach
from growlab.optim import Inheritance
from growlab.optim.state import check_inheritance
from growlab.parts.part import Part

if TYPE_CHECKING:
    from growlab.grower.grower import Grower


def let_follow(
    run: "Grower", given: Iterable[Optimizer | nn.Module], state: Inheritance, announced: bool
) -> list[nn.Module]:
    """Let optimizers, and modules that are averages of the network, follow it; see `Grower.follow`.

    Returns:
        The modules that are new.
    """
    with as_user_errors():
        check_inheritance(state)
    modules: list[nn.Module] = []
    for one in given:
        inner = getattr(one, "optimizer", None)  # of accelerate's and Fabric's wrappers
        follower = inner if isinstance(inner, Optimizer) else one
        if isinstance(follower, Optimizer):
            if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(follower).__mro__):
                raise UserError(
                    f"{type(follower).__name__} shares parameters out among processes once, by their size: growth "
                    "would have to share them out anew; give each process an ordinary optimizer."
                )
            # SAM, Lookahead and the like hold the optimizer that steps, with groups that they share.
            modules += let_follow(run, _inside(follower), state, False)
            run.followers.add(follower, state, announced)
        elif isinstance(follower, nn.Module):
            copy = getattr(follower, "module", follower)
            if not any(copy is known for known in (*run.copies().values(), *modules)):
                _attach(run, follower, copy)
                modules.append(copy)
        else:
            raise UserError(
                f"{type(follower).__name__} cannot follow a network: give torch.optim.Optimizers, or modules that "
                "are averages of the network."
            )
    return modules


def _inside(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Optimizers that another one holds, as attributes or in lists and dictionaries."""
    for value in vars(optimizer).values():
        held = value.values() if isinstance(value, dict) else value
        for one in held if isinstance(value, (list, tuple, dict)) else (value,):
            if isinstance(one, Optimizer):
                yield one


def _attach(run: "Grower", follower: nn.Module, copy: nn.Module) -> None:
    shapes = [{n: t.shape for n, t in m.state_dict().items()} for m in (copy, run.network)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{type(follower).__name__} cannot grow along: its tensors are not those of the network as it "
            "is now; copy the network after the Grower was made."
        )
    attach(copy, run.graph, run.state, run, run.probe())


def told_apart(parts: Any) -> tuple[Part, ...]:
    """Parts as they were given, each of a name of its own.

    Raises:
        UserError: they are no list of parts, or two have one name.
    """
    if not isinstance(parts, Sequence):
        raise UserError(f"parts={parts!r} must be a list of parts: [{parts!r}].")
    if kind := next((part for part in parts if isinstance(part, type)), None):
        raise UserError(f"parts hold the class {kind.__name__}, not a part: write {kind.__name__}(...).")
    if (other := next((part for part in parts if not isinstance(part, Part)), None)) is not None:
        raise UserError(f"parts hold {other!r}, which is no growlab.Part.")
    names = [part.name for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two parts are called {twice}, the key of their states: give one another name.")
    return tuple(parts)
