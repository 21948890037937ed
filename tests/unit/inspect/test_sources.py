"""Networks of other libraries as they are examined."""

import pytest

from growlab.inspect.hub import load

pytest.importorskip("timm")


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("eva02_tiny_patch14_224", 1000),  # built without a classifier
        ("vit_tiny_patch16_224.augreg_in21k", 1000),  # of 21,843 classes
        ("convnext_atto", 1000),
    ],
)
def test_networks_of_timm_have_a_classifier_of_no_more_than_a_thousand_classes(name: str, classes: int) -> None:
    network, (images,) = load(f"timm/{name}", None)
    assert network.num_classes == classes and len(images) == 2
    assert network.get_classifier().out_features == classes


def test_networks_of_segmentation_load_no_trained_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("it loads weights")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", loaded)
    network, (images,) = load("torchvision/lraspp_mobilenet_v3_large", (3, 64, 64))
    assert network.eval()(images)["out"].shape == (2, 21, 64, 64)
