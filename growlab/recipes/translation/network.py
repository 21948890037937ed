"""fairseq's Transformer in a form that can be traced and grown, and its export as a fairseq checkpoint."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.recipes.translation.sentence_pairs import SentencePairs, fairseq_module


class FairseqTransformer(nn.Module):
    """Encoder and decoder of fairseq's layers, between embeddings of a fixed dimension.

    Layers, embeddings, initialisation, parameter names and outputs are those of fairseq. Its forward pass, however,
    branches on padding, and its attention assumes that all heads together are as wide as the layers; here layers are
    called in a form that can be traced at any width.

    A linear map leads from the embeddings, whose dimension is fixed, to the layers' width, and another one back (Yuan
    et al. 2023, Section 4.1). Positions are added before the first map, so that only learned tensors have the layers'
    width.

    Args:
        num_source_tokens: size of the source dictionary.
        num_target_tokens: size of the target dictionary.
        same_tokens: source and target share a dictionary.
        padding: id of the padding token; sentences are padded on the right.
        embedding_features: dimension of embeddings.
        share_embeddings: "none"; "decoder": share its embedding with the output layer; "all": also with the encoder.
        features: width of the residual stream.
        hidden_features: width of the feed-forward layers.
        num_heads: heads of each attention.
        encoder_layers: number of encoder layers.
        decoder_layers: number of decoder layers.
        dropout: after embeddings and before residual additions.
        attention_dropout: of attention weights.
        activation_dropout: of feed-forward activations.
        normalize_before: normalise before each residual branch instead of after the addition.
    """

    def __init__(
        self,
        num_source_tokens: int,
        num_target_tokens: int,
        same_tokens: bool,
        padding: int,
        embedding_features: int = 512,
        share_embeddings: Literal["none", "decoder", "all"] = "decoder",
        features: int = 512,
        hidden_features: int = 2048,
        num_heads: int = 8,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        dropout: float = 0.3,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        normalize_before: bool = False,
    ) -> None:
        super().__init__()
        if share_embeddings == "all" and not same_tokens:
            raise UserError(
                "model.share_embeddings=all needs one dictionary for both languages; set data.joined_dictionary=true."
            )
        if embedding_features % 2:
            raise UserError(f"model.embedding_features={embedding_features} must be even.")
        self.padding, self.share_embeddings = padding, share_embeddings
        self.num_heads, self.dropout, self.normalize_before = num_heads, dropout, normalize_before
        library = fairseq_module("fairseq.models.transformer")
        self.target_tokens = library.Embedding(num_target_tokens, embedding_features, padding)
        if share_embeddings == "all":
            self.source_tokens = self.target_tokens
        else:
            self.source_tokens = library.Embedding(num_source_tokens, embedding_features, padding)
        self.source_in = library.Linear(embedding_features, features, bias=False)
        self.target_in = library.Linear(embedding_features, features, bias=False)
        cfg, kinds = library.TransformerConfig(), fairseq_module("fairseq.modules.transformer_layer")
        cfg.dropout, cfg.attention_dropout = dropout, attention_dropout
        cfg.activation_dropout, cfg.activation_fn = activation_dropout, "relu"
        for side in (cfg.encoder, cfg.decoder):
            side.embed_dim, side.ffn_embed_dim = features, hidden_features
            side.attention_heads, side.normalize_before = num_heads, normalize_before
        self.encoder = nn.ModuleList(kinds.TransformerEncoderLayerBase(cfg) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(kinds.TransformerDecoderLayerBase(cfg) for _ in range(decoder_layers))
        self.encoder_norm = nn.LayerNorm(features) if normalize_before else None
        self.decoder_norm = nn.LayerNorm(features) if normalize_before else None
        self.target_out = library.Linear(features, embedding_features, bias=False)
        self.output = nn.Linear(embedding_features, num_target_tokens, bias=False)
        if share_embeddings == "none":
            nn.init.normal_(self.output.weight, std=embedding_features**-0.5)
        else:
            self.output.weight = self.target_tokens.weight

    def forward(self, source_BS: Tensor, previous_BT: Tensor) -> Tensor:
        """Return logits of the next target token at each position, [B, T, V]."""
        memory_BSC, real_B11S = self.encode(source_BS)
        return self.output(self.decode(previous_BT, memory_BSC, real_B11S))

    def encode(self, source_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Encode the source to memory [B, S, C] for the decoder, and a mask of its non-padding tokens [B, 1, 1, S]."""
        real_B11S = source_BS.ne(self.padding)[:, None, None]
        x = self._embedded(source_BS, self.source_tokens, self.source_in)
        for layer in self.encoder:
            norm = layer.self_attn_layer_norm
            y = self._before(norm, x)
            x = self._after(norm, x + layer.dropout_module(_attend(layer.self_attn, y, y, real_B11S)))
            x = self._transformed(layer, x)
        return x if self.encoder_norm is None else self.encoder_norm(x), real_B11S

    def decode(self, previous_BT: Tensor, memory_BSC: Tensor, real_B11S: Tensor) -> Tensor:
        """Return features for the output layer, [B, T, E].

        The target needs no padding mask, because its padding comes last and attention is causal.
        """
        x = self._embedded(previous_BT, self.target_tokens, self.target_in)
        for layer in self.decoder:
            norm = layer.self_attn_layer_norm
            y = self._before(norm, x)
            x = self._after(norm, x + layer.dropout_module(_attend(layer.self_attn, y, y, None)))
            norm = layer.encoder_attn_layer_norm
            y = _attend(layer.encoder_attn, self._before(norm, x), memory_BSC, real_B11S)
            x = self._after(norm, x + layer.dropout_module(y))
            x = self._transformed(layer, x)
        return self.target_out(x if self.decoder_norm is None else self.decoder_norm(x))

    def _embedded(self, tokens_BT: Tensor, embedding: nn.Embedding, into: nn.Linear) -> Tensor:
        features = embedding.embedding_dim
        x = math.sqrt(features) * embedding(tokens_BT)
        # Computed on each call; a buffer would tie the embeddings' dimension to the layers' width.
        x = into(x + sinusoids(tokens_BT.shape[1], features, self.padding + 1, x))
        return F.dropout(x, self.dropout, self.training)

    def _transformed(self, layer: Any, x: Tensor) -> Tensor:
        y = layer.activation_fn(layer.fc1(self._before(layer.final_layer_norm, x)))
        y = layer.fc2(layer.activation_dropout_module(y))
        return self._after(layer.final_layer_norm, x + layer.dropout_module(y))

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.normalize_before else x

    def _after(self, norm: nn.Module, x: Tensor) -> Tensor:
        return x if self.normalize_before else norm(x)


def sinusoids(length: int, features: int, first: int, like: Tensor) -> Tensor:
    """Return position encodings [T, E] like fairseq's `SinusoidalPositionalEmbedding`, from position `first` on."""
    half = features // 2
    # In float32 like fairseq, whatever the network's precision.
    rates = torch.exp(torch.arange(half, device=like.device).float() * (-math.log(10000) / max(half - 1, 1)))
    angles = torch.arange(first, first + length, device=like.device).float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1).to(like.dtype)


def _attend(attention: Any, x_BTC: Tensor, memory_BSC: Tensor, real_B11S: Tensor | None) -> Tensor:
    """Apply fairseq's multi-head attention with heads of any width; causal if there is no mask."""
    q, k, v = (
        projection(y).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for projection, y in ((attention.q_proj, x_BTC), (attention.k_proj, memory_BSC), (attention.v_proj, memory_BSC))
    )
    dropped = attention.dropout_module.p if attention.training else 0.0
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=real_B11S, dropout_p=dropped, is_causal=real_B11S is None)
    return attention.out_proj(heads.transpose(1, 2).flatten(2))


# Longest sentence in fairseq.
_POSITIONS = 1024


def fairseq_checkpoint(network: FairseqTransformer, pairs: SentencePairs, label_smoothing: float) -> dict[str, Any]:
    """Return a checkpoint that `fairseq-generate` and `fairseq-interactive` load with `--path`.

    fairseq has no linear maps between embeddings and layers, so they are multiplied into neighbouring weights: the maps
    to the layers' width into embeddings and positions (which become a learned table), the map back into the output
    layer.
    """
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        for side, tokens, into in (
            ("encoder", network.source_tokens, network.source_in),
            ("decoder", network.target_tokens, network.target_in),
        ):
            # In float64, so that the product is rounded only once.
            table, into_CE = tokens.weight.double(), into.weight.double()
            first = network.padding + 1
            rows = torch.zeros(first + _POSITIONS, into.out_features, dtype=torch.float64)
            rows[first:] = sinusoids(_POSITIONS, table.shape[1], first, table.cpu()) @ into_CE.cpu().T
            embedded = math.sqrt(table.shape[1]) * table @ into_CE.T
            # Padding is always masked.
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
    task = {"_name": "translation", "data": str(pairs.folder)}
    task |= {"source_lang": pairs.source, "target_lang": pairs.target}
    criterion = {"_name": "label_smoothed_cross_entropy", "label_smoothing": label_smoothing}
    history = {"criterion_name": "LabelSmoothedCrossEntropyCriterion", "optimizer_name": "FairseqAdam"}
    return {
        "cfg": {"model": _architecture(network), "task": task, "criterion": criterion},
        "args": None,
        "model": {name: tensor.detach().float().cpu().clone() for name, tensor in weights.items()},
        "optimizer_history": [{**history, "lr_scheduler_state": {"best": None}, "num_updates": 0}],
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
    # By default fairseq derives these from the decoder's width.
    width = settings["decoder_embed_dim"]
    return {**settings, "decoder_input_dim": width, "decoder_output_dim": width}
