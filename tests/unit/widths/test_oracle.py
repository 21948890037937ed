"""Width groups against Torch-Pruning's dependency groups, found by another tracer from autograd's graph.

For the first and the last output channel of every convolution and linear layer: what Torch-Pruning removes with it
(rows, columns, norm entries, by position) is what ours ties to it. Differences are explained in `KEPT` and `CASES`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
import torch_pruning
from torch import nn

from growlab.inspect.hub import load
from growlab.widths import WidthGraph, trace

# (module path, "out" or "in", position): a row or a column of a layer, or an entry of a norm.
Tie = tuple[str, str, int]
CONVOLUTIONS = nn.modules.conv._ConvNd
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.PReLU)

# growlab's reasons to keep full width where Torch-Pruning would remove channels -> why that is right.
KEPT = {"the network's output": "the logits are the task's; Torch-Pruning leaves it to the user to spare them"}
KEPT_BESIDE_ECA = {
    "neighbouring channels are pooled or convolved": "ECA slides a window over channels: each has its place",
    "added to or multiplied with channels that keep their full width": "a stream that includes such channels",
    "a single channel": "a gate of one channel that multiplies all the others",
}


@dataclass(frozen=True)
class Case:
    """A network: its image size, and why some layers are grouped otherwise or are unknown to Torch-Pruning.

    `kept` has further reasons to keep full width, and why each is right. growlab traces networks that do more in train
    mode in that mode; with `training` Torch-Pruning does so too.
    """

    size: int = 64
    otherwise: str = ""
    training: bool = False
    kept: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "growlab/vgg11": Case(32),
    "growlab/mobilenetv1": Case(32),
    "growlab/resnet20": Case(
        32,
        "padding between streams is unknown to Torch-Pruning: it takes channel i of the wider one for channel i of "
        "the narrower one, which lies in its middle",
    ),
    "torchvision/squeezenet1_1": Case(),
    **{
        f"torchvision/{name}": Case()
        for name in (
            *("alexnet", "vgg11_bn", "resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d"),
            *("densenet121", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "efficientnet_b0"),
            *("regnet_y_400mf", "convnext_tiny"),
        )
    },
    # It has auxiliary heads.
    "torchvision/googlenet": Case(training=True),
    **{
        f"timm/{name}": Case()
        for name in (
            *("resnet10t", "resnet18d", "seresnet18", "vovnet39a", "dla34", "selecsls42b"),
            *("repvgg_a0", "regnetx_002", "ghostnet_050", "tf_efficientnet_lite0", "fbnetc_100"),
            *("spnasnet_100", "semnasnet_050", "hardcorenas_a", "mobilenetv4_conv_small", "convnext_atto"),
        )
    },
    "timm/ecaresnet26t": Case(kept=KEPT_BESIDE_ECA),
    "timm/vit_tiny_patch16_224": Case(224),
    "timm/deit_tiny_patch16_224": Case(224),
}
FAST = ("growlab/vgg11", "growlab/mobilenetv1", "growlab/resnet20", "torchvision/squeezenet1_1")


def tie(network: nn.Module, module: str, side: str, position: int) -> Tie:
    """Normalise ties: norms and depthwise layers have no columns; a grouped layer's are counted within a group."""
    layer = network.get_submodule(module)
    if isinstance(layer, NORMS):
        side = "out"
    elif isinstance(layer, CONVOLUTIONS) and side == "in":
        columns = layer.in_channels // layer.groups
        side, position = ("out", position) if columns == 1 < layer.groups else ("in", position % columns)
    return module, side, position


def our_ties(network: nn.Module, graph: WidthGraph) -> dict[tuple[str, int], set[Tie]]:
    """Group and channel -> ties."""
    layers = {name: m for name, m in network.named_modules() if isinstance(m, (CONVOLUTIONS, nn.Linear, *NORMS))}
    ties = defaultdict(set)
    for tensor, axes in graph.axes.items():
        module, _, leaf = tensor.rpartition(".")
        if module not in layers:
            continue
        for dimension, axis in enumerate(axes):
            side = "in" if dimension == 1 and leaf == "weight" else "out"
            for group in axis.groups:
                channels = {name: torch.full((graph.groups[name].full_width,), -1.0) for name in axis.groups}
                channels[group] = torch.arange(graph.groups[group].full_width, dtype=torch.float)
                for position, channel in enumerate(axis.spread(channels, graph.full_widths, -1).tolist()):
                    if channel >= 0:
                        ties[group, int(channel)].add(tie(network, module, side, position))
    return dict(ties)


def their_ties(network: nn.Module, dependencies: torch_pruning.DependencyGraph, root: str, row: int) -> set[Tie]:
    """Channels that Torch-Pruning removes together with an output channel of a layer."""
    names = {module: name for name, module in network.named_modules()}
    layer = network.get_submodule(root)
    remove = dependencies.get_pruner_of_module(layer).prune_out_channels
    ties = set()
    for dependency, positions in dependencies.get_pruning_group(layer, remove, idxs=[row]):
        module = dependency.target.module
        if isinstance(module, (CONVOLUTIONS, nn.Linear, *NORMS)):
            side = "out" if dependencies.is_out_channel_pruning_fn(dependency.handler) else "in"
            ties |= {tie(network, names[module], side, int(position)) for position in positions}
    return ties


def outcomes(name: str, case: Case) -> Counter[str]:
    """Number of ties on which both tracers agree, and the differences."""
    network, inputs = load(name, (3, case.size, case.size))
    network.eval()
    graph = trace(network, inputs)
    dependencies = torch_pruning.DependencyGraph().build_dependency(
        network, inputs[0], forward_fn=lambda model, images: model.train(case.training)(images)
    )
    ties = our_ties(network, graph)
    channel_of = {one: channel for channel, tied in ties.items() for one in tied}
    found: Counter[str] = Counter()
    for root, layer in network.named_modules():
        if not isinstance(layer, (CONVOLUTIONS, nn.Linear)):
            continue
        for row in {0, layer.weight.shape[0] - 1}:
            channel = channel_of.get((root, "out", row))
            if channel is None:
                found[f"kept: {graph.fixed.get(root, 'no reason').partition(': ')[0]}"] += 1
                continue
            ours = ties[channel]
            try:
                theirs = their_ties(network, dependencies, root, row)
                if ours != theirs:
                    # growlab widens all groups of a grouped convolution equally, Torch-Pruning cuts single channels.
                    rows = [
                        one for one in ours if one[1] == "out" and not isinstance(network.get_submodule(one[0]), NORMS)
                    ]
                    theirs = set().union(*(their_ties(network, dependencies, one[0], one[2]) for one in rows))
            except ValueError:
                found["unknown to Torch-Pruning"] += 1
                continue
            found["same" if ours == theirs else "otherwise"] += 1
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_groups_agree_with_torch_prunings(name: str) -> None:
    case = CASES[name]
    found = outcomes(name, case)
    assert found["same"] > 0
    assert (found["otherwise"] + found["unknown to Torch-Pruning"] > 0) == bool(case.otherwise), found
    kept = {key.removeprefix("kept: ") for key in found if key.startswith("kept: ")}
    assert kept == {**KEPT, **case.kept}.keys()
    print(name, dict(found))


def test_at_least_25_networks_are_compared() -> None:
    assert sum(not case.otherwise for case in CASES.values()) >= 25
