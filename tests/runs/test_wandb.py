"""Offline runs of Weights & Biases, read from disk: group, names, metrics, tables, images, ids."""

import json
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from growlab.lab.training.loggers import EVENT_COLUMNS, SPECTRUM_COLUMNS, WandbRecords, spectra
from tests.command_line import CommandLine
from tests.runs.test_experiment import SHORT
from tests.whole_runs import read_events, read_results, table

wandb = pytest.importorskip("wandb")

SWEEP = (
    *("-m", *SHORT, "logger=wandb", "log_every_n_steps=2", "seed=0", "growth=ours,pairs", "hydra.sweep.dir=grid"),
    "hydra.sweep.subdir=${hydra.job.num}",
)


@dataclass
class OfflineRun:
    """Content of an offline run, as `wandb sync` would send it; values are JSON."""

    files: Path
    id: str
    name: str = ""
    group: str = ""
    job_type: str = ""
    history: list[dict[str, str]] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)
    summaries: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    resumes: bool = False

    @classmethod
    def parse(cls, path: Path) -> "OfflineRun":
        """Read one `.wandb` file."""
        from wandb.proto import wandb_internal_pb2

        run = cls(path.parent / "files", path.parent.name.rpartition("-")[2])
        for content in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                run.history.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
            elif kind == "run":
                assert run.id == record.run.run_id
                run.name = record.run.display_name
                run.group, run.job_type = record.run.run_group, record.run.job_type
                run.resumes = bool(getattr(record.run, "resume", ""))  # a field since 0.31
            elif kind == "metric" and record.metric.summary.ByteSize():
                chosen = record.metric.summary
                run.summaries[record.metric.name] = "max" if chosen.max else "min" if chosen.min else "other"
            elif kind == "exit":
                run.exit_code = record.exit.exit_code
            for update in (record.run.config, record.config):
                run.config |= {i.key or "/".join(i.nested_key): i.value_json for i in update.update}
        return run

    def column(self, name: str) -> list[float]:
        """The values logged under a name, in order."""
        return [json.loads(row[name]) for row in self.history if name in row]

    def table(self, name: str) -> dict[str, Any]:
        """The last table logged under a name, from its file."""
        return json.loads((self.files / str(self.column(f"{name}/path")[-1])).read_text())


def runs_below(folder: Path) -> list[OfflineRun]:
    return [OfflineRun.parse(path) for path in sorted(folder.rglob("offline-run-*/*.wandb"))]


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log behind W&B's header of 7 bytes: fragments with a header of 7 bytes, in 32 KiB blocks."""
    position, record = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last fragment of one
            yield record
            record = b""


@pytest.fixture(scope="module")
def sweep(cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wandb")
    cli.done(*SWEEP, cwd=folder, fault=("with_figures",))
    return folder / "grid"


def test_a_sweep_is_one_group_of_named_runs(sweep: Path) -> None:
    runs = runs_below(sweep)
    assert {run.group for run in runs} == {"mlp3_on_digits grid"}
    assert len({run.id for run in runs}) == len({run.name for run in runs}) == 2
    for run in runs:
        assert run.name.startswith(f"model=mlp8 growth={run.job_type} seed={run.config['seed']} ")
        assert run.exit_code == 0
    assert sorted(run.job_type for run in runs) == ["ours", "pairs"]


def test_metrics_equal_those_in_files_and_have_summaries(sweep: Path) -> None:
    for run in runs_below(sweep):
        metrics = table(run.files.parents[2] / "metrics.csv")
        assert run.column("train_loss") == pytest.approx([float(row["train_loss"]) for row in metrics])
        assert run.column("val_accuracy") == pytest.approx([float(row["val_accuracy"]) for row in metrics])
        steps = table(run.files.parents[2] / "steps.csv")
        for name in ("loss", "lr", "grad_norm"):
            assert run.column(f"step/{name}") == pytest.approx([float(row[name]) for row in steps])
        assert (run.summaries["val_accuracy"], run.summaries["train_loss"]) == ("max", "min")
        assert run.column("growth/stage") == [1]
        groups = json.loads((run.files.parents[2] / "growth.json").read_text())["groups"]
        assert all(run.column(f"width/{name}") == group["widths"] for name, group in groups.items())
        assert any(key.startswith("rate_factor/") for row in run.history for key in row)
        accuracy = read_results(run.files.parents[2])["test_accuracy"]
        assert run.column("result/test_accuracy") == pytest.approx([accuracy])


def test_growth_events_and_spectra_are_tables(sweep: Path) -> None:
    for run in runs_below(sweep):
        events, recorded = run.table("growth_events"), read_events(run.files.parents[2])
        assert events["columns"] == list(EVENT_COLUMNS)
        assert events["data"] == [[event.get(column) for column in EVENT_COLUMNS] for event in recorded]
        singular = run.table("spectra")
        assert singular["columns"] == list(SPECTRUM_COLUMNS)
        assert sorted({row[0] for row in singular["data"]}) == [0, 1]


def test_spectra_of_the_last_stage_are_those_of_the_saved_weights(sweep: Path) -> None:
    run = runs_below(sweep)[0]
    weights = torch.load(run.files.parents[2] / "model.pt", weights_only=True)
    rows = [row for row in run.table("spectra")["data"] if row[0] == 1]
    assert {row[2] for row in rows} == {name for name, weight in weights.items() if weight.dim() > 1}
    # The output factor is folded into the last layer when the run has ended; test the first one.
    name = rows[0][2]
    largest, smallest = rows[0][4], [row for row in rows if row[2] == name][-1][4]
    values = torch.linalg.svdvals(weights[name])
    assert (largest, smallest) == (pytest.approx(float(values[0])), pytest.approx(float(values[-1]), rel=1e-4))


def test_figures_are_images_and_files(sweep: Path) -> None:
    for run in runs_below(sweep):
        for name in ("learning_curves", "widths", "rate_factors"):
            ((image,),) = run.column(f"figures/{name}/filenames")
            assert (run.files / image).read_bytes() == (run.files.parents[2] / "figures" / f"{name}.png").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [("at_step", 5), ("at_checkpoint", 2, "after")], ids=["step", "checkpoint"])
def test_a_resumed_offline_run_has_its_whole_history(cli: CommandLine, tmp_path: Path, fault: tuple[Any, ...]) -> None:
    """After a kill within an epoch, or between a checkpoint and the event; W&B had written nothing by then."""
    command = (*SHORT, "logger=wandb", "log_every_n_steps=1", "checkpoint.every_n_steps=2", "hydra.run.dir=run")
    assert cli(*command, cwd=tmp_path, fault=(*fault, int(signal.SIGKILL))).code < 0
    assert cli(*command, "ckpt_path=last", cwd=tmp_path).code == 0
    broken, resumed = runs_below(tmp_path / "run")
    assert broken.id == resumed.id and (broken.exit_code, resumed.exit_code) == (None, 0)
    assert resumed.group == ""
    # `wandb sync` sends the folders in order; without `resume` each replaces the one before.
    assert not resumed.resumes
    assert resumed.column("_step") == list(range(len(resumed.history)))
    for file, prefix, names in (("steps", "step/", ("loss", "lr")), ("metrics", "", ("train_loss", "val_accuracy"))):
        rows = table(tmp_path / "run" / f"{file}.csv")
        for name in names:
            logged = [row for row in resumed.history if f"{prefix}{name}" in row]
            assert [json.loads(row["trainer/global_step"]) for row in logged] == [int(row["step"]) for row in rows]
            assert [json.loads(row[f"{prefix}{name}"]) for row in logged] == pytest.approx(
                [float(r[name]) for r in rows]
            )
    assert resumed.column("growth/stage") == [1]
    assert len(resumed.table("growth_events")["data"]) == 1
    assert sorted({row[0] for row in resumed.table("spectra")["data"]}) == [0, 1]


class OnlineRun:
    """Imitation of an online run that keeps its artifacts."""

    id, offline = "abc", False

    def __init__(self) -> None:
        self.artifacts: list[Any] = []

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)


@pytest.mark.parametrize("offline", [False, True])
def test_online_runs_upload_checkpoint_and_weights(tmp_path: Path, offline: bool) -> None:
    from lightning import Trainer

    from growlab.lab.training import WandbLogger

    (tmp_path / "checkpoints").mkdir()
    for name in ("checkpoints/last.ckpt", "model.pt", "results.json"):
        (tmp_path / name).write_text(name)
    run = OnlineRun()
    run.offline = offline
    logger = WandbLogger(save_dir=tmp_path)
    logger._experiment = run
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    WandbRecords([logger]).publish(trainer, tmp_path)
    if offline:
        assert run.artifacts == []
        return
    (artifact,) = run.artifacts
    assert (artifact.name, artifact.type) == ("run-abc", "model")
    assert set(artifact.manifest.entries) == {"checkpoints/last.ckpt", "model.pt", "results.json"}


def test_spectra_are_invariant_to_rotations() -> None:
    layer = nn.Conv2d(3, 8, 3)
    rows = spectra(layer)
    assert [row[0] for row in rows] == ["weight"] * 9
    turned = nn.Conv2d(3, 8, 3)
    rotation = torch.linalg.qr(torch.randn(8, 8))[0]
    turned.weight.data = torch.einsum("ij,j...->i...", rotation, layer.weight.data)
    assert [row[2] for row in spectra(turned)] == pytest.approx([row[2] for row in rows], rel=1e-4)
