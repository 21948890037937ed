"""Networks of torchvision and timm, made as the experiment's data asks for."""

from collections.abc import Sequence

from torch import nn

from growlab.errors import UserError


def torchvision_network(
    image_shape: Sequence[int], num_classes: int, name: str, weights: str | None = None
) -> nn.Module:
    """A classification network of torchvision with `num_classes` outputs.

    Args:
        image_shape: [3, H, W]; torchvision's networks take colour images.
        num_classes: number of logits. Pretrained weights keep their own classifier, so it must fit them.
        name: as torchvision lists it, e.g. resnet50.
        weights: name of pretrained weights, e.g. DEFAULT, or None.

    Raises:
        UserError: there is no such network or no such weights, or the images are not in colour.
    """
    from torchvision import models

    if image_shape[0] != 3:
        raise UserError(f"torchvision's networks take images of 3 channels, this data has {image_shape[0]}.")
    options = {} if weights is not None else {"num_classes": num_classes}
    try:
        return models.get_model(name, weights=weights, **options)
    except (ValueError, KeyError) as error:
        raise UserError(f"model.name={name}: {error}; see torchvision.models.list_models().") from error


def timm_network(
    image_shape: Sequence[int], num_classes: int, name: str, pretrained: bool = False
) -> nn.Module:
    """A network of timm with `num_classes` outputs and the data's number of channels.

    Args:
        image_shape: [C, H, W].
        num_classes: number of logits.
        name: as timm lists it, e.g. resnet50.
        pretrained: load full-width weights.

    Raises:
        UserError: timm is not installed, or has no such network.
    """
    try:
        import timm
    except ImportError as error:
        raise UserError("model=timm needs timm; pip install 'growlab[timm]'.") from error
    try:
        return timm.create_model(
            name, pretrained=pretrained, num_classes=num_classes, in_chans=image_shape[0]
        )
    except RuntimeError as error:
        raise UserError(f"model.name={name}: {error}; see timm.list_models().") from error
