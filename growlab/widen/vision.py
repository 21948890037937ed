"""Widen a trained network of torchvision or timm by its name and state_dict, and save it in a folder."""

import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower.trained import warn_of_equal_copies
from growlab.growth.method import GrowthMethod
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.inspect.hub import fit_weights, read_weights, timm_network, torchvision_network
from growlab.widen.folder import EXACT, RECEIPT, check_free, num_params, write_receipt
from growlab.widen.weights import DEFAULT, NOISE_STD, Widening, method_of
from growlab.widths import UnsupportedOperation, WidthGraph, replace_tensors, resize, tensors_of, trace

SOURCES = {"torchvision": torchvision_network, "timm": timm_network}
#: File name of the state_dict in the output folder.
WEIGHTS = "model.pt"
_SHAPE = (3, 224, 224)
_NUM_CLASSES = 1000
# Number of classes for `fit_weights` that no classifier has, so that it never skips one.
_NO_NEW_CLASSES = 0


def widen_weights(
    name: str,
    weights: Path,
    out: Path,
    width: float,
    method: str = DEFAULT,
    seed: int = 0,
    image_shape: tuple[int, int, int] = _SHAPE,
    noise_std: float = NOISE_STD,
) -> dict[str, Any]:
    """Write a wider network with the same outputs as a trained one.

    All width groups become wider; a stream under layer, RMS or group normalisation by copies if its factor is whole.
    Fractional widths are rounded up.

    Args:
        name: `torchvision/NAME` or `timm/NAME`.
        weights: path of its state_dict.
        out: a new folder, which `load_widened` reads.
        width: factor on the width of every group of channels.
        method: a name in `METHODS`.
        seed: seed of all random draws.
        image_shape: [C, H, W] of the images on which the outputs are compared.
        noise_std: standard deviation of the noise that separates copies, see `HyperCloning`.

    Returns:
        The receipt.

    Raises:
        UserError: the weights are not of that network, or it cannot be widened exactly by this factor.
    """
    growth_method = method_of(method, noise_std)
    if width <= 1:
        raise UserError(f"--width {width:g} would not make the network wider; it must be above 1.")
    check_free(out)
    warn_of_equal_copies(growth_method)
    state = read_weights(str(weights), str(weights))
    network, num_classes = _network_for(name, image_shape, state)
    fit_weights(network, state, _NO_NEW_CLASSES, str(weights))
    graph, probe = _traced(name, network, image_shape)
    before = graph.full_widths
    factor = Fraction(width).limit_denominator(4096)
    after = {group: ceil(size * factor) for group, size in before.items()}
    num_params_before = num_params(network)
    dtype = next(network.parameters()).dtype
    error = _widen(name, network.double().eval(), graph, after, growth_method, seed, probe)
    network.to(dtype)
    receipt = {
        "from": name,
        "num_classes": num_classes,
        "image_shape": list(image_shape),
        "widths": {"before": before, "after": after},
        "width": width,
        "method": method,
        "noise_std": noise_std,
        "seed": seed,
        "num_params_before": num_params_before,
        "num_params": num_params(network),
        "relative_error_float64": error,
    }
    out.mkdir(parents=True, exist_ok=True)
    wider = network.state_dict()
    for key, tensor in wider.items():
        # In the precision of the given weights.
        if key in state and tensor.is_floating_point():
            wider[key] = tensor.to(state[key].dtype)
    torch.save(wider, out / WEIGHTS)
    return write_receipt(out / RECEIPT, receipt, ("growlab", "torch"))


def load_widened(folder: str | Path) -> nn.Module:
    """Load the network in a folder that `widen_weights` wrote: its library's class, with wider layers.

    Args:
        folder: folder with the state_dict and the receipt.

    Raises:
        UserError: it is not such a folder.
    """
    folder = Path(folder)
    try:
        receipt = json.loads((folder / RECEIPT).read_text(encoding="utf-8"))
        widths, shape = receipt["widths"], tuple(receipt["image_shape"])
        name, num_classes = receipt["from"], receipt["num_classes"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} contains no widened network of torchvision or timm: {RECEIPT} is missing or describes another "
            "model."
        ) from error
    network = _network(name, shape, num_classes)
    graph, _ = _traced(name, network, shape)
    if graph.full_widths != widths["before"]:
        raise UserError(
            f"{name} in {folder} was widened with another version of the library, which had other widths; install that "
            "version."
        )
    resize(network, graph, widths["before"], widths["after"])
    fit_weights(network, read_weights(str(folder / WEIGHTS), str(folder)), _NO_NEW_CLASSES, str(folder))
    return network


def is_named(name: str) -> bool:
    """Return True for the name of a network, LIBRARY/NAME, and not for a path."""
    return name.partition("/")[0] in SOURCES and "/" in name and not Path(name).exists()


def _network(name: str, image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    source, _, model = name.partition("/")
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        return SOURCES[source](image_shape, num_classes, model)


def _network_for(name: str, image_shape: tuple[int, ...], state: Mapping[str, Tensor]) -> tuple[nn.Module, int]:
    """Create the network with the weights' number of classes; return both."""
    network = _network(name, image_shape, _NUM_CLASSES)
    rows = {
        state[key].shape[0]
        for key, tensor in network.state_dict().items()
        if key in state and tensor.dim() and tensor.shape[0] == _NUM_CLASSES and tensor.dim() == state[key].dim()
    } - {_NUM_CLASSES}
    if len(rows) != 1:
        return network, _NUM_CLASSES
    (num_classes,) = rows
    return _network(name, image_shape, num_classes), num_classes


def _traced(name: str, network: nn.Module, image_shape: tuple[int, ...]) -> tuple[WidthGraph, tuple[Tensor, ...]]:
    probe = (torch.randn(2, *image_shape, generator=torch.Generator().manual_seed(0)).double(),)
    try:
        return trace(network, probe[0].to(next(network.parameters()))), probe
    except UnsupportedOperation as error:
        raise UserError(f"{name} cannot be widened: {error}") from error


def _widen(
    name: str,
    network: nn.Module,
    graph: WidthGraph,
    after: Mapping[str, int],
    method: GrowthMethod,
    seed: int,
    probe: tuple[Tensor, ...],
) -> float:
    """Widen in place by the first way that is exact; return the relative change of the output."""
    expected, old = evaluate(network, probe), tensors_of(network, graph)
    groups = {name: replace(group, full_width=after[name]) for name, group in graph.groups.items()}
    wide = Widening(replace(graph, groups=groups), lambda name, rows: old[name][rows], graph.full_widths, seed, method)
    errors = []
    for way in wide.ways():
        replace_tensors(network, graph, wide.tensors(way))
        errors.append(relative_error(expected, evaluate(network, probe)))
        if errors[-1] <= EXACT:
            return errors[-1]
    raise UserError(
        f"{name} cannot be widened so: its output would change by {min(errors):.0e}"
        + ("." if wide.whole else "; give a whole --width such as 2, which is exact where streams are normalised.")
    )
