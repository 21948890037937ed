"""Create networks by name: growlab's, torchvision's, timm's, small ones of transformers, and any factory's."""

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
# In train mode the kernel of its auxiliary head is too large for 224 pixels.
_SIDES = {"inception_v3": 299}


def torchvision_network(
    image_shape: Sequence[int], num_classes: int, name: str, pretrained: bool | str = False, weights: str | None = None
) -> nn.Module:
    """Create a classification network of torchvision with `num_classes` outputs.

    Args:
        image_shape: [3, H, W]; torchvision's networks take colour images.
        num_classes: number of logits.
        name: as torchvision lists it, e.g. resnet50.
        pretrained: download weights: True for torchvision's default ones, or their name. A classifier for another
            number of classes is not loaded.
        weights: a file to load instead; see `read_weights`.
    """
    if image_shape[0] != 3:
        raise UserError(f"torchvision's networks take images of 3 channels, these have {image_shape[0]}.")
    network: Any = _of_torchvision(name, num_classes=num_classes)
    if pretrained:
        choices = importlib.import_module("torchvision.models").get_model_weights(name)
        wanted = "DEFAULT" if pretrained is True else str(pretrained)
        if wanted not in choices.__members__:
            raise UserError(
                f"torchvision has no weights {wanted} of {name}; choose model.pretrained=true or one of "
                f"{', '.join(choices.__members__) or 'none'}."
            )
        try:
            state = choices[wanted].get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:
            raise _not_downloaded(name, error) from error
        fit_weights(network, state, num_classes, f"torchvision's {wanted} weights of {name}")
        if hasattr(network, "transform_input"):
            # The weights of the two Inceptions were trained on images of another normalisation.
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
        name: as timm lists it, e.g. resnet50.
        pretrained: download weights. A classifier for another number of classes is not loaded, and a first layer for
            other channels is adapted by timm.
        weights: a file to load instead; see `read_weights`.
        settings: of the network's own, such as `img_size=32, patch_size=4` of a ViT.
    """
    network = _of_timm(name, pretrained=pretrained, num_classes=num_classes, in_chans=image_shape[0], **settings)
    return _with_weights(network, weights, num_classes)


def _of_torchvision(name: str, **settings: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    try:
        taken = inspect.signature(models.get_model_builder(name)).parameters
        # Networks for segmentation and detection would download a pretrained backbone.
        untrained = {"weights_backbone": None} if "weights_backbone" in taken else {}
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
    """Read a state_dict from a file; arguments and errors as `read_saved` and `weights_in`."""
    return weights_in(read_saved(path, what), what)


def read_saved(path: str, what: str) -> Any:
    """Load the content of a file that `torch.save` wrote, or of one with the ending .safetensors."""
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
    except Exception as error:  # what damaged files raise is not one family
        reason = getattr(error, "strerror", None) or "it is damaged, or has more than tensors, which could run code"
        raise UserError(f"cannot read {what} ({reason}); save a state_dict there.") from error


def weights_in(content: Any, what: str) -> Mapping[str, Tensor]:
    """Return the state_dict in the content of a file: the content itself, or its entry `state_dict` or `model`."""
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{what} contains no state_dict; save one with torch.save(network.state_dict()).")
    return content


def fit_weights(network: nn.Module, state: Mapping[str, Tensor], num_classes: int, what: str) -> None:
    """Load a state_dict; a classifier for another number of classes is not loaded and keeps its initial weights."""
    own = network.state_dict()
    missing, unknown = own.keys() - state.keys(), state.keys() - own.keys()
    other = sorted(name for name in own.keys() & state.keys() if own[name].shape != state[name].shape)
    # A layer with a row for each logit, which differs only in the number of rows.
    shapes = {name: (own[name].shape, state[name].shape) for name in other}
    classifier = [n for n, (a, b) in shapes.items() if a[:1] == (num_classes,) and a[1:] == b[1:]]
    wrong = sorted(missing | unknown | (set(other) - set(classifier)))
    if wrong:
        first = wrong[0]
        how = "lacks" if first in missing else "also has" if first in unknown else "has another shape of"
        more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
        raise UserError(f"{what} do not fit the network: {how} {first}{more}; give weights of the same network.")
    if classifier:
        log.info("%s: %s keep their initial weights, for %d classes", what, " and ".join(classifier), num_classes)
    # Not a plain dictionary: some classes read the version in their state_dict's metadata.
    own.update((name, state[name]) for name in own.keys() - set(classifier))
    network.load_state_dict(own)


def _not_downloaded(name: str, error: Exception) -> UserError:
    reason = str(getattr(error, "reason", "") or error).strip().partition("\n")[0].rstrip(" .:")
    return UserError(
        f"could not download pretrained weights of {name} ({reason or type(error).__name__}); with a network try "
        "again, else give a state_dict's file with model.weights=FILE, or set model.pretrained=false."
    )


def _library_name(name: str) -> str:
    """The name with the library in front that has such a network, else the nearest one; "" if none is near."""
    found = {"growlab": importlib.import_module("growlab.lab.networks").__all__}
    with contextlib.suppress(ImportError):
        found["torchvision"] = importlib.import_module("torchvision.models").list_models()
    with contextlib.suppress(ImportError):
        found["timm"] = importlib.import_module("timm").list_models()
    # Those of torchvision are the best known.
    known = {model: library for library in reversed(("torchvision", *found)) for model in found.get(library, ())}
    near = [name] if name in known else get_close_matches(name, known, n=1, cutoff=0.8)
    return f"{known[near[0]]}/{near[0]}" if near else ""


def load(name: str, input_shape: Sequence[int] | None, num_classes: int = 10) -> tuple[nn.Module, tuple[Any, ...]]:
    """Create a network and example inputs from its name.

    Args:
        name: `growlab/NAME`, `torchvision/NAME`, `timm/NAME`, `transformers/MODEL_TYPE` (see `small_model`) or
            `package.module:factory`. A factory takes no arguments, or `image_shape` and `num_classes` as in
            `python -m growlab model=custom`; it returns a module, or (module, inputs).
        input_shape: shape of one sample.
        num_classes: number of classes, for growlab's networks and for factories that have this argument.
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
            # A head of 21,841 classes is most of a small network, and no head's outputs ever grow. Without a head
            # (EVA-02, DINOv3) the output is the stream, and so no stream would; in training there is one.
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
    # After installed packages: a `torch.py` here must not replace torch.
    sys.path.append("")
    try:
        made = _made(getattr(importlib.import_module(module), factory_name), input_shape, num_classes)
    except (Exception, SystemExit) as error:
        # The line of the user's code that has raised.
        file = getattr(sys.modules.get(module), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
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


def _made(factory: Any, input_shape: Sequence[int] | None, num_classes: int) -> Any:
    wanted = inspect.signature(factory).parameters
    given = {"image_shape": None if input_shape is None else tuple(input_shape), "num_classes": num_classes}
    return factory(**{name: given[name] for name in given if name in wanted})


def expand(names: Sequence[str]) -> list[str]:
    """Replace `torchvision/*` by its classification networks and `timm/*` by the smallest of each of its families.

    Of timm only networks for images of 3x224x224 are considered. `transformers/*` becomes the model types of `TYPES`.
    """
    listed: Mapping[str, Callable[[], Sequence[str]]] = {
        "torchvision/*": lambda: (models := importlib.import_module("torchvision.models")).list_models(module=models),
        "timm/*": _smallest_of_families,
        "transformers/*": lambda: TYPES,
    }
    found = ([name] if name not in listed else [name[:-1] + model for model in listed[name]()] for name in names)
    return [name for each in found for name in each]


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
