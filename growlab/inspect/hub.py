"""Create networks by name: from growlab, torchvision, timm, transformers (small ones) or any factory."""

import contextlib
import importlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, imported
from growlab.inspect.small_models import TYPES, small_model
from growlab.widths.inputs import inputs_of

log = logging.getLogger(__name__)

# Keys under which training scripts save a network's state_dict.
_NESTED = ("state_dict", "model")
_NUM_CLASSES = 1000
# Image sizes other than 224. In train mode the auxiliary head needs larger images.
_SIDES = {"inception_v3": 299}


def torchvision_network(
    image_shape: Sequence[int], num_classes: int, name: str, pretrained: bool | str = False, weights: str | None = None
) -> nn.Module:
    """Create a classification network of torchvision with `num_classes` outputs.

    Args:
        image_shape: [3, H, W]; torchvision's networks take colour images.
        num_classes: number of logits.
        name: torchvision's name of the network, e.g. resnet50.
        pretrained: download weights: True for torchvision's default weights, or their name. A classifier for another
            number of classes is not loaded.
        weights: a file to load instead; see `read_weights`.
    """
    if image_shape[0] != 3:
        raise UserError(f"torchvision's networks take images with 3 channels, not {image_shape[0]}.")
    network: Any = _of_torchvision(name, num_classes=num_classes)
    if pretrained:
        choices = importlib.import_module("torchvision.models").get_model_weights(name)
        version = "DEFAULT" if pretrained is True else str(pretrained)
        if version not in choices.__members__:
            raise UserError(
                f"torchvision has no weights {version} of {name}; choose model.pretrained=true or one of "
                f"{', '.join(choices.__members__) or 'none'}."
            )
        try:
            state = choices[version].get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:
            raise _not_downloaded(name, error) from error
        fit_weights(network, state, num_classes, f"torchvision's {version} weights of {name}")
        if hasattr(network, "transform_input"):
            # GoogLeNet and Inception v3 were trained on images with another normalisation.
            network.transform_input = True
    return _with_weights(network, weights, num_classes)


def timm_network(
    image_shape: Sequence[int],
    num_classes: int,
    name: str,
    pretrained: bool = False,
    weights: str | None = None,
    **settings: Any,
) -> nn.Module:
    """Create a network of timm with `num_classes` outputs and the data's number of channels.

    Args:
        image_shape: [C, H, W].
        num_classes: number of logits.
        name: timm's name of the network, e.g. resnet50.
        pretrained: download weights. A classifier for another number of classes is not loaded, and timm adapts the
            first layer to other numbers of channels.
        weights: a file to load instead; see `read_weights`.
        settings: settings of the network, such as `img_size=32, patch_size=4` of a ViT.
    """
    network = _of_timm(name, pretrained=pretrained, num_classes=num_classes, in_chans=image_shape[0], **settings)
    return _with_weights(network, weights, num_classes)


def _of_torchvision(name: str, **settings: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    try:
        parameters = inspect.signature(models.get_model_builder(name)).parameters
        # Networks for segmentation and detection download a pretrained backbone by default.
        untrained = {"weights_backbone": None} if "weights_backbone" in parameters else {}
        network: nn.Module = models.get_model(name, weights=None, **untrained, **settings)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"torchvision makes no network {name!r}: {error}; {_nearest(name, models.list_models())}."
        ) from error
    return network


def _of_timm(name: str, pretrained: bool = False, **settings: Any) -> Any:
    timm = imported("timm", "timm")
    try:
        return timm.create_model(name, pretrained=pretrained, **settings)
    except (OSError, RuntimeError, ValueError) as error:
        if pretrained and "Unknown model" not in str(error):
            raise _not_downloaded(name, error) from error
        raise UserError(f"timm makes no network {name!r}: {error}; {_nearest(name, timm.list_models())}.") from error


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}" if near else "its list_models() names all"


def _with_weights(network: nn.Module, path: str | None, num_classes: int) -> nn.Module:
    if path is not None:
        what = f"model.weights={path}"
        fit_weights(network, read_weights(path, what), num_classes, what)
    return network


def read_weights(path: str, what: str) -> Mapping[str, Tensor]:
    """Read a state_dict from a file, see `read_saved` and `weights_in`; `what` names the file in messages."""
    return weights_in(read_saved(path, what), what)


def read_saved(path: str, what: str) -> Any:
    """Load the content of a file written by `torch.save`, or of a .safetensors file."""
    file = Path(path).expanduser()
    try:
        if file.suffix == ".safetensors":
            return importlib.import_module("safetensors.torch").load_file(file)
        with contextlib.suppress(RuntimeError):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        # Files in torch's oldest format cannot be memory-mapped.
        return torch.load(file, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise UserError(f"{file} needs the package safetensors; pip install it, or save with torch.save.") from error
    except Exception as error:  # damaged files may raise anything
        reason = getattr(error, "strerror", None) or "it is damaged, or has more than tensors, which could run code"
        raise UserError(f"cannot read {what} ({reason}); save a state_dict there.") from error


def weights_in(content: Any, what: str) -> Mapping[str, Tensor]:
    """Return the state_dict in the content of a file: the content, or its entry `state_dict` or `model`."""
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{what} contains no state_dict; save one with torch.save(network.state_dict()).")
    return content


def fit_weights(network: nn.Module, state: Mapping[str, Tensor], num_classes: int, what: str) -> None:
    """Load a state_dict; a classifier for another number of classes is not loaded and keeps its initial weights."""
    new = network.state_dict()
    missing, unknown = new.keys() - state.keys(), state.keys() - new.keys()
    shapes = {n: (t.shape, state[n].shape) for n, t in new.items() if n in state and t.shape != state[n].shape}
    # Its tensors have a row for each logit, and differ only in the number of rows.
    classifier = sorted(n for n, (a, b) in shapes.items() if a[:1] == (num_classes,) and a[1:] == b[1:])
    wrong = sorted(missing | unknown | (shapes.keys() - set(classifier)))
    if wrong:
        first = wrong[0]
        how = "lacks" if first in missing else "also has" if first in unknown else "has another shape of"
        more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
        raise UserError(f"{what} do not fit the network: {how} {first}{more}; give weights of the same network.")
    if classifier:
        log.info("%s: %s keep their initial weights, for %d classes", what, " and ".join(classifier), num_classes)
    # Not a plain dict, because some classes read the version in the state_dict's metadata.
    new.update((name, state[name]) for name in new.keys() - set(classifier))
    network.load_state_dict(new)


def _not_downloaded(name: str, error: Exception) -> UserError:
    reason = str(getattr(error, "reason", "") or error).strip().partition("\n")[0].rstrip(" .:")
    return UserError(
        f"could not download pretrained weights of {name} ({reason or type(error).__name__}); try again with a "
        "connection, give a state_dict's file by model.weights=FILE, or set model.pretrained=false."
    )


def _library_name(name: str) -> str:
    """Return LIBRARY/NAME of the library that has such a network, or of the most similar name; "" if all differ."""
    models = {"growlab": importlib.import_module("growlab.lab.networks").__all__}
    with contextlib.suppress(ImportError):
        models["torchvision"] = importlib.import_module("torchvision.models").list_models()
    with contextlib.suppress(ImportError):
        models["timm"] = importlib.import_module("timm").list_models()
    # torchvision takes precedence, as the best known.
    libraries = {model: library for library in reversed(("torchvision", *models)) for model in models.get(library, ())}
    near = [name] if name in libraries else get_close_matches(name, libraries, n=1, cutoff=0.8)
    return f"{libraries[near[0]]}/{near[0]}" if near else ""


def load(name: str, input_shape: Sequence[int] | None, num_classes: int = 10) -> tuple[nn.Module, tuple[Any, ...]]:
    """Create a network and example inputs from its name.

    Args:
        name: `growlab/NAME`, `torchvision/NAME`, `timm/NAME`, `transformers/MODEL_TYPE` (see `small_model`) or
            `package.module:factory`. A factory takes no arguments, or `image_shape` and `num_classes` as in
            `python -m growlab model=custom`; it returns a module, or (module, inputs).
        input_shape: shape of one sample.
        num_classes: number of classes, for growlab's networks and for factories with this argument.
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
        network = _of_timm(model)
        if not 0 < network.num_classes <= _NUM_CLASSES:
            # Outputs never grow. A head of 21,841 classes would be most of a small network, and without a head
            # (EVA-02, DINOv3) the stream would be the output.
            network.reset_classifier(_NUM_CLASSES)
        known = network.pretrained_cfg
        if input_shape is None and (known.get("fixed_input_size") or known.get("min_input_size")):
            shape = tuple(known["input_size"])
        return network, (torch.randn(2, *shape),)
    if source == "transformers" and slash:
        return small_model(model)
    module, colon, factory_name = name.partition(":")
    if not colon:
        near = f"; did you mean {offered}?" if (offered := _library_name(name)) else ""
        raise UserError(
            f"{name!r} is no network's name; write growlab/NAME, torchvision/NAME, timm/NAME, "
            f"transformers/MODEL_TYPE or package.module:factory{near or '.'}"
        )
    # After installed packages: a `torch.py` here must not shadow torch.
    sys.path.append("")
    try:
        result = _call_factory(getattr(importlib.import_module(module), factory_name), input_shape, num_classes)
    except (Exception, SystemExit) as error:
        # The line of the user's code that raised the error.
        file = getattr(sys.modules.get(module), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        where = f" ({file}, line {lines[-1]})" if lines else ""
        raise UserError(f"cannot make {name}: {type(error).__name__}: {error}{where}.") from error
    network, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(network, nn.Module):
        raise UserError(f"{name} returned no network but {type(network).__name__}; return a torch.nn.Module.")
    if inputs is None:
        if input_shape is None:
            raise UserError(
                f"{name} returned a module without inputs; add --input-shape C,H,W, or return (module, inputs)."
            )
        return network, (torch.randn(2, *input_shape),)
    return network, inputs_of(inputs, network)


def _call_factory(factory: Any, input_shape: Sequence[int] | None, num_classes: int) -> Any:
    parameters = inspect.signature(factory).parameters
    known = {"image_shape": None if input_shape is None else tuple(input_shape), "num_classes": num_classes}
    return factory(**{name: value for name, value in known.items() if name in parameters})


def expand(names: Sequence[str]) -> list[str]:
    """Replace `torchvision/*` by its classification networks and `timm/*` by the smallest network of each family.

    Of timm, only networks for images of 3x224x224 are considered. `transformers/*` becomes the model types in `TYPES`.
    """
    patterns: Mapping[str, Callable[[], Sequence[str]]] = {
        "torchvision/*": lambda: (models := importlib.import_module("torchvision.models")).list_models(module=models),
        "timm/*": _smallest_of_families,
        "transformers/*": lambda: TYPES,
    }
    lists = ([name] if name not in patterns else [name[:-1] + model for model in patterns[name]()] for name in names)
    return [name for each in lists for name in each]


def _smallest_of_families() -> list[str]:
    """Return the smallest network of each of timm's families."""
    timm = importlib.import_module("timm")
    smallest = []
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
                    continue  # it cannot be built without values
        if sizes:
            smallest.append(min(sizes, key=sizes.__getitem__))
    return smallest
