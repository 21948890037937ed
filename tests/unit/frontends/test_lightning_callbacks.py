"""Growth with parts and other Lightning callbacks, and checkpoints that are loaded without it."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from growlab.base.errors import UserError
from growlab.grower.triggers import At
from growlab.growth import VarianceTransfer
from growlab.parts import Averages, Classes, Depth, Hyperfan
from tests.unit.frontends.lightning_runs import (
    IMAGES,
    LABELS,
    SIZE,
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

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback"),
]

AVERAGES: dict[str, Callable[[], L.Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "swa": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1),
}


class Convolutions(Plain):
    """Only batch normalisation, so that nothing is annealed and every checkpoint is a plain network."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, momentum=0.9))
        self.network = nn.Sequential(
            *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        )


def test_lightnings_averages_equal_those_of_the_part(tmp_path: Path) -> None:
    """Lightning's average grows with the network; `parts.Averages` computes the same in another order."""
    module, callback = Plain(), growth(parts=[Averages(decay=0.7)])
    fitted(tmp_path, module, growth(), EMAWeightAveraging(decay=0.7))
    fitted(tmp_path, Plain(), callback)
    average = callback.grower.parts[0].module.state_dict()
    for name, tensor in module.network.state_dict().items():
        assert torch.allclose(tensor, average[name], rtol=1e-5, atol=1e-6), name
    assert [p.shape for p in module.network.parameters()] == [p.shape for p in body().parameters()]


@pytest.mark.parametrize("kind", AVERAGES)
def test_a_run_with_an_average_resumes_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    expected = outcome(fitted(tmp_path, Plain(), growth(), AVERAGES[kind](), Save(tmp_path)))
    checkpoint = tmp_path / ("epoch1.ckpt" if kind == "ema" else "epoch2.ckpt")
    assert outcome(fitted(tmp_path, Plain(), growth(), AVERAGES[kind](), ckpt_path=checkpoint)) == expected


def test_an_average_made_before_the_seed_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"put Growth before it, Trainer\(callbacks=\[Growth"):
        fitted(tmp_path, Plain(), EMAWeightAveraging(), growth())


@pytest.mark.parametrize(
    ("weights_only", "average", "layer_multipliers"),
    [(True, None, True), (True, "ema", False), (False, None, False), (False, "ema", True)],
)
def test_checkpoints_contain_plain_weights(
    weights_only: bool, average: str | None, layer_multipliers: bool, tmp_path: Path
) -> None:
    """Lightning skips callbacks' hooks for weights-only checkpoints, and replaces weights by averages."""
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_weights_only=weights_only)
    settings = {"method": VarianceTransfer(layer_multipliers=layer_multipliers), "trigger": {0: 0.5, 1: 0.75, 2: 1.0}}
    seen, others = [], [AVERAGES[average]()] if average else []

    class Looking(Convolutions):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            """Record the outputs of the network that the checkpoint contains."""
            copy = others[0]._average_model.module if others and not weights_only else self
            with torch.no_grad():
                seen.append(copy.network.eval()(IMAGES))
            copy.network.train()

    module, callback = Looking(), growth(**settings)
    trainer = fitted(tmp_path, module, callback, *others, saved, enable_checkpointing=True)
    assert "on_save_checkpoint" not in vars(module)
    path = tmp_path / "epoch=3.ckpt"
    loaded = Convolutions.load_from_checkpoint(path)
    assert torch.allclose(loaded.eval().network(IMAGES), seen[3], atol=1e-6)
    for epoch in range(4):
        stage = growth(**settings, example=IMAGES).load(Convolutions(), tmp_path / f"epoch={epoch}.ckpt")
        assert torch.allclose(stage.eval().network(IMAGES), seen[epoch], atol=1e-6), epoch
    if weights_only:
        return
    # Multipliers were left, without which this test would prove nothing.
    kept = torch.load(path, weights_only=True)["callbacks"][callback.state_key]["kept"][""]
    assert kept and any((kept[k] != t).any() for k, t in module.network.state_dict().items() if k in kept)
    # Training continues from the checkpoint unchanged; if no epoch is left, Lightning calls no hook.
    for epoch in (1, 3):
        again, averages = Convolutions(), [AVERAGES[average]()] if average else []
        checkpoint = tmp_path / f"epoch={epoch}.ckpt"
        continued = fitted(tmp_path, again, growth(**settings), *averages, ckpt_path=checkpoint)
        assert again.state_dict().keys() == Convolutions().state_dict().keys()
        if epoch < 3:
            assert outcome(continued) == outcome(trainer)
        elif not others:
            assert torch.allclose(again.eval().network(IMAGES), module.eval().network(IMAGES), atol=1e-6)


class Two(Plain):
    """Two networks that grow, and a hook of the module."""

    def __init__(self) -> None:
        super().__init__()
        del self.network
        self.first, self.second, self.asked = (body(), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)), 0)
        self.ends = False

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.ends and self.current_epoch:
            raise RuntimeError("the data are gone")
        return self.criterion(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.asked += 1


def test_two_networks_in_a_checkpoint_are_plain_also_after_an_error(tmp_path: Path) -> None:
    # Without annealed normalisations, so that every checkpoint is plain.
    examples = {"first": IMAGES, "second": torch.randn(SIZE, 3)}
    callbacks = [growth(name, example=example, anneal_steps=1) for name, example in examples.items()]
    module = Two()
    module.ends = True
    with pytest.raises(RuntimeError, match="the data are gone"):
        fitted(tmp_path, module, *callbacks)
    module.ends = False
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fitted(tmp_path, module, *callbacks, saved, enable_checkpointing=True)
    assert "on_save_checkpoint" not in vars(module) and module.asked == 4
    loaded = Two.load_from_checkpoint(tmp_path / "epoch=3.ckpt")
    assert torch.allclose(loaded.eval()(IMAGES), module.eval()(IMAGES), atol=1e-6)


class Keyed(Dataset[Any]):
    """Samples that are asked for by name, or batches that are ready."""

    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def __len__(self) -> int:
        return len(IMAGES) // SIZE if self.ready else len(IMAGES)

    def __getitem__(self, key: Any) -> Any:
        index = key if self.ready else int(key.removeprefix("image"))
        rows = slice(SIZE * index, SIZE * (index + 1)) if self.ready else index
        return IMAGES[rows], LABELS[rows]


@pytest.mark.parametrize("ready", [True, False])
def test_loaders_without_indexed_samples(ready: bool, tmp_path: Path) -> None:
    keys = [f"image{index}" for index in range(len(IMAGES))]
    options = {"batch_size": None} if ready else {"batch_size": SIZE, "sampler": keys}
    module, callback = Plain(), growth()
    fitted(tmp_path, module, callback, data=DataLoader(Keyed(ready), **options))
    assert len(callback.grower.events) == 2 and module.network[0].out_features == 8


class WithTarget(Plain):
    """A target network that follows the trained network, and a frozen network of full width."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.teacher = body().requires_grad_(False), body().requires_grad_(False)

    def optimizer_step(self, *arguments: object, **settings: object) -> None:
        super().optimizer_step(*arguments, **settings)
        for mean, value in zip(self.target.parameters(), self.network.parameters(), strict=True):
            # Start with the weights of the first step, like `parts.Averages`.
            mean.data.lerp_(value.data, 0.3 if self.trainer.global_step else 1.0)


def test_a_target_network_grows_with_the_online_network(tmp_path: Path) -> None:
    """It equals the average of `parts.Averages` over the same steps."""

    def both() -> tuple[WithTarget, Any]:
        return WithTarget(), growth(("network", "target"), parts=[Averages(decay=0.7)])

    module, callback = both()
    expected = outcome(fitted(tmp_path, module, callback, Save(tmp_path)))
    average = dict(callback.grower.parts[0].module.named_parameters())
    for name, parameter in module.target.named_parameters():
        assert torch.allclose(parameter, average[name], rtol=1e-5, atol=1e-6), name
    body().load_state_dict(module.target.state_dict(), strict=True)
    for name in ("epoch2.ckpt", "step4.ckpt"):
        assert outcome(fitted(tmp_path, *both(), ckpt_path=tmp_path / name)) == expected
    loaded = WithTarget.load_from_checkpoint(tmp_path / "epoch3.ckpt")
    for name, tensor in module.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], tensor, atol=1e-6), name


def test_a_network_that_configure_model_makes_grows(tmp_path: Path) -> None:
    class Late(Plain):
        def __init__(self) -> None:
            super().__init__()
            del self.network

        def configure_model(self) -> None:
            if not hasattr(self, "network"):
                self.network = body()

    module, callback = Late(), growth("network")
    fitted(tmp_path, module, callback)
    assert len(callback.grower.events) == 2
    body().load_state_dict(module.network.state_dict(), strict=True)


def test_a_missing_parameter_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which grows, is no parameter or buffer of the network any more"):
        fitted(tmp_path, Plain(), growth(), ModelPruning("l1_unstructured", amount=0.3))


@pytest.mark.parametrize(
    ("trigger", "lasts", "due"),
    [
        ({0: 0.5, 4: 1.0}, {}, "at epoch 4, but training ends after 4"),
        ({0: 0.5, 2: 1.0}, {"max_steps": 2 * STEPS}, "at epoch 2, but training ends after 2"),
        ({0: 0.5, 2: 1.0}, {"max_steps": 2 * STEPS + 1}, None),
        (At({0: 0.5, 11: 1.0}, unit="step"), {}, None),
        (At({0: 0.5, 8: 1.0}, unit="step"), {"accumulate_grad_batches": 2}, "at step 8, but training ends after 8"),
    ],
)
def test_training_too_short_for_growth_logs_a_warning_at_the_start(
    trigger: Any, lasts: dict[str, int], due: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = growth(trigger=trigger)
    with caplog.at_level(logging.WARNING):
        fitted(tmp_path, Plain(), callback, **lasts)
    warnings = [r.message for r in caplog.records if "growth is due" in r.message]
    assert len(callback.grower.events) == (due is None)
    assert len(warnings) == (due is not None) and all(due in message for message in warnings)
    assert ("has ended in stage 0 of 1" in caplog.text) == (due is not None)


# Evaluation with parts, and with a method that stores weights in another way --------------------------------------


ORDER = [2, 0, 1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.norm(self.a(x))))


class Deep(Validated):
    """A sequence of blocks with counters among their buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Block(), Block(), Block(), nn.Linear(8, 3))

    test_step = Validated.validation_step


class Arriving(Deep):
    """Two classes at first, in another order than the labels."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        grower = self.trainer.callbacks[0].grower
        seen = torch.isin(batch[1], torch.tensor(ORDER[: grower.state.widths["classes"]]))
        return F.cross_entropy(self.network(batch[0][seen]), grower.targets(batch[1][seen]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.network(batch[0]).argmax(1) == batch[1]).float().mean())

    test_step = validation_step


def accuracy(module: Plain) -> float:
    with torch.no_grad():
        return float((module.network.eval()(IMAGES).argmax(1) == LABELS).float().mean())


def classes() -> Any:
    # Keep multipliers, which the default would fold because of AdamW.
    method = VarianceTransfer(noise_std=1e-3, multipliers="keep")
    return growth(
        method=method, trigger={0: 0.5, 1: 1.0}, parts=[Classes(ORDER, lambda n: [2, 3] if n == 2 else [3] * n)]
    )


def test_the_order_of_classes_is_that_of_the_labels_whatever_is_loaded(tmp_path: Path) -> None:
    module, callback, save = Arriving(), classes(), Save(tmp_path)
    trainer = trainer_of(tmp_path, callback, save, max_epochs=8)
    # Evaluate another network before training.
    trainer.validate(module, Loader(), verbose=False)
    trainer.fit(module, Loader(), Loader())
    expected, logits = accuracy(module), module.network.eval()(IMAGES)
    assert expected > 0.5
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    for name in ("final.ckpt", "epoch7.ckpt"):
        trainer.test(module, Loader(), ckpt_path=tmp_path / name, verbose=False)
        assert accuracy(module) == expected, name
        fresh, other = Arriving(), classes()
        trainer_of(tmp_path, other).test(fresh, Loader(), ckpt_path=tmp_path / name, verbose=False)
        assert torch.allclose(fresh.network.eval()(IMAGES), logits, atol=1e-5), name
        loaded = classes()
        loaded._example = IMAGES[:4]
        assert torch.allclose(loaded.load(Arriving(), tmp_path / name).network.eval()(IMAGES), logits, atol=1e-5), name


def test_blocks_are_restored_if_evaluation_precedes_training(tmp_path: Path) -> None:
    trained = []
    for evaluate in (False, True):
        module, callback = Deep(), growth(trigger={0: 0.5, 1: 1.0}, parts=[Depth()])
        trainer = trainer_of(tmp_path, callback, max_epochs=3)
        if evaluate:
            trainer.validate(module, Loader(), verbose=False)
        trainer.fit(module, Loader(), Loader())
        assert len(callback.grower.events) == 1
        trained.append(module.network.state_dict())
    assert trained[0].keys() == trained[1].keys() == Deep().network.state_dict().keys()


def test_a_method_with_other_parameters_starts_from_the_ordinary_network(tmp_path: Path) -> None:
    def callback() -> Any:
        return growth(method=Hyperfan(), trigger={0: 0.5, 1: 1.0})

    module, first, save = Deep(), callback(), Save(tmp_path)
    module.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    names = sorted(module.network.state_dict())
    trainer = trainer_of(tmp_path, first, save, max_epochs=3)
    trainer.validate(module, Loader(), verbose=False)
    assert sorted(module.network.state_dict()) == names
    trainer.fit(module, Loader(), Loader())
    assert sorted(module.network.state_dict()) == names and len(first.grower.events) == 1
    expected = module.network.eval()(IMAGES)
    with pytest.raises(UserError, match="load checkpoints saved during training into a new network"):
        trainer.test(module, Loader(), ckpt_path=save.paths[-1], verbose=False)
    assert torch.equal(module.network.eval()(IMAGES), expected)
    fresh, other = Deep(), callback()
    fresh.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    again = trainer_of(tmp_path, other, max_epochs=4)
    for _ in range(2):
        again.test(fresh, Loader(), ckpt_path=save.paths[-1], verbose=False)
        assert sorted(fresh.network.state_dict()) == names
        assert torch.allclose(fresh.network.eval()(IMAGES), expected, atol=1e-5)
    fresh.train()
    again.fit(fresh, Loader(), Loader(), ckpt_path=save.paths[-1])
    assert sorted(fresh.network.state_dict()) == names and again.current_epoch == 4
    assert not torch.allclose(fresh.network.eval()(IMAGES), expected, atol=1e-5)
