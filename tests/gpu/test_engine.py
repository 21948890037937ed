"""Growth on a CUDA device: methods, data types, hooks, compiled and recurrent networks, checkpoints to and from CPUs.

`tests/gpu/run.sh --device cpu` runs the tests on a CPU.
"""

import copy
import io
import math
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower, parts
from growlab.lab.networks import CausalTransformer, CifarResNet
from growlab.optim import SGD, Adam, NormRatio
from tests.benchmarks.ratios import llama, logits, tokens
from tests.cases import Around
from tests.gpu import second_device

DEVICE = os.environ.get("GROWLAB_TEST_DEVICE", "cuda")
if DEVICE == "second_device":
    second_device.register()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Warnings of torch and CUDA are no errors here.
    pytest.mark.filterwarnings("default"),
]
METHODS = ["ours", "pairs", "net2net", "random", "gradmax", "tiny", "firefly", "splitting", "bert2bert", "lemon"]
STAGES = {0: 0.5, 1: 1.0}
BOTH = (DEVICE, "cpu")


def recurrent() -> nn.Module:
    lstm = nn.LSTM(6, 16, batch_first=True)
    return Around(lambda net, x: net.head(net.lstm(x)[0][:, -1]), lstm=lstm, head=[16, 10])


def transformer() -> nn.Module:
    return CausalTransformer(32, 8, num_layers=2, width=32, num_heads=2, head_dim=16, hidden=48)


Made = tuple[nn.Module, Tensor]
NETWORKS: dict[str, Callable[[], Made]] = {
    "resnet": lambda: (CifarResNet(2, num_classes=10, channels=(4, 8, 16)), torch.randn(4, 3, 16, 16)),
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 10)), torch.randn(4, 6)),
    "recurrent": lambda: (recurrent(), torch.randn(4, 5, 6)),
    "transformer": lambda: (transformer(), tokens(8, 32)()),
    "llama": lambda: (llama(2, 64, vocab=32), tokens(8, 32)()),
}
# Without Llama, whose normalisation and rotary angles are always computed in float32.
EXACT = ("resnet", "mlp", "recurrent", "transformer")


def made(name: str, device: str = DEVICE, dtype: torch.dtype = torch.float32) -> Made:
    torch.manual_seed(0)
    network, x = NETWORKS[name]()
    return network.to(device, dtype), x.to(device, dtype if x.is_floating_point() else None)


def step(network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    out = logits(network(x)).flatten(0, -2)
    out = out if out.dtype == torch.float64 else out.float()
    loss = F.cross_entropy(out, torch.arange(len(out), device=x.device) % 10)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def grown(
    name: str, method: str = "ours", device: str = DEVICE, dtype: torch.dtype = torch.float32, make: type = SGD, **more
) -> tuple[Grower, list[float]]:
    """Train two steps before and two after an event; check the devices of all tensors."""
    network, x = made(name, device, dtype)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    grower = Grower(network, x, method=method, trigger=STAGES, anneal_steps=1, verbose=False, **more)
    grower.provide(batches=lambda count: [(x, torch.arange(4, device=device))] * count, loss=F.cross_entropy)
    optimizer = make(network.parameters(), lr=0.01, rule=NormRatio())
    grower.follow(optimizer)
    losses = []
    for epoch in (0, 0, 1, 1):
        grower.step(epoch=epoch)
        losses.append(step(network, optimizer, x))
    assert len(grower.events) == 1
    # Factors of hooks are on the CPU, in float64.
    tensors = {key: tensor for key, tensor in network.state_dict().items() if "unfinished_growth" not in key}
    tensors |= {
        (number, key): value
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim()
    }
    assert {key: value.device.type for key, value in tensors.items() if value.device.type != device} == {}
    return grower, losses


@pytest.mark.parametrize("method", METHODS)
def test_methods_grow_as_on_a_cpu(method: str) -> None:
    name = "transformer" if method in ("bert2bert", "lemon") else "mlp"
    ours, theirs = (grown(name, method, device, torch.float64) for device in BOTH)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-9, atol=1e-12)
    assert ours[0].events[0].widths_after == theirs[0].events[0].widths_after


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("make", [SGD, Adam])
def test_networks_and_optimizers_train_as_on_a_cpu(name: str, make: type) -> None:
    ours, theirs = (grown(name, device=device, dtype=torch.float64, make=make) for device in BOTH)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-9, atol=1e-12)
    weights = [{n: t.cpu() for n, t in each[0].finish().state_dict().items()} for each in (ours, theirs)]
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parity_in_the_precision_of_training(name: str, dtype: torch.dtype) -> None:
    (event,) = grown(name, dtype=dtype)[0].events
    limit = 1e-4 if dtype == torch.float32 else 0.1
    assert event.parity_error_eval <= limit and event.parity_error_train <= limit


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_networks_grow_with_and_without_cuda_graphs(mode: str) -> None:
    network, x = made("mlp")
    compiled = torch.compile(network, mode=mode, backend="inductor" if DEVICE == "cuda" else "eager")
    grower = Grower(compiled, x, trigger=STAGES, verbose=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    grower.follow(optimizer)
    for epoch in (0, 0, 1, 1):
        grower.step(epoch=epoch)
        step(compiled, optimizer, x)
        torch.testing.assert_close(compiled(x), network(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("there", [False, True])
def test_checkpoints_move_between_devices(there: bool) -> None:
    first, second = (DEVICE, "cpu") if there else ("cpu", DEVICE)
    saved, _ = grown("resnet", device=first)
    file = io.BytesIO()
    torch.save({"network": saved.network.state_dict(), "grower": saved.state_dict()}, file)
    file.seek(0)
    known = torch.load(file, weights_only=True, map_location=second)
    network, x = made("resnet", second)
    grower = Grower(network, x, trigger=STAGES, anneal_steps=1, verbose=False)
    network.load_state_dict(known["network"])
    grower.load_state_dict(known["grower"])
    ours, theirs = (each.eval().cpu() for each in (copy.deepcopy(network), copy.deepcopy(saved.network)))
    torch.testing.assert_close(ours(x.cpu()), theirs(x.cpu()), rtol=1e-3, atol=1e-4)


PARTS = {
    "averages": lambda: parts.Averages(decay=0.5),
    "depth": parts.Depth,
    "images": lambda: parts.Resolution([8, 16]),
    "warm-up": lambda: parts.Warmup(3),
    "freezing": parts.Freeze,
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_grow_with_the_network(part: str) -> None:
    grower, losses = grown("resnet", parts=[PARTS[part]()])
    assert all(map(math.isfinite, losses))
    for average in grower.copies().values():
        shapes = ({n: p.shape for n, p in each.named_parameters()} for each in (average, grower.network))
        assert next(shapes) == next(shapes)
        # From a checkpoint on the CPU too.
        (own,) = grower.parts
        own.load_state_dict({name: tensor.cpu() for name, tensor in own.state_dict().items()})
        assert all(tensor.device.type == DEVICE for tensor in average.parameters())


def with_positions(net: nn.Module, tokens: Tensor) -> Tensor:
    """A forward that creates a tensor on the default device."""
    return net.head((net.tokens(tokens) + net.positions(torch.arange(tokens.shape[1]))).relu()).mean(1)


@pytest.mark.parametrize("method", ["ours", "net2net"])
def test_growth_under_a_default_device(method: str) -> None:
    with torch.device(DEVICE):
        embeddings = {"tokens": nn.Embedding(9, 16), "positions": nn.Embedding(7, 16)}
        network, tokens = Around(with_positions, **embeddings, head=[16, 9]), torch.arange(14).view(2, 7) % 9
        assert network.head.weight.device.type == DEVICE
        grower = Grower(network, tokens, method=method, trigger=STAGES, verbose=False)
        optimizer = SGD(network.parameters(), lr=0.01, momentum=0.9, rule=NormRatio())
        grower.follow(optimizer)
        for epoch in range(2):
            grower.step(epoch=epoch)
            optimizer.zero_grad()
            F.cross_entropy(network(tokens), tokens[:, 0]).backward()
            optimizer.step()
        grower.finish()
        assert len(grower.events) == 1 and network.head.weight.shape == (9, 16)
