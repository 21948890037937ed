"""Lightning modules without growlab, trained with the callback."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from growlab.base.errors import UserError
from growlab.frontends.lightning import Growth
from growlab.grower.triggers import At
from growlab.growth import make_schedule
from growlab.optim import SGD, NormRatio
from growlab.parts import Averages
from tests.cases import differing, same_parameters
from tests.command_line import CommandLine, join, offer_port
from tests.unit.frontends.lightning_runs import (
    EPOCHS,
    IMAGES,
    LABELS,
    STEPS,
    Loader,
    Plain,
    Save,
    Validated,
    body,
    fitted,
    growth,
    outcome,
    trainer_of,
)

# Checkpoints were written by runs with the callback `Save`, which resumed and evaluated runs do not have.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


class TwoOptimizers(L.LightningModule):
    """A generator that grows and a critic that does not, with manual optimization and one decreasing learning rate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = body(), nn.Linear(3, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        made = self.generator(x)
        first, second = self.optimizers()
        real = F.one_hot(y, 3).float()
        for optimizer, loss in (
            (first, F.softplus(-self.critic(made)).mean()),
            (second, (F.softplus(self.critic(made.detach())) + F.softplus(-self.critic(real))).mean()),
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        every_step, every_epoch = self.lr_schedulers()
        every_step.step()
        if self.trainer.is_last_batch:
            every_epoch.step()

    def configure_optimizers(self) -> Any:
        first = SGD(self.generator.parameters(), lr=0.05, momentum=0.9, rule=NormRatio())
        second = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        return [first, second], [
            torch.optim.lr_scheduler.CosineAnnealingLR(first, EPOCHS * STEPS),
            torch.optim.lr_scheduler.StepLR(second, 1, 0.5),
        ]


MODULES: dict[str, Callable[[], tuple[L.LightningModule, Growth]]] = {
    "automatic": lambda: (Plain(), growth(parts=[Averages(decay=0.7)])),
    "two optimizers": lambda: (TwoOptimizers(), growth("generator", example=IMAGES[:8])),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_resumed_run_equals_the_uninterrupted_one_and_ends_as_an_ordinary_module(kind: str, tmp_path: Path) -> None:
    module, growth = MODULES[kind]()
    save = Save(tmp_path)
    expected = outcome(fitted(tmp_path, module, growth, save))
    assert [event.epoch for event in growth.grower.events] == [1, 3]
    assert len(save.paths) == EPOCHS * STEPS + EPOCHS
    network = growth.grower.network
    assert growth.grower.state.output_factor == 1.0 and not network._forward_hooks
    fresh, _ = MODULES[kind]()
    fresh.load_state_dict(module.state_dict(), strict=True)
    again = fresh.get_submodule("network" if kind == "automatic" else "generator")
    assert torch.equal(again.eval()(IMAGES), network.eval()(IMAGES))
    assert [p.shape for p in network.parameters()] == [p.shape for p in body().parameters()]
    # Resume each kind from every third checkpoint, so that together they cover each moment around an event.
    for path in save.paths[list(MODULES).index(kind) : -1 : 3]:
        assert outcome(fitted(tmp_path, *MODULES[kind](), ckpt_path=path)) == expected, path.name


def test_checkpoints_of_any_stage_are_evaluated_and_loaded(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, LABELS), 16)
    module, callback = Validated(), growth()
    trainer = trainer_of(tmp_path, callback, Save(tmp_path))
    trainer.fit(module, Loader(), data)
    losses = {}
    for path in (tmp_path / f"epoch{epoch}.ckpt" for epoch in (0, 1, 3)):
        # With the trainer of the training, with a new one, and without Trainer.
        (first,) = trainer.validate(module, data, ckpt_path=path, verbose=False)
        fresh = Validated()
        (second,) = trainer_of(tmp_path, growth()).validate(fresh, data, ckpt_path=path, verbose=False)
        loaded = growth(example=IMAGES[:8]).load(Validated(), path) if path.stem != "epoch1" else None
        assert first == second
        losses[path.stem] = second["val_loss"]
        if loaded is not None:
            (third,) = trainer_of(tmp_path).validate(loaded, data, verbose=False)
            assert third["val_loss"] == pytest.approx(second["val_loss"], rel=1e-4)
    assert len(set(losses.values())) == 3
    # Evaluation before training changes no weights, and the module still grows in training.
    module, callback = Validated(), growth()
    before = copy.deepcopy(module.state_dict())
    trainer = trainer_of(tmp_path, callback)
    trainer.validate(module, data, verbose=False)
    assert not differing(before, module.state_dict())
    trainer.fit(module, Loader(), data)
    assert len(callback.grower.events) == 2


@pytest.mark.parametrize(
    "settings",
    [{"precision": "bf16-mixed", "gradient_clip_val": 0.5}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 2}],
    ids=str,
)
def test_precision_clipping_and_accumulation(settings: dict[str, Any], tmp_path: Path) -> None:
    module, callback = Plain(), growth()
    trainer = fitted(tmp_path, module, callback, **settings)
    assert len(callback.grower.events) == 2
    assert {id(p) for p in trainer.optimizers[0].state} == {id(p) for p in module.network.parameters()}
    assert all(p.isfinite().all() for p in module.parameters())


# torch's compiler warns after a graph break, which weighted statistics cause.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_network_grows(tmp_path: Path) -> None:
    module, plain = Plain(), Plain()
    module.network.compile(backend="eager")
    for each in (module, plain):
        fitted(tmp_path, each, growth(trigger={0: 0.5, 1: 1.0}), max_epochs=2)
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-4)


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 1
        self.seen: list[int] = []

    def train_dataloader(self) -> Any:
        self.seen.append(self.batch_size)
        data = torch.utils.data.TensorDataset(IMAGES, LABELS)
        return torch.utils.data.DataLoader(data, self.batch_size)


def test_batch_sizes_go_through_the_data_module(tmp_path: Path) -> None:
    schedule = make_schedule(3, 8, epochs=[1, 2], widths=[0.5, 1.0], batch_sizes=[16, 8])
    data, module = Data(), Plain()
    trainer = fitted(tmp_path, module, growth(trigger=schedule), Save(tmp_path), data=data, max_epochs=3)
    assert trainer.global_step == 3 + 6 + 6 and data.seen[-3:] == [16, 8, 8]
    resumed, again = Data(), Plain()
    checkpoint = tmp_path / "epoch1.ckpt"
    trainer = fitted(tmp_path, again, growth(trigger=schedule), data=resumed, ckpt_path=checkpoint, max_epochs=3)
    assert trainer.global_step == 15 and resumed.seen[-1] == 8
    assert same_parameters(again, module)


def test_batch_sizes_by_steps_change_at_the_next_epoch_and_the_data_module_is_restored(tmp_path: Path) -> None:
    data, trigger = Data(), At({0: 0.5, 4: 1.0}, unit="step", batch_sizes=[16, 8])
    fitted(tmp_path, Plain(), growth(trigger=trigger), data=data, max_epochs=4)
    assert data.seen[-4:] == [16, 16, 8, 8]
    assert data.batch_size == 1 and "train_dataloader" not in vars(data)
    data.batch_size, data.seen[:] = 4, []
    baseline = fitted(tmp_path, Plain(), data=data, max_epochs=1)
    assert data.seen == [4] and baseline.global_step == 12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trigger": At({0: 0.5, 1: 1.0}, unit="cost")}, "a trigger with unit='cost' would never grow"),
        ({"method": "mine"}, "method='mine' must be a growth method, .* or the name of one: bert2bert"),
        ({"parts": [5]}, "parts contain 5"),
        ({"optimizer_state": "keep"}, "optimizer_state must be auto, inherit"),
        ({"anneal_steps": -1}, "anneal_steps must be at least 0"),
    ],
)
def test_arguments_are_checked_as_they_are_given(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        growth(**wrong)


class Logged(DummyLogger):
    """A logger that stores its metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.seen += [(step, metrics)] if "growth/stage" in metrics else []


def test_events_are_logged_and_the_loggers_get_widths_and_parameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, logger = Growth(trigger={0: 0.5, 1: 1.0}), Logged()
    assert repr(callback) == "Growth(trigger={0: 0.5, 1: 1.0})"
    fitted(tmp_path, Plain(), callback, max_epochs=2, logger=logger)
    (event,) = callback.events
    assert [r.message for r in caplog.records if r.name.startswith("growlab")] == [str(event)]
    assert "widths 4..4 -> 8..8, parameters 79 -> 187" in str(event)
    assert [(step, m["growth/num_params"], m["width/0"]) for step, m in logger.seen] == [
        (0, 79, 4), (STEPS, 187, 8)
    ]  # fmt: skip


def test_the_rate_finder_logs_no_warning_of_unfinished_growth(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, trainer = Plain(), trainer_of(tmp_path, growth())
    module.lr = 0.02
    with caplog.at_level(logging.WARNING):
        L.pytorch.tuner.Tuner(trainer).lr_find(module, Loader(), num_training=2)
    assert not [record for record in caplog.records if "training has ended" in record.message]


class ByName(L.LightningModule):
    """A module that is itself the network, called with keyword inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(F.relu(self.hidden(x))) * scale

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(x=batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfSeveral(Plain):
    """A loss over all batches of a combined loader."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = list(batch.values()) if isinstance(batch, dict) else batch
        return sum(self.criterion(self.network(one[0]), one[1]) for one in batches if one is not None)


@pytest.mark.parametrize(
    ("mode", "named"), [("min_size", True), ("max_size", False), ("max_size_cycle", True), ("none", False)]
)
def test_loaders_of_several_loaders(mode: str, named: bool, tmp_path: Path) -> None:
    """Combined by Lightning or by a CombinedLoader of any mode, which starts from its first batch afterwards."""
    loaders = [DataLoader(TensorDataset(IMAGES[:n], LABELS[:n]), 4) for n in (8, 16)]
    several = dict(zip("ab", loaders, strict=True)) if named else loaders
    module, callback = OfSeveral(), growth("network", trigger={0: 0.5, 1: 1.0})
    data = several if mode == "none" else CombinedLoader(several, mode)
    trainer = fitted(tmp_path, module, callback, data=data, max_epochs=2)
    assert len(callback.grower.events) == 1
    assert trainer.global_step == 2 * (2 if mode == "min_size" else 4)


def test_a_module_may_grow_as_a_whole(tmp_path: Path) -> None:
    module, callback = ByName(), growth("", trigger=At({0: 0.25, 4: 1.0}, unit="step"))
    fitted(tmp_path, module, callback)
    assert [event.step for event in callback.grower.events] == [4]
    ByName().load_state_dict(module.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("module", "callback", "sentence"),
    [
        (TwoOptimizers, lambda: growth(), r"2 submodules .*Growth\('generator', ...\), Growth\('critic', ...\)"),
        (TwoOptimizers, lambda: growth("body"), "no submodule 'body', only generator, critic"),
        (TwoOptimizers, lambda: growth("generator"), "training_step .* failed before|give Growth an example"),
    ],
)
def test_unsupported_modules_and_settings_raise_errors(
    module: Any, callback: Any, sentence: str, tmp_path: Path
) -> None:
    if sentence.startswith("training_step"):
        module = type("Early", (TwoOptimizers,), {"training_step": lambda self, batch, index: self.optimizers()[0]})
    with pytest.raises(UserError, match=sentence):
        fitted(tmp_path, module(), callback())


def one_rank(rank: int, folder: Path) -> None:
    join(rank, folder)

    def parameters(*callbacks: L.Callback, **more: Any) -> list[Any]:
        module, settings = Plain(), {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
        callback = growth(parts=[Averages(decay=0.7)])
        fitted(folder, module, callback, *callbacks, data=Loader(rank, 2), **settings, **more)
        return [p.tolist() for p in module.parameters()]

    expected = parameters(Save(folder))
    assert parameters(ckpt_path=folder / "step7.ckpt") == expected
    (folder / f"{rank}.txt").write_text(repr(expected))


def test_two_ranks_end_with_the_same_bits_and_resume(cli: CommandLine, tmp_path: Path) -> None:
    offer_port(tmp_path)
    cli.on_two_ranks(one_rank, tmp_path)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
