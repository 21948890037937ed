"""Create small untrained networks of any model type of transformers, without downloads."""

import importlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, imported

_TYPES = """
bert roberta distilbert albert deberta deberta-v2 electra mpnet xlm-roberta camembert modernbert convbert roformer
megatron-bert gpt2 gpt_neo gpt_neox gptj opt bloom llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 falcon
mpt olmo olmo2 stablelm starcoder2 granite cohere codegen gpt_bigcode smollm3 glm nemotron xglm persimmon t5 mt5 bart
mbart marian pegasus vit deit beit swin swinv2 dinov2 dinov2_with_registers data2vec-vision vit_msn convnext
convnextv2 clip_text_model clip_vision_model siglip_text_model siglip_vision_model whisper wav2vec2 hubert mamba
mixtral qwen2_moe qwen3_moe olmoe llama4_text gpt_oss deepseek_v2 deepseek_v3 glm4_moe granitemoe ernie4_5_moe phimoe
minimax mamba2 bamba jamba lfm2 lfm2_moe rwkv recurrent_gemma clip siglip segformer pvt_v2 hiera dinov3_vit videomae
"""
#: Model types of the matrix: encoders, decoders, both, images, sound, recurrent ones and mixtures of experts.
TYPES = tuple(_TYPES.split())
_TOKENS, _LENGTH, _IMAGE = 64, 12, 32
_SAMPLES = 800
# Size -> names of settings; names that a configuration does not have are ignored. In state-space models, the number of
# heads times their size is `expand` times the hidden size.
_NAMES: Mapping[Any, str] = {
    _TOKENS: "vocab_size entity_vocab_size max_position_embeddings n_positions n_ctx max_seq_len hidden_size d_model "
    "n_embd dim embedding_size embed_dim word_embed_proj_dim projection_dim hidden_dim",
    96: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size",
    32: "max_source_positions max_target_positions image_size q_lora_rank kv_lora_rank",
    16: "head_dim d_kv v_head_dim mamba_d_head mamba_head_dim",
    10: "num_labels",
    8: "qk_rope_head_dim qk_nope_head_dim mamba_n_heads n_mamba_heads mamba_d_state mamba_state_dim ssm_state_size "
    "sliding_window",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts chunk_size mamba_chunk_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_key_value_heads num_experts_per_tok moe_top_k n_group",
    1: "topk_group first_k_dense_replace num_dense_layers n_shared_experts mamba_n_groups mamba_ngroups",
}
_SIZES = {**{name: size for size, names in _NAMES.items() for name in names.split()}, "use_cache": False}
# Ids of special tokens, which are below those of random tokens.
_SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
_SEVERAL_WIDTHS = {"depths": [1, 2], "hidden_sizes": [32, 64]}
_WINDOWS = {"depths": [1, 2], "embed_dim": 32, "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
_AUDIO = {
    "conv_dim": [32, 32, 32],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}
# Other settings that some model types need.
_OWN: Mapping[str, Mapping[str, Any]] = {
    "albert": {"embedding_size": 32},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mpt": {"expansion_ratio": 2},
    "codegen": {"rotary_dim": 8, "n_ctx": 64},
    "wav2vec2": _AUDIO,
    "hubert": _AUDIO,
    "wavlm": _AUDIO,
    "data2vec-audio": {**_AUDIO, "conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 3},
    "unispeech": _AUDIO,
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "convnext": {**_SEVERAL_WIDTHS, "num_stages": 2},
    "convnextv2": {**_SEVERAL_WIDTHS, "num_stages": 2},
    "whisper": {"num_mel_bins": 16},
    "mamba": {"state_size": 8, "time_step_rank": 6, "intermediate_size": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 1},
    **{
        name: {"patch_size": 8}
        for name in (
            *("vit", "deit", "beit", "dinov2", "data2vec-vision", "vit_msn", "dinov2_with_registers"),
            *("clip_vision_model", "siglip_vision_model"),
        )
    },
}
_EXPERTS = "_experts_implementation_internal"
_ANSWERS = ("logits", "logits_per_image", "text_embeds", "image_embeds", "pooler_output")
_TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
)
_CLASSES = {
    "clip_text_model": "CLIPTextModelWithProjection",
    "clip_vision_model": "CLIPVisionModelWithProjection",
    "siglip_text_model": "SiglipTextModel",
    "siglip_vision_model": "SiglipVisionModel",
}
# Task of model types that support several.
_TASK_OF = {
    **dict.fromkeys(("bert", "electra", "roberta", "camembert", "xlm-roberta", "rembert"), "MASKED_LM"),
    **dict.fromkeys(("ernie", "data2vec-text", "megatron-bert", "roformer", "big_bird"), "MASKED_LM"),
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus", "blenderbot", "plbart"), "SEQ_TO_SEQ_CAUSAL_LM"),
    "whisper": "SPEECH_SEQ_2_SEQ",
}


def small_model(model_type: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Create a small untrained network of a model type of transformers, and its positional inputs for two samples.

    It has a language modelling head or a classifier if transformers has such a class.
    """
    auto = automatic_classes(model_type)
    try:
        config = small_config(auto.CONFIG_MAPPING[model_type], model_type)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = _class_of(auto, model_type, type(config))._from_config(config)
        inputs = inputs_of(network)
    except UserError:
        raise
    except Exception as error:  # configurations with unusual sizes may raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"growlab knows no small sizes for the model type {model_type!r} ({why}); write a factory that returns the "
            "network: growlab widths package.module:factory."
        ) from error
    return FirstOutput(network, list(inputs)), tuple(inputs.values())


def automatic_classes(model_type: str) -> Any:
    """Import `transformers.models.auto`, which maps a model type to its classes."""
    auto = imported("transformers.models.auto", "transformers")
    if model_type not in auto.CONFIG_MAPPING:
        near = get_close_matches(model_type, list(auto.CONFIG_MAPPING))
        raise UserError(
            f"transformers has no model type {model_type!r}" + (f"; nearest are {', '.join(near)}." if near else ".")
        )
    return auto


class FirstOutput(nn.Module):
    """Wrapper of a network of transformers with positional inputs, in the order of `names`, and its main output."""

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.network: Any = network
        self.input_names = tuple(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return logits, embeddings of a projection, or the last hidden state."""
        experts = vars(self.network.config).get(_EXPERTS)
        if experts is not None and self.network.dtype == torch.float64:
            # The grouped kernel for all experts does not support float64.
            self.network.set_experts_implementation("eager")
        outputs = self.network(**dict(zip(self.input_names, inputs, strict=True)))
        if experts is not None and self.network.dtype == torch.float64:
            self.network.set_experts_implementation(experts)
        return next(outputs[name] for name in (*_ANSWERS, *outputs) if name in outputs)


def small_config(kind: Any, model_type: str) -> Any:
    """Create a configuration with small sizes; all other settings keep their default values."""
    default = kind()
    names, own = {*default.to_dict(), *default.attribute_map}, _OWN.get(model_type, {})
    aliases = {alias for alias, name in default.attribute_map.items() if name in own}
    sizes = {name: _like(getattr(default, name, None), size) for name, size in _sizes_of(names).items()}
    settings = {name: value for name, value in sizes.items() if name not in aliases and value is not None} | dict(own)
    layers = getattr(default, "num_hidden_layers", None)
    for name in names - set(settings):
        value = getattr(default, name, None)
        if isinstance(getattr(kind, default.attribute_map.get(name, name), None), property):
            continue
        if name in default.sub_configs and value is not None:
            settings[name] = small_config(type(value), value.model_type)
        elif isinstance(value, (list, tuple)) and value and len(value) == layers and isinstance(value[0], str):
            # A kind for each layer: keep one layer of every kind, and at least two layers.
            kinds = list(dict.fromkeys(value))
            settings[name] = kinds if len(kinds) > 1 else kinds * 2
            settings["num_hidden_layers"] = len(settings[name])
    return kind(**{name: value for name, value in settings.items() if name in names})


def _sizes_of(names: Collection[str]) -> dict[str, Any]:
    """Return small sizes for a configuration that has these names."""
    sizes = {**_SIZES, **_SPECIAL}
    if "qk_rope_head_dim" in names:
        # Latent attention: `head_dim` is the rotary dimension, and all heads have keys.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        del sizes["head_dim"]
    return sizes


def _like(default: Any, size: Any) -> Any:
    """Return a size in the form of the default: repeated for a list of equal sizes, None for a list of others."""
    if not isinstance(default, (list, tuple)) or isinstance(size, (list, tuple)):
        return size
    return [size] * len(default) if len(set(map(str, default))) == 1 else None


def _class_of(auto: Any, model_type: str, config: type) -> Any:
    if model_type in _CLASSES:
        return getattr(importlib.import_module("transformers"), _CLASSES[model_type])
    first = _TASK_OF.get(model_type)
    tasks = (first, *_TASKS) if first else _TASKS
    mappings = (getattr(auto.modeling_auto, f"MODEL_FOR_{task}_MAPPING") for task in tasks)
    classes = next((mapping[config] for mapping in mappings if config in mapping), None)
    classes = classes or auto.modeling_auto.MODEL_MAPPING.get(config, None)
    if classes is None:
        raise UserError(f"transformers has no network for the model type {model_type!r}.")
    return classes[0] if isinstance(classes, (tuple, list)) else classes


def _pixels(config: Any, source: torch.Generator) -> Tensor:
    """Draw two images, or two videos of several frames."""
    side = getattr(config, "image_size", _IMAGE)
    sides = tuple(side) if isinstance(side, (list, tuple)) else (side, side)
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    return torch.randn(2, *frames, getattr(config, "num_channels", 3), *sides, generator=source)


def _has_two_towers(config: Any) -> bool:
    """Return True if texts and images have separate encoders, as in CLIP."""
    auto = importlib.import_module("transformers.models.auto").modeling_auto
    return type(config) in auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING


def inputs_of(network: Any) -> dict[str, Tensor]:
    """Draw random inputs by name for a network of transformers, with two samples."""
    source = torch.Generator().manual_seed(0)
    config = network.config
    text = getattr(getattr(config, "text_config", config), "vocab_size", None)

    def tokens() -> Tensor:
        return torch.randint(3, text or _TOKENS, (2, _LENGTH), generator=source)

    name = network.main_input_name
    if name == "pixel_values" and not _has_two_towers(config):
        return {name: _pixels(config, source)}
    if name == "input_values":
        return {name: torch.randn(2, _SAMPLES, generator=source)}
    if name == "input_features":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        inputs = {name: torch.randn(shape, generator=source)}
    else:
        inputs = {"input_ids": tokens()}
    if _has_two_towers(config):
        inputs = {"input_ids": tokens(), "pixel_values": _pixels(config.vision_config, source)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens()
    return inputs
