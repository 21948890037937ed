"""Continual regression: the batched computation equals single hypernetworks', and files of runs."""

import json
from pathlib import Path

import pytest
import torch

from growlab.parts.hypernets import emitted
from growlab.recipes.papers.studies import continual_regression as study
from tests.command_line import CommandLine
from tests.whole_runs import table


def embedding_of(network: torch.nn.Module) -> torch.nn.Parameter:
    return network.classifier.parametrizations.weight[0].features.embedding.values


def test_stacked_networks_compute_the_same_as_each_alone() -> None:
    networks = [study.network(name, seed) for name in ("hyperfan_in", "kaiming_out") for seed in (3, 4)]
    stack = study.Stack(networks)
    embeddings = torch.stack([embedding_of(network).detach() for network in networks])
    x = torch.randn(4, 7, 1)
    weights = stack.emit(embeddings)
    predicted = stack.predict(weights, x)
    for number, network in enumerate(networks):
        own = torch.cat([getattr(module, name).flatten() for module, name in emitted(network)])
        torch.testing.assert_close(weights[number], own.detach())
        torch.testing.assert_close(predicted[number], network(x[number]).detach())


def test_a_step_is_plain_sgd_on_the_hypernetwork() -> None:
    """The first task's steps, against torch.optim on the parametrised network itself."""
    settings = study.Settings(["hyperfan_in"], learning_rates=[1e-3, 1e-2], num_seeds=2, steps=3, measure_every=3)
    curves = study.train(settings, seed=5)
    x, y = study._samples((1, 2, 2), 5)
    drawn = torch.rand(3, 2, 2, generator=study.generator(5, 0, "embeddings"))
    for rate_index, rate in enumerate(settings.learning_rates):
        for number in range(2):
            network, source = study.network("hyperfan_in", 10 + number), study.generator(5, 0, "batches")
            with torch.no_grad():
                embedding_of(network).copy_((2 * drawn[0, number] - 1) * 3**0.5)
            optimizer = torch.optim.SGD(network.parameters(), lr=rate)
            own_x, own_y = x[0, number], y[0, number]
            for _ in range(3):
                chosen = torch.randint(100, (32,), generator=source)
                optimizer.zero_grad()
                (network(own_x[chosen]) - own_y[chosen]).square().mean().backward()
                optimizer.step()
            loss = (network(own_x) - own_y).square().mean()
            # The loss at the first step of the second task is of the weights after the first task.
            measured = curves.losses[1][0, 0, rate_index, number]
            torch.testing.assert_close(measured, loss.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_step_on_a_later_task_has_the_regulariser_before_or_after_the_step(lookahead: bool) -> None:
    """Compared with autograd on one hypernetwork, regularised towards the weights of an earlier embedding."""
    settings = study.Settings(["kaiming_out"], lookahead=lookahead, beta=0.3)
    whole, rate = study.network("kaiming_out", 3).double(), 0.05
    stack = study.Stack([whole])
    source = torch.Generator().manual_seed(0)
    embedding, old, x, y = (torch.randn(1, *shape, generator=source).double() for shape in ((2,), (2,), (5, 1), (5, 1)))
    target = stack.emit(old) + 0.1
    start, embedded = [tensor.clone() for tensor in stack.weights], embedding.clone()
    weights, moved = study._step(stack, embedding, (x, y), [(old, target)], torch.tensor([rate]).double(), settings)

    def loss(given: list[torch.Tensor], e: torch.Tensor) -> torch.Tensor:
        return (stack.predict(stack.emit(e, given), x) - y).square().mean()

    def regulariser(given: list[torch.Tensor]) -> torch.Tensor:
        return 0.3 * (stack.emit(old, given) - target).square().sum()

    own = [tensor.requires_grad_(True) for tensor in (*start, embedded)]
    of_task = torch.autograd.grad(loss(own[:-1], own[-1]), own)
    at = [(w - rate * g if lookahead else w).detach().requires_grad_(True) for w, g in zip(own, of_task, strict=True)]
    of_old = torch.autograd.grad(regulariser(at[:-1]), at[:-1])
    for tensor, w, g, h in zip(weights, start, of_task, of_old, strict=False):
        torch.testing.assert_close(tensor, (w - rate * (g + h)).detach())
    torch.testing.assert_close(moved, (embedded - rate * of_task[-1]).detach())


def test_the_regulariser_keeps_earlier_tasks() -> None:
    left = {}
    for beta in (0.0, 0.5):
        settings = study.Settings(["kaiming_tenth"], [1e-2], num_seeds=3, steps=150, beta=beta, measure_every=150)
        curves = study.train(settings, seed=0)
        assert curves.steps == [0, 150, 300, 450]
        left[beta] = float(curves.losses[-1][0].mean())
    assert left[0.5] < 0.5 * left[0.0]


def test_a_run_writes_losses_a_summary_and_a_figure(cli: CommandLine, tmp_path: Path) -> None:
    cli.done(
        *("experiment=papers/hyperfan_continual_regression", "experiment_function.steps=4"),
        "experiment_function.measure_every=2",
        *("experiment_function.num_seeds=2", "experiment_function.initialisations=[hyperfan_in,kaiming_in]"),
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    rows = table(tmp_path / "run" / "losses.csv")
    assert [int(row["step"]) for row in rows[:7]] == [0, 2, 4, 6, 8, 10, 12]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["initialisation"] for row in summary["rows"]] == ["hyperfan_in", "kaiming_in"]
    assert summary["rows"][0]["median_first_loss"] < summary["rows"][1]["median_first_loss"]
    assert (tmp_path / "run" / "losses.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["command"].startswith("python -m growlab")


def test_losses_by_seed_agree_with_the_means() -> None:
    settings = study.Settings(["hyperfan_in"], [1e-3], num_seeds=2, steps=4, measure_every=2)
    curves = study.train(settings, seed=0)
    (row,) = study.summarise(settings, curves)
    losses, means = curves.stacked[:, :, 0, 0], row["by_seed"]
    assert curves.steps == [0, 2, 4, 6, 8, 10, 12]
    assert means["first_loss"] == pytest.approx(losses[0, 0].tolist(), rel=1e-3)
    ends = torch.stack([losses[2, 0], losses[4, 1], losses[6, 2]]).mean(0)
    assert means["loss_when_learnt"] == pytest.approx(ends.tolist(), rel=1e-3)
    # The first loss of a task is before its training; the last loss of all is at the end of the last task.
    within = torch.stack([losses[1, 0], losses[3, 1], losses[5, 2], losses[6, 2]]).mean(0)
    assert means["loss_while_learnt"] == pytest.approx(within.tolist(), rel=1e-3)
    assert sum(means["final_loss"]) / 2 == pytest.approx(row["final_loss"], rel=1e-3)


def test_the_figure_shows_four_initialisations_that_trained() -> None:
    losses = {"hyperfan_in": 0.3, "kaiming_in": None, "xavier_in": 0.2, "xavier_out": 0.1, "kaiming_out": 0.5}
    rows = [{"initialisation": name, "loss_when_learnt": [loss] * 3} for name, loss in losses.items()]
    rows.append({"initialisation": "last", "loss_when_learnt": [0.4] * 3})
    assert study.sorted_out(rows) == (
        ["hyperfan_in", "kaiming_out", "xavier_out", "xavier_in"],
        ["last"],
        ["kaiming_in"],
    )


def test_divergence_at_every_rate_is_reported(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli.done(
        *("experiment=papers/hyperfan_continual_regression", "experiment_function.steps=30"),
        "experiment_function.measure_every=30",
        *("experiment_function.num_seeds=2", "experiment_function.initialisations=[kaiming_in]"),
        "experiment_function.learning_rates=[10,5]",
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert "kaiming_in: diverged at every rate" in outcome.out
    (row,) = json.loads((tmp_path / "run" / "summary.json").read_text())["rows"]
    assert row["learning_rate"] == 5 and row["rates_that_diverged"] == [10, 5]
    assert row["loss_when_learnt"] == [None] * 3 and row["first_loss"] > 10
    assert (tmp_path / "run" / "losses.png").is_file()


@pytest.mark.parametrize("task", range(3))
def test_samples_lie_on_the_tasks_functions(task: int) -> None:
    x, y = study._samples((1, 1, 2), 0)
    (low, high), function = study.TASKS[task]
    assert low <= x[task].min() and x[task].max() <= high
    assert float((y[task] - function(x[task])).std()) == pytest.approx(0.05, rel=0.3)
