"""From a folder that `save_pretrained` wrote to a folder that `from_pretrained` loads."""

import importlib
import importlib.metadata
import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.errors import UserError, how_to_install
from growlab.files import write_json
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.survey.small_models import FirstOutput, inputs_of
from growlab.widen.layers import deeper
from growlab.widen.sizes import PARTS, changed, deepened, widened
from growlab.widen.weights import METHODS, Widening, read_off
from growlab.widths import UnsupportedOperation, WidthGraph, layouts

#: Name of the receipt in the folder that is written.
RECEIPT = "growlab_widening.json"
# Largest relative change of the outputs in float64 that is rounding.
EXACT = 1e-10
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model")


def widen_folder(
    folder: Path,
    out: Path,
    width: float = 1.0,
    depth: float = 1.0,
    method: str = "pairs",
    parts: Collection[str] = PARTS,
    seed: int = 0,
) -> dict[str, Any]:
    """Write a wider and deeper model that computes what a saved one computes.

    Args:
        folder: what `save_pretrained` wrote: configuration, weights, perhaps a tokenizer.
        out: a new folder, which `from_pretrained` loads.
        width: factor on the sizes of `parts`.
        depth: factor on the number of layers.
        method: for heads and hidden layers, a name in `METHODS`.
        parts: what becomes wider, of `PARTS`.
        seed: of everything that is drawn.

    Returns:
        The receipt.

    Raises:
        UserError: the folder holds no model that can be loaded, or the model cannot be widened so exactly.
    """
    _check(folder, out, method, parts)
    model = load(folder)
    _check_tokenizer(folder, model)
    source = FirstOutput(model, list(inputs := inputs_of(model)))
    probe = tuple(inputs.values())
    dtype, cached = model.dtype, getattr(model.config, "use_cache", None)
    model.config.use_cache = False
    expected = evaluate(source.double(), probe)
    network, config = source, model.config
    if width != 1:
        network = _widened(network, widened(config, width, parts), method, seed, probe, expected)
    if depth != 1:
        network = _deepened(network, deepened(network.network.config, depth), probe, expected)
    error = relative_error(expected, evaluate(network, probe))
    result = network.network
    result.to(dtype)
    result.config.use_cache = cached
    if hasattr(model, "generation_config"):
        result.generation_config = model.generation_config
    out.mkdir(parents=True, exist_ok=True)
    result.save_pretrained(out)
    _copy_others(folder, out)
    receipt = {
        "from": folder.name,
        "model_type": config.model_type,
        "class": type(model).__name__,
        "sizes": {name: {"before": a, "after": b} for name, a, b in changed(config, result.config)},
        "width": width,
        "depth": depth,
        "method": method,
        "parts": list(parts),
        "seed": seed,
        "num_params_before": sum(p.numel() for p in model.parameters()),
        "num_params": sum(p.numel() for p in result.parameters()),
        "relative_error_float64": error,
        "versions": {name: importlib.metadata.version(name) for name in ("growlab", "torch", "transformers")},
    }
    write_json(out / RECEIPT, receipt)
    return receipt


def _check(folder: Path, out: Path, method: str, parts: Collection[str]) -> None:
    if method not in METHODS:
        raise UserError(f"there is no method {method!r} for --method; there are {', '.join(METHODS)}.")
    if unknown := [part for part in parts if part not in PARTS]:
        raise UserError(f"there is no part {unknown[0]!r} for --parts; there are {', '.join(PARTS)}.")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise UserError(
            f"{folder} has a configuration and no weights (model.safetensors); save the model there."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; give -o a folder that is not there yet.")


def load(folder: Path) -> Any:
    """The model in a folder, of the class that its configuration names.

    Raises:
        UserError: transformers does not know it, or its weights do not fit.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"transformers is not installed: {how_to_install('transformers')}.") from error
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"transformers {transformers.__version__} cannot read {folder}: {_told(error)}"
        ) from error
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise UserError(
            f"{folder}/config.json names {names[0] if names else 'no class'} under architectures, which transformers "
            f"{transformers.__version__} does not have."
        )
    try:
        model, info = kind.from_pretrained(folder, output_loading_info=True)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"the weights in {folder} do not fit its configuration: {_told(error)}") from error
    missing = sorted([*info["missing_keys"], *info["mismatched_keys"]], key=str)
    if missing:
        raise UserError(
            f"the weights in {folder} do not fit its configuration: {len(missing)} tensors are missing or of another "
            f"shape, the first is {missing[0]}."
        )
    return model.eval()


def _told(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs code that comes with it, which growlab never runs"
    return (str(error).strip().splitlines() or ["no message"])[0]


def _check_tokenizer(folder: Path, model: Any) -> None:
    if not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        return
    transformers = importlib.import_module("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be read: {_told(error)}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens and the model embeds {rows}: it does not fit; call "
            "resize_token_embeddings, or put the model's own tokenizer there."
        )


def _built(network: FirstOutput, config: Any, probe: tuple[Tensor, ...]) -> tuple[FirstOutput, WidthGraph]:
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            made = type(network.network)._from_config(config).float().eval()
        except (ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
            raise UserError(
                f"transformers builds no {type(network.network).__name__} of these sizes: {_told(error)}"
            ) from error
    target = FirstOutput(made, network.input_names)
    try:
        graph = layouts(target, probe)
    except UnsupportedOperation as error:
        raise UserError(str(error)) from error
    return FirstOutput(made.double(), network.input_names), graph


def _widened(
    network: FirstOutput,
    config: Any,
    method: str,
    seed: int,
    probe: tuple[Tensor, ...],
    expected: Tensor,
) -> FirstOutput:
    target, graph = _built(network, config, probe)
    old = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    old = {name: tensor.detach() for name, tensor in old.items()}
    widths = read_off(graph, target, old)
    start = Widening.of(graph, {name: old[name] for name in graph.axes}, widths, seed)
    wide = start.heads_and_hidden(METHODS[method]())
    scalars = [(old[name], new) for name, new in target.named_buffers() if name in old and new.dim() == 0]
    computed = {
        float(new / own) for own, new in scalars if own.is_floating_point() and not torch.equal(own, new)
    }
    errors = []
    for tensors in wide.ways(computed):
        _put(target, {**{name: old[name] for name in old if name not in graph.axes}, **tensors})
        _undo_factor(target, graph, probe, expected)
        errors.append(relative_error(expected, evaluate(target, probe)))
        if errors[-1] <= EXACT:
            return target
    else_give = "--parts mlp" if wide.whole else "a whole --width such as 2, or --parts mlp"
    raise UserError(
        f"{type(network.network).__name__} cannot be widened so: its output would change by {min(errors):.0e}, as its "
        f"normalisations stand behind sums, or as its code computes numbers from its width; give {else_give}."
    )


def _put(target: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    # What no file holds, the code computes as it loads a model.
    known = target.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in known and known[name].is_floating_point():
                known[name].copy_(tensor)


def _undo_factor(target: nn.Module, graph: WidthGraph, probe: tuple[Tensor, ...], expected: Tensor) -> None:
    """Where the code multiplies outputs by a number that it computes from its width, let the last weights undo it."""
    found = evaluate(target, probe)
    factor = float((found * expected).sum() / found.square().sum())
    if relative_error(expected, found) <= EXACT or relative_error(expected, found, factor) > EXACT:
        return
    layers = [layer for layer in graph.layers if layer.is_output]
    names = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    if not names:
        # In front of a tied table the gain of a normalisation is what consumes the channels.
        names = [n for n, axes in graph.axes.items() if len(axes) == 1 and axes[0].role == "in"]
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name in names:
            offset = graph.offsets.get(name, 0.0)
            parameters[name].add_(offset).mul_(factor).sub_(offset)


def _deepened(network: FirstOutput, config: Any, probe: tuple[Tensor, ...], expected: Tensor) -> FirstOutput:
    target, graph = _built(network, config, probe)
    tensors, _ = deeper(graph, target, network)
    _put(target, tensors)
    error = relative_error(expected, evaluate(target, probe))
    if error > EXACT:
        raise UserError(
            f"a new layer of {type(network.network).__name__} cannot begin as the identity (the output would change by "
            f"{error:.0e}): its normalisations stand behind the sums with the stream, or what a layer computes depends "
            "on how many stand before it; leave --depth out."
        )
    return target


def _copy_others(folder: Path, out: Path) -> None:
    """Tokenizer, generation settings and whatever else lies beside configuration and weights."""
    for path in folder.iterdir():
        own = path.name in ("config.json", RECEIPT) or any(path.match(pattern) for pattern in _WEIGHTS)
        if path.is_file() and not own and not (out / path.name).exists():
            shutil.copy2(path, out / path.name)
