"""Baselines: no growth, and random growth."""

from typing import Literal

from torch import Tensor

from growlab.base.pieces import OneByOne
from growlab.base.settings import above, finite, one_of
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod, NewWeights
from growlab.widths import grid

# Exponent of the output layers' fan-in in the variance of their weights.
_OUTPUT_POWER = {"constructor": 1, "standard": 1, "mup": 2}


class FixedSize(GrowthMethod):
    """Train at a constant width: the baseline.

    Initialisation of the weights, where C is a layer's fan-in:

        constructor    at full width the network keeps its constructor's weights; at other widths as "standard"
        standard       hidden layers N(0, gain / C), output layers N(0, 1 / C)
        mup            hidden layers N(0, gain / C), output layers N(0, 1 / C^2), as the seed of growth=ours

    The last is Yang et al.'s (2021), as used by Yuan et al. (2023) in Figure 3 and Table 1. With SGD, the learning rate
    of output layers then scales with 1 / C: `lr_adapt=mup`. Tensors without a growing axis keep their values.

    Args:
        width_multiple: width of every group relative to full width; may be above 1.
        initialisation: "constructor", "standard" or "mup".
        gain: variance of hidden weights times fan-in; 2 suits ReLU.
        depth_multiple: fraction of the insertable blocks that are present, the first ones.

    Raises:
        ValueError: the initialisation is unknown, or a multiple is out of range.
    """

    def __init__(
        self,
        width_multiple: float = 1.0,
        initialisation: Literal["constructor", "standard", "mup"] = "constructor",
        gain: float = 2.0,
        depth_multiple: float = 1.0,
    ) -> None:
        super().__init__(gain=gain)
        above(0, width_multiple=width_multiple)
        one_of(_OUTPUT_POWER, initialisation=initialisation)
        finite(depth_multiple=depth_multiple)
        if not 0 <= depth_multiple <= 1:
            raise ValueError(f"depth_multiple must be a fraction of the blocks, from 0 to 1, not {depth_multiple}.")
        self.width_multiple, self.depth_multiple = width_multiple, depth_multiple
        self.draws_full_width = initialisation != "constructor"
        self.new_weights = NewWeights(gain, output_power=_OUTPUT_POWER[initialisation])

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Raise an error: a fixed-size run has one stage and never grows."""
        raise RuntimeError("a fixed-size run does not grow")


class RandomGrowth(GrowthMethod):
    """Keep old weights and draw all new ones at their usual scale.

    W' = W at old rows and columns, N(0, gain / fan_in) elsewhere; new channels of a batch normalisation start
    with weight 1, bias 0, mean 0, variance 1.

    **Preserves** nothing: old channels now sum over new ones too.
    """

    preserves = False

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths."""

        def drawn(name: str) -> Tensor:
            old = context.old[name]
            if not context.changes(name):
                return old
            new = self.new_weights.draw(context, name).to(old)
            new[grid(context.kept_runs(name), new.device)] = old
            return new

        return GrownTensors(OneByOne(context.old, drawn))
