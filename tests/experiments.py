"""Every experiment file, shortened to two steps on fake images: one at its first widths, one after growing."""

from pathlib import Path

import numpy as np
import PIL.Image
import yaml

from tests.command_line import ROOT

_FOLDER = ROOT / "conf" / "experiment"
# Without presets of sweeps, whose jobs test_configs.py composes, and translation (tests/recipes/translation).
EXPERIMENTS = sorted(
    path.relative_to(_FOLDER).with_suffix("").as_posix()
    for path in _FOLDER.rglob("*.yaml")
    if not {"sweeper:", "experiment_function:", "translation"} & set(path.read_text().split())
)


def _choices(experiment: str) -> set[tuple[str, str]]:
    """(group, option) of all choices of an experiment and of the experiments it inherits from."""
    defaults = yaml.safe_load((_FOLDER / f"{experiment}.yaml").read_text(encoding="utf-8")).get("defaults", [])
    found: set[tuple[str, str]] = set()
    for entry in defaults:
        if isinstance(entry, dict):
            for group, choice in entry.items():
                found |= {(group, str(one)) for one in (choice if isinstance(choice, list) else [choice])}
        elif entry != "_self_":
            found |= _choices(entry.removeprefix("/experiment/"))
    return found


def _covering() -> list[str]:
    """Small set of experiments that covers every option that any experiment chooses, except networks and data sets.

    tests/lab/test_costs.py plans runs with those.
    """
    found: list[str] = []
    # test_language.py and test_language_models.py run the language models.
    quick = [name for name in EXPERIMENTS if not name.endswith(("imagenet", "_text", "_char"))]
    choices = {
        experiment: {one for one in _choices(experiment) if one[0] not in ("override /model", "override /data")}
        for experiment in quick
    }
    left = set().union(*choices.values())
    while left:
        found.append(max(quick, key=lambda experiment: len(choices[experiment] & left)))
        left -= choices[found[-1]]
    return found


COVERING = _covering()

# Hypernetworks have up to 136 million parameters, tens of times as many as the network.
_NARROWER = {
    f"papers/hyperfan_{name}": ("model.network.width=12",)
    for name in ("mnist", "allconv_cifar10", "bnn_mobilenet_imagenet")
}
# Networks of tens of millions of parameters.
_NARROWER |= {
    f"papers/{name}": ("model.width=12",)
    for name in (
        *("vgg11_cifar10", "vgg19_cifar100", "resnet18_cifar100", "testbed_resnet18_cifar10"),
        *("mobilenetv1_cifar10", "mobilenetv1_cifar100", "mobilenetv1_imagenet"),
    )
}
# The few images give fewer batches than a pass has parts.
_NARROWER["testbed_cifar10"] = ("schedule.budget=null", "data.epochs_per_pass=1")
_NARROWER["llama_text"] = ("schedule.budget=null", "schedule.total_steps=null")
_NARROWER["papers/testbed_resnet18_cifar10"] += _NARROWER["testbed_cifar10"]
_OTHER_DATA = {
    "gpt_char": ("data.limit_characters=4000", "data.eval_batch_size=4"),
    "llama_text": (f"data.path={ROOT / 'conf'}", "data.suffixes=[.yaml]", "data.context=16", "data.vocab_size=300"),
}


def option(name: str) -> str:
    """Name of an experiment on the command line: with `papers/` if its file is in that folder."""
    return next(f"{path.parent.name}/{name}" for path in _FOLDER.rglob(f"{name}.yaml")).removeprefix("experiment/")


def write_fake_images(root: Path, num_train: int = 20) -> Path:
    """Write random colour images, 32 x 32, in 10 classes, 20 of them for testing; return the folder."""
    pixels = np.random.default_rng(0)
    for split, number in (("train", num_train), ("test", 20)):
        for index in range(number):
            folder = root / split / f"class{index % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            image = PIL.Image.fromarray(pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            image.save(folder / f"{index}.png")
    return root


def two_steps(experiment: str, images: Path) -> tuple[str, ...]:
    """Overrides that shorten an experiment to two steps and change nothing else."""
    stages = ("schedule.budget=null", "schedule.epochs=[1,1]", "schedule.widths=[0.25,1]", "schedule.batch_sizes=null")
    on_demand = "isotropic" in experiment and experiment != "papers/isotropic_depth"
    data = (f"data.root={images}", "data.download=false", "data.num_workers=0", "data.limit_test=4")
    return (
        f"experiment={experiment}",
        *_OTHER_DATA.get(experiment, data),
        *(("schedule.total_epochs=2", "growth.first=1") if on_demand else stages),
        *("trainer.limit_train_batches=1", "trainer.accelerator=cpu", "data.batch_size=4"),
        *("probe_size=2", "batch_norm_samples=4"),
        *_NARROWER.get(experiment, ()),
    )
