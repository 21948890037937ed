"""fairseq's Transformer in plain form: equal outputs, padding, and exact growth."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.growth import Net2Net, VarianceTransfer, grow, make_seed
from growlab.recipes.translation import FairseqTransformer
from growlab.recipes.translation.network import fairseq_checkpoint
from growlab.recipes.translation.sentence_pairs import SentencePairs, Words, fairseq_module
from growlab.widths import trace


def network(**changed) -> FairseqTransformer:
    torch.manual_seed(0)
    sizes = {"embedding_features": 16, "features": 24, "hidden_features": 32, "num_heads": 4}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
    made = FairseqTransformer(40, 40, True, 1, **{**sizes, **layers, **changed}).double()
    # Biases of 0 would hide mistakes.
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return made


def sentences() -> tuple[Tensor, Tensor]:
    source, previous = torch.randint(4, 40, (3, 7)), torch.randint(4, 40, (3, 6))
    source[1, 5:] = previous[1, 4:] = previous[2, 2:] = 1
    return source, previous


# Caused by fairseq's masks.
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("share", ["none", "all"])
def test_fairseq_loads_the_checkpoint_with_equal_outputs(share, normalize_before):
    net = network(share_embeddings=share, normalize_before=normalize_before).eval()
    source, previous = sentences()
    dictionary = fairseq_module("fairseq.data").Dictionary()
    for word in range(36):
        dictionary.add_symbol(str(word))
    pairs = SentencePairs(SimpleNamespace(), "de", "en", dictionary, dictionary, Words())
    saved = fairseq_checkpoint(net, pairs, 0.1)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = fairseq_module("fairseq.models").build_model(Namespace(**saved["cfg"]["model"]), task)
    model.load_state_dict(saved["model"], strict=True)
    model = model.double().eval()
    # fairseq pads sources on the left.
    left = torch.stack([torch.cat([row[row.eq(1)], row[row.ne(1)]]) for row in source])
    with torch.no_grad():
        expected, _ = model(left, None, previous)
        found = net(source, previous)
    real = previous.ne(1)
    # Folded weights are rounded to single precision.
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing():
    net = network().eval()
    source, previous = sentences()
    alone = net(source[1:2, :5], previous[1:2, :4])
    torch.testing.assert_close(net(source, previous)[1:2, :4], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("method", "share"), [(VarianceTransfer(), "none"), (Net2Net(), "all")])
def test_growing_keeps_the_function(method, share):
    net = network(share_embeddings=share)
    probe = sentences()
    graph = trace(net, probe)
    assert all(graph.grows(f"{part}.fc1.weight") for part in ("encoder.0", "decoder.1"))
    assert not graph.grows("target_tokens.weight")
    half = {name: max(1, width // 2) for name, width in graph.full_widths.items()}
    state = make_seed(net, graph, method, half, 0)
    event = grow(net, graph, method, state, graph.full_widths, 0, probe)
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-10
    assert {name: p.shape for name, p in net.named_parameters()} == {
        name: p.shape for name, p in network(share_embeddings=share).named_parameters()
    }


def test_one_embedding_needs_one_dictionary():
    with pytest.raises(UserError, match=r"data\.joined_dictionary=true"):
        FairseqTransformer(40, 30, False, 1, share_embeddings="all")
