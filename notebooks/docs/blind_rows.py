"""Train pairs of a network and a budget that were written down before any of them was trained, in six rounds.

`python notebooks/docs/blind_rows.py fourth --write` writes `notebooks/results/blind_fourth/pairs.csv`: networks,
budgets, and the odds of `growlab.plan`. With `--data ../shared/data` in the place of `--write` it trains all runs
missing from `rates.csv` (validation data, one seed) and `arms.csv` (test data), at equal cost in FLOPs, in about half
an hour on one CPU core. `first` is the round of `notebooks/results/blind`. The kept pairs.csv of each round has the
columns of the version that wrote it. Learning rates are chosen on validation data, for each pair and each kind of run.
"""

import argparse
import ast
import csv
import gzip
import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.layers import GatedMlp, SEModule
from timm.models import MlpMixer, VisionTransformer
from timm.models.convmixer import ConvMixer
from timm.models.mlp_mixer import SpatialGatingBlock
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import At, Controller, Grower
from growlab.grower.cost import forward_flops
from growlab.grower.triggers import Never
from growlab.growth import VarianceTransfer
from growlab.lab.networks import MLP, CausalTransformer, CifarResNet
from growlab.lab.networks.language_models import CausalModel
from growlab.lab.training.run import git_commit
from growlab.parts import Depth, Resolution
from growlab.plan import advise

RESULTS = Path(__file__).resolve().parents[1] / "results"
FOLDERS = {"first": RESULTS / "blind"} | {
    name: RESULTS / f"blind_{name}" for name in ("second", "third", "fourth", "fifth", "sixth")
}
SIZES = ("full", "smaller", "grown")
ARMS = ("full", "smaller", "eighth", "grown", "small_input", "grown_input", "controller", "stays", "shallow", "drawn")
# The last rate is tried if the first is better than the second.
RATES, RATE_SEED = (0.005, 0.015, 0.0015), 100
# Seeds of each round; more for what the controller is compared with, since the two differ little.
SEEDS = {"first": 2, "second": 2, "third": 3, "fourth": 3, "fifth": 5, "sixth": 4}
COMPARED = {name: {"controller": 8, "stays": 8} for name in ("third", "fourth")}
# Runs at another one's rate; the controller, and its trunk that never grows, at that of the smaller network.
RATE_OF = {
    **dict.fromkeys(("eighth", "controller", "stays"), "smaller"),
    **dict.fromkeys(("small_input", "grown_input"), "full"),
}
# Parts of the cost: warm-up, decay to 0 at the end, growth of the network, growth of the input.
WARMUP, DECAY, GROW, ENLARGE = 0.05, 0.4, 0.3, 0.5
CHARACTERS, LENGTH, CLASSES = 96, 64, 10
# The most samples of a test.
TESTED = 4000


class Recurrent(nn.Module):
    """Next character by two layers of an LSTM, a GRU or an RNN."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU | nn.RNN], width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.layers = layer(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return self.head(self.layers(self.embedding(tokens_BT))[0])


def mlp(width: int, features: int) -> nn.Module:
    """Three hidden layers."""
    return nn.Sequential(nn.Flatten(), MLP(features, [width] * 3, CLASSES, batch_norm=True))


def convnet(width: int, channels: int) -> nn.Module:
    """Four convolutions, two of stride 2, and the mean over the image."""
    layers: list[nn.Module] = []
    for into, out, stride in (
        (channels, width, 1),
        (width, width, 2),
        (width, 2 * width, 2),
        (2 * width, 2 * width, 1),
    ):
        layers += [nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES))


def resnet(width: int, channels: int) -> nn.Module:
    """ResNet-14: two blocks a stage."""
    return CifarResNet(2, CLASSES, channels, (width, 2 * width, 4 * width), stem_stride=2)


def vit(width: int, channels: int, size: int) -> nn.Module:
    """Four layers, two heads, patches of 4x4."""
    return VisionTransformer(
        img_size=size, patch_size=4, in_chans=channels, num_classes=CLASSES, embed_dim=width, depth=4, num_heads=2,
        mlp_ratio=2, class_token=False, global_pool="avg", dynamic_img_size=True,
    )  # fmt: skip


def decoder(width: int) -> nn.Module:
    """Four layers of a Llama-like decoder."""
    return CausalTransformer(
        CHARACTERS, LENGTH, num_layers=4, width=width, num_heads=2, head_dim=width // 2, rotary_dim=2, hidden=2 * width
    )


def separable(width: int, channels: int) -> nn.Module:
    """Three depthwise-separable convolutions behind a stem."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for into, out, stride in ((width, 2 * width, 1), (2 * width, 2 * width, 2), (2 * width, 4 * width, 1)):
        layers += [nn.Conv2d(into, into, 3, stride, 1, groups=into, bias=False), nn.BatchNorm2d(into), nn.ReLU()]
        layers += [nn.Conv2d(into, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


def vgg(width: int, channels: int) -> nn.Module:
    """Two convolutions and a maximum, twice, then two linear layers with dropout."""
    layers: list[nn.Module] = []
    for into, out in ((channels, width), (width, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv2d(into, out, 3, 1, 1), nn.ReLU(), *([nn.MaxPool2d(2)] if into in (width, 2 * width) else [])]
    head = [nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4 * width, CLASSES)]
    return nn.Sequential(*layers[:-1], nn.AdaptiveMaxPool2d(1), nn.Flatten(), *head)


class Causal(nn.Module):
    """Next character by dilated causal convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.layers = nn.ModuleList([nn.Conv1d(width, width, 3, dilation=2**index) for index in range(4)])
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        x_BCT = self.embedding(tokens_BT).transpose(1, 2)
        for layer in self.layers:
            x_BCT = F.gelu(layer(F.pad(x_BCT, (2 * layer.dilation[0], 0))))
        return self.head(x_BCT.transpose(1, 2))


class Rows(nn.Module):
    """Class of an image from its rows, one after the other, by a GRU."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.layers = nn.GRU(size, width, 2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.head(self.layers(images_BCHW[:, 0])[0][:, -1])


class Branch(nn.Module):
    """Layers beside a skip connection."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the input's shape."""
        return x + self.branch(x)


def resmlp(width: int, features: int) -> nn.Module:
    """Four residual blocks of two linear layers."""
    C = width
    blocks = [Branch(nn.LayerNorm(C), nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C)) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(features, C), *blocks, nn.LayerNorm(C), nn.Linear(C, CLASSES))


def convnext(width: int, channels: int) -> nn.Module:
    """Four residual blocks of a depthwise and two pointwise convolutions, on patches of 2x2."""
    C = width
    blocks = [
        Branch(
            nn.Conv2d(C, C, 5, padding=2, groups=C), nn.BatchNorm2d(C), nn.Conv2d(C, 2 * C, 1), nn.GELU(),
            nn.Conv2d(2 * C, C, 1),
        ) for _ in range(4)
    ]  # fmt: skip
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, CLASSES)]
    return nn.Sequential(nn.Conv2d(channels, C, 2, 2), *blocks, *head)


def mixer(width: int, channels: int, size: int) -> nn.Module:
    """MLP-Mixer of four layers on patches of 4x4."""
    return MlpMixer(CLASSES, size, channels, patch_size=4, num_blocks=4, embed_dim=width, mlp_ratio=(0.5, 2.0))


def preact(width: int, channels: int) -> nn.Module:
    """Four residual blocks of two convolutions behind group normalisation, on half of the image's side."""
    C = width
    blocks = [
        Branch(
            nn.GroupNorm(1, C), nn.ReLU(), nn.Conv2d(C, C, 3, padding=1), nn.GroupNorm(1, C), nn.ReLU(),
            nn.Conv2d(C, C, 3, padding=1),
        ) for _ in range(4)
    ]  # fmt: skip
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, CLASSES)]
    return nn.Sequential(nn.Conv2d(channels, C, 3, 2, 1), *blocks, *head)


def inverted(width: int, channels: int) -> nn.Module:
    """Four inverted residual blocks, three times as wide within."""
    C, D = width, 3 * width
    blocks = [
        Branch(
            nn.Conv2d(C, D, 1, bias=False), nn.BatchNorm2d(D), nn.ReLU6(),
            nn.Conv2d(D, D, 3, padding=1, groups=D, bias=False), nn.BatchNorm2d(D), nn.ReLU6(),
            nn.Conv2d(D, C, 1, bias=False), nn.BatchNorm2d(C),
        ) for _ in range(4)
    ]  # fmt: skip
    stem = [nn.Conv2d(channels, C, 3, 2, 1, bias=False), nn.BatchNorm2d(C)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, CLASSES))


def encoder_layers(width: int, number: int) -> nn.Module:
    """Layers of an encoder with two heads, whose normalisations come first."""
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, number, nn.LayerNorm(width), enable_nested_tensor=False)


class Encoder(nn.Module):
    """Class of an image from its rows, by four layers of an encoder whose normalisations come first."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.rows = nn.Linear(size, width)
        self.positions = nn.Parameter(0.02 * torch.randn(size, width))
        self.layers = encoder_layers(width, 4)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.head(self.layers(self.rows(images_BCHW[:, 0]) + self.positions).mean(1))


def layered(width: int, features: int) -> nn.Module:
    """Three hidden layers with layer normalisation, GELU and dropout."""
    layers: list[nn.Module] = []
    for into in (features, width, width):
        layers += [nn.Linear(into, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, CLASSES))


class GatedCausal(nn.Module):
    """Causal convolution times a gate, beside a skip connection (WaveNet)."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.value, self.gate = (nn.Conv1d(width, width, 2, dilation=dilation) for _ in range(2))
        self.out, self.dilation = nn.Conv1d(width, width, 1), dilation

    def forward(self, x_BCT: Tensor) -> Tensor:
        """Features of the input's shape."""
        padded = F.pad(x_BCT, (self.dilation, 0))
        return x_BCT + self.out(torch.tanh(self.value(padded)) * torch.sigmoid(self.gate(padded)))


class WaveNet(nn.Module):
    """Next character by five gated causal convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.layers = nn.Sequential(*(GatedCausal(width, 2**index) for index in range(5)))
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return self.head(self.layers(self.embedding(tokens_BT).transpose(1, 2)).transpose(1, 2))


def convmixer(width: int, channels: int) -> nn.Module:
    """ConvMixer of timm: four layers, kernels of 5x5, patches of 2x2."""
    return ConvMixer(width, 4, kernel_size=5, patch_size=2, in_chans=channels, num_classes=CLASSES)


def gpt2(width: int) -> nn.Module:
    """GPT-2 of transformers: four layers, two heads."""
    return CausalModel(CHARACTERS, LENGTH, "gpt2", hidden_size=width, num_attention_heads=2)


def excited(width: int, channels: int) -> nn.Module:
    """Three convolutions with batch normalisation, each followed by squeeze-and-excitation of timm."""
    layers: list[nn.Module] = []
    for into, out, stride in ((channels, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 2)):
        layers += [nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.SiLU()]
        layers += [SEModule(out, rd_channels=width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES))


class Strips(nn.Module):
    """Class of an image whose rows are channels, by three convolutions along them."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(size, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1), nn.ReLU()),
            *(nn.Conv1d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * size, CLASSES)),
        )

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.layers(images_BCHW[:, 0])


class Joined(nn.Module):
    """Layers that see the same input, their features one after the other; with `skip`, behind the input (DenseNet)."""

    def __init__(self, *layers: nn.Module, skip: bool = False) -> None:
        super().__init__()
        self.layers, self.skip = nn.ModuleList(layers), skip

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Features of all layers along the channels."""
        return torch.cat([*([x_BCHW] if self.skip else []), *(layer(x_BCHW) for layer in self.layers)], 1)


def conv(into: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch normalisation and ReLU."""
    layer = nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(out), nn.ReLU())


def classified(channels: int, *layers: nn.Module) -> nn.Module:
    """Convolutional layers, and classes from the mean over the image."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def dense(width: int, channels: int) -> nn.Module:
    """DenseNet of four convolutions on half of the image's side."""
    layers = [Joined(conv(into * width, width), skip=True) for into in (1, 2, 3, 4)]
    return classified(5 * width, conv(channels, width, stride=2), *layers)


def inception(width: int, channels: int) -> nn.Module:
    """Three times convolutions of 1x1, 3x3 and 5x5 beside each other."""
    C = width
    mixed = [Joined(conv(into, C, 1), conv(into, C), conv(into, C, 5)) for into in (2 * C, 3 * C, 3 * C)]
    return classified(3 * C, conv(channels, 2 * C, stride=2), mixed[0], nn.MaxPool2d(2), *mixed[1:])


def grouped(width: int, channels: int) -> nn.Module:
    """Four residual blocks with a convolution in four groups within (ResNeXt)."""
    C = width
    blocks = [
        Branch(conv(C, C, 1), conv(C, C, groups=4), nn.Conv2d(C, C, 1, bias=False), nn.BatchNorm2d(C)) for _ in range(4)
    ]
    return classified(C, conv(channels, C, stride=2), *blocks)


def nin(width: int, channels: int) -> nn.Module:
    """Network in network: two convolutions of 5x5 and 3x3, each followed by two of 1x1."""
    C, D = width, 2 * width
    first = conv(channels, C, 5), conv(C, C, 1), conv(C, C, 1)
    return classified(D, *first, nn.MaxPool2d(2), conv(C, D), conv(D, D, 1), conv(D, D, 1))


def pool(width: int, channels: int) -> nn.Module:
    """PoolFormer: means over neighbours in the place of attention, four layers on patches of 2x2."""
    C, blocks = width, list[nn.Module]()
    for _ in range(4):
        blocks += [Branch(nn.GroupNorm(1, C), nn.AvgPool2d(3, 1, 1, count_include_pad=False))]
        blocks += [Branch(nn.GroupNorm(1, C), nn.Conv2d(C, 2 * C, 1), nn.GELU(), nn.Conv2d(2 * C, C, 1))]
    return classified(C, nn.Conv2d(channels, C, 2, 2), *blocks)


def gmlp(width: int, channels: int, size: int) -> nn.Module:
    """Four gated MLPs of timm on patches of 4x4."""
    return MlpMixer(
        CLASSES, size, channels, patch_size=4, num_blocks=4, embed_dim=width, mlp_ratio=2.0,
        block_layer=SpatialGatingBlock, mlp_layer=GatedMlp,
    )  # fmt: skip


def hub(width: int, kind: str) -> nn.Module:
    """Decoder of transformers: four layers, two heads."""
    return CausalModel(CHARACTERS, LENGTH, kind, hidden_size=width, num_attention_heads=2)


def bottleneck(width: int, channels: int) -> nn.Module:
    """Four residual blocks, a quarter as wide within (ResNet-50)."""
    C, D = width, width // 4
    blocks = [Branch(conv(C, D, 1), conv(D, D), nn.Conv2d(D, C, 1, bias=False), nn.BatchNorm2d(C)) for _ in range(4)]
    return classified(C, conv(channels, C, stride=2), *blocks)


def fire(width: int, channels: int) -> nn.Module:
    """SqueezeNet: three times a convolution to half of the channels and two beside each other back to all."""
    C, D = width, width // 2
    squeezed = [layer for _ in range(3) for layer in (conv(C, D, 1), Joined(conv(D, D, 1), conv(D, D)))]
    return classified(C, conv(channels, C, stride=2), *squeezed)


class Sum(nn.Module):
    """Sum of layers that see the same input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Features of one layer's shape."""
        return sum(layer(x_BCHW) for layer in self.layers)


def repvgg(width: int, channels: int) -> nn.Module:
    """Three sums of a 3x3 convolution, one of 1x1 and the input, each normalised (RepVGG)."""
    C, layers = width, list[nn.Module]()
    for _ in range(3):
        beside = [nn.Sequential(nn.Conv2d(C, C, k, 1, k // 2, bias=False), nn.BatchNorm2d(C)) for k in (3, 1)]
        layers += [Sum(*beside, nn.BatchNorm2d(C)), nn.ReLU()]
    return classified(C, conv(channels, C, stride=2), *layers)


def bag(width: int, channels: int) -> nn.Module:
    """Mean over the classes of overlapping patches of 5x5 (BagNet)."""
    layers = conv(channels, width, 5, 2), conv(width, width, 1), conv(width, width, 1)
    return nn.Sequential(*layers, nn.Conv2d(width, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Highway(nn.Module):
    """Layer and input, mixed by a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_BC: Tensor) -> Tensor:
        """Features of the input's shape."""
        gate_BC = torch.sigmoid(self.gate(x_BC) - 1)
        return gate_BC * torch.relu(self.layer(x_BC)) + (1 - gate_BC) * x_BC


def highway(width: int, features: int) -> nn.Module:
    """Three highway layers."""
    first = nn.Flatten(), nn.Linear(features, width), nn.ReLU()
    return nn.Sequential(*first, *(Highway(width) for _ in range(3)), nn.Linear(width, CLASSES))


class Hybrid(nn.Module):
    """Two convolutions, then two layers of an encoder over the positions."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(channels, width, stride=2), conv(width, width, stride=2))
        self.layers = encoder_layers(width, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.head(self.layers(self.stem(images_BCHW).flatten(2).transpose(1, 2)).mean(1))


class Neighbours(nn.Module):
    """Next character by an MLP over the last eight (Bengio et al. 2003)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.window, self.hidden = nn.Conv1d(width, 2 * width, 8), nn.Linear(2 * width, 2 * width)
        self.head = nn.Linear(2 * width, CHARACTERS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        x_BCT = self.embedding(tokens_BT).transpose(1, 2)
        x_BTC = torch.relu(self.window(F.pad(x_BCT, (7, 0)))).transpose(1, 2)
        return self.head(torch.relu(self.hidden(x_BTC)))


class Masked(nn.Module):
    """Next character by four layers of torch's encoder with a causal mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = encoder_layers(width, 4)
        self.head = nn.Linear(width, CHARACTERS)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -torch.inf).triu(1), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        T = tokens_BT.shape[1]
        x_BTC = self.embedding(tokens_BT) + self.positions[:T]
        return self.head(self.layers(x_BTC, mask=self.mask[:T, :T], is_causal=True))


@dataclass(frozen=True)
class Pair:
    """A network and a budget.

    Attributes:
        name: name of the pair.
        family: network and data.
        make: builds the network of a width.
        widths: widths of the full network, and of those with half and, in the first round, an eighth of its parameters.
        data: name of the images or text.
        size: side of an image in pixels; 0 for text.
        ratio: training samples (for text, characters) per parameter of the full network.
        small: side in pixels, or characters, of small inputs; None: the network takes inputs of one size.
        depth: the network grows in depth, not in width.
    """

    name: str
    family: str
    make: Callable[[int], nn.Module]
    widths: tuple[int, ...]
    data: str
    size: int
    ratio: float
    small: int | None
    depth: bool = False
    batch: int = 64

    @property
    def text(self) -> bool:
        """Samples are characters."""
        return not self.size

    @property
    def whole(self) -> int:
        """Pixels of an image's side, or characters of a window."""
        return self.size or LENGTH

    @property
    def params(self) -> tuple[int, ...]:
        """Parameters at each width."""
        return tuple(sum(p.numel() for p in self.make(width).parameters()) for width in self.widths)

    def example(self, size: int) -> Tensor:
        """Two inputs."""
        shape = (2, size) if self.text else (2, 3 if self.data == "cifar10" else 1, size, size)
        return torch.zeros(shape, dtype=torch.long) if self.text else torch.randn(shape)

    def flops(self, network: nn.Module, size: int) -> int:
        """Forward FLOPs of a sample, of text a window."""
        return forward_flops(network, self.example(size)[:1])

    @property
    def budget(self) -> float:
        """Forward FLOPs of all samples of the full network."""
        samples = self.ratio * self.params[0] / (self.whole if self.text else 1)
        return samples * self.flops(self.make(self.widths[0]), self.whole)

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the runs to train."""
        if len(self.widths) == 2:
            return SIZES
        without = {"drawn"} if self.depth else {"shallow"}
        return tuple(arm for arm in ARMS if arm not in without and (self.small or not arm.endswith("input")))


DIGITS, MNIST, CIFAR, SMALL_MNIST = ("digits", 8), ("mnist10k", 20), ("cifar10", 16), ("mnist10k", 14)
ENGLISH, GERMAN, PYTHON = ("en", 0), ("de", 0), ("py", 0)
_OF = {
    "resnet14": resnet, "convnet": convnet, "vit": vit, "mlp": mlp, "decoder": decoder,
    "lstm": partial(Recurrent, nn.LSTM), "gru": partial(Recurrent, nn.GRU),
    "separable": separable, "vgg": vgg, "causal": Causal, "rows": Rows, "resmlp": resmlp, "mixer": mixer,
    "convnext": convnext,
    "preact": preact, "rnn": partial(Recurrent, nn.RNN), "inverted": inverted, "encoder": Encoder, "layered": layered,
    "wavenet": WaveNet, "convmixer": convmixer, "gpt2": gpt2, "excited": excited, "strips": Strips,
    "dense": dense, "inception": inception, "grouped": grouped, "nin": nin, "pool": pool, "gmlp": gmlp,
    "neox": partial(hub, kind="gpt_neox"), "opt": partial(hub, kind="opt"),
    "bottleneck": bottleneck, "fire": fire, "repvgg": repvgg, "bag": bag, "highway": highway, "hybrid": Hybrid,
    "phi": partial(hub, kind="phi"), "qwen2": partial(hub, kind="qwen2"), "neighbours": Neighbours, "masked": Masked,
}  # fmt: skip
_IN_DEPTH = (
    *("resnet14", "vit", "decoder", "resmlp", "mixer", "convnext"),
    *("preact", "inverted", "encoder", "wavenet", "gpt2"),
    *("grouped", "gmlp", "neox", "opt"),
    *("bottleneck", "phi", "qwen2", "masked", "hybrid"),
)


def _pair(
    number: int,
    ratio: float,
    kind: str,
    data: tuple[str, int],
    widths: tuple[int, ...],
    small: int | None,
    batch: int = 64,
    **settings: int,
) -> Pair:
    make, depth = partial(_OF[kind], **settings), kind in _IN_DEPTH
    return Pair(f"w{number}", f"{kind} on {data[0]}", make, widths, *data, ratio, small, depth, batch)


FIRST = [
    _pair(1, 1.0, "resnet14", MNIST, (6, 4, 2), 14, 128, channels=1),
    _pair(2, 1.2, "resnet14", CIFAR, (6, 4, 2), 12, 128, channels=3),
    _pair(3, 1.5, "convnet", CIFAR, (12, 8, 4), 12, channels=3),
    _pair(4, 1.9, "decoder", GERMAN, (24, 16, 8), 32, 8),
    _pair(5, 2.3, "vit", MNIST, (12, 8, 4), 12, channels=1, size=20),
    _pair(6, 2.9, "lstm", ENGLISH, (64, 43, 18), 32, 16),
    _pair(7, 3.5, "mlp", DIGITS, (64, 41, 15), None, features=64),
    _pair(8, 4.3, "vit", CIFAR, (12, 8, 4), 8, 128, channels=3, size=16),
    _pair(9, 5.3, "convnet", SMALL_MNIST, (12, 8, 4), 10, channels=1),
    _pair(10, 6.6, "mlp", SMALL_MNIST, (64, 38, 11), None, features=196),
    _pair(11, 8.1, "decoder", ENGLISH, (24, 16, 8), 32, 16),
    _pair(12, 10.0, "gru", GERMAN, (24, 16, 5), 32, 16),
]
SECOND = [
    _pair(13, 1.0, "mixer", CIFAR, (32, 21), None, channels=3, size=16),
    _pair(14, 1.3, "vgg", MNIST, (12, 8), None, 128, channels=1),
    _pair(15, 1.6, "decoder", PYTHON, (28, 19), None, 8),
    _pair(16, 2.0, "separable", CIFAR, (16, 11), None, channels=3),
    _pair(17, 2.5, "resmlp", SMALL_MNIST, (24, 14), None, features=196),
    _pair(18, 3.2, "causal", ENGLISH, (48, 32), None, 16),
    _pair(19, 4.0, "convnext", MNIST, (12, 8), None, 128, channels=1),
    _pair(20, 5.0, "rows", SMALL_MNIST, (40, 27), None, size=14),
    _pair(21, 6.3, "lstm", PYTHON, (48, 32), None, 16),
    _pair(22, 7.6, "vit", DIGITS, (16, 10), None, channels=1, size=8),
    _pair(23, 8.8, "resmlp", CIFAR, (16, 8), None, features=768),
    _pair(24, 10.0, "mixer", ("mnist10k", 12), (16, 10), None, channels=1, size=12),
    _pair(25, 14.0, "gru", ENGLISH, (24, 16), None, 16),
    _pair(26, 20.0, "separable", DIGITS, (8, 5), None, channels=1),
    _pair(27, 28.0, "resmlp", DIGITS, (12, 8), None, features=64),
    _pair(28, 40.0, "mlp", CIFAR, (12, 6), None, features=768),
]
THIRD = [
    _pair(29, 1.0, "preact", CIFAR, (12, 8, 4), 12, channels=3),
    _pair(30, 1.2, "rnn", GERMAN, (64, 43, 18), 32, 8),
    _pair(31, 1.5, "inverted", MNIST, (16, 11, 5), 14, channels=1),
    _pair(32, 1.9, "encoder", SMALL_MNIST, (24, 16, 8), None, size=14),
    _pair(33, 2.3, "layered", CIFAR, (24, 12, 3), None, features=768),
    _pair(34, 2.9, "wavenet", PYTHON, (32, 22, 10), 32, 8),
    _pair(35, 3.5, "lstm", GERMAN, (48, 32, 13), 32, 16),
    _pair(36, 4.3, "convmixer", CIFAR, (20, 13, 5), 12, channels=3),
    _pair(37, 5.3, "gpt2", ENGLISH, (24, 16, 8), 32, 16),
    _pair(38, 6.6, "excited", SMALL_MNIST, (8, 5, 3), 10, channels=1),
    _pair(39, 8.1, "strips", DIGITS, (24, 16, 6), None, size=8),
    _pair(40, 10.0, "mixer", DIGITS, (12, 8, 4), None, channels=1, size=8),
]
FOURTH = [
    _pair(41, 1.0, "preact", MNIST, (12, 8), None, channels=1),
    _pair(42, 1.2, "convmixer", MNIST, (48, 34), None, channels=1),
    _pair(43, 1.5, "excited", CIFAR, (12, 8), None, channels=3),
    _pair(44, 1.9, "inverted", CIFAR, (16, 11), None, channels=3),
    _pair(45, 2.3, "encoder", DIGITS, (24, 16), None, size=8),
    _pair(46, 2.9, "wavenet", ENGLISH, (32, 22), None, 8),
    _pair(47, 3.5, "layered", SMALL_MNIST, (32, 17), None, features=196),
    _pair(48, 4.3, "rnn", PYTHON, (64, 43), None, 8),
    _pair(49, 5.3, "gpt2", PYTHON, (24, 16), None, 8),
    _pair(50, 6.6, "strips", SMALL_MNIST, (24, 13), None, size=14),
    _pair(51, 8.1, "gru", PYTHON, (32, 21), None, 16),
    _pair(52, 10.0, "causal", GERMAN, (24, 16), None, 16),
]
FIFTH = [
    _pair(53, 1.0, "vgg", CIFAR, (12, 8), None, channels=3),
    _pair(54, 1.0, "causal", PYTHON, (32, 21), None, 8),
    _pair(55, 1.2, "dense", MNIST, (14, 10), None, channels=1),
    _pair(56, 1.2, "gmlp", CIFAR, (24, 16), None, channels=3, size=16),
    _pair(57, 1.5, "neox", ENGLISH, (24, 16), None, 8),
    _pair(58, 1.5, "inception", CIFAR, (8, 5), None, channels=3),
    _pair(59, 1.9, "nin", MNIST, (16, 11), None, channels=1),
    _pair(60, 1.9, "wavenet", GERMAN, (32, 22), None, 8),
    _pair(61, 2.3, "convnext", CIFAR, (16, 11), None, channels=3),
    _pair(62, 2.3, "separable", MNIST, (16, 11), None, channels=1),
    _pair(63, 2.9, "rnn", ENGLISH, (64, 43), None, 8),
    _pair(64, 2.9, "pool", CIFAR, (24, 16), None, channels=3),
    _pair(65, 3.5, "grouped", MNIST, (24, 16), None, channels=1),
    _pair(66, 3.5, "opt", PYTHON, (24, 16), None, 8),
    _pair(67, 4.3, "dense", CIFAR, (14, 10), None, channels=3),
    _pair(68, 4.3, "gmlp", MNIST, (24, 16), None, channels=1, size=20),
    _pair(69, 5.3, "gpt2", GERMAN, (24, 16), None, 16),
    _pair(70, 5.3, "nin", CIFAR, (16, 11), None, channels=3),
    _pair(71, 6.6, "inception", MNIST, (8, 5), None, channels=1),
    _pair(72, 6.6, "neox", GERMAN, (24, 16), None, 16),
    _pair(73, 8.1, "grouped", CIFAR, (24, 16), None, channels=3),
    _pair(74, 8.1, "pool", SMALL_MNIST, (24, 16), None, channels=1),
    _pair(75, 10.0, "opt", ENGLISH, (24, 16), None, 16),
    _pair(76, 10.0, "preact", DIGITS, (12, 8), None, channels=1),
]
SIXTH = [
    _pair(77, 1.0, "hybrid", CIFAR, (20, 14), None, channels=3),
    _pair(78, 1.5, "fire", MNIST, (32, 22), None, channels=1),
    _pair(79, 2.3, "bottleneck", CIFAR, (40, 28), None, channels=3),
    _pair(80, 3.5, "highway", SMALL_MNIST, (28, 17), None, features=196),
    _pair(81, 5.3, "bag", CIFAR, (48, 32), None, channels=3),
    _pair(82, 8.0, "hybrid", SMALL_MNIST, (16, 10), None, channels=1),
    _pair(83, 12.0, "repvgg", MNIST, (12, 8), None, channels=1),
    _pair(84, 18.0, "fire", CIFAR, (20, 14), None, channels=3),
    _pair(85, 27.0, "highway", CIFAR, (12, 7), None, features=768),
    _pair(86, 40.0, "bottleneck", DIGITS, (24, 16), None, channels=1),
    _pair(87, 60.0, "repvgg", CIFAR, (8, 6), None, channels=3),
    _pair(88, 90.0, "bag", SMALL_MNIST, (24, 16), None, channels=1),
    _pair(89, 3.0, "qwen2", ENGLISH, (24, 16), None, 8),
    _pair(90, 4.5, "phi", GERMAN, (24, 16), None, 8),
    _pair(91, 6.7, "opt", GERMAN, (24, 16), None, 16),
    _pair(92, 10.0, "neox", PYTHON, (24, 16), None, 16),
    _pair(93, 14.0, "masked", ENGLISH, (24, 16), None, 16),
    _pair(94, 20.0, "neighbours", PYTHON, (24, 16), None, 16),
    _pair(95, 28.0, "qwen2", PYTHON, (20, 12), None, 16),
    _pair(96, 40.0, "phi", ENGLISH, (16, 10), None, 16),
    _pair(97, 60.0, "neighbours", GERMAN, (20, 13), None, 32),
    _pair(98, 90.0, "masked", PYTHON, (16, 10), None, 32),
    _pair(99, 130.0, "neighbours", ENGLISH, (16, 10), None, 32),
    _pair(100, 200.0, "masked", GERMAN, (12, 8), None, 32),
]
PAIRS = {"first": FIRST, "second": SECOND, "third": THIRD, "fourth": FOURTH, "fifth": FIFTH, "sixth": SIXTH}


# Data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Inputs and labels of images by part, "train", "val" and "test"; of text, characters and no labels."""

    inputs: dict[str, Tensor]
    labels: dict[str, Tensor]


@cache
def load(root: Path, name: str, size: int) -> Data:
    """Data of a name; images are standardised."""
    if not size:
        return Data({part: _characters(root, part, name) for part in ("train", "val", "test")}, {})
    if name == "digits":
        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(found.images, dtype=torch.float32)[order, None], torch.tensor(found.target).long()[order]
        ends = {"train": (0, 1200), "val": (1200, 1438), "test": (1438, 1797)}
        parts = {part: (x[a:b], y[a:b]) for part, (a, b) in ends.items()}
    else:
        held = 2000 if name == "cifar10" else 1000
        (x, y), test = (_images(root / name / f"{part}.parquet", size) for part in ("train", "test"))
        parts = {
            "train": (x[:-held], y[:-held]),
            "val": (x[-held:], y[-held:]),
            "test": tuple(t[:TESTED] for t in test),
        }
    mean, std = (f(parts["train"][0], (0, 2, 3), keepdim=True) for f in (torch.mean, torch.std))
    return Data({p: (x - mean) / std for p, (x, _) in parts.items()}, {p: y for p, (_, y) in parts.items()})


def _images(path: Path, size: int) -> tuple[Tensor, Tensor]:
    rows = datasets.Dataset.from_parquet(str(path), cache_dir="/tmp/growlab-blind").with_format("arrow")[:].to_pydict()
    column = next(name for name in rows if name != "label")
    images = [Image.open(io.BytesIO(one["bytes"])).resize((size, size), Image.Resampling.BOX) for one in rows[column]]
    x = torch.stack([torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8) for one in images])
    return x.view(len(x), size, size, -1).permute(0, 3, 1, 2).float() / 255, torch.tensor(rows["label"])


def _characters(root: Path, part: str, language: str) -> Tensor:
    """Characters by their frequency in the training captions; rare ones share the last number."""

    def text(part: str) -> str:
        if language == "py":
            # The standard library; every sixth module each is for validation and for tests.
            modules = sorted(Path(ast.__file__).parent.glob("*.py"))
            number = {"train": (0, 1), "val": (2,), "test": (5,)}[part]
            return "".join(path.read_text() for at, path in enumerate(modules) if at % 6 in number)[:2_000_000]
        (path,) = (root / "multi30k").glob(f"{part}*.{language}.gz")
        return gzip.decompress(path.read_bytes()).decode()

    train = text("train")
    known = sorted(set(train), key=lambda one: (-train.count(one), one))[: CHARACTERS - 1]
    number = {one: index for index, one in enumerate(known)}
    return torch.tensor([number.get(one, CHARACTERS - 1) for one in text(part)])


def resized(pair: Pair, x: Tensor, size: int) -> Tensor:
    """Images of another size."""
    return x if pair.text or size == pair.size else F.interpolate(x, (size, size), mode="bilinear", antialias=True)


def batches(pair: Pair, data: Data, size: int, seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield training batches without end: images in a new order each pass, or random windows of text."""
    random, x = torch.Generator().manual_seed(seed), data.inputs["train"]
    if not pair.text:
        x, y = resized(pair, x, size), data.labels["train"]
    while True:
        if pair.text:
            starts = torch.randint(0, len(x) - size, (batch,), generator=random)
            window = x[starts[:, None] + torch.arange(size + 1)]
            yield window[:, :-1], window[:, 1:]
        else:
            order = torch.randperm(len(x), generator=random)
            for chosen in order[: len(order) // batch * batch].split(batch):
                yield x[chosen], y[chosen]


# Training ----------------------------------------------------------------------------------------------------


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy, of a sequence's characters too."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@torch.no_grad()
def tested(pair: Pair, network: nn.Module, data: Data, size: int, part: str) -> dict[str, float]:
    """Accuracy and mean loss on a part of the data, in inputs of the size that training ended with."""
    network.eval()
    x = data.inputs[part]
    if pair.text:
        windows = x[: (len(x) - 1) // size * size + 1].unfold(0, size + 1, size)
        x, y = windows[:, :-1], windows[:, 1:]
    else:
        x, y = resized(pair, x, size), data.labels[part]
    outputs = torch.cat([network(one) for one in x.split(256)])
    right = (outputs.argmax(-1) == y).float().mean()
    return {"accuracy": round(float(right), 5), "loss": round(float(loss(outputs, y)), 5)}


class DrawnInFull(VarianceTransfer):
    """Draws the weights of the full network too, so that it begins as a seed does."""

    draws_full_width = True


def grower(pair: Pair, arm: str, network: nn.Module, seed: int, steps: int) -> Grower | None:
    """Return the Grower of an arm, or None if it needs none."""
    new, kind = "as_network" if pair.text else "fan_in", VarianceTransfer
    width = pair.widths[1] / pair.widths[0]
    if arm == "grown":
        trigger = At({0: 1.0 if pair.depth else width, GROW: 1.0}, unit="cost")
        parts = [Depth()] if pair.depth else []
    elif arm == "grown_input":
        trigger, parts = At({0: 1.0, ENLARGE: 1.0}, unit="cost"), [Resolution([pair.small, pair.whole])]
    elif arm == "controller":
        trigger, parts = Controller(width, total_steps=steps), []
    elif arm == "stays":
        trigger, parts = At({0: width}), []
    elif arm == "shallow":
        trigger, parts = Never(depth=0.0), [Depth()]
    elif arm == "drawn":
        trigger, parts, kind = At({0: 1.0}), [], DrawnInFull
    else:
        return None
    method, example = kind(new_weights=new), pair.example(pair.whole)
    return Grower(network, example, method=method, trigger=trigger, parts=parts, seed=seed, verbose=False)


@cache
def commit() -> str | None:
    """Commit at the start of the process, since new rows change the checkout."""
    return git_commit()


def train(pair: Pair, arm: str, rate: float, seed: int, data: Data, part: str) -> dict[str, Any]:
    """Train until the budget is spent; return the row of results."""
    began = time.process_time()
    torch.manual_seed(seed)
    size = pair.small if arm == "small_input" else pair.whole
    width = dict(zip(("smaller", "eighth"), pair.widths[1:], strict=False)).get(arm, pair.widths[0])
    network, budget = pair.make(width), pair.budget
    steps = int(budget / pair.batch / pair.flops(pair.make(pair.widths[1]), pair.whole))
    growing = grower(pair, arm, network, seed, steps)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, fused=True)
    # An eighth of the network sees eight times as many samples.
    batch = 2 * pair.batch if arm == "eighth" else pair.batch
    drawn = batches(pair, data, size, seed, batch)
    if growing is not None:
        growing.follow(optimizer)
        growing.provide(batches=lambda number: list(islice(drawn, number)), loss=loss)
    resolution = growing.parts[0] if growing is not None and arm == "grown_input" else None
    trained, spent, step, flops = 0, 0, 0, pair.flops(network, resolution.size if resolution else size)
    while spent < budget:
        done = spent / budget
        if growing is not None and growing.step(step=step, cost=done):
            flops = pair.flops(network, pair.whole)
        network.train()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (done + 1e-3) / WARMUP, (1 - done) / DECAY)
        x, y = next(drawn)
        optimizer.zero_grad()
        output = network(x)
        loss(output, y if growing is None else growing.targets(y)).backward()
        optimizer.step()
        trained, step = trained + batch * flops, step + 1
        spent = trained + (growing.auxiliary_flops if growing is not None else 0)
    decision = growing.trigger.decision if arm == "controller" and growing is not None else None
    result = tested(pair, network, data, size, part)
    return {
        "pair": pair.name,
        "arm": arm,
        "seed": seed,
        "rate": rate,
        f"{part}_accuracy": result["accuracy"],
        f"{part}_loss": result["loss"],
        "train_cost_percent": round(100 * spent / budget, 2),
        "params": sum(p.numel() for p in network.parameters()),
        "steps": step,
        "grown": "" if decision is None else int(decision["grown"]),
        **{k: "" if (decision or {}).get(k) is None else round(decision[k], 5) for k in ("gap", "gap_error")},
        "seconds": round(time.process_time() - began, 2),
        "commit": commit(),
    }


# Files -------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    """Rows of a file, none if there is no such file."""
    return list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a file."""
    path.parent.mkdir(exist_ok=True)
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def written(pair: Pair) -> dict[str, Any]:
    """A pair, and the odds that a smaller and a grown network end better than the full one at equal cost."""
    full, half = pair.params[:2]
    kind = "language" if pair.text else "classes"
    samples = round(pair.budget / pair.flops(pair.make(pair.widths[0]), pair.whole)) * (LENGTH if pair.text else 1)
    row = {"pair": pair.name, "family": pair.family, "kind": kind, "params": full, "smaller_params": half}
    row |= {"samples": samples, "ratio": f"{samples / full:.3g}", "budget_gflops": round(3 * pair.budget / 1e9, 1)}
    asked = [("smaller_full", half, "any"), ("grown_full", half, "full")]
    asked += [("eighth_full", pair.params[2], "any")] if len(pair.params) > 2 else []
    for name, smaller, size in asked:
        advice = advise(full, samples, smaller=smaller, kind=kind, size=size)
        row[f"odds_{name}"] = round(1 - advice.odds if advice.choice == "full" else advice.odds, 3)
        row[f"regret_{name}"] = round(advice.regret, 4)
    return row


def missing(name: str, pair: Pair) -> Iterator[tuple[str, float, int, str]]:
    """Runs that the files of a round lack: arm, rate, seed and file."""
    folder = FOLDERS[name]
    for arm in dict.fromkeys((*pair.arms, *COMPARED.get(name, ()))):
        for rate in RATES if arm not in RATE_OF else ():
            known = [float(row["rate"]) for row in rates_of(folder, pair, arm)]
            if rate not in known and (rate != RATES[-1] or chosen(folder, pair, arm) == RATES[0]):
                yield arm, rate, RATE_SEED, "rates.csv"
        ends = [
            int(row["seed"]) for row in rows_of(folder / "arms.csv") if (row["pair"], row["arm"]) == (pair.name, arm)
        ]
        for seed in set(range(COMPARED.get(name, {}).get(arm, SEEDS[name]))) - set(ends):
            yield arm, chosen(folder, pair, arm), seed, "arms.csv"


def rates_of(folder: Path, pair: Pair, arm: str) -> list[dict[str, str]]:
    """Validation runs that decide an arm's rate."""
    tried = RATE_OF.get(arm, arm)
    return [row for row in rows_of(folder / "rates.csv") if (row["pair"], row["arm"]) == (pair.name, tried)]


def chosen(folder: Path, pair: Pair, arm: str) -> float:
    """Rate of the best validation run."""
    error = (lambda row: float(row["val_loss"])) if pair.text else (lambda row: -float(row["val_accuracy"]))
    return float(min(rates_of(folder, pair, arm), key=error)["rate"])


def main() -> None:
    """Write the pairs, or train them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("round", choices=FOLDERS)
    parser.add_argument("--write", action="store_true", help="write the pairs, and train none")
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("growlab").setLevel(logging.ERROR)
    folder = FOLDERS[given.round]
    if given.write:
        append(folder / "pairs.csv", [written(pair) for pair in PAIRS[given.round]])
        return
    for pair in PAIRS[given.round]:
        data = load(given.data, pair.data, pair.size)
        for arm, rate, seed, name in missing(given.round, pair):
            row = train(pair, arm, rate, seed, data, "val" if name == "rates.csv" else "test")
            append(folder / name, [row])
            print(row, flush=True)


if __name__ == "__main__":
    main()
