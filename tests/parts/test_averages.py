"""An average of the weights that grows with the network."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from growlab.base.errors import UserError
from growlab.growth import GrowthState, Net2Net, PairGrowth, VarianceTransfer, grow, plant
from growlab.lab.networks import resnet20
from growlab.parts import Averages
from growlab.widths import tensors_of, trace
from tests.command_line import CommandLine
from tests.runs import MLP, Left, kept_run, resumed_from, table

STEPWISE = "checkpoint.every_n_steps=1"

METHODS = {
    "net2net": Net2Net(noise_std=1e-3),
    "pairs": PairGrowth(noise_std=1e-3),
    "ours": VarianceTransfer(noise_std=1e-3),
    "constraint": VarianceTransfer(rule="constraint"),
}


def network_at(seed: int, method, graph, widths) -> tuple[nn.Module, GrowthState]:
    torch.manual_seed(seed)
    network = resnet20((3, 8, 8), 4, width=8).double()
    state = plant(network, graph, method, widths, seed)
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            # Statistics too: as after some training, and different for each seed.
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    return network, state


@pytest.mark.parametrize("name", METHODS)
def test_the_grown_average_is_the_average_of_grown_networks(name: str) -> None:
    """In float64; that it computes what it did is checked by `grow` itself."""
    method = METHODS[name]
    torch.manual_seed(0)
    full = resnet20((3, 8, 8), 4, width=8).double()
    probe = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    graph = trace(full, probe[:2])
    narrow = {group: max(2, width // 2) for group, width in graph.full_widths.items()}
    wide = {group: max(4, 3 * width // 4) for group, width in graph.full_widths.items()}
    early, state = network_at(1, method, graph, narrow)
    late, _ = network_at(2, method, graph, narrow)

    average = AveragedModel(early, multi_avg_fn=get_ema_multi_avg_fn(0.25), use_buffers=True)
    for network in (early, late):
        average.update_parameters(network)
    leader = tensors_of(late, graph)
    for network in (early, average.module, late):
        before = GrowthState.from_dict(state.as_dict())
        grow(network, graph, method, before, wide, 0, (probe,), leader=leader)

    norms = {n for norm in graph.norms for n in (norm.weight, norm.running_var, norm.running_mean)}
    wanted = {
        key: 0.25 * tensor + 0.75 * late.state_dict()[key] for key, tensor in early.state_dict().items()
    }
    for key, tensor in average.module.state_dict().items():
        # Variances scale with the square of what means scale with, and weights of norms with what eps needs.
        if tensor.is_floating_point() and key not in norms:
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-9, atol=1e-12)


def test_scales_of_its_own_would_take_the_average_away_from_the_network() -> None:
    """The negative case: what a network's own weights decide differs from average to network."""
    method = METHODS["constraint"]
    torch.manual_seed(0)
    full = resnet20((3, 8, 8), 4, width=8).double()
    probe = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    graph = trace(full, probe[:2])
    narrow = {group: max(2, width // 2) for group, width in graph.full_widths.items()}
    late, state = network_at(2, method, graph, narrow)
    halved, _ = network_at(2, method, graph, narrow)
    with torch.no_grad():
        halved.conv1.weight.mul_(0.5)
    leader = tensors_of(late, graph)
    grown = []
    for follows in (None, leader):
        copy, _ = network_at(2, method, graph, narrow)
        copy.load_state_dict(halved.state_dict())
        own = GrowthState.from_dict(state.as_dict())
        grow(copy, graph, method, own, graph.full_widths, 0, (probe,), leader=follows)
        grown.append(copy.conv1.weight[: narrow_rows(late)])
    grow(late, graph, method, state, graph.full_widths, 0, (probe,))
    rows = late.conv1.weight[: len(grown[0])]
    torch.testing.assert_close(grown[1], 0.5 * rows)
    assert not torch.allclose(grown[0], 0.5 * rows)


def narrow_rows(network: nn.Module) -> int:
    return network.conv1.out_channels


def test_an_average_changes_nothing_else_and_goes_on_from_a_checkpoint(
    cli: CommandLine, uninterrupted, tmp_path: Path
) -> None:
    """With a decay of nearly nothing it is the network itself, through every growth event."""
    _, kept = kept_run(cli, tmp_path, command := (*MLP, "growth.noise_std=0", "ema.decay=1e-9", STEPWISE))
    outcome = resumed_from(cli, tmp_path, command, kept[8])
    assert outcome.code == 0, outcome.err
    left, plain = Left.by(tmp_path / "run"), uninterrupted(*MLP, "growth.noise_std=0")
    assert all(torch.equal(left.weights[key], tensor) for key, tensor in plain.weights.items())
    average = torch.load(tmp_path / "run" / "model_ema.pt", weights_only=True)
    assert average.keys() == plain.weights.keys()
    for key, tensor in plain.weights.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(average[key], tensor)
    for row in table(tmp_path / "run" / "metrics.csv"):
        assert float(row["val_ema_loss"]) == pytest.approx(float(row["val_loss"]), rel=1e-4)
    assert left.results["test_ema_loss"] == pytest.approx(left.results["test_loss"], rel=1e-4)
    assert all(event["ema_parity_error_eval"] < 1e-4 for event in left.growth["events"])


def test_an_average_resumes_bit_for_bit(cli: CommandLine, tmp_path: Path) -> None:
    whole, kept = kept_run(cli, tmp_path, command := (*MLP, "ema.decay=0.9", STEPWISE))
    assert resumed_from(cli, tmp_path, command, kept[8]).code == 0
    assert Left.by(tmp_path / "run").differences(whole) == []


def test_the_average_of_two_ranks_is_that_of_one(cli: CommandLine, tmp_path: Path) -> None:
    """With statistics over all images, in float64; ranks are compared, the average too, by the run itself."""
    arguments = (*MLP, "ema.decay=0.9", "trainer.precision=64-true")
    ranks = ("trainer=ddp_cpu", "trainer.sync_batchnorm=true")
    for name, more in (("one", ()), ("two", ranks)):
        outcome = cli(*arguments, *more, f"hydra.run.dir={name}", cwd=tmp_path)
        assert outcome.code == 0, outcome.err
    one, two = (torch.load(tmp_path / name / "model_ema.pt", weights_only=True) for name in ("one", "two"))
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=1e-7, atol=1e-9)
    weights = torch.load(tmp_path / "two" / "model.pt", weights_only=True)
    assert not any(torch.equal(two[key], tensor) for key, tensor in weights.items() if tensor.dim() > 1)


def test_an_average_that_drifts_on_one_rank_is_noticed(cli: CommandLine, tmp_path: Path) -> None:
    command = (*MLP, "ema.decay=0.9", "trainer=ddp_cpu", "hydra.run.dir=run")
    outcome = cli(*command, cwd=tmp_path, fault=("on_rank", 1, "drift", "average", 2))
    assert outcome.code == 2, outcome.err
    told = [
        line for line in outcome.err.splitlines() if line.startswith("error: ranks hold different values")
    ]
    assert len(told) == 1 and "classifier.weight of ema" in told[0]


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, 2.0, None, "x"])
def test_impossible_decays_are_refused(decay: Any) -> None:
    with pytest.raises(UserError, match=r"^decay must lie between 0 and 1"):
        Averages(decay)


@pytest.mark.parametrize(
    "callback", ["StochasticWeightAveraging, swa_lrs: 0.1", "EMAWeightAveraging"], ids=["swa", "ema"]
)
def test_averages_that_do_not_grow_are_refused(cli: CommandLine, tmp_path: Path, callback: str) -> None:
    given = f"+trainer.callbacks=[{{_target_: lightning.pytorch.callbacks.{callback}}}]"
    outcome = cli(*MLP, given, "hydra.run.dir=run", cwd=tmp_path)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome.err
    assert "does not grow with the network; use ema.decay=0.999 instead" in outcome.err


def test_buffers_that_are_not_saved_take_on_the_networks_precision_too() -> None:
    network, part = nn.Linear(2, 2), Averages(0.5)
    network.register_buffer("angles", torch.tensor([1.0, 2.0]), persistent=False)
    run = SimpleNamespace(network=network, averages={})
    part.begin(run)
    network.bfloat16()
    part.after_step(run)
    network.angles *= 3
    part.after_step(run)
    assert part.module.angles.dtype == part.module.weight.dtype == torch.bfloat16
    assert part.module.angles.tolist() == [2.0, 4.0]
