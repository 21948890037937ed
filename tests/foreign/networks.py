"""Small networks of public libraries: functions that build a network and its inputs, by "LIBRARY_NAME"."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]
_VIT = {"dim": 32, "heads": 4, "mlp_dim": 48, "dim_head": 8}
_PATCHES = {"image_size": 16, "patch_size": 4}
_CUBES = {"image_size": 16, "image_patch_size": 4, "frames": 4, "frame_patch_size": 2}
_TEXT = {"num_tokens": 40, "max_seq_len": 12}
_STREAM = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}
_BLOCKS = {"sample_size": 8, "block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
_CODES = {"block_out_channels": (16, 32), "norm_num_groups": 4}
_CODES |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_FLAT_VIT = {"spatial_dims": 2, "in_channels": 1, "img_size": 16, "patch_size": 4, "hidden_size": 32, "mlp_dim": 48}


def _image(side: int = 16, channels: int = 3, rows: int = 2) -> Tensor:
    return torch.randn(rows, channels, side, side)


def _tokens(length: int = 12, rows: int = 2) -> Tensor:
    return torch.randint(40, (rows, length))


def _steps() -> Tensor:
    return torch.tensor([3, 7])


def _of(path: str, *args: Any, **settings: Any) -> nn.Module:
    network: nn.Module = resolve_name(path)(*args, **settings)
    return network


def _pytorch(path: str, inputs: Any, **settings: Any) -> Made:
    return _of(f"vit_pytorch.{path}", num_classes=5, **settings), inputs


def _vit(path: str, **settings: Any) -> Made:
    return _pytorch(path, _image(), **{**_VIT, **_PATCHES, "depth": 2, **settings})


def _stack(layers: str = "Decoder", wrapper: str = "TransformerWrapper", of: Any = _TEXT, **settings: Any) -> nn.Module:
    stack = _of(f"x_transformers.{layers}", **_STREAM, **settings)
    return _of(f"x_transformers.{wrapper}", attn_layers=stack, **of)


def _text(layers: str = "Decoder", **settings: Any) -> Made:
    return _stack(layers, **settings), _tokens()


def _diffusers(name: str, inputs: Any, **settings: Any) -> Made:
    return _of(f"diffusers.{name}", **settings), inputs


def _monai(name: str, inputs: Any, *args: Any, **settings: Any) -> Made:
    return _of(f"monai.networks.nets.{name}", *args, **settings), inputs


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _stack("Encoder"), _stack(cross_attend=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.decoder(target, context=self.encoder(source, return_embeddings=True))
        return found


def _each(parts: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    """The same settings for each part, such as `sm_enc_depth` and `lg_enc_depth`."""
    return {f"{part}_{name}": value for part in parts for name, value in settings.items()}


def _stages(**settings: Any) -> dict[str, Any]:
    """Settings by stage, such as `s1_depth` and `s2_depth`."""
    return {f"s{stage}_{name}": n for name, of in settings.items() for stage, n in enumerate(of, start=1)}


_VIT_PYTORCH = {
    "vit": lambda: _vit("vit.ViT"),
    "simple_vit": lambda: _vit("simple_vit.SimpleViT"),
    "simple_vit_with_register_tokens": lambda: _vit("simple_vit_with_register_tokens.SimpleViT"),
    "simple_vit_with_qk_norm": lambda: _vit("simple_vit_with_qk_norm.SimpleViT"),
    "simple_vit_with_value_residual": lambda: _vit("simple_vit_with_value_residual.SimpleViT"),
    "simple_uvit": lambda: _vit("simple_uvit.SimpleUViT"),
    "deepvit": lambda: _vit("deepvit.DeepViT"),
    "cait": lambda: _vit("cait.CaiT", cls_depth=1),
    "xcit": lambda: _vit("xcit.XCiT", cls_depth=1),
    "parallel_vit": lambda: _vit("parallel_vit.ViT"),
    "vit_for_small_dataset": lambda: _vit("vit_for_small_dataset.ViT"),
    "rvt": lambda: _vit("rvt.RvT"),
    "vit_with_patch_merger": lambda: _vit("vit_with_patch_merger.ViT"),
    "jumbo_vit": lambda: _vit("jumbo_vit.JumboViT"),
    "vit_3d": lambda: _pytorch("vit_3d.ViT", torch.randn(2, 3, 4, 16, 16), depth=2, **_CUBES, **_VIT),
    "vit_1d": lambda: _pytorch("vit_1d.ViT", torch.randn(2, 3, 24), seq_len=24, patch_size=4, depth=2, **_VIT),
    "cct": lambda: _pytorch(
        *("cct.CCT", _image()),
        **{"img_size": (16, 16), "embedding_dim": 32, "n_conv_layers": 2, "kernel_size": 3, "stride": 1},
        **{"padding": 1, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "positional_embedding": "learnable"},
    ),
    "cross_vit": lambda: _pytorch(
        *("cross_vit.CrossViT", _image()),
        **{"image_size": 16, "sm_dim": 32, "lg_dim": 48, "sm_patch_size": 4, "lg_patch_size": 8, "depth": 1},
        **_each(("sm_enc", "lg_enc"), depth=1, heads=4, mlp_dim=48, dim_head=8),
        **_each(("cross_attn",), depth=1, heads=4, dim_head=8),
    ),
    "pit": lambda: _vit("pit.PiT", depth=(1, 1)),
    "levit": lambda: _pytorch(
        *("levit.LeViT", _image(32, rows=4)),
        **{"image_size": 32, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (4, 6), "mlp_mult": 2},
        **{"dim_key": 8, "dim_value": 8},
    ),
    "cvt": lambda: _pytorch(
        *("cvt.CvT", _image(32, rows=4)),
        **{**_stages(emb_dim=(16, 32, 48), mlp_mult=(2, 2, 2)), "s2_heads": 2, "s3_heads": 3},
        **{"s2_depth": 1, "s3_depth": 1},
    ),
    "twins_svt": lambda: _pytorch(
        *("twins_svt.TwinsSVT", _image(64)),
        **_stages(emb_dim=(16, 32, 48, 64), depth=(1, 1, 1, 1)),
        **_stages(local_patch_size=(4, 4, 2, 1), global_k=(4, 4, 2, 1)),
    ),
    "regionvit": lambda: _pytorch(
        "regionvit.RegionViT", _image(64), dim=(16, 32, 32, 64), depth=(1, 1, 1, 1), window_size=2
    ),
    "scalable_vit": lambda: _pytorch(
        *("scalable_vit.ScalableViT", _image(32)),
        **{"dim": 16, "depth": (1, 1), "heads": (2, 4), "reduction_factor": (2, 1), "window_size": (4, None)},
        **{"ff_expansion_factor": 2, **_each(("iwsa", "ssa"), dim_key=8, dim_value=8)},
    ),
    "max_vit": lambda: _pytorch(
        *("max_vit.MaxViT", _image(32)),
        **{"dim": 16, "depth": (1, 1), "dim_head": 8, "dim_conv_stem": 16, "window_size": 2},
        **{"mbconv_expansion_rate": 2, "dropout": 0.1},
    ),
    "nest": lambda: _pytorch(
        *("nest.NesT", _image()),
        **{"dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1), "mlp_mult": 2, "dim_head": 8},
        **_PATCHES,
    ),
    "vivit": lambda: _pytorch(
        "vivit.ViViT", torch.randn(2, 3, 4, 16, 16), spatial_depth=1, temporal_depth=1, **_CUBES, **_VIT
    ),
}
_X_TRANSFORMERS = {
    "decoder": _text,
    "encoder": lambda: _text("Encoder"),
    "rotary_glu": lambda: _text(rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True),
    "alibi": lambda: _text(alibi_pos_bias=True, alibi_num_heads=2),
    "simple_rmsnorm_grouped_queries": lambda: _text(use_simple_rmsnorm=True, attn_kv_heads=2),
    "scalenorm": lambda: _text(use_scalenorm=True, rel_pos_bias=True),
    "sandwich_norm": lambda: _text(sandwich_norm=True, ff_relu_squared=True),
    "qk_norm": lambda: _text(attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    "gated_values": lambda: _text("Encoder", attn_gate_values=True, ff_no_bias=True, pre_norm=False),
    "vision": lambda: (_stack("Encoder", "ViTransformerWrapper", {**_PATCHES, "num_classes": 5}), _image()),
    "continuous": lambda: (
        _stack("Encoder", "ContinuousTransformerWrapper", {"dim_in": 6, "dim_out": 3, "max_seq_len": 12}),
        torch.randn(2, 12, 6),
    ),
    "cross_attention": lambda: (Translating(), (_tokens(), _tokens(8))),
}
_DIFFUSERS = {
    "unet2d": lambda: _diffusers(
        *("UNet2DModel", (_image(8), _steps())),
        **{"in_channels": 3, "out_channels": 3, "down_block_types": ("DownBlock2D", "AttnDownBlock2D")},
        **{"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), **_BLOCKS},
    ),
    "unet2d_condition": lambda: _diffusers(
        *("UNet2DConditionModel", (_image(8, 4), _steps(), torch.randn(2, 5, 16))),
        **{"cross_attention_dim": 16, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")},
        **{"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), **_BLOCKS},
    ),
    "autoencoder_kl": lambda: _diffusers("AutoencoderKL", _image(), **_CODES),
    "vq_model": lambda: _diffusers("VQModel", _image(), num_vq_embeddings=16, **_CODES),
    "autoencoder_tiny": lambda: _diffusers(
        *("AutoencoderTiny", _image()),
        **_each(("encoder", "decoder"), block_out_channels=(16, 16)),
        **_each(("num",), encoder_blocks=(1, 1), decoder_blocks=(1, 1)),
    ),
    "dit": lambda: _diffusers(
        "DiTTransformer2DModel",
        {"hidden_states": _image(8, 4), "timestep": _steps(), "class_labels": torch.tensor([1, 2])},
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
        **_HEADS,
    ),
    "pixart": lambda: _diffusers(
        "PixArtTransformer2DModel",
        {"hidden_states": _image(8, 4), "encoder_hidden_states": torch.randn(2, 5, 16), "timestep": _steps()},
        **{"sample_size": 8, "cross_attention_dim": 32, "caption_channels": 16, "num_embeds_ada_norm": 10},
        **{"use_additional_conditions": False, "norm_num_groups": 4, **_HEADS},
    ),
    "sd3": lambda: _diffusers(
        "SD3Transformer2DModel",
        {
            **{"hidden_states": _image(8, 4), "encoder_hidden_states": torch.randn(2, 5, 16)},
            **{"pooled_projections": torch.randn(2, 16), "timestep": _steps()},
        },
        **{"sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 16, **_HEADS},
        **{"caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 8},
    ),
    "flux": lambda: _diffusers(
        "FluxTransformer2DModel",
        {
            **{"hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 5, 16)},
            **{"pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([0.3, 0.7])},
            **{"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)},
        },
        **{"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16},
        **{"num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16},
        axes_dims_rope=(4, 4, 8),
    ),
    "prior": lambda: _diffusers(
        "PriorTransformer",
        {
            **{"hidden_states": torch.randn(2, 16), "timestep": _steps(), "proj_embedding": torch.randn(2, 16)},
            "encoder_hidden_states": torch.randn(2, 5, 16),
        },
        embedding_dim=16,
        num_embeddings=5,
        **_HEADS,
    ),
}
_MONAI = {
    "unet": lambda: _monai("UNet", _image(16, 1), channels=(8, 16, 32), strides=(2, 2), num_res_units=1, **_FLAT),
    "basic_unet": lambda: _monai("BasicUNet", _image(32, 1), features=(8, 8, 16, 16, 32, 8), **_FLAT),
    "basic_unet_plus_plus": lambda: _monai("BasicUNetPlusPlus", _image(32, 1), features=(8, 8, 16, 16, 32, 8), **_FLAT),
    "segresnet": lambda: _monai(
        "SegResNet", _image(16, 1), init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1), **_FLAT
    ),
    "segresnet_ds": lambda: _monai("SegResNetDS", _image(16, 1), init_filters=8, blocks_down=(1, 1, 1), **_FLAT),
    "unetr": lambda: _monai(
        "UNETR", _image(32, 1), img_size=32, feature_size=8, hidden_size=24, mlp_dim=48, num_heads=4, **_FLAT
    ),
    "swin_unetr": lambda: _monai(
        *("SwinUNETR", _image(64, 1)),
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(2, 2, 4, 4),
        window_size=4,
        **_FLAT,
    ),
    "vnet": lambda: _monai("VNet", _image(32, 1), **_FLAT),
    "dynunet": lambda: _monai(
        *("DynUNet", _image(16, 1)),
        **{"filters": [8, 16, 32], "kernel_size": [3, 3, 3], "strides": [1, 2, 2]},
        **{"upsample_kernel_size": [2, 2], **_FLAT},
    ),
    "attention_unet": lambda: _monai(
        "AttentionUnet", _image(16, 1, rows=4), channels=(8, 16, 32), strides=(2, 2), **_FLAT
    ),
    "densenet": lambda: _monai(
        "DenseNet", _image(32, 1, rows=4), init_features=16, growth_rate=8, block_config=(2, 2), **_FLAT
    ),
    "resnet": lambda: _monai(
        *("ResNet", _image(32, 1, rows=4)),
        "basic",
        [1, 1, 1, 1],
        [8, 16, 32, 64],
        spatial_dims=2,
        n_input_channels=1,
        num_classes=5,
    ),
    "highresnet": lambda: _monai(
        *("HighResNet", _image(16, 1, rows=4)),
        layer_params=(
            {"name": "conv_0", "n_features": 8, "kernel_size": 3},
            {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 1},
            {"name": "res_2", "n_features": 16, "kernels": (3, 3), "repeat": 1},
            {"name": "conv_1", "n_features": 16, "kernel_size": 1},
            {"name": "conv_2", "kernel_size": 1},
        ),
        **_FLAT,
    ),
    "classifier": lambda: _monai(
        "Classifier", _image(16, 1), in_shape=(1, 16, 16), classes=5, channels=(8, 16), strides=(2, 2)
    ),
    "generator": lambda: _monai(
        *("Generator", torch.randn(2, 12)),
        latent_shape=(12,),
        start_shape=(16, 4, 4),
        channels=(16, 8, 1),
        strides=(2, 2, 1),
    ),
    "autoencoder": lambda: _monai(
        *("AutoEncoder", _image(16, 1)),
        channels=(8, 16),
        strides=(2, 2),
        inter_channels=[16, 16],
        num_res_units=1,
        **_FLAT,
    ),
    "var_autoencoder": lambda: _monai(
        *("VarAutoEncoder", _image(16, 1)),
        **{"spatial_dims": 2, "in_shape": (1, 16, 16), "out_channels": 1, "latent_size": 6},
        **{"channels": (8, 16), "strides": (2, 2)},
    ),
    "vit": lambda: _monai("ViT", _image(16, 1), num_layers=2, num_heads=4, classification=True, **_FLAT_VIT),
    "vit_autoencoder": lambda: _monai("ViTAutoEnc", _image(16, 1), num_layers=2, num_heads=4, **_FLAT_VIT),
    "diffusion_unet": lambda: _monai(
        *("DiffusionModelUNet", (_image(8, 1), _steps())),
        **{"channels": (16, 32), "attention_levels": (False, True), "num_res_blocks": 1, "norm_num_groups": 4},
        **{"num_head_channels": 8, **_FLAT},
    ),
    "autoencoder_kl": lambda: _monai(
        *("AutoencoderKL", _image(16, 1)),
        **{"channels": (16, 32), "attention_levels": (False, False), "num_res_blocks": 1, "norm_num_groups": 4},
        **_FLAT,
    ),
    "mednext": lambda: _monai(
        *("MedNeXt", _image(16, 1)),
        **{"init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1, 1), "blocks_bottleneck": 1},
        **{"kernel_size": 3, **_FLAT},
    ),
    "decoder_only": lambda: _monai(
        "DecoderOnlyTransformer", _tokens(), attn_layers_dim=32, attn_layers_depth=2, attn_layers_heads=4, **_TEXT
    ),
    "efficientnet": lambda: _monai(
        "EfficientNetBN", _image(32, rows=4), "efficientnet-b0", pretrained=False, num_classes=5
    ),
}
_LIBRARIES = {"vit_pytorch": _VIT_PYTORCH, "x_transformers": _X_TRANSFORMERS, "diffusers": _DIFFUSERS, "monai": _MONAI}
NETWORKS: dict[str, Callable[[], Made]] = {
    f"{library}_{name}": made for library, networks in _LIBRARIES.items() for name, made in networks.items()
}
