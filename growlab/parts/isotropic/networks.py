"""Networks of isotropic primitives, and element-wise variants for comparison."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from growlab.base.settings import one_of
from growlab.optim.followers import replace_parameters
from growlab.parts.isotropic.activations import (
    GAINS,
    Blend,
    ChiNorm,
    IntrinsicLength,
    IsotropicActivation,
    add_gain_column,
    cast,
)

LengthKind = Literal["trained", "constant", "signed"]
Weights = Literal["default", "orthogonal"]

# Element-wise activations for comparison with isotropic ones.
_ELEMENTWISE = {"elementwise_tanh": nn.Tanh, "elementwise_relu": nn.ReLU, "elementwise_leaky": nn.LeakyReLU}


def _activation(name: str, length: float | IntrinsicLength | None, gain_channel: bool) -> nn.Module:
    one_of([*GAINS, *_ELEMENTWISE], activation=name)
    if name not in _ELEMENTWISE:
        return IsotropicActivation(name, length, gain_channel)
    if gain_channel:
        raise ValueError(f"{name} has no gain: take gain_channel=False")
    return _ELEMENTWISE[name]()


def _read_gains(layers: list[nn.Module], classifier: nn.Linear) -> None:
    """Add an input for the previous activation's gain to every layer but the first."""
    readers = [layer for layer in (*layers, classifier) if isinstance(layer, (nn.Linear, nn.Conv2d))]
    for layer in readers[1:]:
        add_gain_column(layer)


class IsotropicMLP(nn.Module):
    """Flatten, hidden linear layers with isotropic activations, and a linear classifier.

    Args:
        in_features: number of values in one flattened sample.
        hidden_features: width of each hidden layer.
        num_classes: number of logits.
        activation: "tanh", "softsign", "soft_relu", "leaky"; for an element-wise variant "elementwise_tanh",
            "elementwise_relu", "elementwise_leaky".
        length: intrinsic length of each activation, see `IsotropicActivation`, or None for none.
        chi_norm: put a Chi-normaliser before each activation.
        gain_channel: let layers read each activation's gain, see `IsotropicActivation`; with zero weights at first.
        blend: make each activation but the first a x + (1 - a) f(x) with a trained a, initially 0, so that a layer can
            be inserted as the identity.

    Raises:
        ValueError: the activation is unknown, or has no gain.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sequence[int],
        num_classes: int,
        activation: str = "tanh",
        length: float | IntrinsicLength | None = 0.01,
        chi_norm: bool = False,
        gain_channel: bool = False,
        blend: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width_in = in_features
        for width in hidden_features:
            nonlinearity = _activation(activation, length, gain_channel)
            layers += [nn.Linear(width_in, width), *([ChiNorm(width)] if chi_norm else [])]
            layers.append(Blend(nonlinearity, 0.0) if blend and len(layers) > 2 else nonlinearity)
            width_in = width
        self.hidden = nn.Sequential(*layers)
        self.classifier = nn.Linear(width_in, num_classes)
        if gain_channel:
            _read_gains(layers, self.classifier)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [B, ...] to logits [B, num_classes]."""
        return self.classifier(self.hidden(torch.flatten(x, 1)))


class IsotropicCNN(nn.Module):
    """Blocks of 3x3 convolution, isotropic activation over the channels and average pooling, then a classifier.

    Average pooling commutes with rotations of channels; max-pooling does not.

    `channels` and `pools` are the width and the pooling factor (1 for none) of each block; the other arguments are
    those of `IsotropicMLP`.

    Raises:
        ValueError: the activation is unknown or has no gain, or `channels` and `pools` differ in length.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        pools: Sequence[int],
        num_classes: int,
        activation: str = "tanh",
        length: float | IntrinsicLength | None = 0.01,
        chi_norm: bool = True,
        gain_channel: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width_in = in_channels
        for width, pool in zip(channels, pools, strict=True):
            layers += [nn.Conv2d(width_in, width, 3, padding=1), *([ChiNorm(width)] if chi_norm else [])]
            layers.append(_activation(activation, length, gain_channel))
            layers += [nn.AvgPool2d(pool)] if pool > 1 else []
            width_in = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width_in, num_classes)
        if gain_channel:
            _read_gains(layers, self.classifier)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, num_classes]."""
        return self.classifier(self.features(x).mean((2, 3)))


class NestedNetwork(nn.Module):
    """Nested functional class network (Eq. 47), with all matrix products of the input computed at once.

    With z_{l,i} = W_{l,i} x + b_{l,i} for every level l and 0 <= i < l, all from one matrix,

        x_l = sum_i z_{l,i} prod_{1 <= j <= i} g(||x_j||),        output x_L

    so deeper levels add terms to shallower ones. Levels may differ in width.

    **Departs from the paper**: the term without a gain (i = 0), the bias of Eq. 46, is affine here; and with
    `products="last"` the product runs over i < j < l backwards from the level, prod_{l - i <= j < l}, as Eq. 45 has it.
    In Eqs. 46 and 47 it runs from the first level on, which includes dense isotropic networks only with zero biases;
    see `nested`.

    Args:
        in_features: number of values in one flattened sample.
        hidden_features: width of each level except the last.
        num_classes: width of the last level.
        activation: gain of each level, a name in `growlab.parts.isotropic.activations.GAINS`.
        length: initial intrinsic length of each, or None.
        products: "first" as in Eq. 47, or "last".

    Raises:
        ValueError: `products` is neither "first" nor "last".
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sequence[int],
        num_classes: int,
        activation: str = "tanh",
        length: float | None = 0.01,
        products: Literal["first", "last"] = "first",
    ) -> None:
        super().__init__()
        one_of(("first", "last"), products=products)
        widths = [*hidden_features, num_classes]
        self.products = products
        levels = [level for level in range(1, len(widths) + 1) for _ in range(level)]
        self.terms = [widths[level - 1] for level in levels]
        self.affine = nn.Linear(in_features, sum(self.terms))
        self.activations = nn.ModuleList(IsotropicActivation(activation, length) for _ in hidden_features)
        # Scale the terms of a level down, so that their sum has the usual scale.
        with torch.no_grad():
            terms = (tensor.split(self.terms) for tensor in (self.affine.weight, self.affine.bias))
            for level, *tensors in zip(levels, *terms, strict=True):
                for tensor in tensors:
                    tensor.mul_(level**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [B, ...] to logits [B, num_classes]."""
        terms = iter(self.affine(torch.flatten(x, 1)).split(self.terms, dim=1))
        gains: list[Tensor] = []
        level = next(terms)
        dtype = level.dtype
        for activation in self.activations:
            assert isinstance(activation, IsotropicActivation)
            gains.append(activation.gain(level))
            level, product = next(terms), None
            for gain in gains if self.products == "first" else reversed(gains):
                product = gain if product is None else product * gain
                level = level + product * next(terms)
        return cast(level, dtype)


def nested(network: IsotropicMLP) -> NestedNetwork:
    """Convert a dense isotropic network to an equivalent nested network (Eqs. 39-45).

    Raises:
        ValueError: an activation is not isotropic or has a gain channel, or there are other modules, such as
            Chi-normalisers, between the layers.
    """
    layers = [module for module in network.hidden if isinstance(module, nn.Linear)]
    activations = [m for m in network.hidden if isinstance(m, IsotropicActivation) and not m.gain_channel]
    if len(layers) + len(activations) != len(network.hidden) or len(layers) != len(activations):
        raise ValueError("only linear layers with isotropic activations have a nested form")
    layers.append(network.classifier)
    widths = [layer.out_features for layer in layers]
    reference = layers[0].weight
    converted = NestedNetwork(layers[0].in_features, widths[:-1], widths[-1], products="last").to(reference)
    converted.activations = nn.ModuleList(activations)
    with torch.no_grad():
        converted.affine.weight.zero_()
        rows, biases = (iter(t.split(converted.terms)) for t in (converted.affine.weight, converted.affine.bias))
        # x_l = b_l + g_{l-1} (W_l b_{l-1} + g_{l-2} (W_l W_{l-1} b_{l-2} + ...)): one bias per term; the last term also
        # has the product of the weights.
        for level in range(len(layers)):
            product = torch.eye(widths[level]).to(reference)
            for index in range(level, -1, -1):
                next(biases).copy_(product @ layers[index].bias)
                term = next(rows)
                product = product @ layers[index].weight
                if index == 0:
                    term.copy_(product)
    return converted


def orthogonal_weights(network: nn.Module) -> None:
    """Draw the weights of linear and convolutional layers as orthogonal matrices, and set their biases to zero.

    All singular values of a layer are then 1, which makes an absolute threshold meaningful, and removed neurons leave
    no bias. Weights psi by which layers read gain channels stay zero.
    """
    for module in network.modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        with torch.no_grad():
            weight = module.weight[:, :-1] if getattr(module, "reads_gain", False) else module.weight
            weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, memory_format=torch.contiguous_format)))
            if module.bias is not None:
                module.bias.zero_()


def _draw_weights(network: nn.Module, weights: str) -> None:
    one_of(("default", "orthogonal"), weights=weights)
    if weights == "orthogonal":
        orthogonal_weights(network)


def isotropic_mlp(
    image_shape: Sequence[int],
    num_classes: int,
    width: int = 32,
    depth: int = 1,
    activation: str = "tanh",
    length: float | None = 0.01,
    chi_norm: bool = False,
    gain_channel: bool = False,
    length_kind: LengthKind = "trained",
    weights: Weights = "default",
    blend: bool = False,
) -> IsotropicMLP:
    """Build the paper's MLP [pixels, width, classes] (Section 4), or one with `depth` hidden layers of that width.

    `length` is the initial intrinsic length, of the kind `length_kind` (see `IntrinsicLength`), or None for none.
    `weights` is "default" (torch's initialisation) or "orthogonal" (`orthogonal_weights`). The other arguments are
    those of `IsotropicMLP`.
    """
    start = None if length is None else IntrinsicLength(length, length_kind)
    pixels, widths = torch.Size(image_shape).numel(), [width] * depth
    network = IsotropicMLP(pixels, widths, num_classes, activation, start, chi_norm, gain_channel, blend)
    _draw_weights(network, weights)
    return network


def isotropic_cnn(
    image_shape: Sequence[int],
    num_classes: int,
    width: int = 32,
    pools: Sequence[int] = (2, 2, 2),
    activation: str = "tanh",
    length: float | None = 0.01,
    chi_norm: bool = True,
    gain_channel: bool = False,
    length_kind: LengthKind = "trained",
    weights: Weights = "default",
) -> IsotropicCNN:
    """Build an `IsotropicCNN` with blocks of width, 2 width, 4 width, ... channels, one per entry of `pools`.

    The other arguments are those of `isotropic_mlp`.
    """
    start = None if length is None else IntrinsicLength(length, length_kind)
    channels = [width * 2**block for block in range(len(pools))]
    network = IsotropicCNN(image_shape[0], channels, pools, num_classes, activation, start, chi_norm, gain_channel)
    _draw_weights(network, weights)
    return network


def isotropic_nested(
    image_shape: Sequence[int],
    num_classes: int,
    width: int = 32,
    depth: int = 2,
    activation: str = "tanh",
    length: float | None = 0.01,
    products: Literal["first", "last"] = "first",
) -> NestedNetwork:
    """Build a `NestedNetwork` on flattened images, with `depth` levels of equal width before the logits."""
    pixels = torch.Size(image_shape).numel()
    return NestedNetwork(pixels, [width] * depth, num_classes, activation, length, products)


def deepen(layers: nn.Sequential, position: int, activation: IsotropicActivation | None = None) -> list[nn.Parameter]:
    """Insert a linear layer and an activation, initialised as the identity.

    The weight is the identity matrix, the bias zero, and the activation f*(x; a) = a x + (1 - a) f(x) starts at a = 1.

    **Preserves** the output exactly. All three are trained; f takes effect as a moves away from 1.

    Args:
        layers: the network's layers; changed in place.
        position: index in `layers` after which to insert; the output of the module there is [B, n].
        activation: f; None for isotropic tanh with a trained intrinsic length.

    Returns:
        The new parameters, for `optimizer.add_param_group`. Trace the network again before its widths change.

    Raises:
        ValueError: there is no linear layer at or before the position, which determines the width.

    Examples:
        >>> layers = nn.Sequential(nn.Linear(4, 3), IsotropicActivation())
        >>> x = torch.randn(5, 4)
        >>> before = layers(x)
        >>> new = deepen(layers, 1)
        >>> torch.equal(layers(x), before), len(layers), sum(p.numel() for p in new)
        (True, 4, 14)
    """
    linear = [module for module in layers[: position + 1] if isinstance(module, nn.Linear)]
    if not 0 <= position < len(layers) or not linear:
        raise ValueError(f"there is no linear layer at or before position {position} of {len(layers)} layers")
    reference = linear[-1].weight
    identity = nn.Linear(len(reference), len(reference))
    nn.init.eye_(identity.weight)
    nn.init.zeros_(identity.bias)
    new = nn.Sequential(identity, Blend(activation or IsotropicActivation())).to(reference.device, reference.dtype)
    for offset, module in enumerate(new, start=1):
        layers.insert(position + offset, module)
    return list(new.parameters())


def change_inputs(layer: nn.Linear | nn.Conv2d, count: int, *optimizers: torch.optim.Optimizer) -> None:
    """Append inputs with zero weights to a first layer, or remove its last ones.

    **Preserves** the output exactly when inputs are added, with any values, and when inputs that are zero are removed.
    New weights learn from the first step, since their gradient is that of the layer's output times the new inputs.

    Args:
        layer: the layer, changed in place; its inputs are a flattened sample, or the channels of an image.
        count: number of inputs to add, or, if negative, to remove from the end.
        optimizers: optimizers of its weight; they keep their state, with zeros for new entries.

    Raises:
        ValueError: no input would remain, or the layer has groups or reads a gain channel.

    Trace the network again before its widths change.

    Examples:
        >>> layer, x = nn.Linear(3, 2), torch.randn(5, 3)
        >>> before = layer(x)
        >>> change_inputs(layer, 2)
        >>> torch.allclose(layer(torch.cat([x, torch.randn(5, 2)], 1)), before)
        True
    """
    old = layer.weight
    inputs = old.shape[1]
    if inputs + count < 1:
        raise ValueError(f"{-count} of {inputs} inputs cannot be removed: a layer keeps at least one")
    if getattr(layer, "reads_gain", False) or getattr(layer, "groups", 1) != 1:
        raise ValueError("inputs of a layer with groups or with a gain channel cannot be added or removed")
    new = nn.Parameter(_resized(old.detach(), count), old.requires_grad)
    for optimizer in optimizers:
        for name, value in optimizer.state.get(old, {}).items():
            if isinstance(value, Tensor) and value.shape == old.shape:
                optimizer.state[old][name] = _resized(value, count)
        replace_parameters(optimizer, {id(old): new})
    layer.weight = new
    if isinstance(layer, nn.Linear):
        layer.in_features += count
    else:
        layer.in_channels += count


def _resized(tensor: Tensor, count: int) -> Tensor:
    """Append `count` columns of zeros, or remove as many from the end if it is negative."""
    return nn.functional.pad(tensor, (*[0] * (2 * (tensor.dim() - 2)), 0, count)).clone()
