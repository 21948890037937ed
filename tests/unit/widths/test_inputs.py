"""Networks with keyword-only inputs, inputs in containers, or packed sequences."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from growlab import parts
from growlab.base.errors import UserError
from growlab.frontends.lightning import Growth
from growlab.grower import Grower
from growlab.grower.cost import forward_flops
from growlab.growth import GradMax, VarianceTransfer
from growlab.widths import trace
from growlab.widths.inputs import Inputs, arguments, inputs_of, inputs_to
from tests.unit.frontends.lightning_runs import IMAGES, LABELS, Loader, Plain, trainer_of

X, MASK, TARGETS = torch.randn(6, 5), torch.ones(6, 1), torch.randint(3, (6,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


class ByName(nn.Module):
    """One positional input, one keyword-only input, one input with a default."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(5, 12), nn.Sequential(Block(), Block(), Block())
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(self.blocks(torch.relu(self.first(x))) * mask) * scale


def module(function: Callable[..., Tensor], **parts: nn.Module) -> nn.Module:
    """A module with the signature of a given forward function."""
    made = type("Made", (nn.Module,), {"forward": function})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize(
    ("function", "example", "positional", "named"),
    [
        (lambda self, x: x, X, 1, []),
        (lambda self, x, y: x, (X, X), 2, []),
        (lambda self, x, y=2, z=3: x, {"z": 1, "x": X}, 3, []),
        (lambda self, x, *, mask: x, {"x": X, "mask": MASK}, 1, ["mask"]),
        (lambda self, *, x: x, {"x": X}, 0, ["x"]),
        (lambda self, x, **more: x, {"x": X, "other": MASK}, 1, ["other"]),
        (lambda self, batch: batch, {"x": X, "mask": MASK}, 1, []),
        (lambda self, batch: batch, ({"batch": X},), 1, []),
        (lambda self, x: x, pack_sequence([X]), 1, []),
    ],
)
def test_examples_become_positional_and_named_inputs(
    function: Any, example: Any, positional: int, named: list[str]
) -> None:
    inputs = inputs_of(example, module(function))
    assert len(inputs) == positional and list(getattr(inputs, "named", {})) == named
    assert isinstance(inputs, Inputs) == bool(named)
    again = copy.deepcopy(inputs)
    assert type(again) is type(inputs) and list(getattr(again, "named", {})) == named


def test_arguments_of_a_call_are_positional_if_possible() -> None:
    network = ByName()
    assert arguments(network, (X,), {}) == (X,)
    found = arguments(network, (), {"mask": MASK, "x": X})
    assert tuple(found) == (X,) and found.named == {"mask": MASK}


def test_inputs_by_name_grow_in_width_and_depth_and_are_measured() -> None:
    network = ByName().double()
    full = {name: tensor.shape for name, tensor in network.state_dict().items()}
    grower = Grower(network, {"x": X, "mask": MASK}, trigger={0: 0.5, 1: 0.75, 2: 1.0}, parts=[parts.Depth()])
    narrow = forward_flops(network, {"x": X[:1].double(), "mask": MASK[:1].double()})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    grower.follow(optimizer)
    for epoch in range(3):
        before = network(X.double(), mask=MASK)
        events = grower.step(epoch=epoch)
        assert len(events) == (epoch > 0)
        assert torch.allclose(network(X.double(), mask=MASK), before, rtol=1e-10, atol=1e-12)
        F.cross_entropy(network(X.double(), mask=MASK), TARGETS).backward()
        optimizer.step()
    grower.finish()
    assert {name: tensor.shape for name, tensor in network.state_dict().items()} == full
    assert forward_flops(network, {"x": X[:1].double(), "mask": MASK[:1].double()}) > narrow


def test_a_method_takes_batches_of_inputs_by_name() -> None:
    network = ByName()
    grower = Grower(network, {"x": X, "mask": MASK}, method=GradMax(), trigger={0: 0.5, 1: 1.0})
    grower.provide(lambda number: [({"x": X, "mask": MASK}, TARGETS)] * number, F.cross_entropy)
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval < 1e-5 and grower.events[0].notes["auxiliary_flops"] > 0


def test_images_by_name_are_small_at_first() -> None:
    layers = {"a": nn.Conv2d(3, 8, 3), "last": nn.Linear(8, 3)}
    network = module(lambda self, *, image: self.last(torch.relu(self.a(image)).mean((2, 3))), **layers)
    image = torch.randn(2, 3, 16, 16)
    Grower(network, {"image": image}, trigger={0: 0.5, 1: 1.0}, parts=[parts.Resolution([8, 16])])
    seen: list[Any] = []
    network.a.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[-1]))
    network.train()(image=image)
    assert seen == [8]


def test_a_mapping_that_is_the_only_input_grows() -> None:
    network = module(lambda self, batch: self.b(torch.relu(self.a(batch["x"]))), a=nn.Linear(5, 8), b=nn.Linear(8, 3))
    grower = Grower(network, {"x": X}, method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    (event,) = grower.step(epoch=1)
    assert set(grower.graph.groups) == {"a"} and event.parity_error_train < 1e-5


def test_lightning_captures_inputs_that_are_given_by_name(tmp_path: Path) -> None:
    class Module(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.network = ByName()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0], mask=batch[1]), batch[2])

    growth = Growth("network", method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    trainer = trainer_of(tmp_path, growth, max_epochs=2)
    trainer.fit(Module(), DataLoader(TensorDataset(X, MASK, TARGETS), batch_size=len(X)))
    assert [event.stage for event in growth.grower.events] == [1]


def test_lightning_captures_batches_after_transfer_hooks(tmp_path: Path) -> None:
    class Module(Plain):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0].flatten(1), batch[1]

    growth = Growth(method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    data = DataLoader(TensorDataset(IMAGES.view(-1, 2, 3), LABELS), 16)
    trainer_of(tmp_path, growth, max_epochs=2).fit(Module(), data)
    assert [event.stage for event in growth.grower.events] == [1]


def test_transfer_hooks_may_need_the_modules_setup(tmp_path: Path) -> None:
    """Lightning calls the callback's `setup` first, so the module's input is captured without these hooks."""

    class Module(Plain):
        def setup(self, stage: str) -> None:
            self.factor = 2.0

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * self.factor, batch[1]

    growth = Growth(method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0})
    trainer_of(tmp_path, growth, max_epochs=2).fit(Module(), DataLoader(TensorDataset(IMAGES, LABELS), 16))
    assert [event.stage for event in growth.grower.events] == [1]


def test_lightnings_example_input_is_moved_to_the_modules_device() -> None:
    class Module(Plain):
        example_input_array = torch.ones(2, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.network(self.stem(x))

    module = Module()
    module.stem = nn.Linear(6, 6)
    (x,) = Growth("network")._example_inputs(module.to("meta"), module.network)
    assert x.is_meta and x.shape == (2, 6)


def test_capturing_inputs_leaves_all_generators_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and training steps may draw from Python's and numpy's generators too, as MixUp does."""
    drawn = []

    class Module(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
            return super().training_step(batch, batch_idx)

    def draws(*callbacks: Growth) -> list[tuple[float, ...]]:
        drawn.clear()
        module = Module()
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        trainer_of(tmp_path, *callbacks, max_epochs=1).fit(module, Loader())
        return drawn.copy()

    plain = draws()
    assert draws(Growth(trigger={0: 1.0}))[-len(plain) :] == plain
    # torch.random.fork_rng warns on a machine with several GPUs.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert inputs_to(nn.Sequential(nn.ReLU()), "0", (X,))[0] is not None


class Packed(nn.Module):
    """A recurrent layer over sequences that are packed before or in the forward, or padded again first."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.rnn, self.last = where, nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any, lengths: Tensor | None = None) -> Tensor:
        if self.where == "inside":
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        if self.where == "padded":
            x = pad_packed_sequence(x, batch_first=True)[0]
        return self.last(self.rnn(x)[1][0][-1])


@pytest.mark.parametrize(
    ("where", "example"),
    [
        ("before", pack_sequence([X[:4], X[:2]])),
        ("before", (pack_sequence([X[:4], X[:2]]),)),
        ("padded", pack_sequence([X[:4], X[:2]])),
        ("inside", (X[:4].expand(2, 4, 5), torch.tensor([4, 2]))),
    ],
)
def test_packed_sequences_raise_an_error_of_one_sentence(where: str, example: Any) -> None:
    with pytest.raises(UserError, match=r"Packed packs sequences.*padded sequences and mask"):
        trace(Packed(where), example)


def test_positional_inputs_for_keyword_only_arguments_raise_an_error() -> None:
    with pytest.raises(UserError, match="ByName takes mask by keyword only: give the example as a dictionary"):
        trace(ByName(), (X, MASK))
    with pytest.raises(UserError, match=r"an input of \[6, 4\], mask \[6, 1\]"):
        trace(ByName(), {"x": X[:, :4], "mask": MASK})
