"""Widen trained networks of torchvision and timm: same outputs, same class, and the result can be loaded."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from growlab.base.errors import UserError
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.inspect.hub import timm_network, torchvision_network
from growlab.widen import load_widened
from growlab.widen.__main__ import main
from growlab.widen.folder import RECEIPT
from tests.cases import train
from tests.unit.widen.test_widen import refusal

NUM_CLASSES = 6
SIDE = "3,64,64"


def saved(path: Path, name: str) -> nn.Module:
    """A network with perturbed weights, and its state_dict in a file."""
    source, _, model = name.partition("/")
    if source == "timm":
        pytest.importorskip("timm")
    torch.manual_seed(0)
    network = (timm_network if source == "timm" else torchvision_network)((3, 64, 64), NUM_CLASSES, model)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    torch.save({"model": network.state_dict()}, path)
    return network.eval()


@pytest.mark.parametrize(
    ("name", "width", "side", "method"),
    [
        ("torchvision/squeezenet1_1", 1.3, 64, "pairs"),
        ("timm/test_resnet", 1.5, 64, "hypercloning"),
        # Its state_dict does not load without the version in its metadata.
        pytest.param("torchvision/mnasnet0_5", 1.25, 64, "pairs", marks=pytest.mark.slow),
        ("timm/test_vit", 1.5, 160, "lemon"),
    ],
)
def test_a_wider_network_computes_the_same_and_loads(
    tmp_path: Path, name: str, width: float, side: int, method: str
) -> None:
    old = saved(tmp_path / "weights.pt", name)
    arguments = [name, str(tmp_path / "weights.pt"), "--width", str(width), "--method", method]
    assert main([*arguments, "-o", str(tmp_path / "new"), "--input-shape", f"3,{side},{side}"]) == 0
    receipt = json.loads((tmp_path / "new" / RECEIPT).read_text())
    assert receipt["relative_error_float64"] <= 1e-10 and receipt["num_classes"] == NUM_CLASSES
    new = load_widened(tmp_path / "new").eval()
    assert type(new) is type(old)
    ratio = sum(p.numel() for p in new.parameters()) / sum(p.numel() for p in old.parameters())
    assert ratio == receipt["num_params"] / receipt["num_params_before"] > width**1.3
    x = torch.randn(2, 3, side, side)
    assert relative_error(evaluate(old, (x,)), evaluate(new, (x,))) <= 1e-4
    # Training moves every tensor, though not every unit, because some units of a ReLU may get no gradient.
    before = {key: p.detach().clone() for key, p in new.train().named_parameters()}
    train(new, torch.optim.SGD(new.parameters(), lr=0.01), x)
    assert [key for key, p in new.named_parameters() if torch.equal(p, before[key])] == []


def test_weights_keep_their_precision(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    state = saved(weights, "timm/test_resnet").bfloat16().state_dict()
    torch.save(state, weights)
    arguments = ["timm/test_resnet", str(weights), "--width", "1.5", "--input-shape", SIDE]
    assert main([*arguments, "-o", str(tmp_path / "out")]) == 0
    wider = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert {key: tensor.dtype for key, tensor in wider.items()} == {k: t.dtype for k, t in state.items()}
    assert load_widened(tmp_path / "out") is not None


def test_widen_reports_bad_weights_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, path, out = "torchvision/squeezenet1_1", tmp_path / "weights.pt", tmp_path / "new"
    saved(path, name)
    refused = partial(refusal, capsys, "-o", out, "--input-shape", SIDE)
    assert "state_dict after its name" in refused(name, "--width", 2)
    assert "must be above 1" in refused(name, path, "--width", 0.5)
    assert "for folders of transformers" in refused(name, path, "--width", 2, "--depth", 2)
    assert "there are pairs, net2net, hypercloning, lemon" in refused(name, path, "--width", 2, "--method", "x")
    error = refused("torchvision/no_such_net", path, "--width", 2)
    # The command has no setting like model.name.
    assert "torchvision makes no network 'no_such_net'" in error and "model." not in error.replace("torchvision.m", "")
    assert "do not fit the network" in refused("torchvision/squeezenet1_0", path, "--width", 2)
    # Weights whose head has inconsistent sizes: no tensor may be left at its initial values.
    state = torch.load(path, weights_only=True)["model"]
    torch.save({**state, "classifier.1.bias": torch.zeros(NUM_CLASSES + 1)}, tmp_path / "heads.pt")
    error = refused(name, tmp_path / "heads.pt", "--width", 2)
    assert "do not fit the network: has another shape of classifier.1.bias" in error
    assert "cannot read" in refused(name, tmp_path / "none.pt", "--width", 2)
    assert "is no torchvision/NAME" in refused(tmp_path, path, "--width", 2)
    assert not out.exists()
    with pytest.raises(UserError, match="contains no widened network"):
        load_widened(tmp_path)
