"""Grow the given networks, or all of them, and write the table."""

import sys

from tests.foreign.grown import TABLE, grown, read, write
from tests.foreign.networks import NETWORKS

known = read() if TABLE.exists() else {}
for name in sys.argv[1:] or NETWORKS:
    row = known[name] = grown(name)
    print(
        f"{name:48} {row.share:6.1%}  {row.eval:.0e} {row.train:.0e} {row.loaded:.0e} {row.seconds:5.1f} s  {row.why}",
        flush=True,
    )
    write([known[each] for each in NETWORKS if each in known])
