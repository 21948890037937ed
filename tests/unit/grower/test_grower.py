"""Grower in a plain loop: optimizers, checkpoints, copies, averages, parts and distributed training."""

import copy
import gc
import io
import itertools
import logging
import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

import growlab.growth
from growlab.base import ranks
from growlab.base.errors import UserError
from growlab.grower import Grower, renew
from growlab.grower.network import METHODS
from growlab.grower.triggers import At, ByMethod, Clock, Demand, GradientNorm, Never, OnDemand, Plateau, Trigger
from growlab.growth import GradMax, Net2Net, PairGrowth, VarianceTransfer, finish, grow, make_schedule, make_seed
from growlab.optim import SGD, NormRatio, follow, weight_regions
from growlab.parts import Averages, Hyperfan, Part
from growlab.widths import trace
from tests.cases import Around, differing, tracked, train
from tests.command_line import ROOT, CommandLine

STEPS, EPOCHS = 3, 4
STAGES = {0: 0.5, 1: 0.75, 3: 1.0}
PROBE = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))


def normed() -> nn.Sequential:
    """Layer normalisation over channels that grow."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    )


def recurrent() -> nn.Module:
    """An LSTM over sequences of three steps of two features."""
    torch.manual_seed(0)
    return Around(
        lambda net, x: net.last(net.norm(net.rnn(net.inside(x.unflatten(1, (3, 2))))[0]).mean(1)),
        **{"inside": [2, 6], "rnn": nn.LSTM(6, 8, num_layers=2, batch_first=True)},
        **{"norm": nn.LayerNorm(8), "last": [8, 3]},
    )


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=source).to(dtype), torch.randint(3, (8,), generator=source)


def two_groups(network: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], lr=0.01)


OPTIMIZERS = {
    "growlab": lambda n: SGD(n.parameters(), lr=0.1, momentum=0.9, rule=NormRatio()),
    "momentum": lambda n: torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9),
    "groups": two_groups,
}


class Loop:
    """A plain training loop with checkpoints: network, optimizer, learning-rate schedule, grower."""

    def __init__(self, make=OPTIMIZERS["growlab"], network=mlp, trigger=STAGES, **settings):
        self.network = network()
        settings = {"method": VarianceTransfer(noise_std=1e-3), "anneal_steps": 2, **settings}
        self.grower = Grower(self.network, PROBE, trigger=trigger, **settings)
        self.optimizer = make(self.network)
        self.rate = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.grower.follow(self.optimizer)
        self.done = 0

    def train(self, until: int = STEPS * EPOCHS) -> "Loop":
        while self.done < until:
            self.grower.step(epoch=self.done // STEPS, step=self.done)
            train(self.network, self.optimizer, *batch(self.done, next(self.network.parameters()).dtype))
            self.done += 1
            if self.done % STEPS == 0:
                self.rate.step()
        return self

    @property
    def parts(self):
        return {"network": self.network, "optimizer": self.optimizer, "rate": self.rate, "grower": self.grower}

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save({"done": self.done, **{n: part.state_dict() for n, part in self.parts.items()}}, file)
        file.seek(0)
        return file

    def resume(self, file: io.BytesIO, order=("network", "optimizer", "rate", "grower")) -> "Loop":
        content = torch.load(file, weights_only=True)
        for name in order:
            self.parts[name].load_state_dict(content[name])
        self.done = content["done"]
        return self

    def everything(self) -> list[object]:
        """The complete state of the run, comparable bit for bit."""
        state = self.optimizer.state_dict()
        moments = [v for entry in state["state"].values() for v in entry.values()]
        copies = [tensor for copy in self.grower.copies().values() for tensor in copy.state_dict().values()]
        tensors = [*self.network.state_dict().values(), *(torch.as_tensor(m) for m in moments), *copies]
        events = [{n: v for n, v in e.as_dict().items() if not n.startswith("seconds")} for e in self.grower.events]
        return [*(t.tolist() for t in tensors), state["param_groups"], events, self.grower.state.as_dict()]


def test_grower_equals_a_handwritten_loop_bit_for_bit() -> None:
    network, method = mlp(), VarianceTransfer(noise_std=1e-3)
    graph = trace(network, PROBE)
    schedule = make_schedule(EPOCHS, 8, epochs=[1, 2, 1], widths=[0.5, 0.75, 1.0])
    widths = schedule.widths(graph)
    state = make_seed(network, graph, method, widths[0], seed=0)
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9, rule=NormRatio())
    for step in range(STEPS * EPOCHS):
        if schedule.stage_at(step // STEPS) > state.stage:
            event = grow(network, graph, method, state, widths[state.stage + 1], seed=0, probe=(PROBE,))
            follow(optimizer, event.replaced, graph, event.widths_before, event.widths_after, carry=event.carry)
            regions = weight_regions(graph, state.births)
            optimizer.set_regions({p: regions[n] for n, p in network.named_parameters() if n in regions})
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(network(x) * state.output_factor, y).backward()
        optimizer.step()
        if step % (2 * STEPS) == 2 * STEPS - 1:
            optimizer.param_groups[0]["lr"] *= 0.5
    finish(network, graph, method, state)
    loop = Loop(trigger=schedule).train()
    loop.grower.finish()
    assert [e.stage for e in loop.grower.events] == [1, 2]
    assert not differing(network.state_dict(), loop.network.state_dict())


@pytest.mark.parametrize("network", [mlp, normed, recurrent])
def test_outputs_stay_the_same_at_events_and_after_finish(network) -> None:
    loop = Loop(network=network, method=VarianceTransfer())
    for epoch in range(EPOCHS):
        loop.train(epoch * STEPS)
        before = loop.network.eval()(PROBE)
        loop.grower.step(epoch=epoch)
        assert torch.allclose(loop.network(PROBE), before, atol=1e-5)
        loop.network.train()
    loop.train()
    outputs = loop.network.eval()(PROBE)
    # The plain state dict is that of the finished network, and taking it changes nothing.
    plain_state, state = loop.grower.plain_state_dict(), loop.grower.state.as_dict()
    assert torch.equal(loop.network(PROBE), outputs) and loop.grower.state.as_dict() == state
    assert loop.grower.finish() is loop.network
    plain = network().eval()
    plain.load_state_dict(copy.deepcopy(loop.network.state_dict()), strict=True)
    assert not differing(plain_state, plain.state_dict())
    assert torch.allclose(plain(PROBE), outputs, atol=1e-6)
    assert not loop.network._forward_hooks and not loop.network._load_state_dict_pre_hooks


@pytest.mark.parametrize(
    ("make", "first"),
    [(torch.optim.Adafactor, "Adafactor's 'row_var'"), (partial(torch.optim.LBFGS, max_iter=2), "LBFGS's 'd'")],
)
def test_state_that_cannot_be_carried_is_reset_with_a_warning(make, first, caplog) -> None:
    loop = Loop(lambda n: make(n.parameters()))

    def loss() -> Tensor:
        x, y = batch(loop.done)
        loop.optimizer.zero_grad()
        value = F.cross_entropy(loop.network(x), y)
        value.backward()
        return value

    with caplog.at_level(logging.WARNING):
        while loop.done < STEPS * EPOCHS:
            loop.grower.step(epoch=loop.done // STEPS)
            assert loop.optimizer.step(loss).isfinite()
            loop.done += 1
    warnings = [record.message for record in caplog.records if record.name == "growlab.optim.carry"]
    assert [message.startswith(first) for message in warnings] == [True] * len(loop.grower.events)


def hyperfan(sharing: str) -> Hyperfan:
    return Hyperfan(sharing=sharing, embedding_features=3, noise_std=1e-3)


@pytest.mark.parametrize(
    ("kind", "network", "method", "steps"),
    [
        ("growlab", mlp, partial(VarianceTransfer, noise_std=1e-3), (1, 5, 11)),
        ("momentum", mlp, partial(VarianceTransfer, noise_std=1e-3), (3, 9)),
        ("groups", normed, partial(VarianceTransfer, noise_std=1e-3), (2, 3, 4, 7, 10)),
        ("momentum", recurrent, partial(VarianceTransfer, noise_std=1e-3), (5,)),
        ("momentum", mlp, partial(hyperfan, "layer"), (2, STEPS + 1)),
        ("momentum", mlp, partial(hyperfan, "chunk"), (2, STEPS + 1)),
    ],
)
def test_a_run_resumed_at_any_step_equals_the_uninterrupted_one(kind, network, method, steps) -> None:
    """The tensors of an average are compared too."""

    def made() -> Loop:
        return Loop(OPTIMIZERS[kind], network, method=method(), parts=[Averages(decay=0.7)])

    uninterrupted = made()
    files = {step: uninterrupted.train(step).saved() for step in steps}
    expected = uninterrupted.train().everything()
    for step, file in files.items():
        assert made().resume(file).train().everything() == expected, step


@pytest.mark.parametrize("kind", ["groups", "factored"])
def test_parts_of_a_checkpoint_load_in_any_order(kind) -> None:
    """Saved in the middle of a stage, with weighted normalisations and an average."""
    # Adafactor keeps rows and columns instead of tensors of a weight's shape.
    make = OPTIMIZERS.get(kind, lambda network: torch.optim.Adafactor(network.parameters()))

    def made() -> Loop:
        loop = Loop(make, normed)
        loop.average = torch.optim.swa_utils.AveragedModel(loop.network)
        loop.grower.follow(loop.average)
        return loop

    uninterrupted = made().train(7)
    file, average = uninterrupted.saved(), copy.deepcopy(uninterrupted.average.state_dict())
    outputs = uninterrupted.average.eval()(PROBE)
    expected = uninterrupted.train().everything()
    orders = list(itertools.permutations(("network", "optimizer", "average", "grower")))
    for order in orders[kind == "groups" :: 4]:
        file.seek(0)
        resumed, content = made().train(1), torch.load(file, weights_only=True) | {"average": average}
        for name in (*order, "rate"):
            (resumed.average if name == "average" else resumed.parts[name]).load_state_dict(content[name])
        resumed.done = content["done"]
        assert torch.equal(resumed.average.eval()(PROBE), outputs)
        assert resumed.average.state_dict().keys() == average.keys()
        assert resumed.train().everything() == expected


@pytest.mark.parametrize("include", [True, False])
def test_an_average_that_also_contains_the_network_grows(include: bool) -> None:
    """As in ema-pytorch; the average may also have the network as a submodule."""
    loop = Loop(method=VarianceTransfer())
    shadow = Around(lambda net, x: net.ema_model(x), ema_model=copy.deepcopy(loop.network).requires_grad_(False))
    shadow.online_model = loop.network if include else [loop.network]
    shadow.register_buffer("step", torch.tensor(0))
    loop.grower.follow(shadow)
    loop.train(STEPS - 1)
    before = shadow.eval()(PROBE)
    loop.network.train()
    loop.grower.step(epoch=1)
    own, average = (dict(net.named_parameters()) for net in (loop.network, shadow.ema_model))
    assert {name: p.shape for name, p in average.items()} == {name: p.shape for name, p in own.items()}
    torch.testing.assert_close(shadow(PROBE), before, atol=1e-5, rtol=1e-4)
    assert "module0_parity_error_eval" in loop.grower.events[-1].notes


@pytest.mark.parametrize(("make", "optimizer_first"), [(OPTIMIZERS["growlab"], True), (OPTIMIZERS["groups"], False)])
def test_a_deep_copy_trains_independently(make, optimizer_first: bool) -> None:
    loop, first = Loop(make, normed).train(STEPS + 1), Loop(make, normed).train(STEPS + 1)
    loop.rate = first.rate = None
    names = ("optimizer", "grower", "network") if optimizer_first else ("network", "grower", "optimizer")
    twin = Loop(make, normed)
    copies = copy.deepcopy([getattr(loop, name) for name in names])
    vars(twin).update(zip(names, copies, strict=True))
    twin.done, twin.rate = loop.done, None
    gc.collect()
    untouched = loop.everything()
    for one in (twin, first):
        one.rate = torch.optim.lr_scheduler.StepLR(one.optimizer, 99)
        one.train()
    assert twin.everything() == first.everything() and loop.everything() == untouched
    # Loading into the copy does not change the original.
    twin.network.load_state_dict(Loop(make, normed).network.state_dict())
    assert twin.grower.state.stage == 0 and loop.everything() == untouched
    twin.grower.finish()
    assert loop.everything() == untouched


def test_a_state_dict_restores_widths_ages_and_multipliers() -> None:
    wide, narrow = Loop().train(), Loop()
    weight = narrow.network[3].weight
    narrow.network.load_state_dict(wide.network.state_dict(), strict=True)
    assert narrow.grower.state == wide.grower.state and narrow.grower.state.multipliers
    assert set(tracked(narrow.optimizer)) == {id(p) for p in narrow.network.parameters()}
    assert id(weight) not in tracked(narrow.optimizer)
    assert torch.equal(narrow.network.eval()(PROBE), wide.network.eval()(PROBE))
    # For plain tensors the trigger determines birth stages; a module around the network changes nothing.
    plain = {f"inner.{name}": tensor for name, tensor in wide.network.state_dict().items()}
    other = Loop()
    nn.ModuleDict({"inner": other.network}).load_state_dict(plain)
    assert other.grower.state.births == wide.grower.state.births and other.grower.state.stage == 2


def test_tensors_of_another_network_are_left_to_torch() -> None:
    loop = Loop()
    other = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(RuntimeError, match="size mismatch"):
        loop.network.load_state_dict(other.state_dict())
    with pytest.raises(UserError, match="another network"):
        Grower(normed()[:4], PROBE, method=PairGrowth(), trigger=Never()).load_state_dict(loop.grower.state_dict())


def test_copies_stay_as_they_are_while_the_network_grows() -> None:
    loop = Loop().train(5)
    best, outputs = copy.deepcopy(loop.network).eval(), loop.network.eval()(PROBE)
    loop.network.train()
    loop.train()
    assert torch.equal(best(PROBE), outputs)
    # A copy may load another stage, too.
    best.load_state_dict(loop.network.state_dict())
    assert torch.equal(best(PROBE), loop.network.eval()(PROBE))
    with io.BytesIO() as file:
        torch.save(loop.network, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(PROBE), best(PROBE))


def test_an_optimizer_from_before_the_seed_or_an_event_follows_or_is_noticed() -> None:
    network = mlp()
    early = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    grower = Grower(network, PROBE, method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    late = torch.optim.SGD(network.parameters(), lr=0.1)

    def refuse(optimizer: torch.optim.Optimizer) -> None:
        F.cross_entropy(network(batch(0)[0]), batch(0)[1]).backward()
        with pytest.raises(UserError, match=r"Grower.follow"):
            optimizer.step()

    grower.step(epoch=0)
    refuse(early)
    grower.follow(early)
    before = [p.clone() for p in network.parameters()]
    early.step()
    assert all(not torch.equal(p, old) for p, old in zip(network.parameters(), before, strict=True))
    grower.step(epoch=1)
    refuse(late)


def test_one_of_two_networks_grows_with_one_optimizer_for_both() -> None:
    """Like a generator and its discriminator."""
    generator, critic = mlp(), nn.Linear(3, 1)
    grower = Grower(generator, PROBE, method=PairGrowth(noise_std=1e-3), trigger={0: 0.5, 1: 1.0})
    optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1, momentum=0.9)
    grower.follow(optimizer)
    for step in range(2):
        momentum = [optimizer.state[p].get("momentum_buffer") for p in critic.parameters()]
        grower.step(epoch=step)
        for p, kept in zip(critic.parameters(), momentum, strict=True):
            assert optimizer.state[p].get("momentum_buffer") is kept
        optimizer.zero_grad()
        critic(generator(batch(step)[0])).mean().backward()
        optimizer.step()
    assert {id(p) for p in optimizer.state} == {id(p) for p in (*generator.parameters(), *critic.parameters())}


def test_gradient_scaling_and_clipping_work_across_events() -> None:
    loop, scaler = Loop(OPTIMIZERS["momentum"]), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        loop.grower.step(step=step, epoch=step // 3)
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(loop.network(batch(step)[0]), batch(step)[1])
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.network.parameters(), 1.0)
        before = loop.network[0].weight.clone()
        scaler.step(loop.optimizer)
        scaler.update()
        assert not torch.equal(loop.network[0].weight, before)
    assert len(loop.grower.events) == 1


@pytest.mark.parametrize("sparse", [False, True])
def test_accumulated_gradients_grow_with_the_network(sparse: bool) -> None:
    torch.manual_seed(0)
    first = nn.Embedding(11, 8, sparse=True) if sparse else nn.Linear(6, 8)
    network = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y = (torch.tensor([1, 4, 4, 9, 1, 0]), torch.arange(6) % 3) if sparse else (batch(0)[0].double(), batch(0)[1])
    grower = Grower(network, x, method=Net2Net(), trigger={0: 0.5, 1: 1.0})
    make = torch.optim.SparseAdam if sparse else torch.optim.SGD
    grower.follow(make(first.parameters(), lr=0.1), torch.optim.SGD(network[1:].parameters(), lr=0.1))
    F.cross_entropy(network(x), y).backward()
    grower.step(epoch=1)
    carried = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    F.cross_entropy(network(x), y).backward()
    for own, gradient in zip(network.parameters(), carried, strict=True):
        assert own.grad.layout == gradient.layout and own.grad.shape == gradient.shape == own.shape
        assert torch.allclose(own.grad.to_dense(), gradient.to_dense(), atol=1e-12)
    if sparse:
        assert torch.equal(carried[0].coalesce().indices(), first.weight.grad.coalesce().indices())


def test_hooks_of_parts_are_called_in_order() -> None:
    class Witness(Part):
        name = "witness"

        def __init__(self) -> None:
            self.calls: list[str] = []

        def before_growth(self, grower, widths):
            self.calls.append(f"before {grower.state.stage}")
            return {"seen": dict(widths)}

        def after_growth(self, grower, event):
            self.calls.append(f"after {grower.state.stage}")
            return {}

        def before_step(self, grower):
            self.calls.append("step")

        def after_step(self, grower):
            self.calls.append("stepped")

        def finish(self, grower):
            self.calls.append("finish")

    witness = Witness()
    loop = Loop(parts=[witness]).train(STEPS + 1)
    loop.grower.finish()
    assert witness.calls == [*["step", "stepped"] * STEPS, "before 0", "after 1", "step", "stepped", "finish"]
    assert loop.grower.events[0].notes["seen"] == loop.grower.events[0].widths_after


@pytest.mark.parametrize(
    ("trigger", "moments"),
    [
        (At({0: 0.5, 4: 1.0}, unit="step"), [{"step": 3}, {"step": 4}]),
        (At({0: 0.5, 0.3: 1.0}, unit="cost"), [{"cost": 0.29, "epoch": 9}, {"cost": 0.3}]),
        (At({0: {"0": 3, "3": 4}, 2: {"3": 8}, 3: 1.0}), [{"epoch": 0}, {"epoch": 2}]),
    ],
)
def test_triggers_count_epochs_steps_or_cost(trigger, moments) -> None:
    grower = Grower(mlp(), PROBE, method=PairGrowth(), trigger=trigger)
    assert [len(grower.step(**moment)) for moment in moments] == [0, 1]
    assert grower.step(**moments[-1]) == []
    assert grower.events[0].widths_after == trigger.forecast(grower.graph)[1]


def test_a_trigger_that_counts_epochs_is_not_asked_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    grower = Grower(mlp(), PROBE, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    asked, ask = [], grower.trigger.next
    monkeypatch.setattr(grower.trigger, "next", lambda run: asked.append(run.clock) or ask(run))
    for step in range(4):
        assert grower.step(epoch=0, step=step) == []
    assert (asked, grower.clock) == ([Clock(0, 0), Clock(0, 1)], Clock(0, 3))
    with pytest.raises(UserError, match="step 2 is before step 3"):
        grower.step(epoch=0, step=2)
    seed = grower.state_dict()
    assert len(grower.step(epoch=1, step=4)) == 1
    assert [grower.step(epoch=1, step=step) for step in (5, 6)] == [[], []]
    grower.load_state_dict({**seed, "clock": {"epoch": 1, "step": 5, "cost": 0.0}})
    assert len(grower.step(epoch=1, step=7)) == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_step_under_no_grad_or_inference_mode_grows_equally(mode) -> None:
    loop = Loop()
    loop.grower.step = mode()(loop.grower.step)
    assert loop.train().everything() == Loop().train().everything()


@pytest.mark.parametrize("network", [mlp, normed])
def test_a_network_loaded_and_finished_in_inference_mode_can_train(network) -> None:
    loop = Loop(network=network).train(2 * STEPS + 1)
    file, other = loop.saved(), Loop(network=network)
    with torch.inference_mode():
        other.resume(file, ["network"]).network.eval()(PROBE)
    other.network.train()
    file.seek(0)
    other.resume(file, ["optimizer", "rate", "grower"])
    assert other.train().everything() == loop.train().everything()
    with torch.inference_mode():
        other.grower.finish()
    loop.grower.finish()
    assert not differing(*(one.train(STEPS * EPOCHS + 2).network.state_dict() for one in (loop, other)))


def test_times_of_any_number_type_are_saved_as_plain_numbers(tmp_path: Path) -> None:
    grower = Loop().grower
    grower.step(epoch=np.int64(1), step=torch.tensor(3), cost=np.float32(0.5))
    torch.save(grower.state_dict(), tmp_path / "grower.pt")
    other = Loop().grower
    other.load_state_dict(torch.load(tmp_path / "grower.pt", weights_only=True))
    assert other.clock == Clock(1, 3, 0.5)


def test_inputs_in_containers_take_the_networks_precision() -> None:
    network = Around(lambda net, batch: {"logits": net.inner(batch["x"][0])}, inner=mlp()).double()
    grower = Grower(network, {"x": [PROBE]}, method=Net2Net(), trigger={0: 0.5, 1: 1.0})
    before = network({"x": [PROBE.double()]})["logits"]
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval <= 1e-12
    assert torch.allclose(network({"x": [PROBE.double()]})["logits"], before, rtol=0, atol=1e-12)


def test_frozen_layers_stay_frozen_and_keep_their_weights() -> None:
    network = mlp()
    network[0].requires_grad_(False)
    network[1].eval()
    grower = Grower(network, PROBE, method=VarianceTransfer(), trigger=STAGES)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.1)
    grower.follow(optimizer)
    seen = []
    for epoch in range(EPOCHS):
        grower.step(epoch=epoch)
        seen.append(network[0].weight.clone())
        train(network, optimizer, *batch(epoch))
        assert torch.equal(network[0].weight, seen[-1])
        assert [p.requires_grad for p in network.parameters()] == [False] * 2 + [True] * 6
        assert [module.training for module in network] == [True, False, *[True] * 4]
    grower.finish()
    for before, after in itertools.pairwise(seen):
        assert torch.equal(before, after[: len(before)])


@pytest.mark.parametrize(
    ("batches", "loss", "message"),
    [
        (None, F.cross_entropy, "provide"),
        ([], F.cross_entropy, "not a single batch"),
        ([PROBE], F.cross_entropy, "a tuple of inputs and a target, not a Tensor"),
        ([batch(0)], partial(F.cross_entropy, reduction="none"), r"a single number, .* not a tensor of shape \[8\]"),
    ],
)
def test_a_data_driven_method_without_data_raises_an_error_before_growth(batches, loss, message) -> None:
    loop = Loop(method=GradMax(fallback="pairs"), trigger={0: 0.5, 1: 1.0})
    before = loop.everything()
    if batches is not None:
        loop.grower.provide(lambda number: batches, loss)
    with pytest.raises(UserError, match=message):
        loop.grower.step(epoch=1)
    assert loop.grower.state.stage == 0 and loop.everything() == before
    loop.grower.provide(lambda number: [batch(n) for n in range(number)], F.cross_entropy)
    assert loop.grower.step(epoch=1)[0].parity_error_eval < 1e-5


def test_compiled_networks_are_recompiled_at_every_width() -> None:
    compiled: list[int] = []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    # More widths than the compiler's limit.
    loop = Loop(trigger={0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0})
    loop.network.compile(backend=backend, dynamic=False)
    seen = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for epoch in range(4):
            loop.grower.step(epoch=epoch)
            loop.network(batch(epoch)[0]).sum().backward()
            seen.append(len(compiled))
    assert seen == sorted(set(seen)), "a width ran without being compiled"


def test_the_network_works_after_its_grower_is_deleted() -> None:
    loop = Loop().train(4)
    network, optimizer = loop.network, loop.optimizer
    outputs = network.eval()(PROBE)
    del loop
    gc.collect()
    assert torch.equal(network(PROBE), outputs)
    network(PROBE).sum().backward()
    optimizer.step()
    network.load_state_dict(network.state_dict())


def grower_of(example):
    return Grower(mlp(), example, method=VarianceTransfer(), trigger=STAGES)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: Loop(method="mine"), "method='mine' must be a growth method, .* or the name of one: bert2bert"),
        (lambda: Loop().train(4).grower.step(0), "epoch 0 is before epoch 1 .* growth goes forwards"),
        (lambda: Loop(trigger={0: 1.0, 1: 0.5}).train(), "only widens"),
        (lambda: Loop(trigger=ByMethod()).train(), "does not decide"),
        (lambda: Loop().grower.follow(nn.Linear(2, 2)), "cannot grow along"),
        (lambda: Loop().grower.follow("adam"), "cannot follow"),
        (lambda: Loop(parts=Part()), r"must be a list of parts"),
        (lambda: Loop(parts=[Part]), r"parts contain the class Part, not a part: write Part\(\.\.\.\)"),
        (lambda: Loop(parts=[5]), "parts contain 5, which is not a growlab.Part"),
        (lambda: Loop().grower.load_state_dict(mlp().state_dict()), "not the state of a Grower"),
        (lambda: Loop().grower.step(epoch="1"), "epoch must be a finite number, not '1'"),
        (lambda: grower_of(PROBE[:0]), "no samples"),
        (lambda: grower_of(PROBE * math.nan), "the example contains NaN"),
        (lambda: grower_of(PROBE.to("meta")), "example is on the meta device"),
        (lambda: grower_of(torch.ones(4, 6, dtype=torch.long)), "mat1 and mat2 must have the same dtype"),
        (lambda: Grower(mlp, PROBE, method=VarianceTransfer(), trigger=STAGES), "torch.nn.Module, not a function"),
        (lambda: Loop().grower.provide(record=list), "no 'record'; it takes batches, loss, .*, records, "),
        (lambda: Loop().grower.provide([PROBE]), "batches of provide must be a function, not a list"),
        (lambda: Loop(network=normed, anneal_steps=50).train().grower.finish(), "47 more optimizer steps"),
        (lambda: Loop(network=normed).train(STEPS + 1).grower.plain_state_dict(), "not plain yet"),
        (lambda: Grower(nn.LazyLinear(8), PROBE), r"\(LazyLinear\) has no shape yet; call the network once"),
    ],
)
def test_invalid_calls_raise_errors_of_one_sentence(act, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        act()


def test_an_optimizer_that_cannot_follow_raises_an_error_before_growth() -> None:
    loop = Loop(lambda network: torch.optim.Adafactor(network.parameters()))
    plain = torch.optim.Adam(loop.network.parameters())
    loop.grower.follow(plain, loop.optimizer, state="inherit")
    loop.train(STEPS)
    before, plain_state = loop.everything(), plain.state_dict()
    for _ in range(2):
        with pytest.raises(UserError, match=r"'row_var' of 0.weight is \(4, 1\).*set optimizer_state='reset'"):
            loop.grower.step(epoch=1)
        assert loop.everything() == before and plain.state_dict() == plain_state and loop.grower.state.stage == 0
    loop.grower.follow(loop.optimizer, state="reset")
    assert [event.stage for event in loop.grower.step(epoch=1)] == [1]


def test_a_finished_network_grows_no_more() -> None:
    loop = Loop().train(STEPS)
    loop.grower.finish()
    keys = loop.network.state_dict().keys()
    assert loop.grower.step(epoch=3) == [] and loop.network.state_dict().keys() == keys
    assert loop.network[0].out_features == 4
    loop.grower.reattach_hooks()
    assert [event.stage for event in loop.grower.step(epoch=3)] == [1, 2]


def test_full_width_weights_with_multipliers_load_after_finish() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    grower = Grower(network, torch.randn(2, 6), method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    grower.step(epoch=1)
    assert grower.state.multipliers
    saved, x = copy.deepcopy(network.state_dict()), torch.randn(5, 6)
    expected = network(x)
    grower.finish()
    grower.reattach_hooks()
    with torch.no_grad():
        for p in network.parameters():
            p.zero_()
    network.load_state_dict(saved)
    assert torch.allclose(network(x), expected, atol=1e-6)
    grower.finish()
    assert sorted(network.state_dict()) == sorted(f"{i}.{n}" for i in (0, 2, 4) for n in ("weight", "bias"))


def test_it_works_without_arguments_and_its_events_are_objects(caplog: pytest.LogCaptureFixture) -> None:
    grower = Grower(mlp(), PROBE)
    assert repr((grower.method, grower.trigger)) == ("(VarianceTransfer(), At(widths={0: 0.25, 10: 0.5, 20: 1.0}))")
    events = grower.step(20, step=7)
    assert len(events) == 2 and all(one is other for one, other in zip(events, grower.events, strict=True))
    assert [(event.stage, event.epoch, event.step) for event in events] == [(1, 20, 7), (2, 20, 7)]
    assert [r.message for r in caplog.records if r.name.startswith("growlab")] == list(map(str, events))
    again = Grower(mlp(), PROBE, verbose=False)
    again.load_state_dict(grower.state_dict())
    assert again.events == events and again.events[0].as_dict()["num_params"] == events[0].num_params
    assert again.events[0]["num_params"] == events[0].num_params
    caplog.clear()
    Grower(mlp(), PROBE, verbose=False).step(20)
    logging.getLogger("growlab").setLevel(logging.WARNING)
    Grower(mlp(), PROBE).step(20)
    logging.getLogger("growlab").setLevel(logging.INFO)
    assert not [r for r in caplog.records if r.name.startswith("growlab")]


def test_events_are_printed_to_stderr_without_logging_handlers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (event,) = Grower(mlp(), PROBE, trigger={0: 0.5, 1: 1.0}).step(1)
    assert capsys.readouterr().err == f"{event}\n"


def test_names_of_methods_are_those_of_the_command_line() -> None:
    folder = ROOT / "conf" / "growth"
    for name, make in METHODS.items():
        settings, base = {}, name
        while base:
            content = yaml.safe_load((folder / f"{base}.yaml").read_text())
            settings = {**content, **settings}
            base = next((one for one in content.get("defaults", []) if "/" not in one and one != "_self_"), "")
        arguments = {key: 2.0 if key == "gain" else value for key, value in settings.items()}
        target = arguments.pop("_target_").rpartition(".")[2]
        arguments.pop("defaults", None)
        named, made = getattr(growlab.growth, target)(**arguments), make()
        assert type(named) is type(made)
        assert {**vars(named), "_given": 0} == {**vars(made), "_given": 0}, name


def trained(network: nn.Module) -> nn.Module:
    train(network, torch.optim.SGD(network.parameters(), lr=0.1), *batch(0))
    return network


def loaded(network: Callable[[], nn.Module]) -> nn.Module:
    fresh = network()
    fresh.load_state_dict(trained(network()).state_dict())
    return fresh


NARROW, NOTHING = {0: 0.5, 1: 1.0}, r"nothing in this network can grow.*it is trained as it is"


@pytest.mark.parametrize(
    ("make", "trigger", "warning"),
    [
        (lambda: loaded(mlp), NARROW, r"draws new weights.*\(1.running_mean is not 0\)"),
        (lambda: loaded(normed), NARROW, r"draws new weights.*\(1.weight has been trained\)"),
        (lambda: trained(plain()), NARROW, r"draws new weights.*\(0.weight has a gradient\)"),
        *((make, NARROW, None) for make in (mlp, normed, plain)),
        # Weights at full width are kept.
        *((make, {0: 1.0}, None) for make in (lambda: loaded(mlp), lambda: loaded(normed), lambda: trained(plain()))),
        (plain, {0: 0.25, 1: 0.5}, "the trigger's last stage has 16 of 32 channels of '0'"),
        (plain, Never(0.5), None),
        (lambda: nn.Sequential(nn.Linear(6, 3)), NARROW, NOTHING),
        (lambda: nn.Sequential(nn.Linear(6, 3)), {0: 1.0}, None),
    ],
)
def test_lost_weights_and_missing_growth_cause_warnings(
    make: Callable[[], nn.Module], trigger: Any, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    Grower(make(), PROBE, trigger=trigger)
    messages = [record.message for record in caplog.records if record.name.startswith("growlab")]
    assert len(messages) == (warning is not None) and all(re.search(warning, message, re.S) for message in messages)


def test_by_default_normalisations_are_plain_before_the_training_ends() -> None:
    loop = Loop(network=normed, anneal_steps=None).train(2 * STEPS)
    # Half of the first stage's 3 steps; half of the 3 that are left.
    assert loop.grower.anneal_steps == 1
    file = loop.saved()
    again = Loop(network=normed, anneal_steps=None).resume(file)
    for one in (loop, again):
        one.grower.provide(total_steps=STEPS * EPOCHS)
        one.train(3 * STEPS + 1)
        assert one.grower.anneal_steps == 1
        one.train().grower.finish()
    assert again.everything() == loop.everything()


def test_a_grower_is_not_pickled() -> None:
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
            copied(Loop().grower)


@pytest.mark.parametrize("anneal_steps", [1, 3])
def test_norms_are_plain_after_anneal_steps(anneal_steps: int) -> None:
    loop = Loop(network=normed, trigger={0: 0.5, 1: 1.0}, anneal_steps=anneal_steps)
    left = []
    for done in range(STEPS, STEPS + 4):
        loop.train(done + 1)
        left.append(bool(loop.grower.state.norm_weights))
    assert left == [step < anneal_steps for step in range(1, 5)]


def in_halves(network: nn.Module) -> nn.parallel.DistributedDataParallel:
    made = nn.parallel.DistributedDataParallel(network)
    made.register_comm_hook(None, fp16_compress_hook)
    return made


def compressed(network: nn.Module) -> nn.parallel.DistributedDataParallel:
    made = nn.parallel.DistributedDataParallel(network)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return made


def by_hand(
    rank: int,
    drift: Callable[[Loop], Tensor] | None = None,
    in_place: bool = False,
    wrap: Callable[..., nn.Module] = nn.parallel.DistributedDataParallel,
    epochs: int = 2,
    **settings: Any,
) -> str:
    """Train on one of two ranks and return its final state; `drift` returns a tensor to change on rank 1."""
    torch.manual_seed(0)
    loop = Loop(**settings)
    wrapped = wrap(loop.network)
    for step in range(STEPS * epochs):
        if drift is not None and rank == 1 and step == 2:
            drift(loop).detach().view(-1)[-1].add_(1e-6)
        if loop.grower.step(epoch=step // STEPS, step=step):
            if in_place:
                renew(nn.Sequential(wrapped))
            else:
                del wrapped
                wrapped = wrap(loop.network)
        train(wrapped, loop.optimizer, *batch(2 * step + rank))
    # Running statistics differ between ranks until the wrapper's next forward pass.
    for each in (loop.network, *loop.grower.copies().values()):
        ranks.broadcast_buffers(each)
    return str(loop.everything())


def one_rank(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    (folder / f"{rank}.txt").write_text(expected := by_hand(rank, epochs=EPOCHS))
    # A renewed wrapper behaves like a new one and keeps its communication hook.
    static = partial(nn.parallel.DistributedDataParallel, static_graph=True)
    assert by_hand(rank, wrap=static, in_place=True, epochs=EPOCHS) == expected
    assert by_hand(rank, wrap=in_halves) == by_hand(rank, wrap=in_halves, in_place=True) != expected
    assert by_hand(rank, wrap=compressed, in_place=True) != expected
    _refusals()
    with pytest.raises(UserError, match=r"ranks hold different values after growth to stage 1: 0.bias"):
        by_hand(rank, drift=lambda loop: loop.network[0].bias)
    other = nn.parallel.DistributedDataParallel(mlp(), process_group=torch.distributed.new_group())
    with pytest.raises(UserError, match="wrap the network again"):
        renew(other)
    with pytest.raises(
        UserError, match="Sequential contains no DistributedDataParallel: pass renew the module that the loop"
    ):
        renew(other.module)
    torch.distributed.destroy_process_group()


def _refusals() -> None:
    """Check that distributed networks and optimizers that cannot grow raise errors at once."""
    x, made = batch(0)[0], {"method": PairGrowth(), "trigger": {0: 0.5, 1: 1.0}}
    with pytest.raises(UserError, match="DistributedDataParallel is a wrapper: give the network inside it"):
        Grower(nn.parallel.DistributedDataParallel(mlp()), x, **made)
    sharded = mlp()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UserError, match="is sharded: give Grower the network before"):
        Grower(sharded, x, **made)
    grower = Grower(mlp(), x, **made)
    with pytest.raises(UserError, match="ZeroRedundancyOptimizer partitions parameters among processes once"):
        grower.follow(ZeroRedundancyOptimizer(grower.network.parameters(), torch.optim.SGD, lr=0.1))


def test_two_ranks_end_bit_identical_and_report_drift(cli: CommandLine, tmp_path: Path) -> None:
    cli.on_two_ranks(one_rank, tmp_path)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in (0, 1))
    assert first == second and "output_factor" in first


def test_parameters_in_one_memory_grow_where_they_do_not_overlap() -> None:
    network = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 10, False))
    tokens, settings = torch.randint(10, (2, 6)), {"method": PairGrowth(), "trigger": {0: 0.5, 1: 1.0}}
    network[4].weight = nn.Parameter(network[0].weight)
    with pytest.raises(UserError, match=r"0\.weight and 4\.weight are two Parameters in the same memory"):
        Grower(network, tokens, **settings)
    network[4].weight = network[0].weight
    memory = torch.randn(16, 9)
    network[1].weight, network[1].bias = nn.Parameter(memory[:, 1:]), nn.Parameter(memory[:, 0])
    grower = Grower(network, tokens, **settings)
    before = network(tokens)
    assert len(grower.step(epoch=1)) == 1
    torch.testing.assert_close(network(tokens), before)


def test_a_growing_network_cannot_be_given_to_another_grower() -> None:
    network, x = plain(), torch.randn(4, 6)
    first = Grower(network, x, method=PairGrowth(), trigger={0: 0.25, 1: 1.0})
    for again in (network, copy.deepcopy(network), nn.Sequential(network, nn.Linear(3, 2))):
        with pytest.raises(UserError, match="the network is growing already"):
            Grower(again, x, method=PairGrowth(), trigger={0: 0.25, 1: 1.0})
    first.step(epoch=1)
    second = Grower(first.finish(), x, method=PairGrowth(), trigger={0: 0.5, 1: 1.0})
    assert second.full_graph.full_widths == {"0": 32}


@pytest.mark.parametrize("unit", ["epoch", "cost"])
def test_step_without_the_triggers_unit_raises_an_error(unit: str) -> None:
    grower = Grower(plain(), torch.randn(4, 6), trigger=At({0: 0.25, 10: 1.0}, unit=unit))
    with pytest.raises(UserError, match=rf"trigger counts in '{unit}', which Grower.step never received: call"):
        grower.step(step=3)
    grower.step(**{unit: 0})
    assert grower.step(step=3) == []


def test_shrinking_stages_raise_an_error_before_training() -> None:
    # One stage needs no moments.
    assert Grower(plain(), torch.randn(4, 6), method=PairGrowth(), trigger={0: 0.5}).step() == []
    with pytest.raises(
        UserError, match=r"stage 2 of the trigger is narrower .* \(16 to 8 channels of '0'\), and PairGrowth"
    ):
        Grower(plain(), torch.randn(4, 6), method=PairGrowth(), trigger={0: 0.25, 3: 0.5, 5: 0.25})


@pytest.mark.parametrize(
    ("other", "loads"),
    [
        ({0: 0.25, 1: 0.5, 9: 0.75, 12: 1.0}, True),
        ({0: 0.25, 7: 0.5, 9: 1.0}, True),
        ({0: 0.5, 3: 1.0}, False),
        ({0: 0.25, 1: 1.0}, False),
        ({0: 0.5}, True),
    ],
)
def test_a_grower_state_resumes_only_with_a_trigger_of_its_widths(other: dict[float, float], loads: bool) -> None:
    x = torch.randn(4, 6)
    first = Grower(plain(), x, method=PairGrowth(), trigger={0: 0.25, 1: 0.5, 2: 1.0})
    first.step(epoch=1)
    second = Grower(plain(), x, method=PairGrowth(), trigger=other)
    before = second.state_dict()
    if loads:
        second.load_state_dict(first.state_dict())
        # The loaded clock has an epoch already.
        assert second.step(step=3) == [] and second.state.widths == {"0": 16}
        return
    with pytest.raises(UserError, match="give the trigger that the run began with"):
        second.load_state_dict(first.state_dict())
    assert second.state_dict() == before


def test_finish_before_the_last_stage_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for epoch, at_any_stage, warns in ((1, False, True), (1, True, False), (2, False, False), (0, False, True)):
        grower = Grower(plain(), torch.randn(4, 6), method=PairGrowth(), trigger={0: 0.25, 1: 0.5, 2: 1.0})
        if epoch:
            grower.step(epoch=epoch)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            grower.finish(at_any_stage)
        assert (f"training has ended in stage {epoch} of 2" in caplog.text) == warns
        assert ("never called Grower.step" in caplog.text) == (not epoch)
        if epoch == 2:
            assert repr(grower) == "Grower(stage 2, PairGrowth, widths {0: 32})"


class _Asks(Trigger):
    """Half of the full widths, then the given widths in epoch 1."""

    def __init__(self, widths: dict[str, object]) -> None:
        self.widths = widths

    def first(self, graph):
        return {group: width // 2 for group, width in graph.full_widths.items()}

    def next(self, grower):
        return self.widths if grower.clock.epoch == 1 and not grower.events else None


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"nope": 8}, r"_Asks asks for a width of 'nope': give whole numbers .* this network \(0, 3\)"),
        ({"0": 8.0}, "_Asks asks for 8.0 channels of '0'"),
        ({"0": 0}, "_Asks asks for 0 channels of '0'"),
    ],
)
def test_custom_triggers_cannot_ask_for_invalid_widths(widths: dict[str, object], message: str) -> None:
    grower = Loop(trigger=_Asks(widths)).grower
    before = copy.deepcopy(grower.network.state_dict())
    with pytest.raises(UserError, match=message):
        grower.step(epoch=1)
    assert not differing(before, grower.network.state_dict())
    # Groups that are left out keep their width.
    grower = Loop(trigger=_Asks({"3": np.int64(8)})).grower
    grower.step(epoch=1)
    assert grower.state.widths == {"0": 4, "3": 8}


def _on_demand(demand: Demand) -> Grower:
    return Loop(trigger=OnDemand(demand, make_schedule(8, 8, num_stages=3), 8)).grower


def test_growth_on_demand_needs_records_from_the_loop() -> None:
    with pytest.raises(UserError, match=r"needs to know the training: call Grower.provide\(records="):
        _on_demand(Plateau()).step(epoch=0)
    with pytest.raises(UserError, match=r"counts in 'epoch', which Grower.step never received"):
        _on_demand(Plateau()).step(step=0)
    grower = _on_demand(GradientNorm())
    grower.gradients = grower.network.state_dict
    known = {"samples": [8] * 8, "flops": lambda widths, _: sum(widths.values()), "reference_flops": 1e3}
    grower.provide(records=lambda: [{"epoch": epoch, "stage": 0} for epoch in range(4)], **known)
    grower.step(epoch=0)
    with pytest.raises(UserError, match="the column 'gradient_norm', which the records lack"):
        grower.step(epoch=4)
