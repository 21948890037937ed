"""`growlab.Controller`: compares growing with continuing on the same batches, and trains on with the better network."""

import copy
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import growlab
from growlab import Controller, Grower
from growlab.base.errors import UserError
from growlab.grower.cost import forward_flops
from growlab.growth import PairGrowth
from growlab.parts import Part
from growlab.plan import advise
from tests.cases import differing
from tests.unit.frontends.lightning_runs import trainer_of

STEPS, BATCH, MOMENT = 1200, 16, 420


def batches(number: int, hard: bool, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Batches of a task that the narrow network cannot learn, or of one for which more steps help more than width."""
    draw = torch.Generator().manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)) if hard else nn.Linear(6, 3)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
        found = []
        for _ in range(number):
            x = torch.randn(BATCH, 6, generator=draw)
            found.append((x, teacher(x)))
    return found


class Loop:
    """A plain training loop with momentum, dropout and a learning-rate schedule."""

    def __init__(self, hard: bool) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.01), nn.Linear(24, 3))
        self.data = batches(STEPS, hard)
        self.trigger = Controller(1 / 8 if hard else 0.5, total_steps=STEPS, branch=0.03)
        self.grower = Grower(self.network, self.data[0][0], method=PairGrowth(), trigger=self.trigger, verbose=False)
        self.grower.provide(batches=lambda number: batches(number, hard, seed=1), loss=F.mse_loss)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1 if hard else 0.002, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, STEPS // 2, 0.1)
        self.grower.follow(self.optimizer)
        self.done = 0

    def train(self, to: int = STEPS) -> "Loop":
        for step in range(self.done, to):
            torch.manual_seed(step)
            self.grower.step(step=step)
            self.take_steps([self.data[step]])
            self.schedule.step()
        self.done = to
        return self

    def take_steps(self, data: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in data:
            self.optimizer.zero_grad()
            F.mse_loss(self.network(x), y).backward()
            self.optimizer.step()

    def saved(self) -> dict[str, Any]:
        parts = (self.network, self.optimizer, self.schedule, self.grower)
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(self, saved: Any, done: int) -> "Loop":
        for part, state in zip((self.network, self.optimizer, self.schedule, self.grower), saved, strict=True):
            # torch's optimizers keep references to the tensors that they load.
            part.load_state_dict(copy.deepcopy(state))
        self.done = done
        return self


def same(one: Any, other: Any) -> bool:
    a, b = (torch.nn.utils.parameters_to_vector(loop.network.parameters()) for loop in (one, other))
    return torch.equal(a, b)


@pytest.fixture(scope="module", params=[True, False], ids=["hard", "easy"])
def trained(request: pytest.FixtureRequest) -> tuple[bool, Loop, dict[int, Any]]:
    """Whether the task is hard, a complete run, and checkpoints of it by step."""
    loop, saved = Loop(request.param), {}
    for moment in (MOMENT, MOMENT + 1):
        saved[moment] = loop.train(moment).saved()
    return request.param, loop.train(), saved


def at_branch(hard: bool, saved: dict[int, Any]) -> Loop:
    """A loop just before the branch."""
    return Loop(hard).load(saved[MOMENT], MOMENT)


def test_the_better_network_trains_on_and_the_receipt_says_why(trained: tuple[bool, Loop, Any]) -> None:
    hard, loop, _ = trained
    decision = loop.trigger.decision
    assert decision is not None and decision["grown"] is hard
    assert decision["gap"] == pytest.approx(decision["loss_continued"] - decision["loss_grown"])
    assert (decision["gap"] > decision["gap_error"]) is hard
    assert loop.network[0].out_features == (24 if hard else 12)
    assert 0 < decision["odds"] < 1 and decision["paid"] > 0
    assert [event.notes.get("controller") for event in loop.grower.events] == [decision] * hard
    assert loop.grower.auxiliary_flops == loop.trigger.auxiliary_passes[0]["auxiliary_flops"] > 0
    # Both branches used equal FLOPs, up to a step.
    steps, grown = decision["steps"]
    assert steps == 36 and grown == (6 if hard else 18)


def test_a_resumed_run_ends_as_the_uninterrupted_one(trained: tuple[bool, Loop, Any]) -> None:
    hard, uninterrupted, saved = trained
    for moment, state in saved.items():
        assert same(Loop(hard).load(state, moment).train(), uninterrupted)


def test_the_winner_is_what_its_branch_trained(trained: tuple[bool, Loop, Any]) -> None:
    """Compare with continuing or growing by hand at the branch, and training on the branch's batches."""
    hard, loop, saved = trained
    steps = loop.trigger.decision["steps"][hard]
    after, by_hand = at_branch(hard, saved), at_branch(hard, saved)
    torch.manual_seed(5)
    after.grower.step(step=MOMENT)
    by_hand.trigger.next = lambda grower: (  # type: ignore[method-assign]
        grower.graph.full_widths if hard and not grower.events else None
    )
    by_hand.grower.step(step=MOMENT)
    torch.manual_seed(5)
    by_hand.take_steps(batches(loop.trigger.decision["steps"][0] + 8, hard, seed=1)[:steps])
    assert same(by_hand, after)


def test_a_declined_event_leaves_the_loops_objects_and_draws(trained: tuple[bool, Loop, Any]) -> None:
    hard, _, saved = trained
    loop = at_branch(hard, saved)
    before, group = dict(loop.network.named_parameters()), loop.optimizer.param_groups[0]["lr"]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    events, mode = loop.grower.step(step=MOMENT), loop.network.training
    assert torch.equal(torch.rand(3), expected) or hard
    assert loop.optimizer.param_groups[0]["lr"] == group and mode
    kept = [before[name] is parameter for name, parameter in loop.network.named_parameters()]
    assert all(kept) is not hard and bool(events) is hard
    assert loop.grower.step(step=MOMENT) == [] and loop.network[0].out_features == (24 if hard else 12)


def test_an_error_in_a_branch_leaves_everything_as_it_was(trained: tuple[bool, Loop, Any]) -> None:
    hard, uninterrupted, states = trained
    loop, calls_left = at_branch(hard, states), [0]

    def failing_loss(output: Tensor, target: Tensor) -> Tensor:
        calls_left[0] -= 1
        if not calls_left[0]:
            raise RuntimeError("no more")
        return F.mse_loss(output, target)

    saved, good = loop.saved(), loop.grower.training.loss
    # In the smaller network's branch, and in the grown one's.
    for calls_left[0] in (4, 20):
        loop.grower.provide(loss=failing_loss)
        with pytest.raises(RuntimeError, match="no more"):
            loop.grower.step(step=MOMENT)
        assert not differing(saved[0], loop.saved()[0])
        assert loop.trigger.decision is None and not loop.grower.events
    loop.grower.provide(loss=good)
    assert same(loop.train(), uninterrupted)


# Not an attribute of the part, because those are restored when growth is undone.
CALLS: list[str] = []


class Counting(Part):
    """Records calls of its hooks around steps."""

    def before_step(self, grower: Any) -> None:
        CALLS.append("before_step")

    def before_update(self, grower: Any, optimizer: Any) -> None:
        CALLS.append("before_update")

    def after_step(self, grower: Any) -> None:
        CALLS.append("after_step")


def test_parts_act_once_around_each_step_of_a_branch() -> None:
    CALLS.clear()
    network, data = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)), batches(1, True)
    trigger = Controller(0.5, total_steps=400, min_odds=0.0)
    grower = Grower(network, data[0][0], trigger=trigger, parts=[Counting()], verbose=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    grower.follow(optimizer)
    grower.provide(batches=lambda number: data * number, loss=F.mse_loss)
    grower.step(step=140)
    assert trigger.decision is not None and sum(trigger.decision["steps"]) > 8
    expected = ["before_update", "before_step", "after_step"] * sum(trigger.decision["steps"])
    assert expected == CALLS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Controller(at=0.1), "at=0.1 of a Controller must be from"),
        (lambda: Controller(branch=0.1), "branch=0.1 of a Controller must be"),
        (lambda: Controller(batches=1), "batches must be at least 2, not 1"),
        (lambda: Controller(max_steps=3.5), "max_steps must be an integer, not 3.5"),
        (lambda: Controller(total_steps=0), "total_steps must be at least 1, not 0"),
        (lambda: Controller(at="0.3"), "at must be"),
        (lambda: Controller(width=2), "a width of 2 must be a fraction"),
    ],
)
def test_controller_rejects_invalid_arguments(make: Callable[[], Controller], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("setting", "steps"),
    [({"branch": 0.002}, 0), ({"branch": 0.01}, 12), ({"min_odds": 1.0}, 36)],
    ids=["no branch", "only the smaller one's", "odds"],
)
def test_where_nothing_is_compared_the_smaller_network_trains_on_at_no_cost(setting: Any, steps: int) -> None:
    loop = Loop(True)
    vars(loop.trigger).update(setting)
    decision = loop.train(MOMENT + 20).trigger.decision
    assert decision is not None and not decision["grown"] and decision["gap"] is None
    assert decision["steps"] == [steps, 0] and decision["paid"] == steps / STEPS
    assert loop.network[0].out_features == 4 and not loop.grower.events
    # By hand: train on the branch's batches, and then on the loop's.
    by_hand = Loop(True)
    by_hand.trigger.next = lambda grower: None  # type: ignore[method-assign]
    by_hand.train(MOMENT)
    torch.manual_seed(MOMENT)
    by_hand.take_steps(batches(steps + 8, True, seed=1)[:steps])
    assert same(by_hand.train(MOMENT + 20), loop)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


class Batch(UserDict[str, Tensor]):
    """A batch like those of transformers' collators, which is no pytree of torch."""

    def to(self, device: Any) -> "Batch":
        return Batch({name: tensor.to(device).clone() for name, tensor in self.items()}, moved=torch.ones(1))


def test_odds_of_language_models_are_those_of_their_tokens() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 11))
    ids = Batch(attention_mask=torch.ones(4, 6).long(), input_ids=torch.randint(0, 11, (4, 6)))
    full, full_flops = count(network), forward_flops(network, (ids["input_ids"],))
    trigger = Controller(0.5, total_steps=400, branch=0.03)
    grower = Grower(network, ids["input_ids"], method=PairGrowth(), trigger=trigger, verbose=False)
    smaller, flops = count(network), forward_flops(network, (ids["input_ids"],))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    grower.follow(optimizer)
    moved = list[bool]()

    def step_loss(batch: Batch) -> Tensor:
        moved.append("moved" in batch)
        return F.cross_entropy(network(batch["input_ids"]).flatten(0, 1), batch["input_ids"].flatten())

    grower.provide(batches=lambda number: [ids] * number, step_loss=step_loss)
    grower.step(step=140)
    decision = trigger.decision
    assert decision is not None and moved and all(moved)
    advice = advise(full, 400 * 4 * 6 * flops / full_flops, smaller=smaller)
    assert decision["odds"] == pytest.approx(advice.odds if advice.choice == "full" else 1 - advice.odds)


def test_missing_batches_or_steps_raise_an_error() -> None:
    loop = Loop(False)
    loop.grower.training = growlab.grower.triggers.Training()
    with pytest.raises(UserError, match="with the loop's batches and loss"):
        loop.train(to=2)  # Long before the branch.
    loop = Loop(False)
    loop.trigger.total_steps = None
    with pytest.raises(UserError, match="give it total_steps=N"):
        loop.train()


# Front ends --------------------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    """A module that logs, and casts batches in a transfer hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
        self.example_input_array = torch.zeros(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [column.float() for column in batch]

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.network(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(folder: Path, resume: Path | None = None) -> tuple[Module, Controller]:
    """Train for two epochs of 40 steps with a checkpoint after each."""
    trigger = Controller(0.5, at=0.25, branch=0.03, total_steps=270)
    module, growth = Module(), growlab.Growth("network", method=PairGrowth(), trigger=trigger, verbose=False)
    # All batches are equal, because Lightning repeats the epoch at whose end it is resumed.
    x, y = (column.repeat(40, 1).double() for column in batches(1, True)[0])
    saving = ModelCheckpoint(folder, save_on_train_epoch_end=True, save_top_k=-1)
    trainer = trainer_of(folder, growth, saving, max_epochs=-1, max_steps=80, enable_checkpointing=True)
    trainer.fit(module, DataLoader(TensorDataset(x, y), BATCH), ckpt_path=resume)
    return module, trigger


@pytest.mark.filterwarnings("ignore")
def test_in_lightning_the_modules_own_step_trains_the_branches_and_a_resumed_run_decides_the_same(
    tmp_path: Path,
) -> None:
    module, trigger = fit(tmp_path / "whole")
    assert trigger.decision is not None and trigger.decision["gap"] is not None
    assert module.network[0].out_features == (24 if trigger.decision["grown"] else 12)
    assert {"log", "log_dict"}.isdisjoint(vars(module))
    # The branch comes after 68 steps.
    resumed, again = fit(tmp_path / "resumed", tmp_path / "whole" / "epoch=0-step=40.ckpt")
    assert same(resumed, module) and again.decision == trigger.decision
