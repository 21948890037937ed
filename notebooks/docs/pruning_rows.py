"""Prunes the 20 networks of tests/unit/test_prune.py by half, with Torch-Pruning too.

`python notebooks/docs/pruning_rows.py` writes notebooks/results/pruning/results.json (some minutes on two CPU cores);
the test checks that growlab prunes all of them exactly. Weights are random, in float64. `BasePruner` removes half of
every layer's outputs but the last one's; for transformers half of the heads, whose number it is given by the names of
query, key and value projections. In the masked network no layer reads the removed inputs. Groups with a layer or RMS
normalisation are left whole, since its statistics would run over fewer channels. A network may take a minute.
"""

import copy
import json
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_pruning
import torchvision
from torch import Tensor, nn

from growlab.base.errors import first_line
from growlab.base.files import write_json
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.inspect.small_models import small_model
from growlab.lab.training.run import provenance

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "notebooks" / "results" / "pruning" / "results.json"
VISION = (
    *("resnet18", "mobilenet_v3_small", "convnext_tiny", "densenet121", "shufflenet_v2_x0_5"),
    *("swin_t", "regnet_y_400mf", "googlenet", "efficientnet_b0", "vit_b_16", "squeezenet1_1", "mnasnet0_5"),
)
TEXT = ("llama", "gpt2", "qwen3", "bert", "t5", "vit", "opt", "phi3")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v")
SEED, LIMIT_SEC = 0, 60


def network_of(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a network with random weights in float64, and inputs."""
    torch.manual_seed(SEED)
    if name in TEXT:
        network, x, *_ = small_model(name)
    else:
        size = 224 if name == "vit_b_16" else 64
        settings = {"init_weights": False} if name == "googlenet" else {}
        network, x = (
            torchvision.models.get_model(name, weights=None, **settings),
            (torch.randn(2, 3, size, size),),
        )
    with torch.no_grad():
        for parameter in network.parameters():  # some begin at zero
            parameter += 0.02 * torch.randn_like(parameter)
    return network.double().eval(), tuple(one.double() if one.is_floating_point() else one for one in x)


def inputs_of(module: Any) -> int:
    """Return the number of input channels of a linear layer or a convolution, else 0."""
    return int(getattr(module, "in_features", 0) or getattr(module, "in_channels", 0))


def masking(mask: Tensor, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Set masked input channels to zero."""
    last = isinstance(module, nn.Linear)
    return (inputs[0] * (mask if last else mask.view(-1, 1, 1)), *inputs[1:])


def size_of(network: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def pruned(network: nn.Module, x: tuple[Tensor, ...]) -> dict[str, Any]:
    """Prune a network; return the share of parameters that is left, and the difference from the masked network."""
    before, masked = size_of(network), copy.deepcopy(network)
    named, of_masked = (
        {module: name for name, module in network.named_modules()},
        dict(masked.named_modules()),
    )
    config = getattr(getattr(network, "network", None), "config", None)
    heads = {}
    for module, name in named.items():
        last = name.rpartition(".")[2]
        if config is not None and isinstance(module, nn.Linear) and last in PROJECTIONS:
            shared = getattr(config, "num_key_value_heads", None) if last in ("k_proj", "v_proj") else None
            heads[module] = shared or config.num_attention_heads
    last_layer = [module for module in network.modules() if isinstance(module, (nn.Linear, nn.Conv2d))][-1]
    pruner = torch_pruning.pruner.BasePruner(
        network, x, torch_pruning.importance.MagnitudeImportance(p=1), pruning_ratio=0.5, num_heads=heads,
        prune_num_heads=bool(heads), prune_head_dims=not heads, head_pruning_ratio=0.5, ignored_layers=[last_layer],
        output_transform=lambda output: output if isinstance(output, Tensor) else output[0],
    )  # fmt: skip
    ways = (torch_pruning.prune_conv_in_channels, torch_pruning.prune_linear_in_channels)
    left = {name: list(range(inputs_of(module))) for module, name in named.items() if inputs_of(module)}
    sizes = {name: len(own) for name, own in left.items()}
    for group in pruner.step(interactive=True):
        kinds = {type(dependency.target.module).__name__ for dependency, _ in group}
        if any("LayerNorm" in kind or "RMSNorm" in kind for kind in kinds):
            continue
        for dependency, channels in group:
            if dependency.handler in ways:
                name = named[dependency.target.module]
                gone = {left[name][channel] for channel in channels}
                left[name] = [channel for channel in left[name] if channel not in gone]
        group.prune()
    for name, own in left.items():
        if len(own) < sizes[name]:
            mask = torch.zeros(sizes[name], dtype=torch.float64).index_fill_(0, torch.tensor(own), 1.0)
            of_masked[name].register_forward_pre_hook(partial(masking, mask))
    error = relative_error(evaluate(masked, x), evaluate(network, x))
    return {"parameters_left": size_of(network) / before, "difference": error}


def _stop(*_: Any) -> None:
    raise TimeoutError(f"not done after {LIMIT_SEC} s")


def main() -> None:
    """Prune all networks, or those that are named, and write their rows."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGVTALRM, _stop)
    rows = []
    for name in sys.argv[1:] or (*VISION, *TEXT):
        row: dict[str, Any] = {"network": name}
        try:
            network = network_of(name)
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SEC)
            row |= pruned(*network)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {first_line(error)}"
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if not sys.argv[1:]:
        about = {"command": "python notebooks/docs/pruning_rows.py", "seed": SEED}
        versions = {"torch_pruning": torch_pruning.__version__, "torchvision": torchvision.__version__}
        ROWS.parent.mkdir(exist_ok=True)
        write_json(ROWS, {**about, "libraries": versions, **provenance(torch.device("cpu")), "rows": rows})


if __name__ == "__main__":
    main()
