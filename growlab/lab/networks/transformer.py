"""Transformers: a decoder with rotary positions and SwiGLU, and the encoder-decoder of Vaswani et al. 2017.

Shape suffixes: B sequences, T positions, S positions of a source, H heads, D channels of a head, C channels of the
residual stream, E channels of the embedding, V tokens.

The embedding has its own width, which does not grow, with projections into and out of the layers' width. Input and
output can share it (Yuan et al. 2023, Sec. 4.4).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Rotary(nn.Module):
    """Rotates the first channels of each head by position-dependent angles (Su et al. 2021).

    Only some channels are rotated, as in GPT-NeoX; the others are interchangeable, so their number can grow.
    """

    cos_TR: Tensor
    sin_TR: Tensor

    def __init__(self, num_channels: int, context: int) -> None:
        super().__init__()
        self.num_channels = num_channels
        powers = -torch.arange(0, num_channels, 2) / num_channels
        angles = torch.arange(context)[:, None] * 10000.0**powers
        angles_TR = torch.cat([angles, angles], 1)
        self.register_buffer("cos_TR", angles_TR.cos(), persistent=False)
        self.register_buffer("sin_TR", angles_TR.sin(), persistent=False)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        """Rotate heads; the shape stays the same."""
        x_BHTR, others = x_BHTD.split([self.num_channels, x_BHTD.shape[-1] - self.num_channels], -1)
        first, second = x_BHTR.chunk(2, -1)
        orthogonal_BHTR = torch.cat([-second, first], -1)
        positions = x_BHTD.shape[2]
        rotated_BHTR = x_BHTR * self.cos_TR[:positions] + orthogonal_BHTR * self.sin_TR[:positions]
        return torch.cat([rotated_BHTR, others], -1)


class Attention(nn.Module):
    """Multi-head scaled dot-product attention."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        dropout: float = 0.0,
        bias: bool = True,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.rotary = num_heads, dropout, rotary
        self.query = nn.Linear(width, num_heads * head_dim, bias)
        self.key = nn.Linear(width, num_heads * head_dim, bias)
        self.value = nn.Linear(width, num_heads * head_dim, bias)
        self.out = nn.Linear(num_heads * head_dim, width, bias)

    def forward(
        self, x_BTC: Tensor, source_BSC: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Attend to the source, or to the stream itself without one; return [B, T, C].

        The mask is True at visible positions and broadcasts with [B, H, T, S].
        """
        source_BSC = x_BTC if source_BSC is None else source_BSC
        query_BHTD, key_BHSD, value_BHSD = (
            layer(stream).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, stream in ((self.query, x_BTC), (self.key, source_BSC), (self.value, source_BSC))
        )
        if self.rotary is not None:
            query_BHTD, key_BHSD = self.rotary(query_BHTD), self.rotary(key_BHSD)
        attended_BHTD = F.scaled_dot_product_attention(
            query_BHTD,
            key_BHSD,
            value_BHSD,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        return self.out(attended_BHTD.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate x) * up x)`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map [B, T, C] to the same shape."""
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


class DecoderBlock(nn.Module):
    """Causal attention, then a gated MLP, each after an RMSNorm and with a residual connection."""

    def __init__(self, width: int, num_heads: int, head_dim: int, hidden: int, dropout: float, rotary: Rotary) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, num_heads, head_dim, dropout, bias=False, rotary=rotary)
        self.mlp = GatedMLP(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map [B, T, C] to the same shape."""
        x_BTC = x_BTC + self.dropout(self.attention(self.norm1(x_BTC), causal=True))
        return x_BTC + self.dropout(self.mlp(self.norm2(x_BTC)))


class CausalTransformer(nn.Module):
    """Decoder-only language model with rotary positions, RMSNorm, SwiGLU and tied embeddings, without biases.

    Weights are drawn from N(0, 1 / fan_in), divided by sqrt(2 num_layers) in the last layer of a residual branch
    (Radford et al. 2019); embeddings from N(0, 1 / E).

    Args:
        vocabulary_size: V.
        context: largest number of positions.
        num_layers: number of blocks.
        embedding_dim: E; None: `width`.
        dropout: of embeddings, attention and residual branches.
        width: C.
        num_heads: H.
        head_dim: D.
        rotary_dim: rotated channels of each head; even, and below `head_dim` so that the others can grow.
        hidden: hidden channels of the gated MLPs.

    Raises:
        ValueError: `rotary_dim` is odd or above `head_dim`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context: int,
        num_layers: int = 4,
        embedding_dim: int | None = None,
        dropout: float = 0.0,
        width: int = 128,
        num_heads: int = 4,
        head_dim: int = 32,
        rotary_dim: int = 8,
        hidden: int = 344,
    ) -> None:
        super().__init__()
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ValueError(f"rotary_dim={rotary_dim} must be even and at most head_dim={head_dim}.")
        embedding_dim = embedding_dim or width
        self.embedding = nn.Embedding(vocabulary_size, embedding_dim)
        self.project_in = nn.Linear(embedding_dim, width, bias=False)
        rotary = Rotary(rotary_dim, context)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, num_heads, head_dim, hidden, dropout, rotary) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.project_out = nn.Linear(width, embedding_dim, bias=False)
        self.head = nn.Linear(embedding_dim, vocabulary_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        _draw(self, num_layers)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits of the next token at each position, [B, T, V]."""
        x_BTC = self.project_in(self.dropout(self.embedding(tokens_BT)))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.project_out(self.norm(x_BTC)))


class TransformerLayer(nn.Module):
    """Encoder layer, or decoder layer if `decodes` (Vaswani et al. 2017, Section 3).

    Layer normalisation follows each residual connection, or precedes each branch if `norm_first`. The other arguments
    are those of `EncoderDecoder`.
    """

    def __init__(
        self, width: int, num_heads: int, head_dim: int, hidden: int, dropout: float, norm_first: bool, decodes: bool
    ) -> None:
        super().__init__()
        self.norm_first, self.decodes = norm_first, decodes
        self.attention = Attention(width, num_heads, head_dim, dropout)
        self.norm1 = nn.LayerNorm(width)
        if decodes:
            self.source_attention = Attention(width, num_heads, head_dim, dropout)
            self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.norm3 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor, source_BSC: Tensor | None, source_mask: Tensor | None) -> Tensor:
        """Map the stream [B, T, C]; the mask is for the source, or for the stream in an encoder layer."""
        if self.decodes:
            x_BTC = self._residual(x_BTC, self.norm1, lambda x: self.attention(x, causal=True))
            x_BTC = self._residual(x_BTC, self.norm2, lambda x: self.source_attention(x, source_BSC, mask=source_mask))
        else:
            x_BTC = self._residual(x_BTC, self.norm1, lambda x: self.attention(x, mask=source_mask))
        return self._residual(x_BTC, self.norm3, self.mlp)

    def _residual(self, x_BTC: Tensor, norm: nn.LayerNorm, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x_BTC + self.dropout(branch(norm(x_BTC)))
        return norm(x_BTC + self.dropout(branch(x_BTC)))


class EncoderDecoder(nn.Module):
    """Transformer for translation.

    Args:
        source_size: size of the source vocabulary.
        target_size: size of the target vocabulary.
        padding: padding token of sources and targets.
        num_layers: number of layers in the encoder, and in the decoder.
        embedding_dim: E; None: `width`.
        tied: share weights of the decoder's embedding and output layer.
        shared: source and target share a vocabulary and an embedding.
        width: C.
        num_heads: H.
        head_dim: D.
        hidden: hidden channels of the MLPs.
        dropout: of embeddings, attention and residual branches.
        norm_first: normalise before branches instead of after them.

    Raises:
        ValueError: `shared`, but the vocabularies differ in size.
    """

    def __init__(
        self,
        source_size: int,
        target_size: int,
        padding: int = 1,
        num_layers: int = 6,
        embedding_dim: int | None = None,
        tied: bool = True,
        shared: bool = False,
        width: int = 512,
        num_heads: int = 8,
        head_dim: int = 64,
        hidden: int = 2048,
        dropout: float = 0.1,
        norm_first: bool = False,
    ) -> None:
        super().__init__()
        if shared and source_size != target_size:
            raise ValueError(f"shared embeddings need one vocabulary, not {source_size} and {target_size} tokens.")
        embedding_dim = embedding_dim or width
        self.padding, self.scale = padding, math.sqrt(embedding_dim)
        self.source_embedding = nn.Embedding(source_size, embedding_dim, padding_idx=padding)
        self.target_embedding = (
            self.source_embedding if shared else nn.Embedding(target_size, embedding_dim, padding_idx=padding)
        )
        self.source_in = nn.Linear(embedding_dim, width)
        self.target_in = nn.Linear(embedding_dim, width)
        sizes = (width, num_heads, head_dim, hidden, dropout, norm_first)
        self.encoder = nn.ModuleList(TransformerLayer(*sizes, decodes=False) for _ in range(num_layers))
        self.decoder = nn.ModuleList(TransformerLayer(*sizes, decodes=True) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.project_out = nn.Linear(width, embedding_dim)
        self.head = nn.Linear(embedding_dim, target_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        _draw(self, num_layers if norm_first else None)
        if tied:
            self.head.weight = self.target_embedding.weight

    def forward(self, source_BS: Tensor, previous_BT: Tensor) -> Tensor:
        """Return logits of the next token at each position of the target, [B, T, V].

        Args:
            source_BS: padded tokens of the source.
            previous_BT: tokens of the target, shifted right by one.
        """
        return self.decode(previous_BT, self.encode(source_BS), source_BS)

    def encode(self, source_BS: Tensor) -> Tensor:
        """Encode a source to [B, S, C]."""
        x_BSC = self.source_in(self._embed(self.source_embedding, source_BS))
        for layer in self.encoder:
            x_BSC = layer(x_BSC, None, self._mask(source_BS))
        return self.encoder_norm(x_BSC)

    def decode(self, previous_BT: Tensor, encoded_BSC: Tensor, source_BS: Tensor) -> Tensor:
        """Return logits from an encoded source; see `forward`."""
        x_BTC = self.target_in(self._embed(self.target_embedding, previous_BT))
        for layer in self.decoder:
            x_BTC = layer(x_BTC, encoded_BSC, self._mask(source_BS))
        return self.head(self.project_out(self.decoder_norm(x_BTC)))

    def _mask(self, source_BS: Tensor) -> Tensor:
        return (source_BS != self.padding)[:, None, None, :]

    def _embed(self, embedding: nn.Embedding, tokens_BT: Tensor) -> Tensor:
        x_BTE = embedding(tokens_BT) * self.scale
        return self.dropout(x_BTE + sinusoids(tokens_BT.shape[1], embedding.embedding_dim, x_BTE))


def sinusoids(num_positions: int, num_channels: int, like: Tensor) -> Tensor:
    """Sinusoidal encodings [T, E] (Vaswani et al. 2017, Section 3.5), with the dtype and device of `like`."""
    channels_E = torch.arange(num_channels, device=like.device)
    frequencies_E = 10000.0 ** (-2 * (channels_E // 2) / num_channels)
    angles_TE = torch.arange(num_positions, device=like.device)[:, None] * frequencies_E
    return torch.where(channels_E % 2 == 0, angles_TE.sin(), angles_TE.cos()).to(like.dtype)


def _draw(network: nn.Module, num_layers: int | None) -> None:
    """Draw weights from N(0, 1 / fan_in), smaller at the ends of residual branches if depth is given; zero biases."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if num_layers is not None and name.endswith((".out", ".down", ".mlp.2")):
                std /= math.sqrt(2 * num_layers)
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
