"""Growing inside one `fit` equals one `fit` for each stage, bit for bit."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch

from growlab.base.errors import UserError
from growlab.frontends.lightning import Growth
from growlab.grower import Grower
from growlab.growth import VarianceTransfer, grow, make_schedule
from growlab.lab.data import ImageData
from growlab.lab.networks import MLP
from growlab.lab.training import LearningRate, Task
from growlab.optim import Inheritance, follow

EPOCHS, WIDTHS, BATCHES = [2, 1, 2], [0.5, 0.75, 1], [40, 32, 24]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=5e-4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def new_run(make: Callable[..., torch.optim.Optimizer]) -> tuple[Task, ImageData]:
    data = ImageData("digits", limit_train=96, limit_test=20, batch_size=24, shift=1, mirror=True, validation="none")
    data.setup()
    lightning.seed_everything(0, verbose=False)
    network = MLP(64, [12, 12], 10, batch_norm=True)
    schedule = make_schedule(5, 24, epochs=EPOCHS, widths=WIDTHS, batch_sizes=BATCHES)
    data.batch_size_at_epoch = schedule.batch_size_at
    method = VarianceTransfer(noise_std=0.001)
    grower = Grower(network, data.probe_batch(16), method=method, trigger=schedule)
    steps = [-(-96 // schedule.batch_size_at(epoch)) for epoch in range(5)]
    rate = LearningRate(shape="constant")
    return Task(grower, schedule, steps, make, learning_rate=rate), data


def new_trainer(epochs: int, *callbacks: lightning.Callback, **more: Any) -> lightning.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {"accelerator": "cpu", "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 0}
    settings |= {**dict.fromkeys(off, False), **more}
    return lightning.Trainer(max_epochs=epochs, callbacks=list(callbacks), **settings)


@pytest.mark.parametrize(
    ("make", "inheritance"), [(sgd, "reset"), (sgd, "inherit"), (adamw, "inherit")], ids=["reset", "sgd", "adamw"]
)
def test_one_fit_equals_one_fit_for_each_stage(
    make: Callable[..., torch.optim.Optimizer], inheritance: Inheritance
) -> None:
    task, data = new_run(make)
    trainer = new_trainer(5, Growth(grower=task.grower, optimizer_state=inheritance))
    trainer.fit(task, datamodule=data)
    assert len(task.grower.events) == 2

    kept: list[torch.optim.Optimizer] = []

    def same_optimizer(parameters: Any) -> torch.optim.Optimizer:
        # The rate is constant, since each fit makes a new schedule.
        kept[:] = kept or [make(parameters)]
        return kept[0]

    reference, data = new_run(same_optimizer)
    network, grower, probe = reference.network, reference.grower, (data.probe_batch(16),)
    graph, optimizer = grower.graph, None
    normalised = frozenset(dict(network.named_parameters()) if make is adamw else ())
    ends = [2, 3, 5]
    stages = new_trainer(ends[0])
    for end, widths in zip(ends, reference.schedule.widths(graph), strict=True):
        if end > ends[0]:
            arguments = (network, graph, grower.method, grower.state, widths, grower.seed, probe)
            event = grow(*arguments, normalised=normalised)
            follow(optimizer, event.replaced, graph, event.widths_before, widths, inheritance, event.carry)
            stages.fit_loop.max_epochs = end
        stages.fit(reference, datamodule=data)
        (optimizer,) = stages.optimizers
        assert stages.current_epoch == end
    for name, value in task.network.state_dict().items():
        assert torch.equal(value, network.state_dict()[name]), name
    (one,), (other,) = trainer.optimizers, stages.optimizers
    for mine, theirs in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert one.state[mine].keys() == other.state[theirs].keys()
        for key, value in one.state[mine].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state[theirs][key])), key
    assert task.grower.state == reference.grower.state


def test_slopes_of_prelu_are_exempt_from_weight_decay() -> None:
    task, _ = new_run(adamw)
    task.network.add_module("slope", torch.nn.PReLU())
    decayed, spared = task.configure_optimizers()["optimizer"].param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    assert [*decayed["params"], *spared["params"]] == list(task.network.parameters())
    assert spared["params"] == list(task.network.slope.parameters())


def test_masks_of_minus_infinity_are_valid_also_in_inserted_or_several_blocks() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(8, 2))
    task = Task(SimpleNamespace(network=network, state=SimpleNamespace(stage=0)), *[None] * 3)
    mask = torch.tensor([0.0, float("-inf")])
    for _ in range(2):
        network.append(torch.nn.Linear(2, 2))
        network[-1].register_buffer("mask", mask)
    network.append(torch.nn.BatchNorm1d(2))
    Task.check_weights(task)
    for buffer, value in ((network[-1].running_var, float("inf")), (mask, float("nan"))):
        good = buffer.clone()
        buffer[0] = value
        with pytest.raises(UserError, match="was NaN or infinite after"):
            Task.check_weights(task)
        buffer.copy_(good)


def test_a_complex_weight_that_is_nan_stops_the_run_too() -> None:
    network = torch.nn.Linear(2, 2, dtype=torch.cfloat)
    run: Any = SimpleNamespace(network=network, device="cpu", global_step=3, _not_finite=lambda what, step: what)
    Task.check_weights(run)
    network.weight.data[0, 0] = complex(0, float("nan"))
    with pytest.raises(UserError, match=r"^weight was NaN or infinite after"):
        Task.check_weights(run)
