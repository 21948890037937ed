"""Networks as textbooks and torch's own modules have them, that were refused once or did not grow."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.odd_networks.table import Linear, Net, odd, real, tokens


@odd(tokens(6), tokens(5))
def translator_of_torchs_modules():
    """Masks that torch looks at, padding, queries apart from keys and values, a width that is checked."""

    def run(m, source, target):
        future = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=m.c.weight.dtype)
        padding = -1e9 * (source == 0).to(m.c.weight.dtype)
        return m.c(
            m.t(
                m.e(source), m.e(target), tgt_mask=future, src_key_padding_mask=padding, memory_key_padding_mask=padding
            )
        )

    t = nn.Transformer(12, 4, 1, 1, dim_feedforward=18, dropout=0.0, batch_first=True)
    return Net(run, e=nn.Embedding(11, 12), t=t, c=Linear(12, 11))


@odd(tokens(6))
def language_model_in_one_forward():
    """Its attention is written out, beside everything else."""

    def run(m, i):
        x = m.e(i) + m.p(torch.arange(i.shape[1]))
        q, k, v = (y.unflatten(-1, (3, -1)).transpose(1, 2) for y in m.qkv(m.n(x)).split(12, dim=2))
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(m.future[: i.shape[1], : i.shape[1]], -1e9)
        x = x + m.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return m.c(x + m.b(F.gelu(m.a(m.n2(x)))))

    norms = {"n": nn.LayerNorm(12), "n2": nn.LayerNorm(12)}
    layers = {"qkv": Linear(12, 36), "o": Linear(12, 12), "a": Linear(12, 48), "b": Linear(48, 12)}
    network = Net(run, e=nn.Embedding(11, 12), p=nn.Embedding(8, 12), c=Linear(12, 11), **norms, **layers)
    network.register_buffer("future", torch.ones(8, 8).triu(1).bool())
    return network


class _Checked(nn.Module):
    """Refuses inputs of another width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.layers = (width, nn.Sequential(Linear(width, 2 * width), nn.ReLU(), Linear(2 * width, width)))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.width:
            raise ValueError(f"{x.shape[-1]} channels, not {self.width}")
        return x + self.layers(x)


@odd(real(5))
def checked_widths():
    def run(m, x):
        return m.c(m.second(m.first(m.a(x))))

    return Net(run, a=Linear(5, 12), first=_Checked(12), second=_Checked(12), c=Linear(12, 3))


@odd(real(5, 6), real(5, 5))
def attention_of_one_head():
    """Written out, as for graphs: what is mixed passes."""

    def run(m, x, weights):
        h = m.a(x)
        scores = m.source(h) + m.target(h).mT + weights
        return m.c(F.elu(torch.bmm(scores.softmax(-1), h)).mean(1))

    return Net(run, a=Linear(6, 24), source=Linear(24, 1), target=Linear(24, 1), c=Linear(24, 3))


class BiasesApart(nn.Module):
    """Attention whose keys have no bias: zeros in a buffer stand for it, as in BEiT."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = Linear(width, 3 * width, bias=False), Linear(width, width)
        self.q_bias, self.v_bias = (nn.Parameter(0.1 * torch.ones(width)) for _ in range(2))
        self.register_buffer("k_bias", torch.zeros(width), persistent=False)

    def forward(self, x):
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).reshape(len(x), x.shape[1], 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@odd(real(5, 7))
def attention_with_biases_apart():
    def run(m, x):
        x = m.a(x)
        x = x + m.attention(m.n(x))
        return m.c(m.last(x).mean(1))

    norms = {"n": nn.LayerNorm(12), "last": nn.LayerNorm(12)}
    return Net(run, a=Linear(7, 12), attention=BiasesApart(12, 3), **norms, c=Linear(12, 3))


@odd(real(5, 7))
def tokens_mixed_by_convolutions_of_one_position():
    """Positions are the convolution's channels, and channels what it slides over, one at a time."""

    def run(m, x):
        x = m.a(x)
        x = x + m.mix(m.n(x))
        x = x.repeat_interleave(2, dim=1)
        return m.c(F.relu(m.b(m.pool(x))).flatten(1))

    mix = nn.Sequential(nn.Conv1d(5, 8, 1), nn.GELU(), nn.Conv1d(8, 5, 1))
    parts = {"pool": nn.Conv1d(10, 2, 1), "b": Linear(12, 9), "c": Linear(18, 3)}
    return Net(run, a=Linear(7, 12), n=nn.LayerNorm(12), mix=mix, **parts)


@odd(real(7))
def channels_beside_one_another():
    """Each three times, the copies neighbours."""

    def run(m, x):
        x = F.relu(m.a(x)).repeat_interleave(3, dim=-1)
        return m.c(F.relu(m.b(x)))

    return Net(run, a=Linear(7, 12), b=Linear(36, 10), c=Linear(10, 3))


@odd((torch.arange(20) % 11).view(4, 5))
def embeddings_of_a_largest_norm():
    """Which the forward shortens in place: their width stays, and what follows them grows."""

    def run(m, i):
        x = m.a(m.e(i)).sum(1) + m.d(m.bag(i))
        return m.c(F.relu(m.b(F.relu(x))))

    parts = {"e": nn.Embedding(11, 6, max_norm=1.0), "bag": nn.EmbeddingBag(11, 6, max_norm=0.5)}
    return Net(run, **parts, a=Linear(6, 12), d=Linear(6, 12), b=Linear(12, 15), c=Linear(15, 3))
