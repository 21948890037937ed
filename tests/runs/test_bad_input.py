"""Invalid input ends with exit code 2 and a one-line message that names it, without a traceback or files of a run."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.command_line import CommandLine

# Command lines and parts of their messages.
TABLE = {
    # Composing.
    "growth=netnet": "there is no growth 'netnet'; near it: net2net.",
    "experiment=resnet20_cifr10": "near it: resnet20_cifar10, resnet20_cifar10_depth, papers/",
    "epochs=16": "did you mean 'schedule.total_epochs' or 'schedule.epochs'",
    "grwth=ours": "did you mean 'growth'?",
    "schedule.totl_epochs=3": "there is no setting 'schedule.totl_epochs'; did you mean",
    "schedule.total_epochs=abc": "schedule.total_epochs must be int, not 'abc'.",
    "tabel runs": "'tabel' is neither NAME=VALUE, such as seed=1, nor a command (widths, ",
    "schedule.epochs=[1": "cannot read 'schedule.epochs=[1'",
    "seed=1,2": "To sweep over it, add --multirun",
    "+seed=1": "An item is already at 'seed'",
    "~seed": "seed",
    "experiment=torn --config-dir own": "torn.yaml, line 3, is not valid YAML",
    "--frobnicate": "unrecognized arguments: --frobnicate",
    "seed=1 -m growth=ours": "unrecognized arguments: growth=ours; put options before or after all overrides",
    "ckpt_path=last name=nothing": "has no earlier run",
    "parts=[] ema.decay=0.9": "ema",
    "~growth": "growth",
    "hydra.run.dir=file/below": "cannot use",
    # Settings of a run.
    "ckpt_path=/nowhere.ckpt": "ckpt_path=/nowhere.ckpt is not a file",
    "data=cifar10 data.root=/nowhere data.download=false": "found no cifar10 data in /nowhere",
    "seed=-1": "seed must be greater than or equal to 0, not -1",
    "growth=gradmax growth.batches=0": "growth.batches must be at least 1, not 0.",
    "optimizer.dampening=-1": "dampening must be at least 0, not -1",
    "model=custom model._target_=no.such.Network": "model: Error locating target 'no.such.Network'",
    "model=custom model._target_=fractions.Fraction": "model._target_=fractions.Fraction",
    "model.width=-3": "model cannot be created with model.width=-3",
    "schedule.total_epochs=3": "3 epochs are fewer than num_stages=5",
    "~optimizer._target_": "optimizer",
    "trainer.accelerator=gpu": "No supported gpu backend found",
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val",
    "callbacks=cuda_graphs model=mlp5 trainer=cpu": "needs training on one CUDA device",
    "+callbacks.x._target_=torch.nn.Identity": "callbacks.x makes a Identity, not a lightning.",
    "objective=characters": "images go with objective=classification",
    "+logger.x=3": "logger.x=3 is not a logger",
    "experiment_function={}": "experiment_function={} needs a _target_",
    "objective._target_=fractions.Fraction": "is no growlab.lab.training.Objective",
    "model=gpt": "got an unexpected keyword argument 'image_shape'",
    "schedule=plateau data.validation=none": "metric='val_loss' is not recorded",
    "schedule=plateau schedule.epochs=[2,2,2]": "schedule.epochs is for stages",
    "schedule=plateau method=equal_flops": "schedule.total_epochs instead of",
    "schedule.batch_size=auto": "set schedule.max_memory_gib_per_device",
    "model=mlp5 schedule.batch_size=auto schedule.max_memory_gib_per_device=1e-5": "not even 2 images on each device",
    "model=isotropic_mlp growth=isotropic lr_adapt=none schedule.batch_size=auto "
    "schedule.max_memory_gib_per_device=1": "schedule.batch_size=auto needs the widths of all epochs",
    "schedule=gradient optimizer.momentum=0": "GradientNorm uses running gradients, which this optimizer does not keep",
    "growth=isotropic growth.importance=gradient optimizer.momentum=0": "Isotropic uses running gradients",
    "plan.size=full": "there is no setting 'plan.size'.",
    "plan=default": "a run has no plan: leave plan=... out, or ask `growlab plan`.",
    "callbacks=early_stopping data.validation=test callbacks.early_stopping.monitor=test_loss": (
        "would decide by test_loss"
    ),
    "callbacks=early_stopping data.validation=none data.limit_train=32 model=mlp5": "`val_loss` which is not available",
    "+trainer.callbacks=[{_target_:lightning.pytorch.callbacks.GradientAccumulationScheduler,scheduling:{0:2}}]": (
        "trainer.accumulate_grad_batches or schedule.batch_sizes"
    ),
    "+trainer.max_time=00:01:00:00": "trainer.max_time cannot be set here: `timeout 3h growlab ...` ends a run",
    "+callbacks.x={_target_:lightning.pytorch.callbacks.Timer,duration:{hours:1}}": "end the run with a signal",
    "experiment=papers/hyperfan_mnist data=digits data.limit_train=60 model.network.width=9 growth=pairs": (
        "take the plain network as model with growth=hyperfan"
    ),
    # Data and networks of a user.
    "data=custom data.source._target_=mine.Odd +data.source.kind=alone model=custom model._target_=mine.Net": (
        "samples must be (inputs..., target) or a mapping with a target"
    ),
    "data=custom data.source._target_=mine.Waves model=mlp8": "missing 1 required positional argument: 'image_shape'",
    "data=custom data.source._target_=mine.Waves model=custom model._target_=mine.Net": (
        "Classification takes outputs [batch, classes] and whole numbers"
    ),
    # Commands.
    "widths --input-shape x growlab/mlp8": "'x' is not of the form 3,32,32",
    "table nowhere": "nowhere",
    "report nowhere": "nowhere",
    "reproduce nope": "nope",
    "widen nowhere --width 2 -o out": "no config.json",
    "plan ckpt_path=last": "ckpt_path is of runs",
    "plan plan.size=huge": "plan.size=huge: Input should be 'any' or 'full'.",
    "plan plan.sise=full": "did you mean 'size'?",
    "plan plan=none": "there is no plan 'none'",
}
# Calls all of them in one process.
PROGRAM = """
import contextlib, io, json, os, sys
from hydra.core.global_hydra import GlobalHydra
from growlab.lab.cli.app import main
ended = []
for arguments in {commands!r}:
    GlobalHydra.instance().clear()
    os.environ.pop("HYDRA_FULL_ERROR", None)
    sys.argv = ["growlab", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    ended.append([code, out.getvalue(), err.getvalue()])
with open("ended.json", "w") as file:
    json.dump(ended, file)
"""


@pytest.fixture(scope="module")
def ended(cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Run all commands; return exit code, output and messages by command."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "file").touch()
    shutil.copy(Path(__file__).parents[1] / "own_data.py", folder / "mine.py")
    (folder / "own" / "experiment").mkdir(parents=True)
    (folder / "own" / "experiment" / "torn.yaml").write_text("# @package _global_\na: [1\nb: 2\n")
    program = PROGRAM.format(commands=[shlex.split(one) for one in TABLE])
    cli.done(cwd=folder, program=program, limit_sec=600)
    assert [path for name in ("results.json", "*.ckpt") for path in folder.rglob(name)] == []
    return dict(zip(TABLE, json.loads((folder / "ended.json").read_text()), strict=True))


@pytest.mark.parametrize("command", TABLE)
def test_bad_input_is_one_sentence(ended: dict[str, tuple[int, str, str]], command: str) -> None:
    code, out, err = ended[command]
    assert (code, "Traceback" in err) == (2, False), err
    # Hydra lists the jobs of a sweep.
    assert out == "" or command.startswith("-m ")
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and last.endswith((".", "?", "!"))
    # A sweep prints the reason at each job.
    assert TABLE[command] in (err if "-m" in command.split() else last)
