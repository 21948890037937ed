"""CUDA graphs, imitated on a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from growlab import At, Grower
from growlab.frontends.lightning import Growth
from growlab.lab.training import cuda_graphs
from growlab.parts import Resolution
from tests.lab.training.test_growth_callback import new_run, new_trainer, sgd


def imitated(captures: list[Any]) -> Any:
    """Replacement of `torch.cuda.make_graphed_callables` that asserts constant addresses and shapes."""

    def capture(called: torch.nn.Module, examples: tuple[Any, ...], **_: Any) -> None:
        run = called.forward
        for _ in range(3):
            run(*examples)
        addresses = [p.data_ptr() for p in called.parameters()]
        captures.append([x.shape for x in examples])

        def replay(*inputs: Any) -> Any:
            assert addresses == [p.data_ptr() for p in called.parameters()]
            assert [x.shape for x in inputs] == [x.shape for x in examples]
            return run(*inputs)

        called.forward = replay  # type: ignore[method-assign]

    return capture


def trained(*callbacks: Any) -> dict[str, torch.Tensor]:
    task, data = new_run(sgd)
    trainer = new_trainer(5, Growth(grower=task.grower), *callbacks)
    trainer.fit(task, datamodule=data)
    assert len(task.grower.events) == 2 and "forward" not in vars(task)
    return task.network.state_dict()


def test_training_is_equal_and_each_event_and_shape_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", imitated(captures))
    monkeypatch.setattr(cuda_graphs, "_on_one_device", lambda trainer: True)
    torch.testing.assert_close(trained(cuda_graphs.CudaGraphs()), trained(), rtol=0, atol=0)
    # 96 images in batches of 40, 32 and 24.
    assert [shapes[0][0] for shapes in captures] == [40, 16, 32, 24]


def test_steps_with_annealed_norms_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", imitated(captures))
    task, graphs = new_run(sgd)[0], cuda_graphs.CudaGraphs()
    for weights in ({"norm": [0.5]}, {}):
        monkeypatch.setattr(task.grower.state, "norm_weights", weights)
        graphs._forward(task, torch.randn(4, 1, 8, 8))
        assert len(captures) == (not weights)


def test_targets_are_cropped_like_the_inputs_of_a_replay_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(called: nn.Module, examples: tuple[Any, ...], **_: Any) -> None:
        output = called.forward(*examples)
        called.forward = lambda *inputs: output  # type: ignore[method-assign]

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    network = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    grower = Grower(network, tokens, trigger=At({0: 1.0, 3: 1.0}), parts=[Resolution([8, 16])], verbose=False)
    task: Any = SimpleNamespace(network=network, growth_state=grower.state, events=[], grower=grower)
    graphs = cuda_graphs.CudaGraphs()
    for length in (16, 12, 16, 6, 12):
        with torch.no_grad():
            network.eval()(tokens)
        output = graphs._forward((network.train(), task)[1], tokens[:, :length])
        assert output.shape[1] == grower.targets(tokens[:, :length]).shape[1] == min(length, 8)
