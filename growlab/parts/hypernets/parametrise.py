"""Parametrise the weights of any network by a hypernetwork, and turn the result into a plain network again.

Shape suffixes: K size of h(e), L of an embedding; A, B rows and columns of a weight in chunks; P entries of a chunk.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import above, at_least, flag, not_none, one_of, whole
from growlab.growth.method import generator
from growlab.parts.hypernets.initialisations import Emission, Initialisation

SHARINGS = ("layer", "size", "network", "chunk")
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OF_EVERY_CLASS = ("__dict__", "__weakref__")


@dataclass(frozen=True)
class Hypernet:
    """Settings of a hypernetwork.

    Attributes:
        sharing: "layer": one hypernetwork per tensor. "size": layers of equal shape and equal variances (Table 1) share
            one for weights and one for biases, with one embedding each. "network": one embedding and one h for all, one
            output layer per tensor. "chunk" (Ha et al. 2016): one embedding and input layer per chunk of a weight, and
            an output layer shared by all weights with the same receptive field.
        initialisation: see `growlab.parts.hypernets.initialisations`.
        distribution: "uniform" or "normal".
        embedding_features: size of an embedding.
        hidden_features: widths of h's hidden layers, each followed by a ReLU; with "chunk" at most one, the input size
            of the shared output layer (default: the embedding's size).
        embedding: "fixed" or "trained".
        noise: half the width of uniform noise on embeddings at every use.
        biases: emit the biases too.
        gain: r of all layers except the last: 2 if a ReLU follows them.
        output_gain: r of the last layer.
        chunk_channels: number of channels of a chunk; None for the largest that divides the inputs or the outputs of
            every weight with the same receptive field.
        small_std: standard deviation of the initialisation `small_random`.
        emit_last: emit the last layer too; else it is a plain layer, drawn by the same initialisation (Figure 6).

    Raises:
        UserError: a value is invalid.
    """

    sharing: str = "layer"
    initialisation: str = "hyperfan_in"
    distribution: str = "uniform"
    embedding_features: int = 50
    hidden_features: Sequence[int] = ()
    embedding: str = "fixed"
    noise: float = 0.0
    biases: bool = False
    gain: float = 1.0
    output_gain: float = 1.0
    chunk_channels: int | None = None
    small_std: float = 0.01
    emit_last: bool = True

    def __post_init__(self) -> None:
        with as_user_errors():
            one_of(SHARINGS, sharing=self.sharing)
            one_of(("fixed", "trained"), embedding=self.embedding)
            for features in self.hidden_features:
                whole(1, hidden_features=features)
            whole(1, embedding_features=self.embedding_features, **not_none(chunk_channels=self.chunk_channels))
            above(0, gain=self.gain, output_gain=self.output_gain)
            at_least(0, noise=self.noise)
            flag(biases=self.biases, emit_last=self.emit_last)
        if self.sharing == "network" and self.initialisation == "constant_embedding":
            raise UserError(
                "constant_embedding gives every layer a separate embedding, but sharing='network' has a single one."
            )
        if self.sharing == "chunk" and (self.biases or len(self.hidden_features) > 1):
            raise UserError("sharing='chunk' emits no biases and has one hidden layer: give one hidden_features.")
        _ = self.variances

    @property
    def variances(self) -> Initialisation:
        """Initialisation of the hypernetwork's layers."""
        return Initialisation(self.initialisation, self.distribution, self.small_std)

    @property
    def embedding_variance(self) -> float:
        """Variance of an embedding, Var(e), noise included."""
        return 1.0 + self.noise**2 / 3

    @property
    def chunk_features(self) -> int:
        """Input size of the output layer of chunks."""
        return self.hidden_features[0] if self.hidden_features else self.embedding_features


class Embedding(nn.Module):
    """Embedding, or array of embeddings: fixed or trained, with or without noise.

    Args:
        values: initial embeddings, [..., L].
        trained: register them as a parameter instead of a buffer.
        noise: half the width of uniform noise added at every use, in train and eval mode (Ukai et al. 2018: a Bayesian
            network's weights are a function of noise); 0 for none.
    """

    values: Tensor

    def __init__(self, values: Tensor, trained: bool = False, noise: float = 0.0) -> None:
        super().__init__()
        if trained:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values)
        self.noise = noise

    def forward(self) -> Tensor:
        """Return the embedding, [..., L], with fresh noise."""
        if not self.noise:
            return self.values
        return self.values + (2 * torch.rand_like(self.values) - 1) * self.noise


class Features(nn.Module):
    """Features h(e), the input of an output layer: an embedding e [L], and hidden layers, which may be shared."""

    def __init__(self, embedding: Embedding, hidden: nn.Module) -> None:
        super().__init__()
        self.embedding, self.hidden = embedding, hidden

    def forward(self) -> Tensor:
        """Compute h(e), [K]."""
        return self.hidden(self.embedding())


class Output(nn.Module):
    """Linear output layer of a hypernetwork: H [..., K], and beta [...] unless it is stored elsewhere."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


class Emitted(nn.Module):
    """Parametrisation of one tensor: H h(e) + beta, where beta is the parametrised tensor's `original`.

    H (`output`), whose leading dimensions are the tensor's, and h(e) (`features`) may be shared. Runs without autocast.
    """

    def __init__(self, output: Output, features: Features) -> None:
        super().__init__()
        self.output, self.features = output, features

    def forward(self, original: Tensor) -> Tensor:
        """Compute the tensor that the main network uses."""
        with torch.autocast(original.device.type, enabled=False):
            return original + self.output.weight @ self.features()

    def right_inverse(self, tensor: Tensor) -> Tensor:
        """Return the beta for which `tensor` is emitted."""
        return tensor - self.forward(torch.zeros_like(tensor))


class Chunks(nn.Module):
    """Parametrisation of one weight by chunks that a shared output layer emits (Ha et al. 2016).

    Chunk (a, b) is gain[a, b] * (H (G[a, b] e[a, b] + gamma[a, b]) + beta): Equation 6 of Chang et al. 2020 with a
    gain. A chunk consists of several outputs of one input, or inputs of one output, over the whole receptive field. The
    gains are the weight's `original`; growth rescales and negates chunks through them.

    Args:
        output: H [P, K] and beta [P]; shared by all weights with the same receptive field.
        embedding: e, [A, B, L].
        weight: G, [A, B, K, L].
        by_inputs: a chunk consists of inputs of one output.
        size: number of channels of a chunk.
        kernel: shape of the receptive field.
    """

    def __init__(
        self, output: Output, embedding: Embedding, weight: Tensor, by_inputs: bool, size: int, kernel: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.output, self.embedding = output, embedding
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros_like(weight[..., 0]))
        self.by_inputs, self.size, self.kernel = by_inputs, size, kernel

    def forward(self, gains: Tensor) -> Tensor:
        """Compute the weight that the main network uses, [out, in, ...]."""
        with torch.autocast(gains.device.type, enabled=False):
            features_ABK = (self.weight @ self.embedding()[..., None])[..., 0] + self.bias
            bias = self.output.bias
            assert bias is not None
            chunks_ABP = (features_ABK @ self.output.weight.T + bias) * gains[..., None]
        rows, columns = gains.shape
        chunks = chunks_ABP.view(rows, columns, self.size, *self.kernel)
        if self.by_inputs:
            return chunks.reshape(rows, columns * self.size, *self.kernel)
        return chunks.transpose(1, 2).reshape(rows * self.size, columns, *self.kernel)

    def right_inverse(self, tensor: Tensor) -> Tensor:
        """Return gains of 1 for any weight: chunks cannot emit every weight."""
        return tensor.new_ones(self.weight.shape[:2])


def linear_layers(weights: list[Tensor]) -> nn.Sequential:
    """Build linear layers with these weights [out, in] and zero biases, each followed by a ReLU."""
    layers: list[nn.Module] = []
    for weight in weights:
        linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], dtype=weight.dtype)
        linear.to(weight.device)
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.zero_()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Layer:
    """A layer whose tensors a hypernetwork will emit."""

    name: str
    module: Any  # a linear layer or convolution
    emission: Emission

    def tensors(self, hypernet: Hypernet) -> list[str]:
        """Names of its tensors that are emitted."""
        return ["weight", "bias"] if hypernet.biases and self.module.bias is not None else ["weight"]


def parametrise(network: nn.Module, hypernet: Hypernet, seed: int = 0) -> nn.Module:
    """Parametrise the weights of every linear layer and convolution by a hypernetwork, in place; return the network.

    The previous weights are lost; biases that are not emitted start at 0 (Section 4.1, Case 1). Emitted tensors keep
    their names (`layer.weight` is computed when it is read); trained parameters are in `layer.parametrizations`.

    Raises:
        UserError: the network has no layer to emit, layers share a weight, or a weight cannot be divided into chunks.
    """
    layers = list(find_layers(network, hypernet))
    if not hypernet.emit_last:
        _draw(layers[-1:], hypernet, seed)
        layers = layers[:-1]
        if not layers:
            raise UserError(f"{type(network).__name__} has one layer alone, and emit_last=False leaves none to emit.")
    if hypernet.sharing == "chunk":
        _parametrise_by_chunks(layers, hypernet, seed)
    else:
        _parametrise_by_tensors(layers, hypernet, seed)
    _zero_biases(layer for layer in layers if "bias" not in layer.tensors(hypernet))
    return network


def initialise(network: nn.Module, hypernet: Hypernet, seed: int = 0) -> nn.Module:
    """Initialise a network without hypernetworks in place, biases with 0; return the network.

    Uses the initialisation, distribution and gains of `hypernet`.

    Raises:
        UserError: there is no linear layer or convolution, or the initialisation is only defined for hypernetworks.
    """
    _draw(list(find_layers(network, hypernet)), hypernet, seed)
    return network


def _draw(layers: Sequence[Layer], hypernet: Hypernet, seed: int) -> None:
    init = hypernet.variances
    with torch.no_grad():
        for layer in layers:
            weight, source = layer.module.weight, generator(seed, 0, f"weight of {layer.name}")
            weight.copy_(init.draw(tuple(weight.shape), init.plain(layer.emission), source))
    _zero_biases(layers)


def _zero_biases(layers: Iterable[Layer]) -> None:
    for layer in layers:
        if layer.module.bias is not None:
            nn.init.zeros_(layer.module.bias)


def materialize(network: nn.Module) -> nn.Module:
    """Turn a network with emitted weights into a plain one with equal outputs, in place, and return it.

    Noise on embeddings is left out. The network has its original classes, shapes and state_dict keys again.
    """
    noises = {module: module.noise for module in network.modules() if isinstance(module, Embedding)}
    for embedding in noises:
        embedding.noise = 0.0
    with torch.no_grad():
        tensors = [(module, name, getattr(module, name).detach()) for module, name in emitted(network)]
    # Only after all are computed, since they may share layers.
    for module, name, value in tensors:
        trained = any(p.requires_grad for p in module.get_submodule(f"parametrizations.{name}").parameters())
        # Copies of the module share torch's dynamic class, from which the property is removed.
        attributes = {key: value for key, value in vars(type(module)).items() if key not in _OF_EVERY_CLASS}
        separate_class: Any = type(type(module).__name__, type(module).__bases__, attributes)
        module.__class__ = separate_class
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        setattr(module, name, nn.Parameter(value.clone(), requires_grad=trained))
    for embedding, noise in noises.items():
        embedding.noise = noise
    return network


def emitted(network: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Iterate over every (module, tensor name) that a hypernetwork emits."""
    for module in network.modules():
        if parametrize.is_parametrized(module):
            for name, parts in module.get_submodule("parametrizations").named_children():
                if any(isinstance(part, (Emitted, Chunks)) for part in parts.children()):
                    yield module, name


def find_layers(network: nn.Module, hypernet: Hypernet) -> Iterator[Layer]:
    """Iterate over linear layers and convolutions, in the order of registration."""
    layers = [(name, module) for name, module in network.named_modules() if isinstance(module, _LAYERS)]
    if not layers:
        raise UserError(f"{type(network).__name__} has no linear layer or convolution to emit weights for.")
    users: dict[int, str] = {}
    for index, (name, module) in enumerate(layers):
        if parametrize.is_parametrized(module):
            raise UserError(f"{name} is parametrised already; a hypernetwork needs plain weights.")
        other = users.setdefault(id(module.weight), name)
        if other != name:
            raise UserError(f"{name} and {other} share a weight, which a hypernetwork cannot emit.")
        kernel = prod(module.weight.shape[2:])
        yield Layer(
            name,
            module,
            Emission(
                fan_in=module.weight[0].numel(),
                fan_out=module.weight.shape[0] * kernel // getattr(module, "groups", 1),
                gain=hypernet.gain if index < len(layers) - 1 else hypernet.output_gain,
                with_bias=hypernet.biases and module.bias is not None,
                embedding_variance=hypernet.embedding_variance,
            ),
        )


def _parametrise_by_tensors(layers: Sequence[Layer], hypernet: Hypernet, seed: int) -> None:
    init, widths = hypernet.variances, [hypernet.embedding_features, *hypernet.hidden_features]
    made: dict[tuple[str, object], Any] = {}
    originals: dict[object, nn.Parameter] = {}

    def once(kind: str, key: object, make: Callable[[torch.Generator], nn.Module]) -> Any:
        if (kind, key) not in made:
            made[kind, key] = make(generator(seed, 0, f"{kind} of {key}"))
        return made[kind, key]

    def emit(layer: Layer, name: str) -> None:
        tensor, full_name, features = getattr(layer.module, name), f"{layer.name}.{name}", widths[-1]
        # The weight's shape for the bias too, since the bias's variance depends on the layer's fan-in.
        kind = (name, tuple(layer.module.weight.shape), layer.emission)
        of_output = kind if hypernet.sharing == "size" else full_name
        of_hidden, of_embedding = ("network", "network") if hypernet.sharing == "network" else (of_output, full_name)

        def embedding(source: torch.Generator) -> nn.Module:
            values = init.embedding((widths[0],), layer.emission, source).to(tensor)
            return Embedding(values, hypernet.embedding == "trained", hypernet.noise)

        def hidden(source: torch.Generator) -> nn.Module:
            pairs = ((before, after, init.hidden(before, after, relu=True)) for before, after in pairwise(widths))
            return linear_layers([init.draw((o, i), variance, source).to(tensor) for i, o, variance in pairs])

        def output(source: torch.Generator) -> nn.Module:
            variance = init.weight if name == "weight" else init.bias
            drawn = (*tensor.shape, features), variance(layer.emission, features, tensor.numel())
            return Output(init.draw(*drawn, source).to(tensor))

        of_features = Features(once("embedding", of_embedding, embedding), once("h", of_hidden, hidden))
        emitted_by = Emitted(once("H", of_output, output), of_features)
        parametrize.register_parametrization(layer.module, name, emitted_by, unsafe=True)
        parts = layer.module.parametrizations[name]
        nn.init.zeros_(parts.original)
        if hypernet.sharing == "size":
            # The bias of the shared output layer.
            parts.original = originals.setdefault(of_output, parts.original)

    for layer in layers:
        for name in layer.tensors(hypernet):
            emit(layer, name)


def _parametrise_by_chunks(layers: Sequence[Layer], hypernet: Hypernet, seed: int) -> None:
    init, size, features = hypernet.variances, hypernet.embedding_features, hypernet.chunk_features
    by_kernel: dict[tuple[int, ...], list[Layer]] = defaultdict(list)
    for layer in layers:
        by_kernel[tuple(layer.module.weight.shape[2:])].append(layer)
    for kernel, same_kernel in by_kernel.items():
        channels = hypernet.chunk_channels or _highest_common_factor(same_kernel)
        numbers, example = channels * prod(kernel), same_kernel[0].module.weight
        variance = init.shared(features, numbers)
        weight = init.draw((numbers, features), variance, generator(seed, 0, f"shared output {kernel}"))
        output = Output(weight.to(example), example.new_zeros(numbers))
        for layer in same_kernel:
            old = layer.module.weight
            rows, columns = old.shape[:2]
            if rows % channels and columns % channels:
                raise UserError(
                    f"{layer.name}'s {rows} outputs and {columns} inputs do not split into chunks of {channels} "
                    "channels; choose another chunk_channels."
                )
            by_inputs = bool(rows % channels)
            shape = (rows, columns // channels) if by_inputs else (rows // channels, columns)
            source = generator(seed, 0, f"chunks of {layer.name}")
            values = init.embedding((*shape, size), layer.emission, source).to(old)
            embedding = Embedding(values, hypernet.embedding == "trained", hypernet.noise)
            variance = init.chunk(layer.emission, size, features)
            weight = init.draw((*shape, features, size), variance, source).to(old)
            chunks = Chunks(output, embedding, weight, by_inputs, channels, kernel)
            parametrize.register_parametrization(layer.module, "weight", chunks, unsafe=True)
            layer.module.parametrizations["weight"].original.requires_grad_(False)


def _highest_common_factor(layers: Sequence[Layer]) -> int:
    """Return the largest chunk size that divides the inputs or the outputs of every weight."""
    shapes = [tuple(layer.module.weight.shape[:2]) for layer in layers]
    candidates = range(max(map(max, shapes)), 0, -1)
    return next(k for k in candidates if all(rows % k == 0 or columns % k == 0 for rows, columns in shapes))


class MonteCarlo(nn.Module):
    """Average a noisy network's class probabilities over several passes in eval mode; outputs their logarithm.

    Args:
        network: a network whose passes differ, since its embeddings are noisy.
        samples: number of passes.
    """

    def __init__(self, network: nn.Module, samples: int) -> None:
        super().__init__()
        self.network, self.samples = network, samples

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch to logits, or in eval mode to log-probabilities, [B, num_classes]."""
        if self.training:
            return self.network(x)
        passes = [torch.log_softmax(self.network(x), 1) for _ in range(self.samples)]
        return torch.logsumexp(torch.stack(passes), 0) - log(self.samples)


def hypernetwork(
    image_shape: Sequence[int],
    num_classes: int,
    network: Callable[..., nn.Module],
    monte_carlo_samples: int = 1,
    **hypernet: Any,
) -> nn.Module:
    """Build a network whose weights a hypernetwork emits, seeded from torch's global generator.

    Args:
        image_shape: [C, H, W].
        num_classes: number of logits.
        network: builds the main network from `image_shape` and `num_classes`.
        monte_carlo_samples: number of passes averaged in eval mode, for noisy embeddings.
        hypernet: fields of `Hypernet`; `sharing="none"` gives a plain network, drawn by the initialisation.
    """
    if monte_carlo_samples < 1:
        raise UserError(f"monte_carlo_samples must be at least 1, not {monte_carlo_samples}.")
    main = network(image_shape=image_shape, num_classes=num_classes)
    seed = int(torch.randint(2**31, ()))
    if hypernet.get("sharing") == "none":
        return initialise(main, Hypernet(**{**hypernet, "sharing": "layer"}), seed)
    parametrise(main, Hypernet(**hypernet), seed)
    return main if monte_carlo_samples == 1 else MonteCarlo(main, monte_carlo_samples)
