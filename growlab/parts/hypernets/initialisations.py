"""Initialisation of hypernetworks: hyperfan (Chang, Flokas, Lipson, ICLR 2020) and its baselines.

A hypernetwork's linear output layer emits W[i, j] = sum_k H[i, j, k] h(e)[k] + beta[i, j] and, if biases are emitted
too, b[i] = sum_l G[i, l] g(e2)[l] + gamma[i]. With d_j and d_i the fan-in and fan-out of the emitted layer (receptive
field included), d_k and d_l the sizes of h(e) and g(e2), r = 2 if a ReLU follows and else 1, and B = 2 if biases are
emitted and else 1 (Table 1):

                  Var(H)                      Var(G)
    hyperfan_in   r / (B d_j d_k Var(e))      r / (2 d_l Var(e2))
    hyperfan_out  r / (d_i d_k Var(e))        max(r (1 - d_j / d_i) / (d_l Var(e2)), 0)

Layers before the output layer have variance (2 with a ReLU behind, else 1) / fan-in; beta and gamma are 0. In Ha's
chunks (Appendix A.2) the output layer is shared by layers of different size: it gets 1 / d_k, and the layer before it,
one per chunk, gets r / (d_j d_l Var(e)) or r / (d_i d_l Var(e)), where d_l is the size of the embedding (the paper
writes d_k for the first; the two are equal in its experiment).

`hyperfan_harmonic`, `hyperfan_geometric` and `hyperfan_arithmetic` use that mean of the two variances (Appendix B.1.3).

The baselines of Section 3: M1 `xavier_*` and `kaiming_*` treat the hypernetwork as any network, with gain 1 and 2, by
fan-in, fan-out or a mean of the two variances; M2 `small_random`; M3 `kaiming_tenth`, whose output layer is a tenth of
`kaiming_in`'s; M4 `constant_embedding`, `kaiming_in` with embeddings that are all d_j^(-1/2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import above, one_of

# Combinations of the variances that preserve activations (by fan-in) and gradients (by fan-out). Both may be 0.
_COMBINED: dict[str, Callable[[float, float], float]] = {
    "in": lambda forward, backward: forward,
    "out": lambda forward, backward: backward,
    "harmonic": lambda forward, backward: 2 / (1 / forward + 1 / backward) if forward * backward else 0.0,
    "geometric": lambda forward, backward: sqrt(forward * backward),
    "arithmetic": lambda forward, backward: (forward + backward) / 2,
}
INITIALISATIONS = (
    *(f"{family}_{rule}" for family in ("hyperfan", "xavier", "kaiming") for rule in _COMBINED),
    *("small_random", "kaiming_tenth", "constant_embedding"),
)


@dataclass(frozen=True)
class Emission:
    """Properties of an emitted layer that the initialisation of the hypernetwork's output layer depends on.

    Attributes:
        fan_in: inputs that one output of the emitted layer sums, receptive field included: d_j.
        fan_out: outputs that one of its inputs enters, receptive field included: d_i.
        gain: r, 2 if a ReLU follows the emitted layer, else 1.
        with_bias: the layer's bias is emitted too.
        embedding_variance: Var(e).
    """

    fan_in: int
    fan_out: int
    gain: float = 1.0
    with_bias: bool = False
    embedding_variance: float = 1.0


@dataclass(frozen=True)
class Initialisation:
    """Variances of a hypernetwork's layers, and random draws with them.

    Attributes:
        name: one of `INITIALISATIONS`.
        distribution: "uniform", on [-sqrt(3 Var), sqrt(3 Var)], or "normal".
        small_std: standard deviation of every layer for `small_random`.

    Raises:
        UserError: the initialisation or distribution is unknown.
    """

    name: str = "hyperfan_in"
    distribution: str = "uniform"
    small_std: float = 0.01

    def __post_init__(self) -> None:
        with as_user_errors():
            one_of(INITIALISATIONS, initialisation=self.name)
            one_of(("uniform", "normal"), distribution=self.distribution)
            above(0, small_std=self.small_std)

    def hidden(self, features_in: int, features_out: int, relu: bool) -> float:
        """Variance of a layer before the output layer, by its fan-in and fan-out and whether a ReLU follows it."""
        if self._hyperfan or self.name == "constant_embedding":
            return (2.0 if relu else 1.0) / features_in
        return self._classical(features_in, features_out)

    def weight(self, emission: Emission, features: int, num_outputs: int) -> float:
        """Variance of H, the weight of an output layer that emits `num_outputs` values from `features` = d_k."""
        before = emission.gain / (features * emission.embedding_variance)
        if self._hyperfan:
            return self._combined(
                before / (emission.fan_in * (2 if emission.with_bias else 1)), before / emission.fan_out
            )
        return self._output(features, num_outputs)

    def bias(self, emission: Emission, features: int, num_outputs: int) -> float:
        """Variance of G, the output layer that emits the bias; arguments as for `weight`."""
        before = emission.gain / (features * emission.embedding_variance)
        if self._hyperfan:
            return self._combined(before / 2, before * max(1 - emission.fan_in / emission.fan_out, 0.0))
        return self._output(features, num_outputs)

    def chunk(self, emission: Emission, embedding: int, features: int) -> float:
        """Variance of a chunk's input layer, from its embedding to the input of the shared output layer."""
        if self._hyperfan:
            return self.weight(emission, embedding, features)
        return self.hidden(embedding, features, relu=False)

    def shared(self, features: int, num_outputs: int) -> float:
        """Variance of an output layer that emitted layers of different sizes share."""
        return 1.0 / features if self._hyperfan else self._output(features, num_outputs)

    def plain(self, emission: Emission) -> float:
        """Variance of a plain layer's weights; for hyperfan that of emitted ones: r / d_j, r / d_i or their mean.

        Raises:
            UserError: the initialisation is only defined for hypernetworks.
        """
        if self.name in ("kaiming_tenth", "constant_embedding"):
            raise UserError(f"{self.name} initialises hypernetworks: choose another for a network without one.")
        if self._hyperfan:
            return self._combined(emission.gain / emission.fan_in, emission.gain / emission.fan_out)
        return self._classical(emission.fan_in, emission.fan_out)

    def embedding(self, shape: tuple[int, ...], emission: Emission, source: torch.Generator) -> Tensor:
        """Draw embeddings: uniform on [-sqrt(3), sqrt(3)], of variance 1, or M4's constants."""
        if self.name == "constant_embedding":
            return torch.full(shape, emission.fan_in**-0.5)
        return (2 * torch.rand(shape, generator=source, dtype=torch.float32) - 1) * sqrt(3)

    def draw(self, shape: tuple[int, ...], variance: float, source: torch.Generator) -> Tensor:
        """Draw float32 numbers of mean 0 and the given variance, the same for any default dtype of torch."""
        if self.distribution == "normal":
            return torch.randn(shape, generator=source, dtype=torch.float32).mul_(sqrt(variance))
        return torch.rand(shape, generator=source, dtype=torch.float32).mul_(2).sub_(1).mul_(sqrt(3 * variance))

    def _output(self, features: int, num_outputs: int) -> float:
        return (0.01 if self.name == "kaiming_tenth" else 1.0) * self._classical(features, num_outputs)

    def _classical(self, fan_in: int, fan_out: int) -> float:
        if self.name == "small_random":
            return self.small_std**2
        gain = 1.0 if self.name.startswith("xavier") else 2.0
        return self._combined(gain / fan_in, gain / fan_out)

    @property
    def _hyperfan(self) -> bool:
        return self.name.startswith("hyperfan")

    def _combined(self, forward: float, backward: float) -> float:
        """Combine the variances that preserve activations and gradients, by `name`; M3 and M4 preserve activations."""
        return _COMBINED.get(self.name.rpartition("_")[2], _COMBINED["in"])(forward, backward)
