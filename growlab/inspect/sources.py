"""Create networks by name: growlab's, torchvision's, timm's, small ones of transformers, and any factory's."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from growlab.base.errors import UserError, how_to_install
from growlab.inspect.small_models import TYPES, small_model
from growlab.widths.inputs import inputs_of

_NUM_CLASSES = 1000
# In train mode the kernel of its auxiliary head is too large for 224 pixels.
_SIDES = {"inception_v3": 299}


def load(
    name: str, input_shape: Sequence[int] | None, num_classes: int = 10
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Create a network and example inputs from its name.

    Args:
        name: `growlab/NAME`, `torchvision/NAME`, `timm/NAME`, `transformers/MODEL_TYPE` (see `small_model`) or
            `package.module:factory`. A factory takes no arguments, or `image_shape` and `num_classes` as in
            `python -m growlab model=custom`; it returns a module, or (module, inputs).
        input_shape: shape of one sample.
        num_classes: number of classes, for growlab's networks and for factories that have this argument.

    Returns:
        The network and a tuple of its inputs.

    Raises:
        UserError: there is no such network, or its package is not installed.
    """
    source, slash, model = name.partition("/")
    shape = tuple(input_shape or (3, 224, 224))
    if source == "growlab" and slash:
        networks = importlib.import_module("growlab.lab.networks")
        shape = tuple(input_shape or (3, 32, 32))
        factory = getattr(networks, model, None)
        if factory is None:
            raise UserError(
                f"growlab has no network {model!r}; it has {', '.join(n for n in networks.__all__ if n.islower())}."
            )
        return factory(image_shape=shape, num_classes=num_classes), (torch.randn(2, *shape),)
    if source == "torchvision" and slash:
        shape = tuple(input_shape or (3, _SIDES.get(model, 224), _SIDES.get(model, 224)))
        return _of_torchvision(model), (torch.randn(2, *shape),)
    if source == "timm" and slash:
        try:
            timm = importlib.import_module("timm")
        except ImportError as error:
            raise UserError(f"timm is not installed: {how_to_install('timm')}.") from error
        try:
            network = timm.create_model(model, pretrained=False)
            if not 0 < network.num_classes <= _NUM_CLASSES:
                # A head of 21,841 classes is most of a small network, and no head's outputs ever grow. Without a head
                # (EVA-02, DINOv3) the output is the stream, and so no stream would; in training there is one.
                network.reset_classifier(_NUM_CLASSES)
        except RuntimeError as error:
            raise UserError(f"timm has no network {model!r}: {error}.") from error
        known = network.pretrained_cfg
        if input_shape is None and (known.get("fixed_input_size") or known.get("min_input_size")):
            shape = tuple(known["input_size"])
        return network, (torch.randn(2, *shape),)
    if source == "transformers" and slash:
        return small_model(model)
    module, colon, factory_name = name.partition(":")
    if not colon:
        raise UserError(
            f"{name!r} is no network's name; write growlab/NAME, torchvision/NAME, timm/NAME, "
            "transformers/MODEL_TYPE or package.module:factory."
        )
    # After installed packages: a `torch.py` here must not replace torch.
    sys.path.append("")
    try:
        made = _made(getattr(importlib.import_module(module), factory_name), input_shape, num_classes)
    except (Exception, SystemExit) as error:
        # The line of the user's code that has raised.
        file = getattr(sys.modules.get(module), "__file__", None)
        lines = [
            place.lineno for place in traceback.extract_tb(error.__traceback__) if place.filename == file
        ]
        where = f" ({file}, line {lines[-1]})" if lines else ""
        raise UserError(f"cannot make {name}: {type(error).__name__}: {error}{where}.") from error
    network, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(network, nn.Module):
        raise UserError(f"{name} returned no network but {type(network).__name__}; return a torch.nn.Module.")
    if inputs is None:
        if input_shape is None:
            raise UserError(
                f"{name} returned a module without inputs; add --input-shape C,H,W, or return (module, inputs)."
            )
        return network, (torch.randn(2, *input_shape),)
    return network, inputs_of(inputs, network)


def _of_torchvision(model: str) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    try:
        taken = inspect.signature(models.get_model_builder(model)).parameters
        # Networks for segmentation and detection would download a pretrained backbone.
        untrained = {"weights_backbone": None} if "weights_backbone" in taken else {}
        network: nn.Module = models.get_model(model, weights=None, **untrained)
    except ValueError as error:
        raise UserError(f"torchvision has no network {model!r}: {error}.") from error
    return network


def _made(factory: Any, input_shape: Sequence[int] | None, num_classes: int) -> Any:
    wanted = inspect.signature(factory).parameters
    given = {"image_shape": None if input_shape is None else tuple(input_shape), "num_classes": num_classes}
    return factory(**{name: given[name] for name in given if name in wanted})


def expand(names: Sequence[str]) -> list[str]:
    """Replace `torchvision/*` by its classification networks and `timm/*` by the smallest of each of its families.

    Of timm only networks for images of 3x224x224 are considered. `transformers/*` becomes the model types of `TYPES`.
    """
    expanded: list[str] = []
    for name in names:
        if name == "torchvision/*":
            models = importlib.import_module("torchvision.models")
            expanded += [f"torchvision/{model}" for model in models.list_models(module=models)]
        elif name == "timm/*":
            expanded += [f"timm/{model}" for model in _smallest_of_families()]
        elif name == "transformers/*":
            expanded += [f"transformers/{model}" for model in TYPES]
        else:
            expanded.append(name)
    return expanded


def _smallest_of_families() -> list[str]:
    timm = importlib.import_module("timm")
    chosen = []
    for family in timm.list_modules():
        sizes = {}
        for model in timm.list_models(module=family):
            settings = timm.get_pretrained_cfg(model)
            if settings is None or tuple(settings.input_size or ()) != (3, 224, 224):
                continue
            with torch.device("meta"):
                try:
                    sizes[model] = sum(p.numel() for p in timm.create_model(model).parameters())
                except (RuntimeError, NotImplementedError, ValueError, TypeError):
                    continue  # it needs numbers to be built: another of its family will do
        if sizes:
            chosen.append(min(sizes, key=sizes.__getitem__))
    return chosen
