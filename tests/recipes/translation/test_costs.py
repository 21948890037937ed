"""Cost of growing the Transformer on IWSLT'14, without training."""

import hydra
import pytest
import torch

from growlab.grower.cost import forward_flops, train_cost_percent
from growlab.growth import make_schedule
from growlab.lab.training.configuration import composed
from growlab.lab.training.plan import StageCost
from growlab.widths import trace
from tests.command_line import ROOT

EXPERIMENT = "papers/transformer_iwslt14"
NUM_TOKENS, LENGTH = 10_000, 25


@pytest.mark.slow
def test_costs_in_the_header_of_the_experiment() -> None:
    cfg = composed([f"experiment={EXPERIMENT}", "model.share_embeddings=all"])
    schedule = make_schedule(
        cfg.schedule.total_epochs,
        cfg.data.batch_tokens,
        cfg.schedule.num_stages,
        epochs=list(cfg.schedule.epochs),
        widths=list(cfg.schedule.widths),
    )
    network = hydra.utils.instantiate(
        cfg.model, num_source_tokens=NUM_TOKENS, num_target_tokens=NUM_TOKENS, same_tokens=True, padding=1
    )
    graph = trace(network, (torch.full((2, 5), 7), torch.full((2, 4), 7)))
    stages = schedule.widths(graph)
    assert [stage["source_in"] for stage in stages] == [64, 128, 256, 512]
    assert [stage["encoder.0.self_attn.q_proj"] for stage in stages] == [8, 16, 32, 64]
    network = network.to("meta")
    sentence = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    flops = [*map(StageCost(network, graph, (), (sentence, sentence)), stages)]
    full = forward_flops(network, (sentence, sentence))
    assert full == flops[-1]
    output = 2 * LENGTH * cfg.model.embedding_features * NUM_TOKENS
    grown = [count - output for count in flops]
    header = (ROOT / "conf" / "experiment" / f"{EXPERIMENT}.yaml").read_text()
    for counts in (flops, grown, [*flops[1:], flops[-1]]):
        percent = train_cost_percent(schedule.epochs, counts, counts[-1], schedule.total_epochs)
        assert f"{percent:.2f} %" in header, percent
    # The last one by hand, with four equal stages.
    assert percent == pytest.approx(100 * (flops[1] + flops[2] + 2 * flops[3]) / (4 * full))
