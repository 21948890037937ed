"""Networks of other libraries, with weights from a file or from the library's cache, without internet access."""

import logging
import urllib.error
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import torchvision
from torch import nn

from growlab.base.errors import UserError
from growlab.inspect.hub import timm_network, torchvision_network
from tests.command_line import CommandLine

IMAGE = (3, 64, 64)
# Networks with 1.2 and 0.5 million parameters.
MAKERS = {
    "torchvision": lambda num_classes=10, **kw: torchvision_network(IMAGE, num_classes, "squeezenet1_1", **kw),
    "timm": lambda num_classes=10, **kw: timm_network(IMAGE, num_classes, "mobilenetv3_small_050", **kw),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture(autouse=True)
def no_network(tmp_path, monkeypatch):
    """Use empty caches, and let downloads fail."""

    def refuse(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("torch.hub.urlopen", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def _same(network: nn.Module, state: dict) -> set[str]:
    """Names of equal tensors."""
    return {name for name, tensor in network.state_dict().items() if torch.equal(tensor, state[name])}


def _error(make, **kwargs) -> str:
    with pytest.raises(UserError) as raised:
        make(**kwargs)
    message = str(raised.value)
    assert "\n" not in message and message.endswith(".")
    return message


@pytest.mark.parametrize(
    ("library", "form"),
    [("torchvision", "plain"), ("timm", "state_dict"), ("torchvision", "safetensors"), ("timm", "model")],
)
def test_weights_from_a_file(library, tmp_path, form):
    make = MAKERS[library]
    state = make().state_dict()
    file = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pt")
    if form == "safetensors":
        from safetensors.torch import save_file

        save_file(state, file)
    else:
        torch.save(state if form == "plain" else {form: state, "epoch": 3}, file)
    assert _same(make(weights=str(file)), state) == set(state)


def test_a_classifier_for_other_classes_is_initialised(make, tmp_path, caplog):
    state = make(20).state_dict()
    torch.save(state, tmp_path / "weights.pt")
    with caplog.at_level(logging.INFO, "growlab.inspect.hub"):
        network = make(10, weights=str(tmp_path / "weights.pt"))
    other = {name for name, tensor in network.state_dict().items() if tensor.shape != state[name].shape}
    assert 1 <= len(other) <= 2 and all(name in caplog.text for name in other)
    assert len(network.state_dict()) == len(state)
    kept = {name: tensor for name, tensor in network.state_dict().items() if name not in other}
    assert all(torch.equal(tensor, state[name]) for name, tensor in kept.items())


def test_invalid_weights_are_refused(make, tmp_path):
    file = tmp_path / "weights.pt"
    assert "No such file" in _error(make, weights=str(file))
    file.write_bytes(b"torn")
    assert "it is damaged" in _error(make, weights=str(file))
    torch.save({"epoch": 3}, file)
    assert "contains no state_dict" in _error(make, weights=str(file))
    state = make().state_dict()
    first = next(iter(state))
    torch.save({name: tensor for name, tensor in state.items() if name != first}, file)
    assert f"lacks {first}" in _error(make, weights=str(file))
    torch.save(state | {"a.extra": torch.zeros(1)}, file)
    assert "also has a.extra" in _error(make, weights=str(file))
    torch.save(state | {first: torch.zeros(1, 2, 3)}, file)
    assert f"another shape of {first}" in _error(make, weights=str(file))


def test_torchvisions_weights_come_from_its_cache(tmp_path):
    weights = torchvision.models.get_model_weights("squeezenet1_1").DEFAULT
    state = torchvision.models.squeezenet1_1().state_dict()
    file = tmp_path / "torch" / "hub" / "checkpoints" / Path(weights.url).name
    file.parent.mkdir(parents=True)
    torch.save(state, file)
    for name in (True, "IMAGENET1K_V1"):
        assert _same(MAKERS["torchvision"](1000, pretrained=name), state) == set(state)
    network = MAKERS["torchvision"](10, pretrained=True)
    assert network.classifier[1].out_channels == 10
    classifier = {"classifier.1.weight", "classifier.1.bias"}
    assert all(torch.equal(network.state_dict()[name], state[name]) for name in set(state) - classifier)


@pytest.mark.filterwarnings("ignore")
def test_a_failed_download_is_one_line(make):
    message = _error(make, pretrained=True)
    assert "could not download pretrained weights of" in message and "model.weights=FILE" in message


def test_unknown_names():
    assert "IMAGENET1K_V1" in _error(MAKERS["torchvision"], pretrained="BEST")
    with pytest.raises(UserError, match="torchvision makes no network 'resnet5': Unknown model"):
        torchvision_network(IMAGE, 10, "resnet5")
    for pretrained in (False, True):
        with pytest.raises(UserError, match=r"'resnet5': Unknown model \(resnet5\); did you mean resnet"):
            timm_network(IMAGE, 10, "resnet5", pretrained)
    with pytest.raises(UserError, match="3 channels"):
        torchvision_network((1, 8, 8), 10, "squeezenet1_1")


def test_settings_are_passed_to_timm() -> None:
    settings = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "num_heads": 2}
    network = timm_network((1, 8, 8), 10, "vit_tiny_patch16_224", **settings)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10) and network.embed_dim == 32


def test_a_run_starts_from_weights_only_at_full_width(cli: CommandLine, tmp_path: Path) -> None:
    """A growing run would reinitialise its network, so it refuses weights."""
    state = timm_network((1, 8, 8), 10, "resnet10t").state_dict()
    torch.save(state, tmp_path / "weights.pt")
    command = ("model=timm", "model.name=resnet10t", "model.weights=weights.pt", "data.limit_train=64")
    command += ("data.limit_test=16", "schedule.total_epochs=1", "hydra.run.dir=run", "lr_adapt=none")
    cli.done(*command, "schedule.num_stages=1", "schedule.widths=[1]", "optimizer.lr=0", cwd=tmp_path)
    saved = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert all(torch.equal(saved[name], state[name]) for name in state if "running" not in name and "num" not in name)
    refused = cli(*command, "growth=ours", "schedule.epochs=[1,1]", "schedule.widths=[0.5,1]", cwd=tmp_path)
    assert refused.code == 2 and "growth=none" in refused.err and "model.weights=weights.pt" in refused.err
