"""A run that begins with a file: weights of the first stage's network, and the state of its optimizer."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.inspect.hub import read_saved, weights_in
from growlab.optim import load_named_state

log = logging.getLogger(__name__)

# Where such a file keeps `growlab.optim.named_state`, next to "state_dict".
OPTIMIZER = "optimizer"


def start_from(grower: Grower, path: str) -> Callable[[Optimizer], None]:
    """Let the first stage begin with the weights of a file, averages of the network too.

    Args:
        grower: whose network has not been trained yet.
        path: of a state_dict, of a network of the seed's widths, or of "state_dict" and "optimizer", as
            `growlab.lab.planner` writes it.

    Returns:
        Hands an optimizer of the network the file's state; one of another class starts fresh, with a warning.

    Raises:
        UserError: the file cannot be read, or is of another network.
    """
    what = f"start_from={path}"
    content = read_saved(path, what)
    state = weights_in(content, what)
    for network in (grower.network, *grower.copies().values()):
        _check(state, network.state_dict(), what)
        network.load_state_dict(state)
    saved = content.get(OPTIMIZER) if isinstance(content, Mapping) else None

    def hand_over(optimizer: Optimizer) -> None:
        # Files of other programs may have an "optimizer" too, by number and not by name.
        if not isinstance(saved, Mapping) or not {"class", "state"} <= saved.keys():
            return
        try:
            load_named_state(optimizer, grower.network, saved)
        except ValueError as error:
            log.warning("the optimizer's state of %s is left aside: %s", what, error)

    return hand_over


def continuing(make: Callable[[Any], Optimizer], hand_over: Callable[[Optimizer], None]) -> Any:
    """Wrap a maker of optimizers so that they continue with a file's state, see `start_from`."""

    def make_and_load(parameters: Any) -> Optimizer:
        optimizer = make(parameters)
        hand_over(optimizer)
        return optimizer

    return make_and_load


def _check(state: Mapping[str, Tensor], own: Mapping[str, Tensor], what: str) -> None:
    there = {name: list(tensor.shape) for name, tensor in state.items()}
    here = {name: list(tensor.shape) for name, tensor in own.items()}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise UserError(
                f"{what} is of another network than the first stage's: {name} is {there.get(name, 'absent')} there "
                f"and {here.get(name, 'absent')} here."
            )
