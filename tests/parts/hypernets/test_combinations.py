"""Hypernetworks that emit the weights of a network which grows in depth too."""

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from growlab.grower import Grower
from growlab.lab.networks.resnet import CifarResNet
from growlab.parts import Averages, Depth
from growlab.parts.hypernets import Hyperfan
from tests.command_line import CommandLine
from tests.parts.combined import check_resumed, check_two_ranks

DEEP = (
    *("data.limit_train=96", "data.limit_test=40", "data.batch_size=32", "data.validation=none"),
    *("schedule.epochs=[1,1,1]", "schedule.widths=[0.25,0.75,1]", "log_rates_every_n_steps=2"),
    *("growth=hyperfan", "growth.embedding_features=3", "model.width=8", "optimizer.lr=0.01"),
    *("depth.blocks=auto", "depth.start=stack", "ema.decay=0.9"),
)


def network() -> CifarResNet:
    torch.manual_seed(0)
    return CifarResNet(2, 10, 1, (4, 8, 8)).double()


@pytest.mark.parametrize("start", ["zero", "stack"])
@pytest.mark.parametrize("sharing", ["layer", "chunk"])
def test_blocks_come_in_with_hypernetworks_of_their_own(sharing: str, start: str) -> None:
    grown, x = network(), torch.randn(8, 1, 8, 8, dtype=torch.float64)
    parts = [Averages(0.9), Depth("auto", start)]
    method = Hyperfan(sharing=sharing, embedding_features=3)
    grower = Grower(grown, x, method=method, trigger={0: 0.5, 1: 1.0}, parts=parts)
    optimizer = torch.optim.SGD(grown.parameters(), 0.01, momentum=0.9)
    grower.follow(optimizer)
    for epoch in range(2):
        grower.step(epoch=epoch, step=epoch)
        before = [p.detach().clone() for p in grown.parameters()]
        optimizer.zero_grad()
        F.cross_entropy(grown(x), torch.arange(8)).backward()
        optimizer.step()
    (receipt,) = grower.events
    assert len(receipt["inserted"]) >= 2 and receipt["parity_error_eval"] < 1e-12
    assert receipt["ema_parity_error_eval"] < 1e-12
    for block in receipt["inserted"]:
        assert max(block["parity_error_eval"], block["parity_error_train"]) < 1e-12
    # What emits the weights of a block that has come in is trained; chunks of all layers have one output layer.
    own = "output" if sharing == "layer" else "embedding"
    emitting = [name for name, _ in grown.named_parameters() if "layers.2.1" in name and own in name]
    outputs = {name for name, _ in grown.named_parameters() if "layers.2.1" in name and "output" in name}
    assert bool(outputs) == (sharing == "layer")
    moved = {
        name
        for old, (name, new) in zip(before, grown.named_parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert emitting and any("layers.2.1" in name for name in moved)
    outputs = grown.eval()(x)
    plain = network()
    plain.load_state_dict(copy.deepcopy(grower.finish().state_dict()))
    assert torch.allclose(plain.eval()(x), outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharing", ["layer", "chunk"])
def test_resumed_equals_uninterrupted(cli: CommandLine, tmp_path: Path, sharing: str) -> None:
    whole = check_resumed(cli, tmp_path, (*DEEP, f"growth.sharing={sharing}"))
    assert sum(len(event["inserted"]) for event in whole.growth["events"]) >= 4


@pytest.mark.parametrize("sharing", ["layer", "chunk"])
def test_two_ranks_hold_the_same(cli: CommandLine, tmp_path: Path, sharing: str) -> None:
    run = check_two_ranks(cli, tmp_path, (*DEEP, f"growth.sharing={sharing}"))
    assert len(run.growth["events"]) == 2
