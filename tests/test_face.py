"""`import growlab`: the names that people use, and nothing that takes long."""

import subprocess
import sys

import growlab


def test_every_name_is_there() -> None:
    assert {name for name in growlab.__all__ if getattr(growlab, name) is None} == set()
    assert set(growlab.__all__) <= set(dir(growlab))
    assert growlab.__all__ == sorted(growlab.__all__, key=lambda name: (name.islower(), name))


def test_importing_it_imports_nothing_else() -> None:
    program = (
        "import sys, time; began = time.perf_counter(); import growlab; took = time.perf_counter() - began\n"
    )
    program += "print(took, *sorted({'torch', 'lightning', 'hydra'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, *imported = done.stdout.split()
    assert float(seconds) < 0.3 and imported == []
