"""Random growth: the naive baseline."""

from growlab.growth.method import Expansion, GrownTensors, GrowthMethod
from growlab.widths import grid


class RandomGrowth(GrowthMethod):
    """Keep old weights and draw all new ones at their usual scale.

    W' = W at old rows and columns, N(0, gain / fan_in) elsewhere; new channels of a batch normalisation start
    with weight 1, bias 0, mean 0, variance 1.

    **Preserves** nothing: old channels now also sum the new ones.
    """

    preserves = False

    def grow(self, expansion: Expansion) -> GrownTensors:
        """Compute every tensor at the new widths."""
        tensors = {}
        for name, old in expansion.old.items():
            if not expansion.changes(name):
                tensors[name] = old
                continue
            new = self.new_weights.draw(expansion, name).to(old)
            new[grid(expansion.kept(name), new.device)] = old
            tensors[name] = new
        return GrownTensors(tensors)
