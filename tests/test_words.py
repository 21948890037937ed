"""No feature's name stands in a room that is not its own: the words of the code are read."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import growlab

PACKAGE = Path(growlab.__file__).parent


@dataclass(frozen=True)
class Feature:
    """A feature, by the words that only it uses.

    Attributes:
        words: a pattern.
        home: files and folders that are its own, relative to the package.
        elsewhere: files that may name it all the same, each with the reason.
    """

    words: str
    home: tuple[str, ...]
    elsewhere: dict[str, str] = field(default_factory=dict)


FACE, EXPORTS = {"__init__.py": "the face names what users import"}, {"parts/__init__.py": "exports"}
FEATURES = {
    "averages": Feature(
        r"\bema\b|import Averages|Averages\(|AveragedModel|average_parity",
        ("parts/averages.py",),
        {
            **EXPORTS,
            "lab/training/build.py": "says what to use in place of Lightning's averages, which do not grow",
            "grower/grower.py": "gives torch's AveragedModel as an example of what may follow",
        },
    ),
    "old gradients": Feature(
        r"\bosgd\b|OldGradient|Orthogonalised|mean_gradients|look_back",
        ("parts/osgd.py",),
        {
            **EXPORTS,
            "recipes/papers/paper_table.py": "finds published rows by their settings",
            "lab/analysis/identity.py": "knows which settings make a run",
        },
    ),
    "depth": Feature(
        r"\bDepth\b|parts.depth import|depth\.(blocks|start)|STARTS|\bSkippedBlock\b",
        ("parts/depth",),
        {
            **EXPORTS,
            "lab/analysis/identity.py": "knows which settings make a run",
            "lab/analysis/results.py": "names runs that grow in depth",
            "grower/trained.py": "inserts the layers that a small trained network lacks",
        },
    ),
    "arriving classes": Feature(
        r"\bCLASSES\b|\bClasses\b\(|import Classes|with_classes|sort_classes|class_order",
        ("parts/classes.py",),
        {**EXPORTS, "lab/data/image_data.py": "data whose classes arrive bring the part along"},
    ),
    "arriving features": Feature(r"FirstFeatures|import Features\b|with_features", ("parts/features.py",), EXPORTS),
    "isotropic layers": Feature(
        r"[Ii]sotropic|ChiNorm|change_width|sparsify",
        ("parts/isotropic",),
        {
            **FACE,
            **EXPORTS,
            "lab/analysis/identity.py": "knows what optimizer_state=auto stands for",
            "recipes/papers/studies/isotropic_appendices.py": "a study with them",
            "recipes/papers/studies/isotropic_invariance.py": "a study with them",
            "widths/carry.py": "turns bases, which only these channels have no fixed one of",
            "widths/groups.py": "holds what tracing found of norms over channels",
            "widths/rules/norms.py": "finds which channels no operation tells apart",
            "widths/trace.py": "says what following norms is for",
        },
    ),
    "hypernetworks": Feature(
        r"[Hh]yper(net|fan)|Emitted",
        ("parts/hypernets",),
        {
            **EXPORTS,
            "lab/analysis/step_figures.py": "draws the figures of their paper",
            "growth/method.py": "any method may draw new weights as hyperfan-initialised networks emit them",
            "lab/training/build.py": "says what to take in place of networks whose weights are computed from others",
            "recipes/papers/studies/continual_regression.py": "a study with them",
            "recipes/papers/studies/continual_regression_figure.py": "draws it",
        },
    ),
    "resolution": Feature(
        r"[Rr]esolution\b(?!s)|Resizer",
        ("parts/resolution.py",),
        {**EXPORTS, "lab/analysis/identity.py": "knows which settings make a run"},
    ),
    "patch sizes": Feature(r"\bPatchSize\b|parts\.patch_size\b", ("parts/patch_size.py",), EXPORTS),
    "settings": Feature(r"parts\.setting\b", ("parts/setting.py",), EXPORTS),
    "growth on demand": Feature(
        r"\bOnDemand\b|\bPlateau\b|\bGradientNorm\b|\bBudget\b\(|climb",
        ("grower/triggers/demand.py",),
        {
            "grower/triggers/__init__.py": "exports",
            "lab/training/plan.py": "chooses the trigger that a schedule means, and checks its budget",
            "lab/training/recorder.py": "records gradient norms and auxiliary passes where demand needs them",
            "lab/training/run.py": "checks that what demand reads is recorded",
        },
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_features_words_stay_at_home(name: str) -> None:
    feature, found = FEATURES[name], {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(("conf/", *feature.home)):
            continue
        lines = [line.strip() for line in path.read_text().splitlines() if re.search(feature.words, line)]
        if lines:
            found[place] = lines
    unexpected = {place: lines for place, lines in found.items() if place not in feature.elsewhere}
    assert not unexpected
    there = {place for place in feature.elsewhere if (PACKAGE / place).exists()}
    assert there <= set(found), "the list of exceptions is longer than it need be"
