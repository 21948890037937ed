"""Parts, and a method that holds weights in another way, where Lightning evaluates before, between and after fits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.growth import VarianceTransfer
from tests.unit.frontends.lightning_runs import IMAGES, LABELS, Loader, Plain, Save, growth, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
ORDER = [2, 0, 1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.norm(self.a(x))))


class Deep(Plain):
    """Blocks behind one another, with counters among their buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Block(), Block(), Block(), nn.Linear(8, 3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.criterion(self.network(batch[0]), batch[1]), on_epoch=True)

    test_step = validation_step


class Arriving(Deep):
    """Two classes at first, in an order that is not the labels'."""

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
    from growlab.parts.classes import Classes

    # Under AdamW the default folds multipliers, which is no matter of classes.
    method = VarianceTransfer(noise_std=1e-3, multipliers="keep")
    return growth(
        method=method, trigger={0: 0.5, 1: 1.0}, parts=[Classes(ORDER, lambda n: [2, 3] if n == 2 else [3] * n)]
    )


def test_the_order_of_classes_is_that_of_the_labels_whatever_is_loaded(tmp_path: Path) -> None:
    module, callback, save = Arriving(), classes(), Save(tmp_path)
    trainer = trainer_of(tmp_path, callback, save, max_epochs=8)
    # What is evaluated first is not what is trained.
    trainer.validate(module, Loader(), verbose=False)
    trainer.fit(module, Loader(), Loader())
    wanted, logits = accuracy(module), module.network.eval()(IMAGES)
    assert wanted > 0.5
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    for name in ("final.ckpt", "epoch7.ckpt"):
        trainer.test(module, Loader(), ckpt_path=tmp_path / name, verbose=False)
        assert accuracy(module) == wanted, name
        fresh, other = Arriving(), classes()
        trainer_of(tmp_path, other).test(fresh, Loader(), ckpt_path=tmp_path / name, verbose=False)
        assert torch.allclose(fresh.network.eval()(IMAGES), logits, atol=1e-5), name
        loaded = classes()
        loaded._example = IMAGES[:4]
        assert torch.allclose(loaded.load(Arriving(), tmp_path / name).network.eval()(IMAGES), logits, atol=1e-5), name


def test_blocks_come_back_where_evaluation_stands_before_training(tmp_path: Path) -> None:
    from growlab.parts.depth import Depth

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


def test_a_method_that_holds_weights_in_another_way_begins_from_the_ordinary_network(tmp_path: Path) -> None:
    from growlab.parts.hypernets.growth import Hyperfan

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
    wanted = module.network.eval()(IMAGES)
    with pytest.raises(UserError, match="load checkpoints saved during training into a new network"):
        trainer.test(module, Loader(), ckpt_path=save.paths[-1], verbose=False)
    assert torch.equal(module.network.eval()(IMAGES), wanted)
    fresh, other = Deep(), callback()
    fresh.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    again = trainer_of(tmp_path, other, max_epochs=4)
    for _ in range(2):
        again.test(fresh, Loader(), ckpt_path=save.paths[-1], verbose=False)
        assert sorted(fresh.network.state_dict()) == names
        assert torch.allclose(fresh.network.eval()(IMAGES), wanted, atol=1e-5)
    fresh.train()
    again.fit(fresh, Loader(), Loader(), ckpt_path=save.paths[-1])
    assert sorted(fresh.network.state_dict()) == names and again.current_epoch == 4
    assert not torch.allclose(fresh.network.eval()(IMAGES), wanted, atol=1e-5)
