"""Averages of isotropic networks."""

from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from growlab.growth import GrowthState, grow, plant
from growlab.parts.isotropic import Isotropic, isotropic_mlp
from growlab.parts.isotropic.method import adaptable
from growlab.widths import tensors_of, trace
from tests.command_line import CommandLine
from tests.parts.combined import check_average_of_one_step
from tests.test_resume import BY_STEPS, ISOTROPIC


@pytest.mark.parametrize(
    "choices",
    [{}, {"correction": "batch", "least_squares": True}, {"columns": "random", "rotate": False}],
    ids=["default", "observed", "random"],
)
def test_an_average_grows_and_is_pruned_in_the_basis_of_its_network(choices: dict) -> None:
    """Weights of the average remain the average of weights, though bases are decided by what one network does."""
    method = Isotropic(mode="scheduled", target_width=8, **choices)
    probe = torch.randn(16, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    networks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        networks.append(isotropic_mlp((1, 4, 4), 5, width=6, depth=3).double())
    early, late = networks
    graph = trace(early, probe[:2], follow_norms=True)
    hidden = adaptable(graph)
    average = AveragedModel(early, multi_avg_fn=get_ema_multi_avg_fn(0.25), use_buffers=True)
    for network in networks:
        average.update_parameters(network)
    state = plant(late, graph, method, graph.full_widths, 0)
    for widths in ((8, 9, 7), (4, 9, 6), (5, 7, 3)):
        wanted = {**state.widths, **dict(zip(hidden, widths, strict=True))}
        leader, before = tensors_of(late, graph), state.as_dict()
        leading = grow(late, graph, method, state, wanted, 0, (probe,))
        for network in (early, average.module):
            own = GrowthState.from_dict(before)
            event = grow(network, graph, method, own, wanted, 0, (probe,), leader=leader, leading=leading)
            assert event.carry.bases.keys() == leading.carry.bases.keys() != set()
            for group, basis in leading.carry.bases.items():
                assert torch.equal(event.carry.bases[group], basis), group
        for name, weight in average.module.named_parameters():
            if weight.dim() == 2:
                expected = 0.25 * early.get_parameter(name) + 0.75 * late.get_parameter(name)
                torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [ISOTROPIC, pytest.param(BY_STEPS, marks=pytest.mark.slow)],
    ids=["isotropic", "isotropic_by_steps"],
)
def test_an_average_of_one_step_is_the_network(
    cli: CommandLine, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    check_average_of_one_step(cli, tmp_path, arguments)
