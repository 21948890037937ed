"""Every experiment file, shortened: two steps on fake images, one at its first widths and one after growing."""

from pathlib import Path

import numpy as np
import PIL.Image
import yaml

from tests.command_line import ROOT

_FOLDER = ROOT / "conf" / "experiment"
# A sweep's preset runs what the experiment that it names runs; test_configs.py composes each of its jobs. Those of
# translation train on text: tests/recipes/translation runs them.
EXPERIMENTS = sorted(
    path.relative_to(_FOLDER).with_suffix("").as_posix()
    for path in _FOLDER.rglob("*.yaml")
    if not {"sweeper:", "experiment_function:", "translation"} & set(path.read_text().split())
)


def _choices(experiment: str) -> set[tuple[str, str]]:
    """Choices of an experiment and of those that it begins with."""
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
    """Few experiments that make, together, every choice that any of them makes of a method, optimizer or task.

    Networks and data sets do not interact with those: tests/lab/test_costs.py plans their runs.
    """
    found: list[str] = []
    # The experiments of language models are those of test_language.py and test_language_models.py.
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

# Hypernetworks have tens of times the parameters of what they emit, up to 136 million.
_NARROWER = {
    f"papers/hyperfan_{name}": ("model.network.width=12",)
    for name in ("mnist", "allconv_cifar10", "bnn_mobilenet_imagenet")
}
# Networks of tens of millions of parameters have all that they have at a sixth of their width, too.
_NARROWER |= {
    f"papers/{name}": ("model.width=12",)
    for name in (
        *("vgg11_cifar10", "vgg19_cifar100", "resnet18_cifar100", "testbed_resnet18_cifar10"),
        *("mobilenetv1_cifar10", "mobilenetv1_cifar100", "mobilenetv1_imagenet"),
    )
}
# A pass over the few images here has fewer batches than parts.
_NARROWER["testbed_cifar10"] = ("schedule.budget=null", "data.epochs_per_pass=1")
_NARROWER["llama_text"] = ("schedule.budget=null", "schedule.total_steps=null")
_NARROWER["papers/testbed_resnet18_cifar10"] += _NARROWER["testbed_cifar10"]
_OTHER_DATA = {
    "gpt_char": ("data.limit_characters=4000", "data.eval_batch_size=4"),
    "llama_text": (f"data.path={ROOT / 'conf'}", "data.suffixes=[.yaml]", "data.context=16", "data.vocab_size=300"),
}


def option(name: str) -> str:
    """An experiment as the command line names it: with `papers/` in front where its file is in that folder."""
    return next(f"{path.parent.name}/{name}" for path in _FOLDER.rglob(f"{name}.yaml")).removeprefix("experiment/")


def write_fake_images(root: Path) -> Path:
    """A folder of random colour images, 32 x 32, in 10 classes; gives the folder back."""
    pixels = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(10):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(2):
                image = PIL.Image.fromarray(pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8))
                image.save(folder / f"{number}.png")
    return root


def two_steps(experiment: str, images: Path) -> tuple[str, ...]:
    """Overrides that shorten an experiment; everything else is as its file says."""
    schedule = (
        "schedule.budget=null",
        "schedule.epochs=[1,1]",
        "schedule.widths=[0.25,1]",
        "schedule.batch_sizes=null",
    )
    decides = "isotropic" in experiment and experiment != "papers/isotropic_depth"
    data = (f"data.root={images}", "data.download=false", "data.num_workers=0", "data.limit_test=4")
    return (
        f"experiment={experiment}",
        *_OTHER_DATA.get(experiment, data),
        *(("schedule.total_epochs=2", "growth.first=1") if decides else schedule),
        *("trainer.limit_train_batches=1", "trainer.accelerator=cpu", "data.batch_size=4"),
        *("probe_size=2", "batch_norm_samples=4"),
        *_NARROWER.get(experiment, ()),
    )
