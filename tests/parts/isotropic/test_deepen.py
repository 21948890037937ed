"""A layer that is inserted changes nothing at first and learns then."""

from pathlib import Path

import pytest
import torch
from torch import nn

from growlab.parts.isotropic import IsotropicMLP, deepen, spectra
from growlab.widths import tensors_of, trace
from tests.command_line import CommandLine
from tests.runs import Left


def test_a_network_is_deepened_and_trained_on() -> None:
    torch.manual_seed(0)
    network, x, y = IsotropicMLP(6, [5, 4], 3), torch.randn(32, 6), torch.arange(32) % 3
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    before = network(x)
    new = deepen(network.hidden, 1)
    assert torch.allclose(network(x), before, rtol=1e-6)
    optimizer.add_param_group({"params": new})
    assert {id(p) for p in network.parameters()} == {
        id(p) for g in optimizer.param_groups for p in g["params"]
    }
    old = [p.detach().clone() for p in new]
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(old, new, strict=True)), (
        "a part of the new layer does not learn"
    )
    assert loss < nn.functional.cross_entropy(before, y)
    # The deeper network is an isotropic one, of three layers.
    graph = trace(network, x[:2], follow_norms=True)
    assert list(spectra(graph, tensors_of(network, graph), graph.full_widths)) == [
        "hidden.0",
        "hidden.2",
        "hidden.4",
    ]


DEEPER = (
    *(
        "data.limit_train=96",
        "data.limit_test=40",
        "data.batch_size=32",
        "model=isotropic_mlp",
        "model.depth=4",
    ),
    *("model.width=6", "growth=pairs", "lr_adapt=none", "optimizer=adamw", "optimizer.lr=0.01"),
    *("schedule.initial_width=1", "schedule.num_stages=4", "schedule.total_epochs=6"),
    *("depth.blocks=['hidden.2:4','hidden.4:6','hidden.6:8']", "depth.start=identity"),
)


def test_layers_come_in_from_the_command_line(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*DEEPER, "model.blend=true", "hydra.run.dir=run", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    run = Left.by(tmp_path / "run")
    inserted = [[one["block"] for one in event["inserted"]] for event in run.growth["events"]]
    assert inserted == [["hidden.2:4"], ["hidden.4:6"], ["hidden.6:8"]]
    for event in run.growth["events"]:
        assert all(one["parity_error_eval"] < 1e-6 for one in event["inserted"])
    # They learn from the identity on.
    blends = [float(tensor) for name, tensor in run.weights.items() if name.endswith(".blend")]
    assert len(blends) == 3 and all(0.5 < blend < 1.5 and blend != 1 for blend in blends)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "hidden.2:4 of blocks cannot be left out with start='identity'"),
        (("model.blend=true", "model.gain_channel=true"), "needs an activation without a gain channel"),
        (
            ("model.blend=true", "isotropic.mode=scaffold"),
            "leave IsotropicLayers out, or let no layer come in",
        ),
    ],
)
def test_layers_that_cannot_come_in_are_told(
    cli: CommandLine, tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    outcome = cli(*DEEPER, *more, cwd=tmp_path)
    assert outcome.code == 2 and told in outcome.err and "Traceback" not in outcome.err, outcome.err


@pytest.mark.parametrize("position", [-1, 4, 9])
def test_a_wrong_place_is_told(position: int) -> None:
    layers = (
        nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) if position == -1 else IsotropicMLP(6, [5, 4], 3).hidden
    )
    with pytest.raises(ValueError, match="no linear layer at or before position"):
        deepen(layers, position)
