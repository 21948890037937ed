"""Exponential moving average (EMA) of the weights that grows with the network."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from growlab.base.errors import UserError
from growlab.grower.part import Part
from growlab.grower.triggers import GrowingNetwork
from growlab.widths.meta import named_tensors, share_attributes


class Averages(Part):
    """Exponential moving average of weights and buffers: `a <- decay a + (1 - decay) w` after every step.

    A growth event maps weights to `G(w)`, an affine function of the old ones and the draws. The average is mapped by
    the same function, with the same draws and with scales computed from `w`. Since an average's coefficients sum to
    one, `G(average of w) = average of G(w)`: the result is the average of a network that always had this width.

    Args:
        decay: decay rate between 0 and 1, such as 0.999.

    Attributes:
        module: the averaged network, at the widths of the network.

    Raises:
        UserError: `decay` is out of range.
    """

    name = "ema"
    num_copies = 1

    def __init__(self, decay: float = 0.999) -> None:
        if not isinstance(decay, Real) or not 0 < decay < 1:
            raise UserError(f"decay must lie between 0 and 1, not {decay}.")
        self._decay: float = decay
        self._average: AveragedModel

    @property
    def module(self) -> nn.Module:
        """The averaged network, at the widths of the network.

        Raises:
            UserError: the part is not attached to a Grower yet.
        """
        if not hasattr(self, "_average"):
            raise UserError("there are no averaged weights yet: pass Averages to a Grower as one of its parts.")
        return self._average.module

    def begin(self, grower: GrowingNetwork) -> None:
        """Start the average as a copy of the seed network."""
        average = get_ema_multi_avg_fn(self._decay)
        self._average = AveragedModel(grower.network, multi_avg_fn=average, use_buffers=True)
        self._average.requires_grad_(False).eval()
        share_attributes(named_tensors(grower.network), self._average.module)
        grower.averages[self.name] = self._average.module

    def after_step(self, grower: GrowingNetwork) -> None:
        """Update the average with the network's weights and buffers."""
        # Not the state_dict, which omits non-persistent buffers.
        _convert_like(self._average.module, named_tensors(grower.network))
        self._average.n_averaged = self._average.n_averaged.to(next(grower.network.parameters()).device)
        self._average.update_parameters(grower.network)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights and the number of averaged steps."""
        return self._average.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        current = named_tensors(self._average)
        # In the saved dtype, to which the network may be converted later, but on the network's device: a GPU's
        # checkpoint may have been loaded to the CPU.
        _convert_like(self._average, {n: t.to(current[n].device) for n, t in state.items() if n in current})
        self._average.load_state_dict(state)


def _convert_like(average: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Move an average's tensors to the device and dtype of the tensors of the same names, in place."""
    for name, tensor in named_tensors(average).items():
        other = tensors.get(name)
        if other is not None and (tensor.device, tensor.dtype) != (other.device, other.dtype):
            tensor.data = tensor.data.to(other.device, other.dtype)
