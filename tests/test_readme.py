"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys

from tests.runs import ROOT

# Importing any of these fails, as on a machine without them.
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('lightning', 'pytorch_lightning', 'hydra', 'omegaconf')))\n"


def test_a_loop_of_ones_own_needs_neither_lightning_nor_hydra() -> None:
    (program,) = [code for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
                  if "make_schedule" in code]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BLOCKED + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    events = re.findall(r"stage (\d): ([\d,]+) parameters, error (\S+)", done.stdout)
    assert [stage for stage, _, _ in events] == ["1", "2"] and events[-1][1] == "269,722"
    assert all(float(error) < 1e-5 for _, _, error in events)
