"""Pruned networks compute what the masked network computes, and training continues with the optimizer's state."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from growlab import UserError, prune, trace
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.inspect.small_models import FirstOutput, inputs_of, small_model
from growlab.widen.prune import RECEIPT, main
from tests.cases import Around, differing, train

VISION = (
    *("resnet18", "mobilenet_v3_small", "convnext_tiny", "densenet121", "shufflenet_v2_x0_5"),
    *("swin_t", "regnet_y_400mf", "googlenet", "efficientnet_b0", "vit_b_16", "squeezenet1_1", "mnasnet0_5"),
)
TEXT = ("llama", "gpt2", "qwen3", "bert", "t5", "vit", "opt", "phi3")
# The others take up to a minute each.
QUICK = ("resnet18",)


def plain_forward(net: Any, x: Tensor) -> Tensor:
    """Two convolutions with batch normalisation and two linear layers."""
    x = net.second(net.norm(net.first(x)).relu()).relu()
    return net.last(net.third(x.flatten(1)).tanh())


def plain() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    convolutions = {"first": nn.Conv2d(3, 8, 3, padding=1), "norm": nn.BatchNorm2d(8), "second": nn.Conv2d(8, 6, 3)}
    network = Around(plain_forward, **convolutions, third=[6 * 4, 10], last=[10, 4]).double()
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    for _ in range(3):
        network(torch.randn(16, 3, 4, 4, dtype=torch.float64))
    return network, x


def masked_output(network: Any, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
    """Output if activations of removed channels are zero in the inputs of the next layers."""

    def only(channels: Tensor, y: Tensor) -> Tensor:
        mask = torch.zeros(y.shape[1], dtype=y.dtype).index_fill_(0, channels, 1.0)
        return y * mask.view(-1, *[1] * (y.dim() - 2))

    network.eval()
    y = only(kept["first"], network.norm(network.first(x)).relu())
    y = only(kept["second"], network.second(y).relu())
    return network.last(only(kept["third"], network.third(y.flatten(1)).tanh()))


def test_a_pruned_network_computes_what_the_masked_one_does() -> None:
    network, x = plain()
    graph = trace(network, x)
    full = copy.deepcopy(network)
    kept = prune(network, graph, {"first": [6, 1, 2], "second": 4, "third": 0.5}, example=x)
    assert {group: len(channels) for group, channels in kept.items()} == {"first": 3, "second": 4, "third": 5}
    assert kept["first"].tolist() == [1, 2, 6]
    assert torch.allclose(network.eval()(x), masked_output(full, x, kept), rtol=1e-12)
    assert (network.first.out_channels, network.norm.num_features, network.last.in_features) == (3, 3, 5)
    # The channels with the largest weights that produce and consume them are kept.
    sizes = full.third.weight.abs().sum(1) + full.last.weight.abs().sum(0)
    assert kept["third"].tolist() == sizes.topk(5).indices.sort().values.tolist()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizer_state_of_kept_channels_is_kept(make: Any) -> None:
    network, x = plain()
    graph = trace(network, x)
    settings = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = make(network.parameters(), lr=0.01, **settings)
    train(network, optimizer, x, steps=3)
    moments = ["momentum_buffer"] if make is torch.optim.SGD else ["exp_avg", "exp_avg_sq"]
    before = {key: optimizer.state[network.third.weight][key].clone() for key in moments}
    group = optimizer.param_groups[0]
    kept = prune(network, graph, 0.5, score="taylor", optimizer=optimizer)
    # Channels of the second convolution are four columns each of the layer behind `flatten`.
    columns = (kept["second"][:, None] * 4 + torch.arange(4)).flatten()
    for key, moment in before.items():
        assert torch.equal(optimizer.state[network.third.weight][key], moment[kept["third"]][:, columns])
    assert optimizer.param_groups[0] is group
    assert {id(p) for p in group["params"]} == {id(p) for p in network.parameters()}
    weights = network.third.weight.detach().clone()
    train(network, optimizer, x)
    assert not torch.equal(weights, network.third.weight)


def test_an_optimizer_that_cannot_follow_loses_its_state_or_leaves_the_network_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Joined(torch.optim.AdamW):
        """Keeps the elements of all parameters in one vector."""

        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.average = torch.cat([p.detach().flatten() for p in self.param_groups[0]["params"]])

    for make in (torch.optim.Adafactor, Joined):
        network, x = plain()
        graph, parameters = trace(network, x), list(network.parameters())
        optimizer = make(network.parameters())
        network(x).square().mean().backward()
        optimizer.step()
        expected = evaluate(network, (x,))
        if make is Joined:
            with pytest.raises(UserError, match="in one tensor in 'average'"):
                prune(network, graph, 0.5, optimizer=optimizer)
            assert torch.equal(evaluate(network, (x,)), expected)
            assert all(one is other for one, other in zip(network.parameters(), parameters, strict=True))
        else:
            prune(network, graph, 0.5, optimizer=optimizer)
            assert "the optimizer's state is reset" in caplog.text and not optimizer.state
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in network.parameters()}


def test_scores_rank_channels() -> None:
    network, x = plain()
    graph = trace(network, x)
    own = {"third": torch.arange(10.0)}
    assert prune(copy.deepcopy(network), graph, {"third": 3}, score=own)["third"].tolist() == [7, 8, 9]
    drawn = [prune(copy.deepcopy(network), graph, {"third": 3}, "random", seed=s)["third"] for s in (0, 0, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert any(not torch.equal(drawn[0], other) for other in drawn[2:])
    network(x).square().mean().backward()
    taylor = (network.third.weight * network.third.weight.grad).abs().sum(1)
    taylor += (network.last.weight * network.last.weight.grad).abs().sum(0)
    kept = prune(network, graph, {"third": 4}, score="taylor")["third"]
    assert kept.tolist() == taylor.topk(4).indices.sort().values.tolist()


@pytest.mark.parametrize(
    ("keep", "score", "message"),
    [
        ({"first": 0}, "l1", "first has 8 channels and cannot keep 0"),
        ({"first": 1.5}, "l1", "cannot keep 1.5"),
        ({"first": [0, 0]}, "l1", "each once"),
        ({"first": [8]}, "l1", "channels 0 to 7"),
        ({"first": torch.tensor(3)}, "l1", "each once; not 3"),
        ({"first": True}, "l1", "each once; not 1"),
        ({"other": 2}, "l1", "no width group 'other'"),
        (0.5, "taylor", "call backward"),
        (0.5, "l2", "no score 'l2'"),
        (0.5, {"first": torch.ones(3)}, "score has no [8] tensor for first"),
    ],
)
def test_prune_rejects_invalid_arguments(keep: Any, score: Any, message: str) -> None:
    network, x = plain()
    state = copy.deepcopy(network.state_dict())
    with pytest.raises(UserError) as error:
        prune(network, trace(network, x), keep, score)
    assert message in str(error.value)
    assert not differing(state, network.state_dict())


@pytest.mark.parametrize("keep", [np.int64(3), np.float32(0.375)])
def test_numbers_of_numpy_are_accepted(keep: Any) -> None:
    network, x = plain()
    assert len(prune(network, trace(network, x), {"first": keep})["first"]) == 3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in (*VISION, *TEXT)]
)
def test_networks_of_libraries_are_pruned_exactly(name: str) -> None:
    """Keep half of every group; `prune` itself compares with the masked network, to 2e-13 of the output."""
    torch.manual_seed(0)
    if name in TEXT:
        network, x, *_ = small_model(name)
    else:
        size = 224 if name == "vit_b_16" else 64
        torchvision = pytest.importorskip("torchvision")
        # Other initialisation is slow and causes a warning.
        given = {"init_weights": False} if name == "googlenet" else {}
        network, x = torchvision.models.get_model(name, weights=None, **given), (torch.randn(2, 3, size, size),)
    network = network.double().eval()
    with torch.no_grad():
        # A head of zeros would hide errors in the layers before it.
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    example = tuple(one.double() if one.is_floating_point() else one for one in x)
    before = sum(p.numel() for p in network.parameters())
    graph = trace(network, example)
    kept = prune(network, graph, 0.5, example=example)
    assert kept.keys() == graph.groups.keys()
    assert sum(p.numel() for p in network.parameters()) < 0.6 * before


@pytest.mark.parametrize(
    ("kind", "parts"), [("llama", "heads,mlp"), pytest.param("gpt2", "heads,mlp,stream", marks=pytest.mark.slow)]
)
def test_a_saved_model_is_pruned_and_loads(tmp_path: Path, kind: str, parts: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model: Any = small_model(kind)[0].network
    model.save_pretrained(tmp_path / "old")
    assert main([str(tmp_path / "old"), "-o", str(tmp_path / "new"), "--keep", "0.5", "--parts", parts]) == 0
    receipt = json.loads((tmp_path / "new" / RECEIPT).read_text())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    assert receipt["num_params"] == sum(p.numel() for p in loaded.parameters()) < receipt["num_params_before"]
    inputs = inputs_of(model)
    network, probe = FirstOutput(model.eval(), list(inputs)), tuple(inputs.values())
    kept = {f"network.{group}": channels for group, channels in receipt["kept"].items()}
    prune(network, trace(network, probe), kept)
    assert relative_error(evaluate(network, probe), evaluate(FirstOutput(loaded, list(inputs)), probe)) < 1e-6


@pytest.mark.slow
def test_a_model_that_cannot_be_pruned_is_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model: Any = small_model("gemma2")[0].network
    model.save_pretrained(tmp_path / "old")
    for arguments, message in (
        (["--keep", "0.5", "--parts", "stream"], "its code computes numbers from these sizes"),
        (["--keep", "0.3"], "no whole number; nearest widths that fit:"),
        (["--keep", "1.5"], "must be above 0 and below 1"),
        (["--keep", "0.5", "--parts", "tails"], "there is no part 'tails'"),
    ):
        assert main([str(tmp_path / "old"), "-o", str(tmp_path / "new"), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "new").exists()
