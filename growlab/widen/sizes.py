"""Multiply sizes in configurations of transformers by a factor."""

import copy
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from math import gcd
from typing import Any

from growlab.base.errors import UserError

#: Parts that can be widened: the residual stream, the number of heads, the hidden layers of MLPs.
PARTS = ("stream", "heads", "mlp")
#: Names of their sizes in configurations.
NAMES: Mapping[str, Collection[str]] = {
    "stream": ("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "pooler_hidden_size"),
    "heads": (
        *("num_attention_heads", "n_head", "n_heads", "num_heads"),
        *("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads", "num_kv_heads"),
    ),
    "mlp": (
        *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
    ),
}
#: Names of the number of layers.
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers"),
)
_HEAD_DIMENSIONS = ("head_dim", "d_kv")
# Lists without an entry per layer, even if they are as long as there are layers.
_NOT_OF_LAYERS = (
    *("image_size", "patch_size", "tubelet_size", "image_mean", "image_std", "architectures"),
    *("conv_dim", "conv_kernel", "conv_stride", "tdnn_dim", "tdnn_kernel", "tdnn_dilation"),
)


def sizes(config: Any, names: Collection[str]) -> dict[str, int]:
    """Return the integer sizes that a configuration has under any of these names."""
    settings = config.to_dict()
    return {name: settings[name] for name in names if type(settings.get(name)) is int}


def widened(config: Any, width: float, parts: Collection[str]) -> Any:
    """Return a configuration with wider `parts`, among `PARTS`; `width` is a factor of at least 1.

    The number of heads grows, and their dimension stays. Only if the stream is divided among the heads and grows
    without them, each head becomes wider.

    Raises:
        UserError: a size would not be whole, or heads and stream cannot be widened separately.
    """
    if width < 1:
        raise UserError(f"--width {width:g} would make the network narrower; it must be 1 or more.")
    return resized(config, width, parts)


def resized(config: Any, width: float, parts: Collection[str]) -> Any:
    """Return a configuration with wider or narrower parts, see `widened`."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise UserError(f"there is no part {unknown[0]!r} for --parts; there are {', '.join(PARTS)}.")
    target = copy.deepcopy(config)
    if width == 1:
        return target
    before = {name: size for part in parts for name, size in sizes(config, NAMES[part]).items()}
    if not before:
        raise UserError(
            f"the configuration of {config.model_type} has no size of {', '.join(parts)} to change{_inside(config)}."
        )
    for name, size in _times(before, width, "widths").items():
        setattr(target, name, size)
    _keep_head_dimension(config, target, parts)
    return target


def _inside(config: Any) -> str:
    """Explain that a composite model, such as of text and images, has its sizes in sub-configurations, or ""."""
    names = [name for name in getattr(config, "sub_configs", ()) if getattr(config, name, None) is not None]
    remedy = "save one of its models separately and give that folder"
    return f": sizes are in its {' and '.join(names)}; {remedy}" if names else ""


def _times(before: Mapping[str, int], by: float, kind: str) -> dict[str, int]:
    """Multiply sizes by a factor; raise a UserError with the nearest possible factors if a size would not be whole."""
    factor, step = Fraction(by).limit_denominator(4096), Fraction(1, gcd(*before.values()))
    broken = next((name for name, size in before.items() if (size * factor).denominator != 1), None)
    if broken is not None:
        below = factor // step * step
        nearest = " and ".join(f"{float(other):g}" for other in (below, below + step) if other > 0 and other != 1)
        raise UserError(
            f"{broken} {before[broken]} times {by:g} is no whole number; nearest {kind} that fit: {nearest}."
        )
    return {name: int(size * factor) for name, size in before.items()}


def _keep_head_dimension(config: Any, target: Any, parts: Collection[str]) -> None:
    settings = config.to_dict()
    heads, stream = sizes(config, NAMES["heads"][:6]), sizes(config, NAMES["stream"])
    for name in _HEAD_DIMENSIONS:
        if name in settings:
            if settings[name] is None and heads and stream:
                # Otherwise the model would compute it from the new sizes.
                setattr(target, name, next(iter(stream.values())) // next(iter(heads.values())))
            return
    if heads and "heads" in parts and "stream" not in parts:
        raise UserError(
            f"{config.model_type} divides its stream among its heads: change both (--parts stream,heads,mlp), or "
            "neither (--parts mlp)."
        )


def divides_its_stream(config: Any) -> bool:
    """Return True if the head dimension is the stream's width over the number of heads, and grows with the stream."""
    return not any(name in config.to_dict() for name in _HEAD_DIMENSIONS)


def deepened(config: Any, depth: float) -> Any:
    """Return a configuration with more layers; lists with an entry per layer become longer."""
    if depth < 1:
        raise UserError(f"--depth {depth:g} would remove layers; it must be 1 or more.")
    target = copy.deepcopy(config)
    if depth == 1:
        return target
    if isinstance(stages := config.to_dict().get("depths"), (list, tuple)):
        # Layers of each stage (Swin, ConvNeXt); "number of layers" means the number of stages there.
        target.depths = list(_times({f"depths[{n}]": each for n, each in enumerate(stages)}, depth, "depths").values())
        return target
    before = sizes(config, LAYERS)
    if not before:
        raise UserError(f"the configuration of {config.model_type} has no number of layers{_inside(config)}.")
    after = _times(before, depth, "depths")
    counts = {before[name]: after[name] for name in before}
    for name, size in after.items():
        setattr(target, name, size)
    for name, entries in config.to_dict().items():
        if (more := _for_more_layers(name, entries, counts)) is not None:
            setattr(target, name, more)
    return target


def _for_more_layers(name: str, entries: Any, counts: Mapping[int, int]) -> list[Any] | None:
    """Extend a list with an entry per layer; None for any other value. `counts` maps old to new numbers of layers."""
    if not isinstance(entries, (list, tuple)) or not entries or name in _NOT_OF_LAYERS:
        return None
    if all(isinstance(e, (list, tuple)) and len(e) == 2 and isinstance(e[0], (list, tuple)) for e in entries):
        # Kinds of layers with the number of repetitions: GPT-Neo's [[["global", "local"], 6]].
        repeated = [kind for kinds, times in entries for _ in range(times) for kind in kinds]
        more = _for_more_layers(name, repeated, counts)
        return None if more is None else [[more, 1]]
    ascending = all(type(e) is int for e in entries) and all(a < b for a, b in pairwise([-1, *entries]))
    for before, after in counts.items():
        places = sources(before, after)
        if (
            ("layer" in name or "idx" in name)
            and ascending
            and entries[-1] < before
            and (len(entries) < before or before > 2 or "moe" in name)
        ):
            # Indices of some layers.
            return [place for place, source in enumerate(places) if source in entries]
        if len(entries) == before:
            return [entries[place] for place in places]
    return None


def sources(before: int, after: int) -> list[int]:
    """Return for each of `after` layers the index of the old layer that it is or copies; copies follow originals."""
    return [place * before // after for place in range(after)]


def changed(config: Any, target: Any) -> Iterator[tuple[str, int, int]]:
    """Yield name, old and new number of the sizes in which two configurations differ."""
    names = [*(name for part in PARTS for name in NAMES[part]), *LAYERS]
    before, after = sizes(config, names), sizes(target, names)
    yield from ((name, size, after[name]) for name, size in before.items() if after.get(name) != size)
