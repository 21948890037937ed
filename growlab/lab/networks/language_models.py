"""Causal language models of transformers, built from sizes and saved for `from_pretrained`."""

import copy
import importlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.inspect.small_models import FirstOutput, automatic_classes
from growlab.widen.sizes import LAYERS, NAMES, PARTS, sizes

# Names of the number of heads for keys and values.
_KEY_VALUE = ("num_key_value_heads", "num_kv_heads")
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": tuple(NAMES["stream"]),
    "intermediate_size": tuple(NAMES["mlp"]),
    "num_hidden_layers": LAYERS,
    "num_attention_heads": tuple(name for name in NAMES["heads"] if name not in _KEY_VALUE),
    "num_key_value_heads": _KEY_VALUE,
}
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Default ratio of MLP width to stream width.
_EXPANSION = 4
# Number of tokens to test if a model sees later tokens, and if a saved model equals the trained one.
_PROBE = 8
# Relative difference of logits that counts as rounding.
_ROUNDING = 1e-3


class CausalModel(FirstOutput):
    """Untrained causal language model of transformers: tokens [B, T] to logits [B, T, vocabulary].

    Args:
        vocabulary_size: number of tokens.
        context: largest number of positions.
        type: `model_type` of a transformers configuration: `llama`, `qwen3`, `gpt2`.
        end_of_text: token after a text, at which `generate` stops; None: no such token.
        config: further entries of the configuration.
        hidden_size: channels of the residual stream. This and the following sizes also set the entries that a type
            names differently.
        intermediate_size: hidden channels of MLPs; None: four times `hidden_size`.
        num_hidden_layers: number of layers.
        num_attention_heads: heads of each layer; None for a type without heads, such as mamba.
        num_key_value_heads: heads of keys and values; None: `num_attention_heads`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context: int,
        type: str,
        end_of_text: int | None = None,
        config: Mapping[str, Any] | None = None,
        hidden_size: int = 128,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 4,
        num_attention_heads: int | None = 4,
        num_key_value_heads: int | None = None,
    ) -> None:
        model_sizes = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
        }
        auto = automatic_classes(type)
        kind, known = auto.CONFIG_MAPPING[type], auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        if kind not in known:
            raise UserError(f"model.type={type} is no causal language model; llama, qwen3 and gpt2 are.")
        names, entries = _names(kind), _entries(kind, type, model_sizes, config or {})
        entries |= {name: context for name in _POSITIONS if name in names and name not in entries}
        entries |= {name: end_of_text for name in _SPECIAL if name in names and name not in entries}
        if "pad_token_id" in names and "pad_token_id" not in (config or {}):
            entries["pad_token_id"] = None
        entries["vocab_size"] = vocabulary_size
        model = _built(known[kind], kind, entries)
        if "is_decoder" in names and _sees_later_tokens(model, vocabulary_size, context):
            model = _built(known[kind], kind, {**entries, "is_decoder": True})
        if _sees_later_tokens(model, vocabulary_size, context):
            raise UserError(f"model.type={type} sees the tokens that it should predict; llama and gpt2 do not.")
        super().__init__(model, ["input_ids"])
        self.context = context

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder for `from_pretrained`: the configuration with the final sizes, and the weights."""
        model = plain_model(self)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent))
        importlib.import_module("transformers").logging.disable_progress_bar()
        try:
            model.save_pretrained(temporary)
            temporary.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def plain_model(network: CausalModel) -> Any:
    """Rebuild the model of a grown network as an ordinary transformers model of its current sizes."""
    trained: Any = network.network
    kind = type(trained)
    tensors, present = _present(trained)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for config in _candidates(trained, tensors, present):
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                candidate = kind._from_config(config).state_dict()
        except Exception:  # impossible sizes raise various exceptions
            continue
        if {name: tensor.shape for name, tensor in candidate.items()} != shapes:
            continue
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = kind._from_config(config).to(trained.dtype).eval()
        model.load_state_dict(tensors)
        if _same(model, network):
            # Off in training; `generate` needs it.
            model.config.use_cache = True
            return model
    raise UserError(
        f"no configuration of {trained.config.model_type} describes the final network, whose layers differ or have a "
        "factor of the full width: its weights are in model.pt only."
    )


def _names(kind: Any) -> set[str]:
    default = kind()
    return {*default.to_dict(), *default.attribute_map} - {"model_type", "architectures", "transformers_version"}


def _entries(
    kind: Any, model_type: str, model_sizes: Mapping[str, int | None], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries of a configuration with these sizes and further entries `config`."""
    direct, names = set(kind().to_dict()), _names(kind)
    if unknown := sorted(set(config) - names):
        raise UserError(f"model.config: {model_type} has no entry {unknown[0]}.")
    heads, hidden = model_sizes["num_attention_heads"], model_sizes["hidden_size"] or 0
    entries: dict[str, Any] = {}
    for setting, size in model_sizes.items():
        family = _FAMILIES[setting]
        keys = [n for n in family if n in direct] or [n for n in family if n in names]
        if not keys and size is not None:
            raise UserError(f"{model_type} has no {setting} to choose: set model.{setting}=null.")
        if setting == "intermediate_size" and size is None:
            size = _EXPANSION * hidden
        if setting == "num_key_value_heads" and size is None:
            size = heads
        entries |= dict.fromkeys(keys, size)
    entries |= config
    if heads is not None and "head_dim" in names and config.get("head_dim") is None:
        entries["head_dim"] = hidden // heads
    return entries


def _built(classes: Any, kind: Any, entries: Mapping[str, Any]) -> Any:
    model = classes[0] if isinstance(classes, (tuple, list)) else classes
    if "use_cache" in _names(kind):
        entries = {**entries, "use_cache": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model._from_config(kind(**entries))


def _sees_later_tokens(model: Any, vocabulary_size: int, context: int) -> bool:
    """True if logits depend on later tokens."""
    tokens = torch.arange(min(_PROBE, context))[None] % vocabulary_size
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % vocabulary_size
    training = model.training
    model.eval()
    with torch.no_grad():
        one, two = (model(input_ids=ids).logits[:, :-1] for ids in (tokens, other))
    model.train(training)
    return not torch.allclose(one, two, rtol=_ROUNDING, atol=1e-5)


def _present(trained: nn.Module) -> tuple[dict[str, Tensor], dict[int, list[int]]]:
    """Return tensors renumbered without the layers never inserted, and the other layers' indices by full depth."""
    renamed: dict[str, str] = {}
    indices: dict[int, list[int]] = {}
    for path, layers in trained.named_modules():
        if isinstance(layers, nn.ModuleList) and any(True for _ in layers.parameters()):
            indices[len(layers)] = [n for n, layer in enumerate(layers) if any(True for _ in layer.parameters())]
            renamed |= {f"{path}.{old}.": f"{path}.{new}." for new, old in enumerate(indices[len(layers)])}
    tensors = {}
    for name, tensor in trained.state_dict().items():
        old = next((start for start in renamed if name.startswith(start)), "")
        tensors[renamed.get(old, "") + name.removeprefix(old)] = tensor.detach().cpu()
    return tensors, indices


def _candidates(trained: Any, tensors: Mapping[str, Tensor], present: Mapping[int, list[int]]) -> Iterator[Any]:
    """Yield possible final configurations of the model, the full width first."""
    full = copy.deepcopy(trained.config)
    for name, size in sizes(full, LAYERS).items():
        if size in present:
            setattr(full, name, len(present[size]))
    for name, entries in trained.config.to_dict().items():
        if isinstance(entries, list) and len(entries) in present and name.startswith("layer"):
            setattr(full, name, [entries[place] for place in present[len(entries)]])
    full_sizes = {part: sizes(full, NAMES[part]) for part in PARTS}
    (stream, *_), heads = full_sizes["stream"].values(), next(iter(full_sizes["heads"].values()), 1)
    lengths = {size for tensor in tensors.values() for size in tensor.shape}
    ratios = {
        "stream": {Fraction(trained.get_input_embeddings().weight.shape[1], stream)},
        "heads": {Fraction(number, heads) for number in range(1, heads + 1)},
        "mlp": {Fraction(n, size) for size in full_sizes["mlp"].values() for n in lengths if n < size} | {Fraction(1)},
    }
    for factors in product(*(sorted(ratios[part], reverse=True) for part in PARTS)):
        entries = {
            name: size * factor
            for part, factor in zip(PARTS, factors, strict=True)
            for name, size in full_sizes[part].items()
        }
        if any(value.denominator != 1 for value in entries.values()):
            continue
        config = copy.deepcopy(full)
        for name, value in entries.items():
            setattr(config, name, int(value))
        if "head_dim" in config.to_dict() and config.head_dim is None:
            config.head_dim = stream // heads
        yield config


def _same(model: Any, network: CausalModel) -> bool:
    """True if a model computes the same logits as a network."""
    device = next(network.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(min(_PROBE, network.context))[None] % vocabulary
    training = network.training
    network.eval()
    with torch.no_grad():
        expected = network(tokens.to(device)).cpu().float()
        logits = model(input_ids=tokens).logits.float()
    network.train(training)
    return bool((logits - expected).abs().max() <= _ROUNDING * expected.abs().max())
