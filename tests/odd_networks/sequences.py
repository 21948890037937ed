"""Networks of indices, sequences, sets and graphs."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import Linear, Net, Norm1d, odd, real, tokens

# Embeddings -------------------------------------------------------------------------------------------------


@odd(tokens(5), last="c w")
def factorisation_machine():
    def run(m, i):
        v = m.e(i)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1, keepdim=True)
        return pairs + m.w(i).sum(1) + m.c(F.relu(m.b(v.flatten(1))))

    parts = {"b": Linear(40, 12), "c": Linear(12, 1)}
    return Net(run, e=nn.Embedding(11, 8), w=nn.Embedding(11, 1), **parts)


@odd(tokens(1), tokens(3), real(3), last="b d")
def two_towers():
    def run(m, user, items, about):
        u = m.b(F.relu(m.a(torch.cat([m.users(user[:, 0]), about], -1))))
        return (u[:, None] * m.d(F.relu(m.items(items)))).sum(-1)

    parts = {"users": nn.Embedding(11, 6), "items": nn.Embedding(11, 9)}
    return Net(run, a=Linear(9, 12), b=Linear(12, 8), d=Linear(9, 8), **parts)


@odd(tokens(6))
def bag_of_words():
    def run(m, i):
        return m.c(F.relu(m.n(m.b(m.e(i)))))

    return Net(run, e=nn.EmbeddingBag(11, 12), b=Linear(12, 15), n=Norm1d(15), c=Linear(15, 3))


# Sequences --------------------------------------------------------------------------------------------------


@odd(real(6, 5), torch.arange(6).expand(4, 6) < torch.tensor([[6], [4], [5], [2]]))
def attention_pooling():
    def run(m, x, mask):
        x = F.relu(m.a(x))
        scores = m.score(torch.tanh(m.key(x))).squeeze(-1).masked_fill(~mask, -1e4)
        return m.c(torch.einsum("bl,blc->bc", scores.softmax(-1), x))

    return Net(run, a=Linear(5, 15), key=Linear(15, 9), score=Linear(9, 1), c=Linear(15, 3))


@odd(real(6, 5))
def latent_queries():
    def run(m, x):
        x = m.norm(m.a(x))
        q = m.q(m.latents).expand(len(x), -1, -1)
        mixed = torch.softmax(q @ m.k(x).transpose(1, 2) / 8**0.5, -1) @ m.v(x)
        return m.c(F.gelu(m.out(mixed)).flatten(1))

    parts = {"q": Linear(6, 8), "k": Linear(12, 8), "v": Linear(12, 10), "out": Linear(10, 9)}
    return Net(
        run, a=Linear(5, 12), norm=nn.LayerNorm(12), latents=torch.randn(3, 6), c=Linear(27, 3), **parts
    )


@odd(real(6, 5))
def mixer():
    def run(m, x):
        x = m.a(x)
        x = x + m.token2(F.gelu(m.token1(m.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + m.channel2(F.gelu(m.channel1(m.n2(x))))
        return m.c(x.mean(1))

    parts = {"token1": Linear(6, 9), "token2": Linear(9, 6), "channel1": Linear(12, 18)}
    norms = {"n1": nn.LayerNorm(12), "n2": nn.LayerNorm(12), "channel2": Linear(18, 12)}
    return Net(run, a=Linear(5, 12), c=Linear(12, 3), **parts, **norms)


@odd(tokens(6))
def lstm_inside():
    def run(m, i):
        x, _ = m.lstm(F.relu(m.a(m.e(i))))
        return m.c(F.relu(m.b(x[:, -1])))

    lstm = nn.LSTM(8, 6, batch_first=True)
    return Net(run, e=nn.Embedding(11, 12), a=Linear(12, 8), lstm=lstm, b=Linear(6, 12), c=Linear(12, 3))


@odd(real(5, 4), real(5, 5))
def graph_convolution():
    def run(m, x, edges):
        edges = torch.softmax(edges, -1)
        x = F.relu(torch.bmm(edges, m.a(x)))
        x = F.relu((edges[..., None] * m.b(x)[:, None]).sum(2))
        return m.c(x.sum(1)).squeeze(-1)

    return Net(run, a=Linear(4, 12), b=Linear(12, 15), c=Linear(15, 1))


@odd(real(5, 4))
def set_of_points():
    def run(m, x):
        x = F.relu(m.b(F.relu(m.n(m.a(x).transpose(1, 2))).transpose(1, 2)))
        return m.c(torch.cat([x.mean(1), x.max(1).values, x.logsumexp(1)], -1))

    return Net(run, a=Linear(4, 9), n=Norm1d(9), b=Linear(9, 12), c=Linear(36, 3))


@odd(tokens(5), tokens(5, 3))
def tables_summed():
    def run(m, i, j):
        x = m.n(m.e(i) * 3 + m.k(j) + m.places[: i.shape[1]].unsqueeze(0))
        return m.c((x + m.down(F.gelu(m.up(x)))).amax(1))

    parts = {"e": nn.Embedding(11, 9), "k": nn.Embedding(3, 9), "places": torch.randn(8, 9)}
    return Net(run, n=nn.LayerNorm(9), up=Linear(9, 18), down=Linear(18, 9), c=Linear(9, 3), **parts)


@odd(real(6, 5))
def leaky_state():
    def run(m, x):
        decay, x = torch.sigmoid(m.decay), m.a(x)
        states = [torch.zeros(len(x), x.shape[-1]).to(x)]
        for now in x.unbind(1):
            states.append(decay * states[-1] + (1 - decay) * now)
        return m.c(F.relu(m.b(torch.stack(states, 1))).mean(1))

    return Net(run, a=Linear(5, 9), decay=torch.zeros(9), b=Linear(9, 12), c=Linear(12, 3))


@odd(real(5), torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 1]]))
def messages_along_edges():
    def run(m, x, edges):
        x = F.relu(m.a(x))
        for layer in m.layers:
            sent = F.relu(layer(torch.cat([x[edges[0]], x[edges[1]]], -1)))
            x = x + torch.zeros_like(x).index_add(0, edges[1], sent)
        return m.c(x)

    return Net(run, a=Linear(5, 9), layers=nn.ModuleList([Linear(18, 9) for _ in range(2)]), c=Linear(9, 3))


@odd(real(5, 7))
def no_register_tokens():
    """A parameter without an entry is laid beside the tokens, as DINOv3 has it."""

    def run(m, x):
        x = m.a(x)
        x = torch.cat([m.token.expand(len(x), -1, -1), m.registers.expand(len(x), -1, -1), x], 1)
        x = x + m.down(F.gelu(m.up(m.n(x))))
        return m.c(m.n2(x)[:, 0])

    tokens_of_all = {"token": torch.randn(1, 1, 12), "registers": torch.zeros(1, 0, 12)}
    norms = {"n": nn.LayerNorm(12), "n2": nn.LayerNorm(12)}
    return Net(
        run,
        a=Linear(7, 12),
        **tokens_of_all,
        up=Linear(12, 18),
        down=Linear(18, 12),
        **norms,
        c=Linear(12, 3),
    )


@odd(real(5, 7))
def windows_that_a_short_sequence_does_not_fill():
    """Of windows of eight tokens there is none in five."""

    def run(m, x):
        x = m.a(x)
        whole = x.shape[1] // 8
        means = x[:, : 8 * whole].reshape(len(x), whole, 8, x.shape[-1]).sum(2) / 8
        x = torch.cat([m.b(means), m.b(x)], 1)
        return m.c(F.relu(x).sum(1))

    return Net(run, a=Linear(7, 12), b=Linear(12, 9), c=Linear(9, 3))
