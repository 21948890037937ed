"""No growth: the fixed-size baseline."""

from growlab.growth.method import Expansion, Growth, GrowthMethod


class FixedSize(GrowthMethod):
    """Trains one width from beginning to end.

    Args:
        width_multiple: width of every group relative to full width; may be above 1. At 1 the network keeps
            the initialisation that its own constructor gave it.

    Raises:
        ValueError: the multiple is not positive.
    """

    def __init__(self, width_multiple: float = 1.0) -> None:
        super().__init__()
        if width_multiple <= 0:
            raise ValueError(f"growth.width_multiple must be above 0, not {width_multiple}.")
        self.width_multiple = width_multiple

    def grow(self, expansion: Expansion) -> Growth:
        """A fixed-size run has one stage and never grows."""
        raise RuntimeError("a fixed-size run does not grow")
