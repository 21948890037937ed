"""Commands on a run's folder: `growlab resume RUN`, `growlab show RUN` and `growlab eval RUN`."""

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

# Settings that locate the data.
_PLACES = ("data.root.", "data.path.", "data.name.", "data.source.")
_FOLDER = {"hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.mode", "ckpt_path"}


@command
def main(argv: Sequence[str]) -> int | None:
    """Run the command `argv[0]`, which is `resume`, `show` or `eval`, with the other arguments."""
    name, *arguments = argv
    if name != "resume":
        (show if name == "show" else evaluate)(arguments)
        return None
    sys.argv = ["growlab", *resumed(arguments)]
    from growlab.lab.cli import app

    return app.main()


def resumed(argv: Sequence[str]) -> list[str]:
    """Return the arguments that resume a run, or the unfinished jobs of a sweep."""
    parser = CommandParser(
        prog="growlab resume",
        description="Resume an interrupted run, or a sweep: finished jobs are skipped.",
        epilog="Example: growlab resume runs/digits/2026-01-31_12-00-00_000000 trainer=gpu",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run or of a sweep")
    free = "settings that do not change the numbers"
    # Without a default, argparse's usage would show the settings as required.
    parser.add_argument("overrides", metavar="NAME=VALUE", nargs="*", default=[], help=free)
    arguments = parser.parse_args(argv)
    sweep = arguments.folder / "multirun.yaml"
    if sweep.is_file():
        options, overrides = _command(sweep)
        options, where = [*options, "-m"], [f"hydra.sweep.dir={quoted(arguments.folder)}"]
    else:
        options, overrides = _command(arguments.folder / ".hydra" / "hydra.yaml")
        where = [LAST, in_folder(arguments.folder)]
    return [*options, *overrides, *arguments.overrides, *where]


def _command(file: Path) -> tuple[list[str], list[str]]:
    """Return the options that locate a run's configuration, and its overrides, from the file that Hydra wrote."""
    if not file.is_file():
        raise UserError(f"{file.parent.parent} is not the folder of a growlab run or sweep.")
    hydra: Any = OmegaConf.to_container(OmegaConf.load(file))
    hydra = hydra["hydra"]
    name = hydra["job"]["config_name"]
    options = [] if name in (None, PRIMARY) else ["--config-name", name]
    for source in hydra["runtime"].get("config_sources") or ():
        if source["provider"] == "command-line":
            options += ["--config-dir", source["path"]]
    overrides = [*hydra["overrides"]["hydra"], *hydra["overrides"]["task"]]
    return options, [override for override in overrides if name_of(override) not in _FOLDER]


def show(argv: Sequence[str]) -> None:
    """Print a run's stages and result (or its last epoch), growth events and command."""
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
    # Archived runs may lack it.
    if (file := folder / ".hydra" / "hydra.yaml").exists():
        options, overrides = _command(file)
        print(shell_lines(["growlab", *options, *overrides]))


def evaluate(argv: Sequence[str]) -> None:
    """Test a run's weights on the data of its configuration, or on other data."""
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
        raise UserError(f"{file} does not exist: {arguments.folder} is not a finished run with such weights.")
    options, overrides = _command(arguments.folder / ".hydra" / "hydra.yaml")
    values = dict(zip(options[::2], options[1::2], strict=True))
    where = (values.get("--config-dir"), values.get("--config-name", PRIMARY))
    overrides = [override for override in overrides if not override.startswith("hydra")]
    own = composed(overrides, *where)
    if "data" in map(name_of, arguments.overrides):
        # Drop the choice and location of the run's data, but keep the preprocessing.
        overrides = [o for o in overrides if not f"{name_of(o)}.".startswith(_PLACES) and name_of(o) != "data"]
    cfg = composed([*overrides, *arguments.overrides], *where)
    numbers = _tested(own, cfg, file)
    if arguments.output:
        write_json(arguments.output, numbers)
    print(json.dumps(numbers, indent=2))


def _tested(own: DictConfig, cfg: DictConfig, weights: Path) -> dict[str, float]:
    """Return the metrics of weights on the test set of a configuration, with a classifier's calibration error.

    Other images are normalised like those that the run (`own`) trained on. The expected calibration error uses 15 bins
    of confidence (Guo et al. 2017).
    """
    import torch
    from torchmetrics.classification import MulticlassCalibrationError

    from growlab.inspect.hub import read_saved
    from growlab.lab.data import ImageData
    from growlab.lab.training.build import make_data, make_network, make_objective
    from growlab.lab.training.objectives import Classification

    data, other = (make_data(config.data, config.seed) for config in (own, cfg))
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
                *inputs, target = (tensor.to(device) for tensor in batch)
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
