"""Networks of other libraries as they are examined, and the matrix's row of one."""

import importlib

import pytest
import torch

from growlab.base.errors import UserError
from growlab.inspect import examine, expand, load
from growlab.inspect.small_models import TYPES, small_model
from growlab.widths import trace

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["t5", "vit", "wav2vec2"])
def test_a_small_network_puts_out_one_tensor(name: str) -> None:
    network, inputs = load(f"transformers/{name}", None)
    assert sum(p.numel() for p in network.parameters()) < 250_000
    with torch.no_grad():
        output = network(*inputs)
    assert isinstance(output, torch.Tensor)
    assert len(output) == 2


def test_an_unknown_type_raises_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="no model type 'llamma'; nearest are llama"):
        small_model("llamma")


def test_the_matrix_has_many_types() -> None:
    assert len(expand(["transformers/*"])) == len(set(TYPES)) >= 40


@pytest.mark.parametrize(
    ("name", "method", "share"),
    [
        ("qwen3", "pairs", 0.99),
        ("llama", "ours", 0.99),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", "ours", 0.99), ("bert", "ours", 0.95))),
    ],
)
def test_a_model_of_text_grows_whole_and_exactly(name: str, method: str, share: float) -> None:
    report = examine(f"transformers/{name}", methods=(method,))
    assert report.grows
    assert report.growing_share >= share
    assert max(report.parity[method].values()) <= 1e-10


@pytest.mark.parametrize("name, reason", [("autoformer", "prediction_length")])
def test_a_type_that_cannot_be_made_small_raises_an_error(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"no small sizes for the model type '{name}'.*{reason}.*write a factory"):
        small_model(name)


def test_layers_that_the_example_does_not_run_have_that_reason() -> None:
    graph = trace(*small_model("blenderbot-small"))
    path = "network.model.decoder.layers.0.encoder_attn.k_proj"
    assert graph.fixed[path] == f"{path}.weight is not used in the forward on this example"


@pytest.mark.parametrize(
    "name", ["flaubert", *(pytest.param(one, marks=pytest.mark.slow) for one in ("big_bird", "dinov3_vit"))]
)
def test_types_whose_code_is_odd_are_traced(name: str) -> None:
    """Assertions on numbers, modules replaced by forwards, tensors without an entry."""
    if name not in importlib.import_module("transformers.models.auto").CONFIG_MAPPING:
        pytest.skip("this release of transformers does not know it")
    network, inputs = small_model(name)
    graph = trace(network, inputs)
    sizes = {key: p.numel() for key, p in network.named_parameters()}
    assert sum(size for key, size in sizes.items() if graph.grows(key)) > 0.5 * sum(sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*("deepseek_v3", "clip", "llama4_text", "mamba", "mamba2", "lfm2_moe", "segformer")])
def test_recent_types_grow_for_the_most_part(name: str) -> None:
    """Experts in one parameter, latent attention, state spaces, two towers, sizes for each of several stages."""
    if name not in importlib.import_module("transformers.models.auto").CONFIG_MAPPING:
        pytest.skip("this release of transformers does not know it")
    report = examine(f"transformers/{name}", methods=("ours",), parts=False)
    assert report.full_params < 500_000
    assert report.grows
    # A stage of one head keeps its stream, and CLIP its table of positions.
    assert report.growing_share >= {"clip": 0.75, "segformer": 0.6}.get(name, 0.95)


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("eva02_tiny_patch14_224", 1000),  # built without a classifier
        ("vit_tiny_patch16_224.augreg_in21k", 1000),  # of 21,843 classes
        ("convnext_atto", 1000),
    ],
)
def test_networks_of_timm_have_a_classifier_of_no_more_than_a_thousand_classes(name: str, classes: int) -> None:
    pytest.importorskip("timm")
    network, (images,) = load(f"timm/{name}", None)
    assert network.num_classes == classes and len(images) == 2
    assert network.get_classifier().out_features == classes


def test_networks_of_segmentation_load_no_trained_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("it loads weights")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", loaded)
    network, (images,) = load("torchvision/lraspp_mobilenet_v3_large", (3, 64, 64))
    assert network.eval()(images)["out"].shape == (2, 21, 64, 64)
