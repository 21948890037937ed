"""Input features and classes that arrive: new columns of the first layers, new rows of the last layer."""

import copy
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from growlab import Grower, growth
from growlab.base.errors import UserError
from growlab.frontends.lightning import Growth
from growlab.grower.network import METHODS
from growlab.grower.part import open_channels
from growlab.grower.triggers import Never
from growlab.growth import GradMax, HyperCloning, Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.lab.networks import MLP
from growlab.parts import Averages, Classes, Features
from growlab.parts.classes import CLASSES, sort_classes, with_classes
from growlab.parts.features import FEATURES
from growlab.widths import WidthGraph, trace
from tests.cases import Around, differing, train
from tests.unit.frontends.lightning_runs import Validated, trainer_of

EXACT = 1e-13
COUNTS, STAGES = [4, 7, 10], {0: 0.25, 1: 0.5, 2: 1.0}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


class Readers(nn.Module):
    """The input is normalised, gated, added to a layer's output, appended to another, and read by several layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", torch.randn(10))
        self.scale, self.norm = nn.Parameter(torch.rand(10)), nn.BatchNorm1d(10)
        self.down, self.up, self.gate = nn.Linear(10, 12), nn.Linear(12, 10), nn.Linear(10, 10)
        self.hidden, self.last = nn.Linear(22, 6), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x - self.mean) * self.scale
        h = self.down(x).relu()
        x = (x + self.up(h)) * torch.sigmoid(self.gate(x))
        return self.last(torch.cat([x, self.hidden(torch.cat([h, x], 1)).relu()], 1))


def channels() -> nn.Module:
    """Convolutions of image channels, one of them depthwise, and a flattened skip connection."""
    torch.manual_seed(0)
    return Around(
        lambda net, x: net.last(net.norm(net.conv(net.each(x))).relu().mean((2, 3)) + net.skip(x.flatten(1))),
        **{"each": nn.Conv2d(10, 10, 3, padding=1, groups=10), "conv": nn.Conv2d(10, 8, 3, padding=1)},
        **{"norm": nn.BatchNorm2d(8), "skip": [10 * 16, 8], "last": [8, 3]},
    )


def normed() -> nn.Module:
    """Weight normalisation of the layer that reads the input."""
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(10, 12)), nn.ReLU(), nn.Linear(12, 3))


class Sequences(nn.Module):
    """A time series, as steps [B, T, F] or as a signal [B, F, T]."""

    def __init__(self, of_signal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_signal, self.last = of_signal, nn.Linear(12, 3)
        self.first = nn.Conv1d(10, 12, 3) if of_signal else nn.LSTM(10, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu().mean(2) if self.of_signal else self.first(x)[0][:, -1])


class Fusion(nn.Module):
    """Another input is embedded before the features are appended to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.last = nn.Linear(5, 8), nn.Linear(18, 8), nn.Linear(8, 3)

    def forward(self, given: Tensor, *, late: Tensor) -> Tensor:
        return self.last(self.hidden(torch.cat([self.embed(given).relu(), late], 1)).relu())


def columns(seed: int = 1, shape: tuple[int, ...] = (8, 10)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


# A network, its input, and settings of the part.
NETWORKS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mlp": (mlp, columns(), {}),
    "readers": (Readers, columns(), {}),
    "channels": (channels, columns(shape=(4, 10, 4, 4)), {}),
    "normed": (normed, columns(), {}),
    "steps": (lambda: Sequences(False), columns(shape=(4, 5, 10)), {}),
    "signal": (lambda: Sequences(True), columns(shape=(4, 10, 5)), {"dim": 1}),
    "fusion": (Fusion, {"given": columns(shape=(8, 5)), "late": columns()}, {"argument": "late"}),
}


def first(inputs: Any, count: int, settings: dict[str, Any]) -> Any:
    """The first `count` features of a batch."""
    if isinstance(inputs, dict):
        return {**inputs, "late": inputs["late"][:, :count]}
    dim = settings.get("dim", 1 if inputs.dim() == 4 else -1)
    return inputs.narrow(dim, 0, count)


def called(network: nn.Module, inputs: Any) -> Tensor:
    output: Tensor = network(**inputs) if isinstance(inputs, dict) else network(inputs)
    return output


def error(before: Tensor, after: Tensor) -> float:
    return relative_error(before.detach(), after.detach())


class Loop:
    """A plain training loop on one batch, with steps and moments as a checkpoint has them."""

    def __init__(self, name: str = "mlp", trigger: Any = None, parts: Any = (), **settings: Any) -> None:
        make, self.inputs, of_part = NETWORKS[name]
        self.part, self.of_part = Features(COUNTS, **of_part, **settings.pop("part", {})), of_part
        self.network = make().double()
        self.grower = Grower(
            self.network,
            self.inputs,
            trigger=STAGES if trigger is None else trigger,
            parts=[self.part, *parts],
            verbose=False,
            **{"method": PairGrowth(), "anneal_steps": 0, **settings},
        )
        self.optimizer = torch.optim.AdamW(self.network.parameters(), 0.01)
        self.grower.follow(self.optimizer, state="inherit")

    def train(self, until: int, since: int = 0, arrived_alone: bool = False) -> "Loop":
        for step in range(since, until):
            self.grower.step(epoch=step // 2, step=step)
            inputs = self.inputs
            if arrived_alone:
                inputs = first(inputs, self.grower.state.widths[FEATURES], self.of_part)
            self.optimizer.zero_grad()
            output = called(self.network, inputs)
            F.cross_entropy(output, torch.arange(len(output)) % 3).backward()
            self.optimizer.step()
        return self

    def everything(self) -> list[Any]:
        moments = [v for entry in self.optimizer.state_dict()["state"].values() for v in entry.values()]
        tensors = [*self.network.state_dict().values(), *(torch.as_tensor(m) for m in moments)]
        return [*(t.tolist() for t in tensors), [event.widths_after for event in self.grower.events]]


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_do_not_depend_on_features_that_have_just_arrived(name: str) -> None:
    loop = Loop(name).train(2)
    _, inputs, settings = NETWORKS[name]
    for epoch, (before, after) in enumerate(pairwise(COUNTS), start=1):
        early = first(inputs, before, settings)
        expected = called(loop.network.eval(), early)
        # Features that have not arrived are not read.
        assert torch.equal(called(loop.network, inputs), expected)
        (event,) = loop.grower.step(epoch=epoch, step=2 * epoch)
        assert event.widths_before[FEATURES] == before and event.widths_after[FEATURES] == after
        assert event.parity_error_eval < EXACT and event.as_dict()["features_output_change"] < EXACT
        there = first(inputs, after, settings)
        assert error(expected, called(loop.network, there)) < EXACT
        for value in (0.0, 1e3):
            others = copy.deepcopy(there)
            new = others["late"] if isinstance(others, dict) else others
            new.narrow(settings.get("dim", 1 if new.dim() == 4 else -1), before, after - before).mul_(value)
            # Batch normalisation divides by the roots of its new variances.
            assert error(expected, called(loop.network, others)) < 1e3 * EXACT
        loop.network.train()
        loop.train(2 * epoch + 2, 2 * epoch, arrived_alone=True)
    expected = called(loop.network.eval(), inputs)
    plain = loop.grower.finish()
    assert not plain._forward_pre_hooks and error(expected, called(plain, inputs)) < EXACT
    fresh = NETWORKS[name][0]().double()
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(called(fresh.eval(), inputs), called(plain, inputs))


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"none"}))
@pytest.mark.parametrize("name", ["readers", "channels"])
def test_features_arrive_with_any_method(method: str, name: str) -> None:
    chosen: Any = growth.Tiny(fallback="pairs") if method == "tiny" else method
    loop = Loop(name, method=chosen)
    loop.grower.provide(lambda number: [(loop.inputs, torch.arange(len(loop.inputs)) % 3)] * number, F.cross_entropy)
    loop.train(6)
    assert [event.widths_after[FEATURES] for event in loop.grower.events] == COUNTS[1:]
    assert all(event.notes["features_output_change"] < EXACT for event in loop.grower.events)
    loop.grower.anneal(1.0)
    expected = evaluate(loop.network, (loop.inputs,))
    assert error(expected, evaluate(loop.grower.finish(), (loop.inputs,))) < EXACT


def test_new_columns_are_newborn_and_have_their_own_age() -> None:
    loop = Loop("readers").train(4)
    new, state = loop.grower.newborn(), loop.grower.state
    assert state.births[FEATURES] == [0] * 4 + [1] * 3
    mask = new.masks["down.weight"]
    assert mask.shape == loop.network.down.weight.shape and bool(mask[:, 4:].all())
    assert not mask[: state.births["down"].count(0), :4].any()
    assert new.masks["norm.weight"].tolist() == [False] * 4 + [True] * 3
    assert torch.equal(loop.grower.regions()["down.weight"].columns_I, torch.tensor([0] * 4 + [1] * 3))


def test_frozen_layers_get_zero_columns_too() -> None:
    network = mlp().double()
    network[0].requires_grad_(False)
    parts = [Features([4, 10])]
    grower = Grower(network, columns(), method=PairGrowth(), trigger={0: 0.5, 1: 1.0}, parts=parts, verbose=False)
    expected = network(columns()).detach()
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval < EXACT and event["features_output_change"] < EXACT
    assert error(expected, network(columns()) * grower.state.output_factor) < EXACT
    assert not network[0].weight[:, 4:].any() and not network[0].weight.requires_grad


@pytest.mark.parametrize("normed", [False, True])
def test_drawn_columns_have_the_spread_of_the_others(normed: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(400, 200), nn.ReLU(), nn.Linear(200, 3)).double()
    if normed:
        nn.utils.parametrizations.weight_norm(network[0])
    x = columns(shape=(8, 400))
    parts = [Features([100, 400], columns="drawn")]
    grower = Grower(network, x, method=PairGrowth(), trigger={0: 1.0, 1: 1.0}, parts=parts, verbose=False)
    old = network[0].weight.detach().clone()
    (event,) = grower.step(epoch=1)
    assert torch.allclose(network[0].weight[:, :100], old)
    assert 0.9 < network[0].weight[:, 100:].std() / (2 / 400) ** 0.5 < 1.1
    assert event.notes["features_output_change"] > 0.1


def test_buffers_of_the_data_are_those_of_the_full_network() -> None:
    loop = Loop("readers")
    mean = Readers().double().mean
    for epoch, count in enumerate(COUNTS):
        loop.grower.step(epoch=epoch)
        assert torch.equal(loop.network.mean, mean[:count])


def test_classes_arrive_with_features() -> None:
    loop = Loop("readers", parts=[Classes([2, 0, 1], lambda number: [1, 2, 3])])
    for epoch, counts in enumerate(zip(COUNTS, (1, 2, 3), strict=True)):
        loop.grower.step(epoch=epoch)
        assert (loop.network.down.in_features, loop.network.last.out_features) == counts
    assert all(event.notes["features_output_change"] < EXACT for event in loop.grower.events)


def test_widths_may_stay_while_features_arrive() -> None:
    loop = Loop(trigger={0: 1.0, 1: 1.0, 2: 1.0}).train(6)
    assert [event.num_params - event.num_params_before for event in loop.grower.events] == [36, 36]


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_resumed_run_is_the_uninterrupted_one(at: int) -> None:
    def loop() -> Loop:
        return Loop("readers", parts=[Averages(0.9)], method=HyperCloning(noise_std=0.1))

    uninterrupted, first, resumed = loop().train(6), loop().train(at), loop()
    saved = io.BytesIO()
    torch.save([one.state_dict() for one in (first.network, first.optimizer, first.grower)], saved)
    states = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    for one, state in zip((resumed.network, resumed.optimizer, resumed.grower), states, strict=True):
        one.load_state_dict(state)
    assert resumed.train(6, at).everything() == uninterrupted.everything()
    assert not differing(*(one.grower.copies()["ema"].state_dict() for one in (uninterrupted, resumed)))


def test_a_finished_network_that_loads_an_early_checkpoint_takes_the_first_features_again() -> None:
    loop = Loop()
    early = copy.deepcopy([loop.network.state_dict(), loop.grower.state_dict()])
    expected = called(loop.network, loop.inputs)
    loop.train(6).grower.finish()
    loop.grower.reattach_hooks()
    loop.network.load_state_dict(early[0])
    loop.grower.load_state_dict(early[1])
    assert torch.equal(called(loop.network, loop.inputs), expected)


def test_copies_and_compiled_networks_take_the_first_features_too() -> None:
    loop = Loop(parts=[Averages(0.9)]).train(2)
    twin = copy.deepcopy(loop.grower)
    average = torch.optim.swa_utils.AveragedModel(loop.network)
    loop.grower.follow(average)
    for network in (loop.network, twin.network, average, loop.grower.copies()["ema"]):
        network(loop.inputs)
    loop.grower.step(epoch=1)
    assert called(loop.network, loop.inputs).shape == called(average, loop.inputs).shape
    assert twin.network[0].in_features == 4 and average.module[0].in_features == 7
    torch.compiler.reset()
    compiled = torch.compile(loop.network, backend="eager", fullgraph=True)
    for epoch in (1, 2):
        loop.grower.step(epoch=epoch)
        assert torch.equal(compiled(loop.inputs), called(loop.network, loop.inputs))
    torch.compiler.reset()


def test_a_plain_state_dict_is_available_during_training() -> None:
    loop = Loop(method=Net2Net(noise_std=0.1)).train(6)
    fresh = mlp().double()
    fresh.load_state_dict(loop.grower.plain_state_dict(), strict=True)
    assert error(called(loop.network, loop.inputs), called(fresh, loop.inputs)) < EXACT


@pytest.mark.parametrize("trigger", [None, {0: "small", 1: 1.0}], ids=str)
def test_a_trained_network_gets_more_features(trigger: Any) -> None:
    torch.manual_seed(1)
    small = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    optimizer, x, wide = torch.optim.AdamW(small.parameters(), 0.01), columns(), mlp().double()
    train(small, optimizer, x[:, :4], torch.arange(8) % 3, steps=3)
    moments = optimizer.state[small[0].weight]["exp_avg"].clone()
    expected = small(x[:, :4])
    grower = Grower.from_trained(
        *(small, wide, x), optimizer=optimizer, trigger=trigger, parts=[Features([4, 10])], verbose=False
    )
    assert error(expected, wide(x)) < EXACT
    (event,) = grower.step(epoch=1)
    assert event.widths_after[FEATURES] == 10 and event.notes["features_output_change"] < EXACT
    new = optimizer.state[wide[0].weight]["exp_avg"]
    # HyperCloning halves the gradients of copies' outputs, and new columns have none.
    assert torch.allclose(new[:6, :4], moments / 2) and not new[:, 4:].any()
    with pytest.raises(UserError, match="begins with 5 channels of 'input features', and the trained network has 4"):
        Grower.from_trained(small, mlp().double(), x, parts=[Features([5, 10])], verbose=False)


class Late(torch.utils.data.Dataset[Any]):
    """Data of an epoch in which later features have not arrived."""

    def __init__(self) -> None:
        self.count = COUNTS[0]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return columns(index, (10,)).float()[: self.count], index % 3


class Arrive(lightning.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.train_dataloader.dataset.count = COUNTS[trainer.current_epoch]


def growing(**more: Any) -> dict[str, Any]:
    return {"method": PairGrowth(), "trigger": STAGES, "parts": [Features(COUNTS)], "anneal_steps": 0, **more}


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You defined a `validation_step`")
def test_lightning_trains_evaluates_and_resumes_while_features_arrive(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(columns().float(), torch.arange(8) % 3), 4)
    modules = [Validated() for _ in range(4)]
    for each in modules:
        each.network = mlp()
    module, other, again, late = modules
    callback = Growth(**growing())
    trainer = trainer_of(tmp_path, callback, max_epochs=3)
    # A network that is only evaluated has all features.
    trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader, loader)
    assert [event.widths_after[FEATURES] for event in callback.events] == COUNTS[1:]
    first_half = trainer_of(tmp_path, Growth(**growing()), max_epochs=1)
    first_half.fit(other, loader, loader)
    assert other.network[0].in_features == COUNTS[0]
    first_half.save_checkpoint(tmp_path / "early.ckpt")
    # Continue with the same trainer, and from the file with a new one.
    first_half.fit_loop.max_epochs = 3
    first_half.fit(other, loader, loader)
    assert other.network[0].in_features == COUNTS[-1]
    resumed = trainer_of(tmp_path, Growth(**growing()), max_epochs=3)
    resumed.fit(again, loader, loader, ckpt_path=tmp_path / "early.ckpt")
    assert not differing(module.state_dict(), again.state_dict())
    # The loader has no later features yet; the example has.
    callbacks = (Growth(**growing(example=columns().float())), Arrive())
    trainer_of(tmp_path, *callbacks, max_epochs=3, limit_val_batches=0).fit(late, DataLoader(Late(), 4))
    assert late.network[0].in_features == COUNTS[-1]


def test_the_trainer_saves_plain_models_while_features_arrive(tmp_path: Path) -> None:
    from growlab.frontends.transformers import Growth as GrowthInTrainer
    from tests.unit.frontends import trainer_runs

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp()

        def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.network(values)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    data = [{"values": columns(n, (10,)).float(), "labels": n % 3} for n in range(8)]
    settings = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "save_strategy": "epoch"}

    def run(resume: Path | None = None) -> tuple[Any, Any]:
        example = {"values": columns().float(), "labels": torch.arange(8) % 3}
        callback = GrowthInTrainer(**growing(example=example))
        trainer = trainer_runs.trained(tmp_path, Model(), data, callback, resume=resume, **settings)
        return trainer.model, callback

    model, callback = run()
    assert [event.widths_after[FEATURES] for event in callback.events] == COUNTS[1:]
    resumed, _ = run(tmp_path / "checkpoint-2")
    assert not differing(model.state_dict(), resumed.state_dict())


# What cannot arrive -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("also", "reason"),
    [
        (lambda own, x: own.network(own.norm(x)), "norm normalises over them"),
        (lambda own, x: own.network(x) * x.mean(1, keepdim=True), "reduced by mean"),
        (lambda own, x: own.network(x.softmax(1)), "softmax runs over these channels"),
        (lambda own, x: own.network(x) * x[:, :1], "the code distinguishes some of them"),
        (lambda own, x: own.network(x) * x.shape[1], "the code computes something else at narrow widths"),
    ],
    ids=["norm", "mean", "softmax", "first", "number"],
)
def test_features_used_by_more_than_weights_raise_an_error(also: Any, reason: str) -> None:
    network = Around(also, network=mlp(), norm=nn.LayerNorm(10))
    with pytest.raises(UserError) as raised:
        Grower(network, columns().float(), trigger=STAGES, parts=[Features(COUNTS)])
    message = "the features of this network's input cannot arrive in stages: "
    assert str(raised.value).startswith(message + reason)


@pytest.mark.parametrize(
    "counts",
    [[4, 10], [4, 3, 10], [0, 4, 10], [4, 7, 11], [True, 7, 10], lambda stages: [10] * (stages - 1), lambda _: 4],
)
def test_features_rejects_invalid_counts(counts: Any) -> None:
    with pytest.raises(UserError, match="counts must give 3 ascending numbers of features from 1 to 10"):
        Grower(mlp(), columns().float(), trigger=STAGES, parts=[Features(counts)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 3}, r"dim=3 is not a feature dimension of an input of shape \[8, 10\]"),
        ({"dim": 0}, r"dim=0 is not a feature dimension"),
        ({"dim": "x"}, "dim must be an integer, not 'x'"),
        ({"argument": "y"}, r"no floating-point tensor named 'y': \[8, 10\]"),
        ({}, "the example has no floating-point tensor"),
    ],
)
def test_unsupported_inputs_raise_errors(settings: dict[str, Any], message: str) -> None:
    embedding = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    network, x = (mlp(), columns().float()) if settings else (embedding, torch.arange(8))
    with pytest.raises(UserError, match=message):
        Grower(network, x, trigger=STAGES, parts=[Features(COUNTS, **settings)])


def test_a_batch_with_too_few_or_too_many_features_raises_an_error() -> None:
    loop = Loop()
    for count in (3, 11):
        with pytest.raises(UserError, match=rf"a batch has {count} features .* Sequential takes 4 of 10"):
            loop.network(columns(shape=(8, count)))


def test_a_network_that_does_not_grow_has_all_features() -> None:
    network = mlp()
    Grower(network, columns().float(), trigger=Never(), parts=[Features(COUNTS)])
    assert network[0].in_features == 10


GROWING = [PairGrowth(), Net2Net(), VarianceTransfer(noise_std=0.0)]


def planted(method, classes: int) -> tuple[nn.Module, WidthGraph, object]:
    torch.manual_seed(0)
    network = MLP(20, [12, 8], 10, batch_norm=True).double()
    graph = with_classes(trace(network, torch.randn(2, 20).double()), 10)
    widths = {name: 4 for name in graph.groups} | {CLASSES: classes}
    return network, graph, make_seed(network, graph, method, widths, 0)


@pytest.mark.parametrize("method", GROWING, ids=lambda m: m.name)
def test_old_logits_stay_and_new_rows_are_drawn(method) -> None:
    network, graph, state = planted(method, 3)
    x = torch.randn(16, 20).double()
    before = network.eval()(x)
    assert before.shape == (16, 3)
    wider = {**graph.full_widths, CLASSES: 3}
    event = grow(network, graph, method, state, wider, 0, (x,))
    factor = event.output_factor
    replaced = open_channels(network, graph, method, state, CLASSES, 7, 0)
    after = network.eval()(x)
    assert after.shape == (16, 7) and torch.allclose(after[:, :3] * factor, before, rtol=1e-9, atol=1e-12)
    head = network.get_parameter(next(name for name in replaced if name.endswith("weight")))
    rows = head[3:]
    # New classes are not copies of others, and have the scale with which the method draws the head.
    assert torch.linalg.matrix_rank(rows) == 4
    expected = 1 / 8 if isinstance(method, VarianceTransfer) else 8**-0.5
    assert 0.5 * expected < rows.std() < 1.7 * expected
    assert state.widths[CLASSES] == 7 and state.births[CLASSES] == [0, 0, 0, 1, 1, 1, 1]
    assert {name for name, (_, new) in replaced.items() if new.shape[0] == 7} == set(replaced)


@pytest.mark.parametrize("method", [GradMax(steps=1), Net2Net()], ids=lambda m: m.name)
def test_classes_arrive_with_methods_that_use_data_or_copy_units(method) -> None:
    """Net2Net maps every channel's optimizer state, including that of known classes."""

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(step)
        return torch.randn(8, 20, generator=source), torch.randint(4, (8,), generator=source)

    torch.manual_seed(0)
    network, order = MLP(20, [12, 8], 10, batch_norm=True), torch.randperm(10).tolist()
    part = Classes(order, lambda stages: [4, 7, 10][:stages])
    trigger = {0: 0.5, 1: 0.75, 2: 1.0}
    grower = Grower(network, batch(0)[0], method=method, trigger=trigger, parts=[part])
    grower.provide(lambda number: [batch(n) for n in range(number)], F.cross_entropy)
    optimizer = torch.optim.AdamW(network.parameters(), 0.01)
    grower.follow(optimizer, state="inherit")
    for step in range(6):
        grower.step(epoch=step // 2)
        x, y = batch(step)
        # `targets` maps labels of the classes that have arrived to the network's rows.
        train(network, optimizer, x, grower.targets(torch.tensor(order)[y]))
    events = grower.events
    assert [event.widths_after["classes"] for event in events] == [7, 10]
    assert all(event.parity_error_eval <= event.parity_tolerance_eval for event in events)
    x = batch(9)[0]
    before = network.eval()(x)
    assert torch.allclose(grower.finish().eval()(x)[:, order], before, rtol=1e-5, atol=1e-6)


def test_rows_are_sorted_by_label() -> None:
    network, graph, _ = planted(PairGrowth(), 10)
    x = torch.randn(5, 20).double()
    before, order = network.eval()(x), torch.randperm(10).tolist()
    sort_classes(network, graph, order)
    assert torch.allclose(network(x)[:, order], before, rtol=1e-12, atol=1e-13)


def test_a_head_that_is_no_layer_does_not_grow() -> None:
    two = Around(lambda net, x: net.one(h := net.body(x).relu()) + net.other(h), body=[6, 8], one=[8, 4], other=[8, 4])
    graph = trace(two, torch.randn(2, 6))
    assert with_classes(graph, 4) is None and with_classes(trace(two.body, torch.randn(2, 6)), 4) is None
