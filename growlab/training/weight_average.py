"""An exponential moving average of a network's weights that grows with the network."""

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from growlab.errors import UserError
from growlab.growth import GrowthState, restore
from growlab.widths import WidthGraph, resize


class WeightAverage(AveragedModel):
    """`a <- decay a + (1 - decay) w` after every optimizer step, statistics of normalisation included.

    A growth event maps weights to `G(w)`, linear in the old ones plus what it draws. The average goes through the
    same map, with the same draws and with scales that are decided by `w`. Since an average's coefficients add up to
    one, `G(average of w) = average of G(w)`: it is the average that there would be had the network always been this
    wide, and it computes after the event what it computed before, as the network itself does. (What batch
    normalisation's eps needs is decided by the average's own statistics.)

    Args:
        network: what is averaged; it starts as a copy.
        decay: between 0 and 1, such as 0.999.

    Raises:
        UserError: another decay.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise UserError(f"ema.decay={decay} must lie between 0 and 1, or be null for no average.")
        super().__init__(network, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.requires_grad_(False)

    def resize(self, graph: WidthGraph, before: GrowthState, after: GrowthState) -> None:
        """Bring it to the widths that a checkpoint's tensors have."""
        resize(self.module, graph, before.widths, after.widths)
        restore(self.module, graph, after)
