"""`conf/` is found and is part of the wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from growlab.lab.training.configuration import config_dir
from tests.command_line import ROOT


def test_conf_is_found_in_the_package_or_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `conf/` in the current folder is ignored."""
    here, inside, adjacent = config_dir(), tmp_path / "growlab" / "conf", tmp_path / "conf"
    for folder in (inside, adjacent):
        folder.mkdir(parents=True)
    (adjacent / "config.yaml").touch()
    assert config_dir(inside.parent) == adjacent
    (inside / "config.yaml").touch()
    assert config_dir(inside.parent) == inside
    monkeypatch.chdir(tmp_path)
    assert config_dir() == here and here.is_absolute()


@pytest.mark.slow
def test_the_wheel_contains_conf(tmp_path: Path) -> None:
    """Unpacked and run from another folder, it composes its own configuration."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("growlab-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    packed = {name.removeprefix("growlab/conf/") for name in names if name.startswith("growlab/conf/")}
    conf = ROOT / "conf"
    assert {path.relative_to(conf).as_posix() for path in conf.rglob("*.yaml")} <= packed
    assert not [name for name in names if name.startswith(("tests", "notebooks", "conf"))]
    package = {f"growlab/{path.relative_to(ROOT / 'growlab')}" for path in _package_files()}
    assert package <= set(names) and "growlab/py.typed" in package
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = [sys.executable, "-m", "growlab", "--cfg", "job", "seed=17"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(run, cwd=elsewhere, env=environment, check=True, capture_output=True, text=True)
    assert "seed: 17" in done.stdout
    where = "import growlab.lab.training.configuration as c; print(c.config_dir())"
    done = subprocess.run(
        [sys.executable, "-c", where], cwd=elsewhere, env=environment, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()) == site / "growlab" / "conf"


def _package_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "growlab"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build"]
    subprocess.run([*build, "-d", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (source,) = tmp_path.glob("growlab-*.tar.gz")
    shutil.unpack_archive(source, tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    subprocess.run([*build, "-t", "wheel", "-d", "again"], cwd=unpacked, check=True, capture_output=True)
    one, other = (next(folder.glob("*.whl")) for folder in (tmp_path, unpacked / "again"))
    with zipfile.ZipFile(one) as ours, zipfile.ZipFile(other) as theirs:
        contents = [{info.filename: info.CRC for info in archive.infolist()} for archive in (ours, theirs)]
    assert contents[0] == contents[1]
