"""A grown network as a checkpoint of fairseq's own Transformer, which fairseq's commands take as it is."""

import math
from typing import Any

import torch
from torch import Tensor

from growlab.recipes.translation.network import FairseqTransformer, sinusoids
from growlab.recipes.translation.sentence_pairs import SentencePairs

# fairseq's own; longer sentences it refuses.
_POSITIONS = 1024


def fairseq_checkpoint(
    network: FairseqTransformer, pairs: SentencePairs, label_smoothing: float
) -> dict[str, Any]:
    """What `fairseq-generate` and `fairseq-interactive` load with `--path`.

    fairseq's encoder has no map between embeddings and layers, and none is needed once training is over: the maps into
    the layers' width are multiplied into the embeddings and the positions, which become a table like learned ones, and
    the map out of it into the output layer.

    Args:
        network: at full width, its output factor folded into its weights.
        pairs: the data that it was trained on.
        label_smoothing: of the loss.

    Returns:
        Plain containers of tensors and numbers, in single precision.
    """
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        for side, tokens, into in (
            ("encoder", network.source_tokens, network.source_in),
            ("decoder", network.target_tokens, network.target_in),
        ):
            # In double precision, rounded once.
            table, into_CE = tokens.weight.double(), into.weight.double()
            first = network.padding + 1
            rows = torch.zeros(first + _POSITIONS, into.out_features, dtype=torch.float64)
            rows[first:] = sinusoids(_POSITIONS, table.shape[1], first, table.cpu()) @ into_CE.cpu().T
            embedded = math.sqrt(table.shape[1]) * table @ into_CE.T
            # Padding is masked wherever it is read.
            embedded[network.padding] = 0
            weights[f"{side}.version"] = torch.tensor([3.0])
            weights[f"{side}.embed_tokens.weight"] = embedded
            weights[f"{side}.embed_positions.weight"] = rows
            layers = getattr(network, side)
            weights |= {f"{side}.layers.{name}": tensor for name, tensor in layers.state_dict().items()}
            if (norm := getattr(network, f"{side}_norm")) is not None:
                weights |= {f"{side}.layer_norm.{name}": tensor for name, tensor in norm.state_dict().items()}
        output = network.output.weight.double() @ network.target_out.weight.double()
        weights["decoder.output_projection.weight"] = output
    return {
        "cfg": {
            "model": _architecture(network),
            "task": {
                "_name": "translation",
                "data": str(pairs.folder),
                "source_lang": pairs.source,
                "target_lang": pairs.target,
            },
            "criterion": {"_name": "label_smoothed_cross_entropy", "label_smoothing": label_smoothing},
        },
        "args": None,
        "model": {name: tensor.detach().float().cpu().clone() for name, tensor in weights.items()},
        "optimizer_history": [
            {
                "criterion_name": "LabelSmoothedCrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {"best": None},
                "num_updates": 0,
            }
        ],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }


def _architecture(network: FairseqTransformer) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "_name": "transformer",
        "arch": "transformer",
        "dropout": network.dropout,
        "no_scale_embedding": True,
        "share_decoder_input_output_embed": False,
        "share_all_embeddings": False,
        "max_source_positions": _POSITIONS,
        "max_target_positions": _POSITIONS,
    }
    for side, layers in (("encoder", network.encoder), ("decoder", network.decoder)):
        settings |= {
            f"{side}_embed_dim": layers[0].fc1.in_features,
            f"{side}_ffn_embed_dim": layers[0].fc1.out_features,
            f"{side}_layers": len(layers),
            f"{side}_attention_heads": network.num_heads,
            f"{side}_normalize_before": network.normalize_before,
            f"{side}_learned_pos": True,
        }
    # fairseq takes these from the decoder's width where they are not given.
    width = settings["decoder_embed_dim"]
    return {**settings, "decoder_input_dim": width, "decoder_output_dim": width}
