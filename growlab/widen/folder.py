"""Widen and deepen a saved model: read a folder of `save_pretrained`, write a folder for `from_pretrained`.

Neither model is ever completely in memory: tensors are read, computed and written one at a time, also to check that the
outputs are equal.
"""

import importlib.metadata
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.command_parser import in_columns
from growlab.base.errors import UserError, first_line, imported
from growlab.base.files import write_json
from growlab.grower.trained import warn_of_equal_copies
from growlab.growth.method import GrowthMethod
from growlab.growth.parity import relative_error
from growlab.inspect.small_models import FirstOutput, inputs_of
from growlab.widen.checkpoint import Checkpoint, Rows, first_names, read_folder, reverted, units, write_folder
from growlab.widen.sizes import PARTS, changed, deepened, divides_its_stream, sources, widened
from growlab.widen.skeletons import output_of, set_precision, skeleton
from growlab.widen.weights import DEFAULT, NOISE_STD, Way, Widening, blocks_of, method_of, read_off, with_unused
from growlab.widths import WidthGraph, layouts

#: File name of the receipt in the output folder.
RECEIPT = "growlab_widening.json"
#: Relative change of the outputs in float64 up to which they count as equal.
EXACT = 1e-10
# Prefix of the model's names in a `FirstOutput`.
_PREFIX = "network."
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model")


def widen_folder(
    folder: Path,
    out: Path,
    width: float = 1.0,
    depth: float = 1.0,
    method: str = DEFAULT,
    parts: Collection[str] = PARTS,
    seed: int = 0,
    noise_std: float = NOISE_STD,
) -> dict[str, Any]:
    """Write a wider and deeper model with the same outputs as a saved one.

    Args:
        folder: folder of `save_pretrained`: configuration, weights, perhaps a tokenizer.
        out: a new folder, which `from_pretrained` loads.
        width: factor on the sizes of `parts`.
        depth: factor on the number of layers.
        method: growth method for heads and hidden layers, a name in `METHODS`.
        parts: parts to widen, among `PARTS`.
        seed: seed of all random draws.
        noise_std: standard deviation of the noise that separates copies, see `HyperCloning`.

    Returns:
        The receipt.

    Raises:
        UserError: the folder contains no loadable model, or the model cannot be widened exactly in this way.
    """
    growth_method = method_of(method, noise_std)
    check_out(folder, out)
    if width != 1:
        warn_of_equal_copies(growth_method)
    files = read_folder(folder)
    kind, config = load(folder)
    source = skeleton(kind, config)
    saved = Checkpoint(folder, files, source)
    _check_tokenizer(folder, source)
    plan, way, error, target_config, parts = _exact_plan(
        saved, source, config, width, depth, parts, growth_method, seed
    )
    write_model(folder, out, plan.target, target_config, saved.shard_bytes, partial(plan.tensor, way=way), plan.dtype)
    receipt = {
        "from": folder.name,
        "model_type": config.model_type,
        "class": kind.__name__,
        "sizes": {name: {"before": a, "after": b} for name, a, b in changed(config, target_config)},
        "width": width,
        "depth": depth,
        "method": method,
        "noise_std": noise_std,
        "parts": list(parts),
        "seed": seed,
        "num_params_before": num_params(source),
        "num_params": num_params(plan.target),
        "relative_error_float64": error,
    }
    return write_receipt(out / RECEIPT, receipt)


def _exact_plan(
    saved: Checkpoint,
    source: nn.Module,
    config: Any,
    width: float,
    depth: float,
    parts: Collection[str],
    method: GrowthMethod,
    seed: int,
) -> tuple["Plan", Way, float, Any, Collection[str]]:
    """Find an exact plan: return it, its way and error, the configuration, and the parts that become wider."""
    kind, failed, inexact = type(source), None, None
    choices = [parts]
    if width != 1 and {"heads", "stream"} <= {*parts} and divides_its_stream(config):
        # If the code computes numbers from the number of heads (ALiBi), each head may become wider instead.
        choices.append([part for part in parts if part != "heads"])
    for chosen in choices:
        target = deepened(widened(config, width, chosen), depth)
        try:
            built = skeleton(kind, target)
            if num_params(built) == num_params(source):
                raise UserError(
                    f"no tensor of {kind.__name__} becomes larger by {', '.join(chosen)} of its configuration, which "
                    "has its sizes under names that growlab does not know; give --depth alone."
                )
            plan = Plan(saved, source, built, method, seed)
            way, error = plan.exact_way()
        except UserError as refusal:
            failed = failed or refusal
            continue
        if way is not None:
            return plan, way, error, target, chosen
        # Raised rather than `failed`, because it says more.
        inexact = inexact or plan.inexact(error)
    if depth != 1:
        deeper = Plan(saved, source, skeleton(kind, deepened(config, depth)), method, seed)
        way, error = deeper.exact_way()
        if way is None:
            raise deeper.not_deeper(error)
    if getattr(config, "alibi", False) and divides_its_stream(config) and {*parts} & {"heads", "stream"}:
        raise UserError(
            f"the heads and the stream of {kind.__name__} with ALiBi cannot be widened, because its slopes depend on "
            "the number of heads and its scale on their size; give --parts mlp, or leave --width out."
        )
    refusal = inexact or failed
    assert refusal is not None
    raise refusal


def num_params(model: nn.Module) -> int:
    """Return the number of a model's parameters, counting tied parameters once."""
    return sum(parameter.numel() for parameter in model.parameters())


def check_out(folder: Path, out: Path) -> None:
    """Raise a UserError unless a folder has a configuration and the output folder is free."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    check_free(out)


def check_free(out: Path) -> None:
    """Raise a UserError unless the output folder is free."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; give -o a new folder.")


def load(folder: Path) -> tuple[Any, Any]:
    """Load class and configuration of a folder's model without running code from the folder."""
    transformers = imported("transformers", "transformers")
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # custom configurations may raise anything
        raise UserError(f"transformers {transformers.__version__} cannot read {folder}: {_message(error)}") from error
    if not config.architectures:
        raise UserError(f"{folder}/config.json names no class under architectures; save the model again.")
    name = config.architectures[0]
    if (kind := getattr(transformers, name, None)) is None:
        raise UserError(
            f"{folder}/config.json names {name} under architectures, which transformers {transformers.__version__} "
            "does not have."
        )
    return kind, config


def _message(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs code from the folder, which growlab never runs"
    return first_line(error)


def _check_tokenizer(folder: Path, model: Any) -> None:
    if not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        return
    transformers = imported("transformers", "transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be read: {_message(error)}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, but the model embeds only {rows}; call "
            "resize_token_embeddings, or put the model's own tokenizer there."
        )


class Plan:
    """Mapping from the tensors of a saved model to those of a wider and deeper one; both models are skeletons."""

    def __init__(
        self, saved: Checkpoint, source: nn.Module, target: nn.Module, method: GrowthMethod, seed: int
    ) -> None:
        self._saved, self._source, self.target = saved, source, target
        inputs = inputs_of(source)
        self._probe = tuple(inputs.values())
        # A previous plan has left it in float64.
        set_precision(source, torch.float32)
        self._network, old = (FirstOutput(model, list(inputs)) for model in (target, source))
        self._deeper = Deeper(self._network, old)
        graph = layouts(self._network, self._probe, old, lambda path: self._deeper.source(f"{path}.")[:-1])
        named = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        tensors = {**dict(target.named_parameters()), **dict(target.named_buffers())}
        shapes = {
            f"{_PREFIX}{name}": tuple(named[origin].shape)
            for name in tensors
            if (origin := self._origin(name)) in named
        }
        if unknown := [name for name in graph.axes if name not in shapes]:
            raise UserError(
                f"{unknown[0].removeprefix(_PREFIX)} of a deeper {type(target).__name__} has no counterpart: the code "
                "alternates between several kinds of layers; leave --depth out."
            )
        full = {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}
        graph = with_unused(graph, shapes, full)
        widths = read_off(graph, shapes, full)
        self._widening = Widening(graph, self._old, widths, seed, method)
        self._state = target.state_dict(keep_vars=True)
        self._first = first_names(target)
        self._zeros: set[str] = set()

    def _origin(self, name: str) -> str:
        """Name of the saved tensor that a tensor of the target is computed from."""
        return self._deeper.source(f"{_PREFIX}{name}").removeprefix(_PREFIX)

    def _old(self, name: str, rows: Rows) -> Tensor:
        return self._saved(self._origin(name.removeprefix(_PREFIX)), rows)

    def exact_way(self) -> tuple[Way | None, float]:
        """Return the first way with equal outputs, or None, and the smallest relative change of the output."""
        network = FirstOutput(self._source, self._network.input_names)
        norms = {norm.name: self._deeper.source(f"{norm.name}.")[:-1] for norm in self._widening.graph.channel_norms}
        old = {name: name for name in first_names(self._source) if name in self._saved}
        state = self._source.state_dict(keep_vars=True)
        expected, writing = output_of(
            network,
            self._probe,
            old,
            lambda name: blocks_of(partial(self._saved, name), tuple(state[name].shape)),
            set(norms.values()),
        )
        writing = {name for name, origin in norms.items() if origin in writing}
        self._widening = replace(self._widening, writing=writing)
        if self._deeper.new:
            self._zeros = self._deeper.zeros(self._widening.graph, writing)
        errors = []
        for way in self._widening.ways(self._computed()):
            output = self._output(way)
            errors.append(relative_error(expected, output))
            factor = float((output * expected).sum() / output.square().sum())
            if errors[-1] > EXACT and relative_error(expected, output, factor) <= EXACT:
                # The code multiplies outputs by a number that it computes from its width.
                way = replace(way, factors=dict.fromkeys(self._last_tensors(), factor))
                errors.append(relative_error(expected, self._output(way)))
            if errors[-1] <= EXACT:
                return way, errors[-1]
        return None, min(errors)

    def _output(self, way: Way) -> Tensor:
        names = {name: first for name, first in self._first.items() if self._is_saved(first)}
        return output_of(self._network, self._probe, names, partial(self._blocks, way=way))[0]

    def _computed(self) -> set[float]:
        """Ratios (wider over saved) of numbers that the code computes from its width and stores in buffers."""
        old = dict(self._source.named_buffers())
        pairs = [(old[name], new) for name, new in self.target.named_buffers() if name in old and not new.dim()]
        return {float(new / own) for own, new in pairs if own.is_floating_point() and not torch.equal(own, new)}

    def _last_tensors(self) -> list[str]:
        graph = self._widening.graph
        layers = [layer for layer in graph.layers if layer.is_output]
        names = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
        # In front of a tied table, the gain of a normalisation consumes the channels.
        return names or [n for n, axes in graph.axes.items() if len(axes) == 1 and axes[0].role == "in"]

    def _is_saved(self, name: str) -> bool:
        """Return True if a tensor is computed from a saved one; others are set when the model is built."""
        source = self._origin(name)
        return source in self._saved and (
            self._state[name].is_floating_point() or isinstance(self._state[name], nn.Parameter)
        )

    def _blocks(self, name: str, way: Way) -> Iterator[Tensor]:
        key, graph = f"{_PREFIX}{name}", self._widening.graph
        if key in self._zeros:
            yield torch.zeros(self._state[name].shape, dtype=torch.float64) - graph.offsets.get(key, 0.0)
        elif key in graph.axes:
            yield from self._widening.blocks(key, way)
        else:
            yield from blocks_of(partial(self._old, key), tuple(self._state[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which to write a tensor: that of the source's files."""
        return self._saved.dtypes[self._origin(name)] if self._is_saved(name) else self._state[name].dtype

    def tensor(self, name: str, way: Way) -> Tensor:
        """Compute one tensor of the target."""
        if not self._is_saved(name):
            return self._state[name].detach().clone()
        tensor, start = torch.empty(self._state[name].shape, dtype=self.dtype(name)), 0
        for block in self._blocks(name, way):
            if not tensor.dim():
                return block.to(tensor)
            tensor[start : start + len(block)] = block
            start += len(block)
        return tensor

    def not_deeper(self, error: float) -> UserError:
        """Explain why the model cannot become deeper, after `exact_way` has returned None."""
        kind = type(self.target).__name__
        if not self._zeros:
            return UserError(
                f"growlab cannot find the layers that write to the stream of {kind}, which is its output: save a model "
                "with a head, or leave --depth out."
            )
        return UserError(
            f"a new layer of {kind} cannot begin as the identity (the output would change by {error:.0e}): it is "
            "post-norm, or the computation of a layer depends on its index; leave --depth out."
        )

    def inexact(self, error: float) -> UserError:
        """Explain why the model cannot become wider."""
        changes = f"{type(self.target).__name__} cannot be widened so: its output would change by {error:.0e}"
        if self._widening.whole:
            return UserError(f"{changes}, as its code computes numbers from its width; give --parts mlp.")
        return UserError(
            f"{changes}. For a fraction, only layers may write to its stream and only normalisations may read it (no "
            "positional convolution, normalised embedding, layer scale or sum in front of a normalisation), and its "
            "code may compute no numbers from its width; give a whole --width such as 2, or --parts mlp."
        )


def write_model(
    folder: Path,
    out: Path,
    model: nn.Module,
    config: Any,
    shard_bytes: int | None,
    make: Callable[[str], Tensor],
    dtype: Callable[[str], torch.dtype],
) -> None:
    """Write a model's tensors unit by unit, its configuration, and the other files of a folder.

    `make` maps a tensor's name to the tensor, and `dtype` to its dtype; a unit has the dtype of its first tensor.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = units(model)
    dtypes = {key: dtype(unit.names[0]) for unit in written for key in unit.shapes}
    made = (reverted(model, {name: make(name) for name in unit.names}) for unit in written)
    write_folder(out, [unit.shapes for unit in written], dtypes, made, shard_bytes)
    config.save_pretrained(out)
    copy_others(folder, out)


def write_receipt(
    path: Path, entries: dict[str, Any], packages: Sequence[str] = ("growlab", "torch", "transformers")
) -> dict[str, Any]:
    """Write and return a receipt with the versions of `packages`."""
    receipt = {**entries, "versions": {name: importlib.metadata.version(name) for name in packages}}
    write_json(path, receipt)
    return receipt


def report(out: Path, receipt: Mapping[str, Any], *more: str) -> None:
    """Print a summary of a receipt, and `more`."""
    parts = [
        f"{out}: {receipt.get('class', receipt['from'])} of {receipt['num_params']:,} parameters, from "
        f"{receipt['num_params_before']:,}"
    ]
    if "relative_error_float64" in receipt:
        parts.append(f"relative change of its output {receipt['relative_error_float64']:.0e} (float64)")
    print(in_columns("; ".join([*parts, *more])))
    for name, size in receipt.get("sizes", {}).items():
        print(f"  {name}: {size['before']} to {size['after']}")


def copy_others(folder: Path, out: Path) -> None:
    """Copy all files except configuration and weights, such as the tokenizer and generation settings."""
    for path in folder.iterdir():
        written = path.name in ("config.json", RECEIPT) or any(path.match(pattern) for pattern in _WEIGHTS)
        if path.is_file() and not written and not (out / path.name).exists():
            shutil.copy2(path, out / path.name)


class Deeper:
    """Map the layers of a deeper network to those of a shallower one, and find the tensors that start as zeros.

    Each old layer is followed by copies of it whose tensors that write to the residual stream are zero, so that they
    start as the identity. `new` has the paths of these new layers.
    """

    def __init__(self, network: nn.Module, old: nn.Module) -> None:
        self._origin: dict[str, str] = {}
        self.new: list[str] = []
        before = {path: module for path, module in old.named_modules() if isinstance(module, nn.ModuleList)}
        for path, layers in network.named_modules():
            if not isinstance(layers, nn.ModuleList) or len(layers) <= len(before.get(path, layers)):
                continue
            places = sources(len(before[path]), len(layers))
            for place, source in enumerate(places):
                self._origin[f"{path}.{place}"] = f"{path}.{source}"
                if place and places[place - 1] == source:
                    self.new.append(f"{path}.{place}")

    def source(self, name: str) -> str:
        """Return the name of the tensor in the shallower network that a tensor corresponds to or copies."""
        for match in re.finditer(r"\.\d+(?=\.)", name):
            path = name[: match.end()]
            if path in self._origin:
                return self._origin[path] + name[match.end() :]
        return name

    def zeros(self, graph: WidthGraph, writing: Collection[str]) -> set[str]:
        """Return the names of the new layers' tensors that start as zeros: those that write to a stream.

        Of normalisations, these are the biases of `writing`, whose outputs are added to a stream: their input is zero.
        """
        inside = {name for name in graph.axes if any(name.startswith(f"{path}.") for path in self.new)}
        made = {n: {g for axis in axes if axis.role == "out" for g in axis.groups} for n, axes in graph.axes.items()}
        # Streams: channels that are written both inside and outside of new layers.
        within, outside = (set().union(*(made[n] for n in names)) for names in (inside, made.keys() - inside))
        norms = {norm.name for norm in graph.channel_norms}

        def writes(name: str) -> bool:
            path, _, parameter = name.rpartition(".")
            if path in norms:
                return path in writing and parameter.endswith("bias")
            return bool(made[name] & within & outside)

        return set(filter(writes, inside))
