"""A part that a user writes; parts on two ranks; a part's files taken away."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn import functional as F

from growlab.base import ranks
from growlab.base.errors import UserError
from growlab.grower.part import checked_parts
from growlab.grower.triggers import At
from growlab.lab.training.build import make_parts
from growlab.parts import Part
from tests.command_line import ROOT, SERVER, CommandLine
from tests.unit.grower.test_grower import EPOCHS, STEPS, Loop, batch, mlp
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
    """A part without a name has its key in the configuration."""
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
    with pytest.raises(UserError, match="two parts are called part, the key of their states"):
        checked_parts([Part(), Part()])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "parts.x=3 is not a part: give it a _target_"),
        ({"y": 3}, "is not a part: give it a _target_"),
        ({"_target_": f"fractions.{Fraction.__name__}"}, "makes a Fraction, not a growlab.grower.part.Part"),
    ],
)
def test_entries_that_make_no_part_are_refused(entry: Any, message: str) -> None:
    data = SimpleNamespace(parts=list)
    with pytest.raises(UserError, match=message):
        make_parts(OmegaConf.create({"x": entry}), data, At({0: 0.5, 1: 1.0}))


def settings_of(name: str) -> dict[str, Any]:
    from growlab.parts import Averages, Hyperfan, IsotropicLayers
    from tests.unit.parts.isotropic.mixed import Mixed

    if name == "hypernetworks":
        return {"method": Hyperfan(sharing="chunk", noise_std=1e-3), "parts": [Averages(0.9)]}
    layers = IsotropicLayers(reserve_neurons=2, threshold=0.5, importance="gradient", removal_compensation="batch")
    return {"network": lambda: Mixed(6, 3, 8, "batch"), "parts": [layers, Averages(0.9)]}


def trained(rank: int, drift: bool = False, **settings: Any) -> str:
    torch.manual_seed(0)
    loop = Loop(**settings)
    wrapped = torch.nn.parallel.DistributedDataParallel(loop.network)
    for step in range(STEPS * EPOCHS):
        if drift and rank == 1 and step == 2:
            loop.grower.copies()["ema"][0].weight.view(-1)[-1].add_(1e-6)
        if loop.grower.step(epoch=step // STEPS, step=step):
            wrapped = torch.nn.parallel.DistributedDataParallel(loop.network)
        x, y = batch(2 * step + rank)
        loop.optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        loop.optimizer.step()
    # Statistics of normalisation are each rank's until the wrapper's next forward pass.
    ranks.broadcast_buffers(loop.network)
    return str(loop.everything())


def one_rank(rank: int, folder: Path) -> None:
    from growlab.parts import Averages

    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for name in ("hypernetworks", "isotropic"):
        (folder / f"{name}_{rank}.txt").write_text(trained(rank, **settings_of(name)))
    with pytest.raises(UserError, match=r"ranks hold different values after growth .*: 0\.weight of ema"):
        trained(rank, drift=True, network=mlp, parts=[Averages(0.9)])
    torch.distributed.destroy_process_group()


def test_ranks_end_with_the_same_bits_and_an_average_that_drifts_is_noticed(cli: CommandLine, tmp_path: Path) -> None:
    cli.on_two_ranks(one_rank, tmp_path)
    for name, word in (("hypernetworks", "Hyperfan"), ("isotropic", "asked_by")):
        first, second = ((tmp_path / f"{name}_{rank}.txt").read_text() for rank in (0, 1))
        assert first == second and word in first


@dataclass(frozen=True)
class Files:
    """Patterns of a part's files below growlab/ and conf/, and settings of other parts, which still work."""

    code: tuple[str, ...]
    conf: tuple[str, ...]
    others: tuple[str, ...] = ("ema.decay=0.9",)


REMOVED = {
    "averages": Files(("parts/averages.py",), ("parts/ema.yaml",), ("osgd.anneal=run",)),
    "old gradients": Files(
        ("parts/osgd.py", "recipes/papers/entries/*_osgd.yaml"), ("parts/osgd.yaml", "method/ours_osgd.yaml")
    ),
    "depth": Files(
        ("parts/depth", "recipes/papers/entries/*_depth.yaml"),
        ("parts/depth.yaml", "method/grown_*.yaml", "method/smaller.yaml"),
        ("ema.decay=0.9", "osgd.anneal=stage"),
    ),
    "resolution": Files(("parts/resolution.py",), ("parts/resolution.yaml", "method/grown_resolution.yaml")),
    "patch sizes": Files(("parts/patch_size.py",), ("parts/patch_size.yaml",)),
    "settings": Files(("parts/setting.py",), ("parts/setting.yaml",)),
    "arriving classes": Files(("parts/classes.py",), ()),
    "arriving features": Files(("parts/features.py",), ("parts/features.yaml",)),
    "isotropic layers": Files(
        ("parts/isotropic", "recipes/papers/studies/isotropic*.py", "recipes/papers/entries/3_bird*.yaml"),
        ("parts/isotropic.yaml", "parts/gain_weights.yaml"),
    ),
    "hypernetworks": Files(
        ("parts/hypernets", "recipes/papers/studies/continual_regression*.py", "recipes/papers/entries/2_chang.yaml"),
        ("*/hyperfan*.yaml", "*/hypernet*.yaml"),
    ),
}


def matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]


def copied(code: Path, *parts: Files) -> None:
    """A copy of the package and its settings without some parts."""
    for name in ("growlab", "conf"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for files in parts:
        for path in (*matching(code / "growlab", files.code), *matching(code / "conf", files.conf)):
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    # A run takes the parts that config.yaml names, in their order, which says what a pass over old data costs.
    config, there = code / "conf" / "config.yaml", {path.stem for path in (code / "conf" / "parts").glob("*.yaml")}

    def left(found: re.Match[str]) -> str:
        return f"- parts: [{', '.join(name for name in found[1].split(', ') if name in there)}]"

    config.write_text(re.sub(r"- parts: \[(.*)\]", left, config.read_text()))


def imported(path: Path) -> set[str]:
    """Names of what a module imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("part", REMOVED)
def test_nothing_that_stays_needs_a_part_to_be_imported(part: str) -> None:
    package = ROOT / "growlab"
    gone = {path for own in matching(package, REMOVED[part].code) for path in (own, *own.rglob("*.py"))}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in gone if path.suffix == ".py"}
    modules |= {name.removesuffix(".__init__") for name in modules}
    stay = set(package.rglob("*.py")) - gone
    assert modules and {path.name: lost for path in stay if (lost := imported(path) & modules)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("gone", [(name,) for name in REMOVED] + [tuple(REMOVED)], ids=" and ".join)
def test_experiments_run_without_a_part(gone: tuple[str, ...], tmp_path: Path) -> None:
    code = tmp_path / "code"
    copied(code, *(REMOVED[name] for name in gone))
    others = REMOVED[gone[0]].others if len(gone) == 1 else ()
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    # It has imported what the copy lacks.
    environment.pop(SERVER, None)
    command = [sys.executable, "-m", "growlab", *MLP, *others, "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert (tmp_path / "run" / "results.json").exists()
