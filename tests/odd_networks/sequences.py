"""Networks of indices, sequences, sets and graphs."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.cases import Around
from tests.odd_networks.table import made, net, odd, real, tokens


@odd(
    real(8, 4),
    layers=nn.ModuleList([nn.Conv1d(9, 18, 2, dilation=2**step) for step in range(2)]),
    **{"a": nn.Conv1d(4, 9, 1), "skip": nn.Conv1d(9, 12, 1), "c": nn.Conv1d(12, 3, 1)},
)
def gated_wavenet(m, x):
    x, skips = m.a(x.transpose(1, 2)), 0
    for step, layer in enumerate(m.layers):
        y = F.glu(layer(F.pad(x, (2**step, 0))), 1)
        x, skips = x + y, skips + m.skip(y)
    return m.c(F.relu(skips)).transpose(1, 2)


@made(real(5, 12), last="last")
def weight_norms_of_a_vocoder():
    """HiFi-GAN's generator: transposed convolutions, and residual blocks of dilated ones."""

    def run(m, x):
        x = m.first(x)
        for up, block in zip(m.ups, m.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            for one, two in zip(block, block, strict=True):
                x = x + two(F.leaky_relu(one(F.leaky_relu(x, 0.1)), 0.1))
        return torch.tanh(m.last(F.leaky_relu(x)))

    def conv(inputs, outputs, dilation=1):
        return weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation, padding=dilation))

    ups = [weight_norm(nn.ConvTranspose1d(n, n // 2, 4, 2, padding=1)) for n in (16, 8)]
    blocks = [nn.ModuleList(conv(n, n, d) for d in (1, 3)) for n in (8, 4)]
    return net(run, first=conv(5, 16), ups=nn.ModuleList(ups), blocks=nn.ModuleList(blocks), last=conv(4, 1))


@odd(
    real(5, 7),
    **{"groups": {"a": 12, "up": 18}, "a": [7, 12], "up": [12, 18], "down": [18, 12], "c": [12, 3]},
    **{
        "n": nn.LayerNorm(12),
        "n2": nn.LayerNorm(12),
        "token": torch.randn(1, 1, 12),
        "registers": torch.zeros(1, 0, 12),
    },
)
def no_register_tokens(m, x):
    """A parameter without an entry is laid beside the tokens, as DINOv3 has it."""
    x = m.a(x)
    x = torch.cat([m.token.expand(len(x), -1, -1), m.registers.expand(len(x), -1, -1), x], 1)
    x = x + m.down(F.gelu(m.up(m.n(x))))
    return m.c(m.n2(x)[:, 0])


@odd(real(5, 7), groups={"a": 12, "b": 9}, a=[7, 12], b=[12, 9], c=[9, 3])
def windows_that_a_short_sequence_does_not_fill(m, x):
    """Of windows of eight tokens there is none in five."""
    x = m.a(x)
    whole = x.shape[1] // 8
    means = x[:, : 8 * whole].reshape(len(x), whole, 8, x.shape[-1]).sum(2) / 8
    return m.c(F.relu(torch.cat([m.b(means), m.b(x)], 1)).sum(1))


# Normalisations in forwards -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Two normalisations of one stream in a forward that calls other modules too."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gains = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(width))
        self.mix, self.up, self.down = nn.Linear(5, 5), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        y = F.layer_norm(x, x.shape[-1:], self.gains[0], self.shift)
        x = x + self.mix(y.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(F.rms_norm(x, x.shape[-1:], self.gains[1]))))


@odd(
    real(5, 7),
    **{"groups": {"a": 12, "blocks.0.up": 18, "blocks.1.up": 18}, "a": [7, 12], "n": nn.LayerNorm(12), "c": [12, 3]},
    blocks=nn.ModuleList(Block(12, 18) for _ in range(2)),
)
def mixer_with_norms_in_its_forward(m, x):
    for block in m.blocks:
        x = block(m.a(x) if block is m.blocks[0] else x)
    return m.c(m.n(x).mean(1))


@odd(real(5, 7), groups={"d": 10}, a=[7, 12], b=[12, 16], d=[16, 10], c=[10, 3])
def norms_of_two_streams_in_one_forward(m, x):
    """One weight a channel cannot be of both: the two keep their width."""
    y = F.layer_norm(m.b(F.layer_norm(m.a(x), (12,))), (16,))
    return m.c(F.relu(m.d(y)).mean(1))


@odd(
    real(5, 7),
    centre=Around(lambda net, x: x - x.mean(1, keepdim=True) - x.mean(-1, keepdim=True)),
    **{"groups": {"a": 12, "b": 9}, "a": [7, 12], "b": [12, 9], "n": nn.LayerNorm(9), "c": [45, 3]},
)
def centred_both_ways(m, x):
    return m.c(m.n(m.b(F.relu(m.centre(m.a(x))))).flatten(1))


# As textbooks and torch's own modules have them ---------------------------------------------------------------


@odd(
    *(tokens(6), tokens(5)),
    t=nn.Transformer(12, 4, 1, 1, dim_feedforward=18, dropout=0.0, batch_first=True),
    **{"e": nn.Embedding(11, 12), "c": [12, 11]},
)
def translator_of_torchs_modules(m, source, target):
    """Masks that torch looks at, padding, queries apart from keys and values, a width that is checked."""
    future = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=m.c.weight.dtype)
    padding = -1e9 * (source == 0).to(m.c.weight.dtype)
    masks = {"tgt_mask": future, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    return m.c(m.t(m.e(source), m.e(target), **masks))


@odd(real(5, 6), real(5, 5), a=[6, 24], source=[24, 1], target=[24, 1], c=[24, 3])
def attention_of_one_head(m, x, weights):
    """Written out, as for graphs: what is mixed passes."""
    h = m.a(x)
    scores = m.source(h) + m.target(h).mT + weights
    return m.c(F.elu(torch.bmm(scores.softmax(-1), h)).mean(1))


class BiasesApart(nn.Module):
    """Attention whose keys have no bias: zeros in a buffer stand for it, as in BEiT."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_bias, self.v_bias = (nn.Parameter(0.1 * torch.ones(width)) for _ in range(2))
        self.register_buffer("k_bias", torch.zeros(width), persistent=False)

    def forward(self, x):
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).reshape(len(x), x.shape[1], 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@odd(
    real(5, 7),
    **{"groups": {"a": 12, "attention.qkv": 3}, "a": [7, 12], "attention": BiasesApart(12, 3), "c": [12, 3]},
    **{"n": nn.LayerNorm(12), "last_norm": nn.LayerNorm(12)},
)
def attention_with_biases_apart(m, x):
    x = m.a(x)
    x = x + m.attention(m.n(x))
    return m.c(m.last_norm(x).mean(1))


@odd(
    real(5, 7),
    mix=nn.Sequential(nn.Conv1d(5, 8, 1), nn.GELU(), nn.Conv1d(8, 5, 1)),
    **{"groups": {"a": 12, "mix.0": 8}, "a": [7, 12], "n": nn.LayerNorm(12)},
    **{"pool": nn.Conv1d(10, 2, 1), "b": [12, 9], "c": [18, 3]},
)
def tokens_mixed_by_convolutions_of_one_position(m, x):
    """Positions are the convolution's channels, and channels what it slides over, one at a time."""
    x = m.a(x)
    x = x + m.mix(m.n(x))
    x = x.repeat_interleave(2, dim=1)
    return m.c(F.relu(m.b(m.pool(x))).flatten(1))


@odd(
    (torch.arange(20) % 11).view(4, 5),
    **{"e": nn.Embedding(11, 6, max_norm=1.0), "bag": nn.EmbeddingBag(11, 6, max_norm=0.5)},
    **{"a": [6, 12], "d": [6, 12], "b": [12, 15], "c": [15, 3]},
)
def embeddings_of_a_largest_norm(m, i):
    """Which the forward shortens in place: their width stays, and what follows them grows."""
    x = m.a(m.e(i)).sum(1) + m.d(m.bag(i))
    return m.c(F.relu(m.b(F.relu(x))))
