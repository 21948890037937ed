"""Modules of a hypernetwork: embeddings, hidden layers, output layers, and parametrisations of weights.

Shape suffixes: K size of h(e), L of an embedding; A, B rows and columns of a weight in chunks; P numbers in a chunk.
"""

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """Embedding, or array of embeddings: fixed or trained, with or without noise.

    Args:
        values: initial embeddings, [..., L].
        trained: they are parameters, else buffers.
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
    """Features h(e), the input of an output layer: hidden layers, which may be shared, of an embedding e [L]."""

    def __init__(self, embedding: Embedding, hidden: nn.Module) -> None:
        super().__init__()
        self.embedding, self.hidden = embedding, hidden

    def forward(self) -> Tensor:
        """Compute h(e), [K]."""
        return self.hidden(self.embedding())


class Output(nn.Module):
    """Linear output layer of a hypernetwork: H [..., K] and beta [...], None if that is stored elsewhere."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


class Emitted(nn.Module):
    """Parametrisation of one tensor: H h(e) + beta, where beta is the parametrised tensor's `original`.

    H (`output`), whose leading dimensions are the tensor's, and h(e) (`features`) may be shared. Autocast is off.
    """

    def __init__(self, output: Output, features: Features) -> None:
        super().__init__()
        self.output, self.features = output, features

    def forward(self, original: Tensor) -> Tensor:
        """Compute the tensor that the main network uses."""
        with torch.autocast(original.device.type, enabled=False):
            return original + self.output.weight @ self.features()

    def right_inverse(self, tensor: Tensor) -> Tensor:
        """Return the beta with which `tensor` is emitted."""
        return tensor - self.forward(torch.zeros_like(tensor))


class Chunks(nn.Module):
    """Parametrisation of one weight by chunks that a shared output layer emits (Ha et al. 2016).

    Chunk (a, b) is gain[a, b] * (H (G[a, b] e[a, b] + gamma[a, b]) + beta): Equation 6 of Chang et al. 2020 with a
    gain. A chunk consists of several outputs of one input, or inputs of one output, over the whole receptive field. The
    gains are the weight's `original`: growth rescales and negates chunks by them.

    Args:
        output: H [P, K] and beta [P]; shared by all weights of the same receptive field.
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
