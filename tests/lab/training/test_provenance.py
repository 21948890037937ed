import shutil
import subprocess
from pathlib import Path

import pytest

import growlab
from growlab.lab.training.run import git_commit, versions


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose package replaces growlab."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "someone@example.org")
    for folder in ("growlab", "conf"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(growlab, "__file__", str(tmp_path / "growlab" / "__init__.py"))
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_copy_inside_a_foreign_repository_has_no_commit(repository: Path) -> None:
    (repository / "README").write_text("a project that has growlab in its .venv")
    git(repository, "add", "README")
    git(repository, "commit", "-qm", "foreign")
    assert git_commit() is None


def test_changes_to_the_package_or_its_configuration_are_marked(repository: Path) -> None:
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "own")
    commit = git(repository, "rev-parse", "HEAD")
    assert git_commit() == commit
    (repository / "notes").write_text("not part of it")
    assert git_commit() == commit
    (repository / "conf" / "__init__.py").write_text("changed")
    assert git_commit() == f"{commit}-dirty"
    assert set(versions()) == {"python", "torch", "lightning", "growlab"}
