"""Growing a compiled network: it stays compiled, and its weights keep their names."""

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch

from growlab.frontends.lightning import Growth
from growlab.grower import Grower
from growlab.growth import PairGrowth, make_schedule
from growlab.lab.data import ImageData
from growlab.lab.networks.mlp import MLP
from growlab.lab.training import Task

NUM_STAGES, LIMIT = 4, 2  # more widths than the compiler compiles


class _Counter:
    """A compiler backend that runs the graph as it is and counts."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return run


def small_network() -> MLP:
    return MLP(64, [2 * NUM_STAGES, 2 * NUM_STAGES], 10, batch_norm=True)


def train(backend: _Counter | None) -> dict[str, torch.Tensor]:
    """Train through all widths and return the weights."""
    data = ImageData("digits", limit_train=40, limit_test=20, batch_size=16, validation="none")
    data.setup()
    lightning.seed_everything(0, verbose=False)
    network = small_network()
    widths = [(stage + 1) / NUM_STAGES for stage in range(NUM_STAGES - 1)]
    schedule = make_schedule(NUM_STAGES, 16, epochs=[1] * NUM_STAGES, widths=[*widths, 1])
    method = PairGrowth(noise_std=0.001)
    grower = Grower(network, data.probe_batch(16), method=method, trigger=schedule)
    if backend is not None:
        network.compile(backend=backend)
        grower.reattach_hooks()
    task = Task(grower, schedule, [3] * NUM_STAGES, lambda p: torch.optim.SGD(p, 0.05, 0.9))
    trainer = lightning.Trainer(
        max_epochs=NUM_STAGES,
        callbacks=[Growth(grower=grower)],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data)
    assert len(task.events) == NUM_STAGES - 1
    return network.state_dict()


@pytest.mark.slow  # test_grower.py compiles every width
def test_every_width_is_compiled_and_nothing_else_changes() -> None:
    """Without the callback's reset the third width would fall back to eager."""
    torch.compiler.reset()
    counter = _Counter()
    with torch._dynamo.config.patch(recompile_limit=LIMIT, fail_on_recompile_limit_hit=True):
        compiled = train(counter)
    # Three batches in each epoch, none of them run eagerly.
    assert counter.calls == NUM_STAGES * 3
    assert counter.graphs >= NUM_STAGES
    eager = train(None)
    assert list(compiled) == list(eager) == list(small_network().state_dict())
    assert all(torch.equal(value, eager[name]) for name, value in compiled.items())
