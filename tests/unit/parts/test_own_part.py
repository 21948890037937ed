"""Parts of users, parts on two ranks, and the package without the files of a part."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from growlab.base.errors import UserError
from growlab.grower.part import checked_parts
from growlab.grower.triggers import At
from growlab.growth import Net2Net
from growlab.lab.training.build import make_parts
from growlab.parts import Part
from tests.command_line import ROOT, SERVER, CommandLine
from tests.unit.grower.test_grower import EPOCHS, by_hand
from tests.unit.test_imports import MODULES, imported, tree_of
from tests.whole_runs import MLP

PARTS = """
from growlab.parts import Part

class BarePart(Part):
    pass

class Counted(Part):
    name = "counted"

    def __init__(self, start):
        self.steps = start

    def after_step(self, grower):
        self.steps += 1

    def after_growth(self, grower, event):
        return {"counted_steps": self.steps}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
"""


def test_parts_see_steps_and_events_and_resume_under_their_names(cli: CommandLine, tmp_path: Path) -> None:
    """A part without a name gets its key in the configuration."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    bare = (f"+parts.{name}._target_=my_parts.BarePart" for name in ("one", "two"))
    counted = ("+parts.counted._target_=my_parts.Counted", "+parts.counted.start=100")
    command = (*MLP, *bare, *counted, "hydra.run.dir=run")
    assert cli(*command, cwd=tmp_path, fault=("at_step", 8, 9)).code == -9
    outcome = cli(*command, "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    events = json.loads((tmp_path / "run" / "growth.json").read_text())["events"]
    assert [event["counted_steps"] - event["step"] for event in events] == [100, 100]
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert "'one': {}, 'two': {}, 'counted': {'steps': 118}" in str(state)


def test_a_part_without_a_name_has_that_of_its_class() -> None:
    class GradientNoise(Part):
        pass

    class Named(Part):
        name = "own"

    assert [part.name for part in checked_parts([GradientNoise(), Named()])] == ["gradient_noise", "own"]
    with pytest.raises(UserError, match="two parts have the name part, which is the key of their state"):
        checked_parts([Part(), Part()])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "parts.x=3 is not a part: give it a _target_"),
        ({"y": 3}, "is not a part: give it a _target_"),
        ({"_target_": f"fractions.{Fraction.__name__}"}, "makes a Fraction, not a growlab.grower.part.Part"),
    ],
)
def test_configurations_that_are_not_parts_raise_errors(entry: Any, message: str) -> None:
    data = SimpleNamespace(parts=list)
    with pytest.raises(UserError, match=message):
        make_parts(OmegaConf.create({"x": entry}), data, At({0: 0.5, 1: 1.0}))


# Runs on two ranks, and a word that their final state contains.
WORDS = {"hypernetworks": "Hyperfan", "isotropic": "asked_by", "features": "input features"}


def settings_of(name: str) -> dict[str, Any]:
    from growlab.parts import Averages, Features, Hyperfan, IsotropicLayers
    from tests.unit.parts.isotropic.mixed import Mixed

    if name == "hypernetworks":
        return {"method": Hyperfan(sharing="chunk", noise_std=1e-3), "parts": [Averages(0.9)]}
    if name == "features":
        return {"method": Net2Net(noise_std=0.1), "parts": [Features([2, 4, 6])], "in_place": True}
    layers = IsotropicLayers(reserve_neurons=2, threshold=0.5, importance="gradient", removal_compensation="batch")
    return {"network": lambda: Mixed(6, 3, 8, "batch"), "parts": [layers, Averages(0.9)]}


def one_rank(rank: int, folder: Path) -> None:
    from growlab.parts import Averages

    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for name in WORDS:
        (folder / f"{name}_{rank}.txt").write_text(by_hand(rank, epochs=EPOCHS, **settings_of(name)))
    with pytest.raises(UserError, match=r"ranks hold different values after growth .*: 0\.weight of ema"):
        by_hand(rank, drift=lambda loop: loop.grower.copies()["ema"][0].weight, parts=[Averages(0.9)])
    torch.distributed.destroy_process_group()


def test_ranks_end_with_the_same_bits_and_an_average_that_drifts_is_noticed(cli: CommandLine, tmp_path: Path) -> None:
    cli.on_two_ranks(one_rank, tmp_path)
    for name, word in WORDS.items():
        first, second = ((tmp_path / f"{name}_{rank}.txt").read_text() for rank in (0, 1))
        assert first == second and word in first


# Patterns of the files that each part needs alone.
REMOVED: dict[str, tuple[str, ...]] = {
    "averages": ("growlab/parts/averages.py", "conf/parts/ema.yaml"),
    "old gradients": (
        *("growlab/parts/osgd.py", "growlab/recipes/papers/entries/*_osgd.yaml"),
        *("conf/parts/osgd.yaml", "conf/method/ours_osgd.yaml"),
    ),
    "depth": (
        *("growlab/parts/depth", "growlab/recipes/papers/entries/*_depth.yaml"),
        *("conf/parts/depth.yaml", "conf/method/grown_*.yaml", "conf/method/smaller.yaml"),
    ),
    "resolution": (
        *("growlab/parts/resolution.py", "conf/parts/resolution.yaml", "conf/method/grown_resolution.yaml"),
    ),
    "patch sizes": ("growlab/parts/patch_size.py", "conf/parts/patch_size.yaml"),
    "settings": ("growlab/parts/setting.py", "conf/parts/setting.yaml"),
    "arriving classes": ("growlab/parts/classes.py",),
    "arriving features": ("growlab/parts/features.py", "conf/parts/features.yaml"),
    "isotropic layers": (
        *("growlab/parts/isotropic", "growlab/recipes/papers/studies/isotropic*.py"),
        *("growlab/recipes/papers/entries/3_bird*.yaml", "conf/parts/isotropic.yaml", "conf/parts/gain_weights.yaml"),
    ),
    "hypernetworks": (
        *("growlab/parts/hypernets", "growlab/recipes/papers/studies/continual_regression*.py"),
        *("growlab/recipes/papers/entries/2_chang.yaml", "conf/*/hyperfan*.yaml", "conf/*/hypernet*.yaml"),
    ),
}


def files_of(part: str, root: Path = ROOT) -> list[Path]:
    return [path for pattern in REMOVED[part] for path in root.glob(pattern)]


def copied(code: Path, *parts: str) -> None:
    """Copy the package and its settings without some parts."""
    for name in ("growlab", "conf"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (path for part in parts for path in files_of(part, code)):
        (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    # A run uses the parts of config.yaml in their order, which determines the cost of a pass over old data.
    config, known = code / "conf" / "config.yaml", {path.stem for path in (code / "conf" / "parts").glob("*.yaml")}

    def remaining(found: re.Match[str]) -> str:
        return f"- parts: [{', '.join(name for name in found[1].split(', ') if name in known)}]"

    config.write_text(re.sub(r"- parts: \[(.*)\]", remaining, config.read_text()))


@pytest.mark.parametrize("part", REMOVED)
def test_no_other_module_imports_a_part(part: str) -> None:
    gone = {path for own in files_of(part) for path in (own, *own.rglob("*.py"))}
    lost = {name for name, path in MODULES.items() if path in gone}
    needed = {}
    for name in MODULES.keys() - lost:
        statements = [node for node in tree_of(name).body if isinstance(node, ast.Import | ast.ImportFrom)]
        needed[name] = lost & {module for _, module in imported(ast.Module(statements, []))}
    assert lost and {name: modules for name, modules in needed.items() if modules} == {}


@pytest.mark.slow
@pytest.mark.parametrize("gone", [(name,) for name in REMOVED] + [tuple(REMOVED)], ids=" and ".join)
def test_experiments_run_without_a_part(gone: tuple[str, ...], tmp_path: Path) -> None:
    code = tmp_path / "code"
    copied(code, *gone)
    others = [] if len(gone) > 1 else ["osgd.anneal=run" if gone == ("averages",) else "ema.decay=0.9"]
    # Not by the server, which has already imported the removed modules.
    environment = {name: value for name, value in os.environ.items() if name != SERVER}
    command = [sys.executable, "-m", "growlab", *MLP, *others, "hydra.run.dir=run"]
    paths = {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert (tmp_path / "run" / "results.json").exists()
