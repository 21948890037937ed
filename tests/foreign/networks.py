"""Small networks of public libraries: one function each, which makes it and its inputs.

Depths, images and vocabularies are small; widths are as small as leaves something to grow. A name begins with the
library's.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]
_VIT = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}
_VIT |= {"dim_head": 8}
_STAGES = {"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8}
_TEXT = {"num_tokens": 40, "max_seq_len": 12}
_STREAM = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}
_BLOCKS = {"sample_size": 8, "block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}


def _image(side: int = 16, channels: int = 3, rows: int = 2) -> Tensor:
    return torch.randn(rows, channels, side, side)


def _tokens(length: int = 12, rows: int = 2) -> Tensor:
    return torch.randint(40, (rows, length))


def _vit(module: str, name: str = "ViT", **settings: Any) -> Made:
    return getattr(import_module(f"vit_pytorch.{module}"), name)(**{**_VIT, **settings}), _image()


def _text(layers: str = "Decoder", **settings: Any) -> Made:
    of = import_module("x_transformers")
    stack = getattr(of, layers)(**{**_STREAM, **settings})
    return of.TransformerWrapper(attn_layers=stack, **_TEXT), _tokens()


def _monai(name: str, *args: Any, **settings: Any) -> nn.Module:
    network: nn.Module = getattr(import_module("monai.networks.nets"), name)(*args, **settings)
    return network


def _diffusers(name: str, **settings: Any) -> nn.Module:
    network: nn.Module = getattr(import_module("diffusers"), name)(**settings)
    return network


# vit-pytorch -----------------------------------------------------------------------------------------------


def vit_pytorch_vit() -> Made:
    return _vit("vit")


def vit_pytorch_simple_vit() -> Made:
    return _vit("simple_vit", "SimpleViT")


def vit_pytorch_simple_vit_with_register_tokens() -> Made:
    return _vit("simple_vit_with_register_tokens", "SimpleViT")


def vit_pytorch_simple_vit_with_qk_norm() -> Made:
    return _vit("simple_vit_with_qk_norm", "SimpleViT")


def vit_pytorch_simple_vit_with_value_residual() -> Made:
    return _vit("simple_vit_with_value_residual", "SimpleViT")


def vit_pytorch_simple_uvit() -> Made:
    return _vit("simple_uvit", "SimpleUViT")


def vit_pytorch_deepvit() -> Made:
    return _vit("deepvit", "DeepViT")


def vit_pytorch_cait() -> Made:
    return _vit("cait", "CaiT", cls_depth=1)


def vit_pytorch_xcit() -> Made:
    return _vit("xcit", "XCiT", cls_depth=1)


def vit_pytorch_parallel_vit() -> Made:
    return _vit("parallel_vit")


def vit_pytorch_vit_for_small_dataset() -> Made:
    return _vit("vit_for_small_dataset")


def vit_pytorch_rvt() -> Made:
    return _vit("rvt", "RvT")


def vit_pytorch_vit_with_patch_merger() -> Made:
    return _vit("vit_with_patch_merger")


def vit_pytorch_jumbo_vit() -> Made:
    return _vit("jumbo_vit", "JumboViT")


def vit_pytorch_vit_3d() -> Made:
    settings = {k: v for k, v in _VIT.items() if k != "patch_size"}
    of = import_module("vit_pytorch.vit_3d")
    return of.ViT(image_patch_size=4, frames=4, frame_patch_size=2, **settings), torch.randn(2, 3, 4, 16, 16)


def vit_pytorch_vit_1d() -> Made:
    settings = {k: v for k, v in _VIT.items() if k != "image_size"}
    return import_module("vit_pytorch.vit_1d").ViT(seq_len=24, **settings), torch.randn(2, 3, 24)


def vit_pytorch_cct() -> Made:
    of = import_module("vit_pytorch.cct")
    network = of.CCT(
        img_size=(16, 16),
        embedding_dim=32,
        n_conv_layers=2,
        kernel_size=3,
        stride=1,
        padding=1,
        num_layers=2,
        num_heads=4,
        mlp_ratio=2.0,
        num_classes=5,
        positional_embedding="learnable",
    )
    return network, _image()


def vit_pytorch_cross_vit() -> Made:
    of = import_module("vit_pytorch.cross_vit")
    sizes = {
        f"{size}_enc_{what}": n
        for size in ("sm", "lg")
        for what, n in (("depth", 1), ("heads", 4), ("mlp_dim", 48), ("dim_head", 8))
    }
    network = of.CrossViT(
        image_size=16,
        num_classes=5,
        sm_dim=32,
        lg_dim=48,
        sm_patch_size=4,
        lg_patch_size=8,
        depth=1,
        cross_attn_depth=1,
        cross_attn_heads=4,
        cross_attn_dim_head=8,
        **sizes,
    )
    return network, _image()


def vit_pytorch_pit() -> Made:
    return _vit("pit", "PiT", depth=(1, 1))


def vit_pytorch_levit() -> Made:
    of = import_module("vit_pytorch.levit")
    network = of.LeViT(
        image_size=32, num_classes=5, stages=2, dim=(32, 48), depth=1, heads=(4, 6), mlp_mult=2, dim_key=8, dim_value=8
    )
    return network, _image(32, rows=4)


def vit_pytorch_cvt() -> Made:
    of = import_module("vit_pytorch.cvt")
    network = of.CvT(
        num_classes=5,
        **{"s1_emb_dim": 16, "s2_emb_dim": 32, "s3_emb_dim": 48, "s2_heads": 2, "s3_heads": 3},
        **{"s2_depth": 1, "s3_depth": 1, "s1_mlp_mult": 2, "s2_mlp_mult": 2, "s3_mlp_mult": 2},
    )
    return network, _image(32, rows=4)


def vit_pytorch_twins_svt() -> Made:
    of = import_module("vit_pytorch.twins_svt")
    network = of.TwinsSVT(
        num_classes=5,
        **{f"s{stage}_emb_dim": 16 * stage for stage in range(1, 5)},
        **{f"s{stage}_depth": 1 for stage in range(1, 5)},
        **{f"s{stage}_local_patch_size": size for stage, size in enumerate((4, 4, 2, 1), start=1)},
        **{f"s{stage}_global_k": size for stage, size in enumerate((4, 4, 2, 1), start=1)},
    )
    return network, _image(64)


def vit_pytorch_regionvit() -> Made:
    of = import_module("vit_pytorch.regionvit")
    network = of.RegionViT(dim=(16, 32, 32, 64), depth=(1, 1, 1, 1), window_size=2, num_classes=5)
    return network, _image(64)


def vit_pytorch_scalable_vit() -> Made:
    of = import_module("vit_pytorch.scalable_vit")
    sizes = {f"{kind}_dim_{what}": 8 for kind in ("iwsa", "ssa") for what in ("key", "value")}
    network = of.ScalableViT(
        num_classes=5,
        dim=16,
        depth=(1, 1),
        heads=(2, 4),
        reduction_factor=(2, 1),
        window_size=(4, None),
        ff_expansion_factor=2,
        **sizes,
    )
    return network, _image(32)


def vit_pytorch_max_vit() -> Made:
    of = import_module("vit_pytorch.max_vit")
    settings = {"dim_conv_stem": 16, "window_size": 2, "mbconv_expansion_rate": 2, "dropout": 0.1}
    return of.MaxViT(**_STAGES, **settings), _image(32)


def vit_pytorch_nest() -> Made:
    of = import_module("vit_pytorch.nest")
    settings = {"num_hierarchies": 2, "block_repeats": (1, 1), "mlp_mult": 2, "dim_head": 8}
    return of.NesT(image_size=16, patch_size=4, num_classes=5, dim=16, heads=2, **settings), _image()


def vit_pytorch_vivit() -> Made:
    of = import_module("vit_pytorch.vivit")
    settings = {k: v for k, v in _VIT.items() if k not in ("patch_size", "depth")}
    network = of.ViViT(image_patch_size=4, frames=4, frame_patch_size=2, spatial_depth=1, temporal_depth=1, **settings)
    return network, torch.randn(2, 3, 4, 16, 16)


# x-transformers --------------------------------------------------------------------------------------------


def x_transformers_decoder() -> Made:
    return _text()


def x_transformers_encoder() -> Made:
    return _text("Encoder")


def x_transformers_rotary_glu() -> Made:
    return _text(rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True)


def x_transformers_alibi() -> Made:
    return _text(alibi_pos_bias=True, alibi_num_heads=2)


def x_transformers_simple_rmsnorm_grouped_queries() -> Made:
    return _text(use_simple_rmsnorm=True, attn_kv_heads=2)


def x_transformers_scalenorm() -> Made:
    return _text(use_scalenorm=True, rel_pos_bias=True)


def x_transformers_sandwich_norm() -> Made:
    return _text(sandwich_norm=True, ff_relu_squared=True)


def x_transformers_qk_norm() -> Made:
    return _text(attn_qk_norm=True, attn_qk_norm_dim_scale=True)


def x_transformers_gated_values() -> Made:
    return _text("Encoder", attn_gate_values=True, ff_no_bias=True, pre_norm=False)


def x_transformers_vision() -> Made:
    of = import_module("x_transformers")
    return of.ViTransformerWrapper(
        image_size=16, patch_size=4, num_classes=5, attn_layers=of.Encoder(**_STREAM)
    ), _image()


def x_transformers_continuous() -> Made:
    of = import_module("x_transformers")
    network = of.ContinuousTransformerWrapper(dim_in=6, dim_out=3, max_seq_len=12, attn_layers=of.Encoder(**_STREAM))
    return network, torch.randn(2, 12, 6)


def x_transformers_cross_attention() -> Made:
    of = import_module("x_transformers")

    class Translating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = of.TransformerWrapper(attn_layers=of.Encoder(**_STREAM), **_TEXT)
            self.decoder = of.TransformerWrapper(attn_layers=of.Decoder(cross_attend=True, **_STREAM), **_TEXT)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            found: Tensor = self.decoder(target, context=self.encoder(source, return_embeddings=True))
            return found

    return Translating(), (_tokens(), _tokens(8))


# diffusers -------------------------------------------------------------------------------------------------


def diffusers_unet2d() -> Made:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    blocks["up_block_types"] = ("AttnUpBlock2D", "UpBlock2D")
    network = _diffusers("UNet2DModel", in_channels=3, out_channels=3, **blocks, **_BLOCKS)
    return network, (_image(8), torch.tensor([3, 7]))


def diffusers_unet2d_condition() -> Made:
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    blocks["up_block_types"] = ("UpBlock2D", "CrossAttnUpBlock2D")
    network = _diffusers("UNet2DConditionModel", cross_attention_dim=16, **blocks, **_BLOCKS)
    return network, (_image(8, 4), torch.tensor([3, 7]), torch.randn(2, 5, 16))


def diffusers_autoencoder_kl() -> Made:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return _diffusers("AutoencoderKL", block_out_channels=(16, 32), norm_num_groups=4, **blocks), _image()


def diffusers_vq_model() -> Made:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    settings = {"num_vq_embeddings": 16, "norm_num_groups": 4}
    return _diffusers("VQModel", block_out_channels=(16, 32), **settings, **blocks), _image()


def diffusers_autoencoder_tiny() -> Made:
    widths = {f"{half}_block_out_channels": (16, 16) for half in ("encoder", "decoder")}
    blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    return _diffusers("AutoencoderTiny", **widths, **blocks), _image()


def diffusers_dit() -> Made:
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "norm_num_groups": 4}
    network = _diffusers("DiTTransformer2DModel", sample_size=8, num_embeds_ada_norm=10, **heads)
    return network, {
        "hidden_states": _image(8, 4),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
    }


def diffusers_pixart() -> Made:
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "norm_num_groups": 4}
    network = _diffusers(
        "PixArtTransformer2DModel",
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=16,
        num_embeds_ada_norm=10,
        use_additional_conditions=False,
        **heads,
    )
    return network, {
        "hidden_states": _image(8, 4),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "timestep": torch.tensor([3, 7]),
    }


def diffusers_sd3() -> Made:
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "pos_embed_max_size": 8}
    network = _diffusers(
        "SD3Transformer2DModel",
        sample_size=8,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        **heads,
    )
    return network, {
        "hidden_states": _image(8, 4),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([3, 7]),
    }


def diffusers_flux() -> Made:
    network = _diffusers(
        "FluxTransformer2DModel",
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    return network, {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def diffusers_prior() -> Made:
    network = _diffusers(
        "PriorTransformer",
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=5,
    )
    return network, {
        "hidden_states": torch.randn(2, 16),
        "timestep": torch.tensor([3, 7]),
        "proj_embedding": torch.randn(2, 16),
        "encoder_hidden_states": torch.randn(2, 5, 16),
    }


# MONAI -----------------------------------------------------------------------------------------------------


def monai_unet() -> Made:
    network = _monai("UNet", channels=(8, 16, 32), strides=(2, 2), num_res_units=1, **_FLAT)
    return network, _image(16, 1)


def monai_basic_unet() -> Made:
    features = (8, 8, 16, 16, 32, 8)
    return _monai("BasicUNet", features=features, **_FLAT), _image(32, 1)


def monai_basic_unet_plus_plus() -> Made:
    return _monai("BasicUNetPlusPlus", features=(8, 8, 16, 16, 32, 8), **_FLAT), _image(32, 1)


def monai_segresnet() -> Made:
    blocks = {"blocks_down": (1, 1, 1), "blocks_up": (1, 1)}
    return _monai("SegResNet", init_filters=8, **blocks, **_FLAT), _image(16, 1)


def monai_segresnet_ds() -> Made:
    return _monai("SegResNetDS", init_filters=8, blocks_down=(1, 1, 1), **_FLAT), _image(16, 1)


def monai_unetr() -> Made:
    widths = {"feature_size": 8, "hidden_size": 24, "mlp_dim": 48, "num_heads": 4}
    return _monai("UNETR", img_size=32, **widths, **_FLAT), _image(32, 1)


def monai_swin_unetr() -> Made:
    settings = {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 4, 4), "window_size": 4}
    return _monai("SwinUNETR", **settings, **_FLAT), _image(64, 1)


def monai_vnet() -> Made:
    return _monai("VNet", **_FLAT), _image(32, 1)


def monai_dynunet() -> Made:
    kernels = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    return _monai("DynUNet", filters=[8, 16, 32], **kernels, **_FLAT), _image(16, 1)


def monai_attention_unet() -> Made:
    return _monai("AttentionUnet", channels=(8, 16, 32), strides=(2, 2), **_FLAT), _image(16, 1, rows=4)


def monai_densenet() -> Made:
    settings = {"init_features": 16, "growth_rate": 8, "block_config": (2, 2)}
    return _monai("DenseNet", **settings, **_FLAT), _image(32, 1, rows=4)


def monai_resnet() -> Made:
    network = _monai(
        "ResNet", "basic", [1, 1, 1, 1], [8, 16, 32, 64], spatial_dims=2, n_input_channels=1, num_classes=5
    )
    return network, _image(32, 1, rows=4)


def monai_highresnet() -> Made:
    layers = (
        {"name": "conv_0", "n_features": 8, "kernel_size": 3},
        {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 1},
        {"name": "res_2", "n_features": 16, "kernels": (3, 3), "repeat": 1},
        {"name": "conv_1", "n_features": 16, "kernel_size": 1},
        {"name": "conv_2", "kernel_size": 1},
    )
    return _monai("HighResNet", layer_params=layers, **_FLAT), _image(16, 1, rows=4)


def monai_classifier() -> Made:
    network = _monai("Classifier", in_shape=(1, 16, 16), classes=5, channels=(8, 16), strides=(2, 2))
    return network, _image(16, 1)


def monai_generator() -> Made:
    network = _monai("Generator", latent_shape=(12,), start_shape=(16, 4, 4), channels=(16, 8, 1), strides=(2, 2, 1))
    return network, torch.randn(2, 12)


def monai_autoencoder() -> Made:
    channels = {"channels": (8, 16), "strides": (2, 2), "inter_channels": [16, 16], "num_res_units": 1}
    return _monai("AutoEncoder", **channels, **_FLAT), _image(16, 1)


def monai_var_autoencoder() -> Made:
    network = _monai(
        "VarAutoEncoder",
        spatial_dims=2,
        in_shape=(1, 16, 16),
        out_channels=1,
        latent_size=6,
        channels=(8, 16),
        strides=(2, 2),
    )
    return network, _image(16, 1)


def monai_vit() -> Made:
    network = _monai(
        "ViT",
        in_channels=1,
        img_size=16,
        patch_size=4,
        hidden_size=32,
        mlp_dim=48,
        num_layers=2,
        num_heads=4,
        classification=True,
        spatial_dims=2,
    )
    return network, _image(16, 1)


def monai_vit_autoencoder() -> Made:
    network = _monai(
        "ViTAutoEnc",
        in_channels=1,
        img_size=16,
        patch_size=4,
        hidden_size=32,
        mlp_dim=48,
        num_layers=2,
        num_heads=4,
        spatial_dims=2,
    )
    return network, _image(16, 1)


def monai_diffusion_unet() -> Made:
    settings = {"channels": (16, 32), "attention_levels": (False, True), "num_res_blocks": 1}
    network = _monai("DiffusionModelUNet", norm_num_groups=4, num_head_channels=8, **settings, **_FLAT)
    return network, (_image(8, 1), torch.tensor([3, 7]))


def monai_autoencoder_kl() -> Made:
    settings = {"channels": (16, 32), "attention_levels": (False, False), "num_res_blocks": 1}
    return _monai("AutoencoderKL", norm_num_groups=4, **settings, **_FLAT), _image(16, 1)


def monai_mednext() -> Made:
    blocks = {"blocks_down": (1, 1), "blocks_up": (1, 1), "blocks_bottleneck": 1, "kernel_size": 3}
    return _monai("MedNeXt", init_filters=8, **blocks, **_FLAT), _image(16, 1)


def monai_decoder_only() -> Made:
    settings = {"attn_layers_dim": 32, "attn_layers_depth": 2, "attn_layers_heads": 4}
    return _monai("DecoderOnlyTransformer", num_tokens=40, max_seq_len=12, **settings), _tokens()


def monai_efficientnet() -> Made:
    return _monai("EfficientNetBN", "efficientnet-b0", pretrained=False, num_classes=5), _image(32, rows=4)


NETWORKS = {
    name: made
    for name, made in dict(globals()).items()
    if name.startswith(("vit_pytorch_", "x_transformers_", "diffusers_", "monai_"))
}
