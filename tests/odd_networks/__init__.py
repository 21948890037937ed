"""Networks that are in no other table: odd ends, casts, shared modules, several heads, many kinds of inputs."""

from tests.odd_networks import images, sequences, vectors
from tests.odd_networks.table import ODD_NETWORKS

__all__ = ["ODD_NETWORKS", "images", "sequences", "vectors"]
