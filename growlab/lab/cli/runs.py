"""Commands about one run's folder: `growlab resume RUN`, `growlab show RUN` and `growlab eval RUN`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from growlab.base.command_parser import CommandParser, command, shell_lines
from growlab.base.errors import UserError
from growlab.base.files import write_json
from growlab.lab.training.configuration import LAST, PRIMARY, composed
from growlab.lab.training.processes import in_folder, name_of, quoted

# Settings that say where data are.
_PLACES = ("data.root.", "data.path.", "data.name.", "data.source.")
_FOLDER = {"hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.mode", "ckpt_path"}


@command
def main(argv: Sequence[str]) -> int | None:
    """Run the command `resume`, `show` or `eval`, which is the first of `argv`, with the other arguments."""
    name, *given = argv
    if name != "resume":
        (show if name == "show" else evaluate)(given)
        return None
    sys.argv = ["growlab", *resumed(given)]
    from growlab.lab.cli import app

    return app.main()


def resumed(argv: Sequence[str]) -> list[str]:
    """Return the command line that resumes a run, or a sweep with the jobs that are not done."""
    parser = CommandParser(
        prog="growlab resume",
        description="Resume an interrupted run, or a sweep: finished jobs are skipped.",
        epilog="Example: growlab resume runs/digits/2026-01-31_12-00-00_000000 trainer=gpu",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run or of a sweep")
    free = "settings that do not change the numbers"
    # With a default, or argparse says that the settings are required too.
    parser.add_argument("overrides", metavar="NAME=VALUE", nargs="*", default=[], help=free)
    arguments = parser.parse_args(argv)
    sweep = arguments.folder / "multirun.yaml"
    if sweep.is_file():
        options, given = _command(sweep)
        options, where = [*options, "-m"], [f"hydra.sweep.dir={quoted(arguments.folder)}"]
    else:
        options, given = _command(arguments.folder / ".hydra" / "hydra.yaml")
        where = [LAST, in_folder(arguments.folder)]
    return [*options, *given, *arguments.overrides, *where]


def _command(file: Path) -> tuple[list[str], list[str]]:
    """Options that a run's configuration was found with, and its overrides, as Hydra has written them down."""
    if not file.is_file():
        raise UserError(f"{file.parent.parent} is no folder of a run or sweep that growlab has written.")
    # Interpolations are left as they are.
    hydra: Any = OmegaConf.to_container(OmegaConf.load(file))
    hydra = hydra["hydra"]
    name = hydra["job"]["config_name"]
    options = [] if name in (None, PRIMARY) else ["--config-name", name]
    for source in hydra["runtime"].get("config_sources") or ():
        if source["provider"] == "command-line":
            options += ["--config-dir", source["path"]]
    overrides = [*hydra["overrides"]["hydra"], *hydra["overrides"]["task"]]
    return options, [one for one in overrides if name_of(one) not in _FOLDER]


def show(argv: Sequence[str]) -> None:
    """Print what a run has reached: its stages and result, or its last epoch, its events and its command."""
    from growlab.lab.analysis.report import print_results
    from growlab.lab.analysis.results import open_run

    parser = CommandParser(
        prog="growlab show",
        description="Print a run's stages, result, growth events and command.",
        epilog="Example: growlab show runs/digits/2026-01-31_12-00-00_000000",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run")
    folder = parser.parse_args(argv).folder
    run = open_run(folder)
    if run.results:
        print_results(run.results, folder)
    else:
        last = run.metrics.iloc[-1].dropna().to_dict()
        print(f"{folder} has no result yet; its last line of metrics.csv:")
        print("\n".join(f"  {name:<20} {value:g}" for name, value in last.items()))
    for event in run.events:
        sizes = f"{event['num_params_before']:,} -> {event['num_params']:,} parameters"
        print(f"stage {event['stage']} at step {event['step']}: {sizes}, output error {event['parity_error_eval']:.1e}")
    # Rows that are kept may lack it.
    if (file := folder / ".hydra" / "hydra.yaml").exists():
        options, overrides = _command(file)
        print(shell_lines(["growlab", *options, *overrides]))


def evaluate(argv: Sequence[str]) -> None:
    """Test a run's weights on the data of its configuration, or on others."""
    parser = CommandParser(
        prog="growlab eval",
        description="Test a finished run's weights, on its own test set or on other data of the same shape and "
        "classes, such as corrupted images; classifiers get their calibration error too.",
        epilog="Example: growlab eval runs/digits/2026-01-31_12-00-00_000000 data=folder data.root=corrupted",
    )
    add = parser.add_argument
    add("folder", metavar="RUN", type=Path, help="folder of a run")
    add("overrides", metavar="NAME=VALUE", nargs="*", help="such as data=folder data.root=FOLDER")
    add("--weights", metavar="FILE", default="model.pt", help="in RUN (model.pt), such as model_ema.pt")
    add("-o", "--output", metavar="FILE", help="write the numbers to a JSON file")
    arguments = parser.parse_args(argv)
    file = arguments.folder / arguments.weights
    if not file.is_file():
        raise UserError(f"{file} is not there: {arguments.folder} is no finished run with such weights.")
    options, given = _command(arguments.folder / ".hydra" / "hydra.yaml")
    found = dict(zip(options[::2], options[1::2], strict=True))
    where = (found.get("--config-dir"), found.get("--config-name", PRIMARY))
    given = [one for one in given if not one.startswith("hydra")]
    own = composed(given, *where)
    if "data" in map(name_of, arguments.overrides):
        # Another data set is not where the run's was; how images are prepared stays.
        given = [one for one in given if not f"{name_of(one)}.".startswith(_PLACES) and name_of(one) != "data"]
    cfg = composed([*given, *arguments.overrides], *where)
    numbers = _tested(own, cfg, file)
    if arguments.output:
        write_json(arguments.output, numbers)
    print(json.dumps(numbers, indent=2))


def _tested(own: DictConfig, cfg: DictConfig, weights: Path) -> dict[str, float]:
    """Metrics of weights on the test set of a configuration; of a classifier its expected calibration error too.

    Other images are standardised as those that the run (`own`) trained on. The calibration error is over 15 bins of
    confidence (Guo et al. 2017), by torchmetrics.
    """
    import torch
    from torchmetrics.classification import MulticlassCalibrationError

    from growlab.inspect.hub import read_saved
    from growlab.lab.data import ImageData
    from growlab.lab.training.build import make_data, make_network, make_objective
    from growlab.lab.training.objectives import Classification

    data, other = (make_data(one.data, one.seed) for one in (own, cfg))
    try:
        if own.data != cfg.data and isinstance(data, ImageData) and isinstance(other, ImageData):
            data.setup()
            data.test_on(other)
        else:
            data = other
            data.setup()
        network, objective = make_network(cfg.model, data), make_objective(cfg.objective, data)
        network.load_state_dict(read_saved(str(weights), str(weights)))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network.to(device).eval()
        total, calibration = None, None
        with torch.no_grad():
            for batch in data.evaluation("test"):
                *inputs, target = (one.to(device) for one in batch)
                output = network(*inputs)
                sums = objective(output, target)[1].double()
                total = sums if total is None else total + sums
                if isinstance(objective, Classification) and output.dim() == 2:
                    calibration = calibration or MulticlassCalibrationError(output.shape[1]).to(device)
                    calibration.update(output.softmax(-1), target)
        numbers = dict(objective.metrics([] if total is None else total.tolist()))
        return numbers | ({} if calibration is None else {"calibration_error": float(calibration.compute())})
    finally:
        data.teardown("test")
