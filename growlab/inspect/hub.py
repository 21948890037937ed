"""Create networks of torchvision and timm for the shape and classes of the data, with pretrained weights on request."""

import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, how_to_install

log = logging.getLogger(__name__)

# Keys under which training scripts save a network's state_dict.
_NESTED = ("state_dict", "model")


def torchvision_network(
    image_shape: Sequence[int],
    num_classes: int,
    name: str,
    pretrained: bool | str = False,
    weights: str | None = None,
) -> nn.Module:
    """Create a classification network of torchvision with `num_classes` outputs.

    Args:
        image_shape: [3, H, W]; torchvision's networks take colour images.
        num_classes: number of logits.
        name: as torchvision lists it, e.g. resnet50.
        pretrained: download weights: True for torchvision's default ones, or their name. A classifier for another
            number of classes is not loaded.
        weights: a file to load instead; see `load_weights`.

    Raises:
        UserError: there is no such network or no such weights, or the images are not in colour.
    """
    from torchvision import models

    if image_shape[0] != 3:
        raise UserError(f"torchvision's networks take images of 3 channels, these have {image_shape[0]}.")
    _check_one(pretrained, weights)
    try:
        network = models.get_model(name, weights=None, num_classes=num_classes)
        choices = models.get_model_weights(name)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"torchvision makes no network {name!r}: {error}; see torchvision.models.list_models()."
        ) from error
    if pretrained:
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
    elif weights is not None:
        load_weights(network, weights, num_classes)
    return network


def timm_network(
    image_shape: Sequence[int],
    num_classes: int,
    name: str,
    pretrained: bool = False,
    weights: str | None = None,
) -> nn.Module:
    """Create a network of timm with `num_classes` outputs and the data's number of channels.

    Args:
        image_shape: [C, H, W].
        num_classes: number of logits.
        name: as timm lists it, e.g. resnet50.
        pretrained: download weights. A classifier for another number of classes is not loaded, and a first layer for
            other channels is adapted by timm.
        weights: a file to load instead; see `load_weights`.

    Raises:
        UserError: timm is not installed, or has no such network or no such weights.
    """
    try:
        import timm
    except ImportError as error:
        raise UserError(f"timm is not installed: {how_to_install('timm')}.") from error
    _check_one(pretrained, weights)
    try:
        network = timm.create_model(
            name, pretrained=pretrained, num_classes=num_classes, in_chans=image_shape[0]
        )
    except (OSError, RuntimeError, ValueError) as error:
        if pretrained and "Unknown model" not in str(error):
            raise _not_downloaded(name, error) from error
        raise UserError(f"timm makes no network {name!r}: {error}; see timm.list_models().") from error
    if weights is not None:
        load_weights(network, weights, num_classes)
    return network


def load_weights(network: nn.Module, path: str, num_classes: int) -> None:
    """Load a full-width network's state_dict from a file, such as a run's `model.pt`.

    A classifier for another number of classes is not loaded and keeps its initial weights.

    Args:
        network: loaded in place.
        path: file written by `torch.save` (a state_dict, or a dictionary with one as `state_dict` or `model`), or
            one with the ending .safetensors.
        num_classes: number of logits of the network.

    Raises:
        UserError: the file cannot be read, or does not fit the network.
    """
    what = f"model.weights={path}"
    fit_weights(network, read_weights(path, what), num_classes, what)


def read_weights(path: str, what: str) -> Mapping[str, Tensor]:
    """Read a state_dict from a file that `torch.save` wrote, or from one with the ending .safetensors.

    Args:
        path: path of the file.
        what: name of the file in error messages.

    Raises:
        UserError: the file cannot be read, or contains no state_dict.
    """
    return weights_in(read_saved(path, what), what)


def read_saved(path: str, what: str) -> Any:
    """Load the content of a file that `torch.save` wrote or of a .safetensors file; arguments as `read_weights`.

    Raises:
        UserError: the file cannot be read.
    """
    file = Path(path).expanduser()
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise UserError(
            f"{file} needs the package safetensors; pip install it, or save with torch.save."
        ) from error
    except Exception as error:  # what damaged files raise is not one family
        reason = getattr(error, "strerror", None) or "it holds no weights that torch.load takes"
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is damaged, or holds objects other than tensors, which growlab does not load"
        raise UserError(f"cannot read {what} ({reason}); give the file of a state_dict.") from error
    return content


def weights_in(content: Any, what: str) -> Mapping[str, Tensor]:
    """Return the state_dict in the content of a file: the content itself, or its entry `state_dict` or `model`.

    Raises:
        UserError: it contains no state_dict.
    """
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{what} holds no state_dict; save one with torch.save(network.state_dict()).")
    return content


def fit_weights(network: nn.Module, state: Mapping[str, Tensor], num_classes: int, what: str) -> None:
    """Load a state_dict; a classifier for another number of classes is not loaded and keeps its initial weights.

    Args:
        network: loaded in place.
        state: tensors by name.
        num_classes: number of logits of the network.
        what: name of the weights in error messages.

    Raises:
        UserError: they do not fit the network.
    """
    own = network.state_dict()
    missing, unknown = own.keys() - state.keys(), state.keys() - own.keys()
    other = sorted(name for name in own.keys() & state.keys() if own[name].shape != state[name].shape)
    # A layer with a row for each logit, which differs only in the number of rows.
    classifier = [
        name
        for name in other
        if own[name].shape[:1] == (num_classes,) and own[name].shape[1:] == state[name].shape[1:]
    ]
    wrong = sorted(missing | unknown | (set(other) - set(classifier)))
    if wrong:
        first = wrong[0]
        how = "lacks" if first in missing else "also has" if first in unknown else "has another shape of"
        more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
        raise UserError(
            f"{what} do not fit the network: {how} {first}{more}; give weights of the same network."
        )
    if classifier:
        log.info("%s: %s start anew, for %d classes", what, " and ".join(classifier), num_classes)
    # Not a plain dictionary: some classes read the version in their state_dict's metadata.
    own.update((name, state[name]) for name in own.keys() - set(classifier))
    network.load_state_dict(own)


def _check_one(pretrained: bool | str, weights: str | None) -> None:
    if pretrained and weights is not None:
        raise UserError(
            f"model.pretrained={pretrained} and model.weights={weights} exclude each other; keep one."
        )


def _not_downloaded(name: str, error: Exception) -> UserError:
    reason = str(getattr(error, "reason", "") or error).strip().partition("\n")[0].rstrip(" .:")
    return UserError(
        f"could not download pretrained weights of {name} ({reason or type(error).__name__}); with a network try "
        "again, else give a state_dict's file with model.weights=FILE, or set model.pretrained=false."
    )
