"""What follows a grower's network: which optimizers and copies of it, and which of its parts' names clash."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from growlab.base.errors import UserError, as_user_errors
from growlab.grower.part import Part
from growlab.grower.wrapping import see_through
from growlab.growth.attached import attach
from growlab.optim import Inheritance
from growlab.optim.own_lists import inside
from growlab.optim.state import check_inheritance

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
        if isinstance(one, nn.Module):
            for copy in _copies(run, one):
                if not any(copy is known for known in (*run.copies().values(), *modules)):
                    see_through(copy, run.full_graph)
                    attach(copy, run.graph, run.state, run, run.probe())
                    modules.append(copy)
        elif any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(one).__mro__):
            raise UserError(
                f"{type(one).__name__} shares parameters out among processes once, by their size: growth "
                "would have to share them out anew; give each process an ordinary optimizer."
            )
        elif (inner := list(inside(one))) or isinstance(one, Optimizer):
            # Wrappers of accelerate and Fabric, SAM, Lookahead and the like hold the optimizer that steps, may share
            # its groups and its state, and may have state of their own.
            modules += let_follow(run, inner, state, False)
            run.followers.add(one, state, announced)
        else:
            raise UserError(
                f"{type(one).__name__} cannot follow a network: give torch.optim.Optimizers, or modules that "
                "are averages of the network."
            )
    return modules


def _copies(run: "Grower", follower: nn.Module) -> list[nn.Module]:
    """Copies of the network in a module that averages it, which may have the network itself as a submodule too."""
    own, wanted, found = set(run.network.modules()), _shapes(run.network), list[nn.Module]()
    waiting = [follower]
    for module in waiting:
        if module not in own and _shapes(module) == wanted:
            found.append(module)
        elif module not in own:
            waiting += module.children()
    if not found:
        raise UserError(
            f"{type(follower).__name__} cannot grow along: its tensors are not those of the network as it "
            "is now; copy the network after the Grower was made."
        )
    return found


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(entry, "shape", None) for name, entry in module.state_dict().items()}


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
