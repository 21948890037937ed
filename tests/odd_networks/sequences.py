"""Networks of indices, sequences, sets and graphs."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.odd_networks.table import Linear, Net, Norm1d, odd, real, tokens

# Embeddings -------------------------------------------------------------------------------------------------


@odd(tokens(1), tokens(3), real(3), last="b d")
def two_towers():
    def run(m, user, items, about):
        u = m.b(F.relu(m.a(torch.cat([m.users(user[:, 0]), about], -1))))
        return (u[:, None] * m.d(F.relu(m.items(items)))).sum(-1)

    parts = {"users": nn.Embedding(11, 6), "items": nn.Embedding(11, 9)}
    return Net(run, a=Linear(9, 12), b=Linear(12, 8), d=Linear(9, 8), **parts)


# Sequences --------------------------------------------------------------------------------------------------


@odd(real(6, 5), torch.arange(6).expand(4, 6) < torch.tensor([[6], [4], [5], [2]]))
def attention_pooling():
    def run(m, x, mask):
        x = F.relu(m.a(x))
        scores = m.score(torch.tanh(m.key(x))).squeeze(-1).masked_fill(~mask, -1e4)
        return m.c(torch.einsum("bl,blc->bc", scores.softmax(-1), x))

    return Net(run, a=Linear(5, 15), key=Linear(15, 9), score=Linear(9, 1), c=Linear(15, 3))


@odd(tokens(6))
def lstm_inside():
    def run(m, i):
        x, _ = m.lstm(F.relu(m.a(m.e(i))))
        return m.c(F.relu(m.b(x[:, -1])))

    lstm = nn.LSTM(8, 6, batch_first=True)
    return Net(run, e=nn.Embedding(11, 12), a=Linear(12, 8), lstm=lstm, b=Linear(6, 12), c=Linear(12, 3))


@odd(real(5, 4))
def set_of_points():
    def run(m, x):
        x = F.relu(m.b(F.relu(m.n(m.a(x).transpose(1, 2))).transpose(1, 2)))
        return m.c(torch.cat([x.mean(1), x.max(1).values, x.logsumexp(1)], -1))

    return Net(run, a=Linear(4, 9), n=Norm1d(9), b=Linear(9, 12), c=Linear(36, 3))


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
    return Net(run, a=Linear(7, 12), **tokens_of_all, up=Linear(12, 18), down=Linear(18, 12), **norms, c=Linear(12, 3))


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
