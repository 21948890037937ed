"""Continual learning with hypernetworks on three regression tasks (Chang et al. 2020, Section 5.2, Figure 4).

The set-up is that of von Oswald et al. (2020). A hypernetwork with two hidden layers of 10 units emits all weights and
biases of a main network, which has two hidden layers of 10 ReLUs, from an embedding per task. While a task is learnt, a
regulariser preserves the hypernetwork's outputs for earlier tasks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor, nn

from growlab.base.files import write_json, write_text
from growlab.growth.method import generator
from growlab.lab.analysis import style
from growlab.lab.networks import MLP
from growlab.parts.hypernets import Hypernet, parametrise

# Intervals, functions and noise of the three tasks (von Oswald et al. 2020, their code's task set 1), 100 samples each.
TASKS = (((-4.0, -2.0), lambda x: x + 3), ((-1.0, 1.0), lambda x: 2 * x**2 - 1), ((2.0, 4.0), lambda x: (x - 3) ** 3))
_NOISE, _SAMPLES, _HIDDEN = 0.05, 100, 10


@dataclass(frozen=True)
class Settings:
    """Settings of the study; the defaults are the paper's.

    Attributes:
        initialisations: of the hypernetwork.
        learning_rates: each initialisation is shown at the best of these.
        steps: SGD steps per task.
        beta: weight of the regulariser.
        measure_every: steps between measurements.
        lookahead: take the regulariser's gradient after a step on the task alone, as in von Oswald et al., Eq. 2, with
            the step a constant; False: at the current weights.
    """

    initialisations: Sequence[str]
    learning_rates: Sequence[float] = (1e-2, 1e-3, 1e-4, 1e-5)
    num_seeds: int = 15
    steps: int = 6000
    batch_size: int = 32
    beta: float = 0.005
    measure_every: int = 100
    lookahead: bool = False


@dataclass
class Curves:
    """Measurements of every combination of initialisation, rate and seed.

    Attributes:
        steps: number of completed steps over all tasks at each measurement, [M], from 0.
        losses: mean squared error on each task's training samples, [M, T, initialisation, rate, seed].
    """

    steps: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    @property
    def stacked(self) -> Tensor:
        """All losses as one tensor."""
        return torch.stack(self.losses)


def continual_regression(run_dir: Path, seed: int = 0, **settings: Any) -> None:
    """Train all combinations at once and write `losses.csv`, `summary.json` and `losses.png` to the run's folder."""
    study = Settings(**settings)
    curves = train(study, seed)
    rows = summarise(study, curves)
    write_text(run_dir / "losses.csv", _table(study, curves, rows))
    write_json(run_dir / "summary.json", {"settings": vars(study), "seed": seed, "rows": rows})
    draw(run_dir)
    for row in rows:
        ends = ", ".join("-" if value is None else f"{value:.3g}" for value in row["loss_when_learnt"])
        print(f"{label(row):45s} first loss {row['first_loss']:8.3g}; tasks when learnt {ends}")


class Stack:
    """Many hypernetworks trained together with batched matrix products.

    Shape suffixes: E networks, P emitted numbers, L size of an embedding, S samples, T tasks.

    Args:
        networks: main networks of equal shapes, each with its hypernetwork from `parametrise` with sharing="network".
    """

    def __init__(self, networks: Sequence[MLP]) -> None:
        self.weights: list[Tensor] = []
        hidden = [_layers(network)[0].parametrizations.weight[0].features.hidden for network in networks]
        for layer in range(0, len(hidden[0]), 2):
            for name in ("weight", "bias"):
                self.weights.append(torch.stack([getattr(h[layer], name).detach() for h in hidden]))
        self.shapes = [part.shape for layer in _layers(networks[0]) for part in (layer.weight, layer.bias)]
        outputs = [[p for layer in _layers(main) for p in layer.parametrizations.values()] for main in networks]
        features = outputs[0][0][0].output.weight.shape[-1]
        self.weights += [
            torch.stack([torch.cat([p[0].output.weight.detach().view(-1, features) for p in ps]) for ps in outputs]),
            torch.stack([torch.cat([p.original.detach().flatten() for p in ps]) for ps in outputs]),
        ]

    def emit(self, embedding_EL: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Return all weights and biases of the main networks, [E, P], optionally with other hypernetwork weights."""
        x, weights = embedding_EL[..., None], self.weights if weights is None else weights
        for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            x = torch.relu(torch.baddbmm(bias[..., None], weight, x))
        return torch.baddbmm(weights[-1][..., None], weights[-2], x)[..., 0]

    def predict(self, emitted_EP: Tensor, x_ES1: Tensor) -> Tensor:
        """Return the outputs of the main networks with these weights, [E, S, 1]."""
        pieces = emitted_EP.split([shape.numel() for shape in self.shapes], 1)
        x, last = x_ES1, len(pieces) - 2
        for index in range(0, len(pieces), 2):
            weight = pieces[index].view(-1, *self.shapes[index])
            x = torch.baddbmm(pieces[index + 1][:, None], x, weight.transpose(1, 2))
            x = x if index == last else torch.relu(x)
        return x


def train(settings: Settings, seed: int) -> Curves:
    """Train every combination of initialisation, rate and seed in one batched computation; return all losses."""
    shape = (len(settings.initialisations), len(settings.learning_rates), settings.num_seeds)
    networks = []
    for name in settings.initialisations:
        of_seeds = [network(name, seed * settings.num_seeds + number) for number in range(settings.num_seeds)]
        networks += of_seeds * len(settings.learning_rates)
    stack = Stack(networks)
    rates = torch.tensor(settings.learning_rates).repeat_interleave(shape[2]).repeat(shape[0])
    drawn = torch.rand(len(TASKS), shape[2], 2, generator=generator(seed, 0, "embeddings"))
    embeddings = list(((2 * drawn - 1) * sqrt(3)).repeat(1, shape[0] * shape[1], 1))
    x_TES1, y_TES1 = _samples(shape, seed)
    source, curves = generator(seed, 0, "batches"), Curves()

    def measure(step: int) -> None:
        with torch.no_grad():
            predicted = [stack.predict(stack.emit(e), x) for e, x in zip(embeddings, x_TES1, strict=True)]
            errors = [(p - y).square().mean((1, 2)) for p, y in zip(predicted, y_TES1, strict=True)]
        curves.steps.append(step)
        curves.losses.append(torch.stack(errors).view(-1, *shape))

    for task in range(len(TASKS)):
        with torch.no_grad():
            kept = [stack.emit(e) for e in embeddings[:task]]
        for step in range(settings.steps):
            if step % settings.measure_every == 0:
                measure(task * settings.steps + step)
            indices = torch.randint(_SAMPLES, (settings.batch_size,), generator=source)
            old = list(zip(embeddings[:task], kept, strict=True))
            batch = x_TES1[task][:, indices], y_TES1[task][:, indices]
            stack.weights, embeddings[task] = _step(stack, embeddings[task], batch, old, rates, settings)
    measure(len(TASKS) * settings.steps)
    return curves


def _step(
    stack: Stack,
    embedding_EL: Tensor,
    batch: tuple[Tensor, Tensor],
    old: Sequence[tuple[Tensor, Tensor]],
    rates: Tensor,
    settings: Settings,
) -> tuple[list[Tensor], Tensor]:
    """Return weights and embedding after a step of SGD; `old` has (embedding, emitted) of earlier tasks."""
    trained = [tensor.requires_grad_(True) for tensor in (*stack.weights, embedding_EL)]

    def moved(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [
                tensor - rates.view(-1, *[1] * (tensor.dim() - 1)) * gradient
                for tensor, gradient in zip(tensors, gradients, strict=True)
            ]

    def regulariser(weights: Sequence[Tensor]) -> Tensor:
        drifts = [(stack.emit(e, weights) - target).square().sum() for e, target in old]
        return settings.beta / len(old) * torch.stack(drifts).sum()

    # The networks are independent, so the gradient of the sum is the gradient of each.
    loss = (stack.predict(stack.emit(embedding_EL), batch[0]) - batch[1]).square().mean((1, 2)).sum()
    if old and not settings.lookahead:
        loss = loss + regulariser(stack.weights)
    gradients = list(torch.autograd.grad(loss, trained))
    if old and settings.lookahead:
        ahead = [tensor.requires_grad_(True) for tensor in moved(trained, gradients)[:-1]]
        more = torch.autograd.grad(regulariser(ahead), ahead)
        gradients = [a + b for a, b in zip(gradients, more, strict=False)] + gradients[-1:]
    *weights, embedding = moved(trained, gradients)
    return weights, embedding


def network(initialisation: str, seed: int) -> MLP:
    """Return a main network with its hypernetwork; the embedding represents the task."""
    hypernet = Hypernet(
        *("network", initialisation),
        embedding_features=2,
        hidden_features=(_HIDDEN, _HIDDEN),
        embedding="trained",
        biases=True,
        gain=2.0,
    )
    main = MLP(1, [_HIDDEN, _HIDDEN], 1)
    parametrise(main, hypernet, seed)
    return main


def _layers(network: MLP) -> list[Any]:
    return [module for module in [*network.hidden, network.classifier] if isinstance(module, nn.Linear)]


def _samples(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets of every task as a function of the seed, [T, E, S, 1] each."""
    xs, ys = [], []
    for task, ((low, high), function) in enumerate(TASKS):
        source = generator(seed, task, "samples")
        x = low + (high - low) * torch.rand(shape[2], _SAMPLES, 1, generator=source)
        y = function(x) + _NOISE * torch.randn(x.shape, generator=source)
        xs.append(x.repeat(shape[0] * shape[1], 1, 1))
        ys.append(y.repeat(shape[0] * shape[1], 1, 1))
    return torch.stack(xs), torch.stack(ys)


def summarise(settings: Settings, curves: Curves) -> list[dict[str, Any]]:
    """Summarise each initialisation at its best rate, with the lowest mean loss on each task when it was just learnt.

    Rates at which a run diverges are not chosen; if all diverge, the smallest is shown. Runs with equal seeds share
    samples, batches and draws of embeddings, so `by_seed` allows paired comparisons.
    """
    learning = being_learnt(settings, curves)
    last = [(t + 1) * settings.steps for t in range(len(TASKS))]
    at = [max(i for i, step in enumerate(curves.steps) if step <= end) for end in last]
    ends = torch.stack([curves.stacked[i, t] for t, i in enumerate(at)])
    later = [i for i, step in enumerate(curves.steps) if step % settings.steps or step == last[-1]]
    means = ends.mean((0, 3)).nan_to_num(nan=torch.inf)
    rows = []
    for index, name in enumerate(settings.initialisations):
        slowest = min(range(len(settings.learning_rates)), key=settings.learning_rates.__getitem__)
        best = int(means[index].argmin()) if means[index].isfinite().any() else slowest
        losses = curves.stacked[:, :, index, best]
        rows.append(
            {
                "initialisation": name,
                "learning_rate": settings.learning_rates[best],
                "rates_that_diverged": [
                    rate
                    for rate, mean in zip(settings.learning_rates, means[index].tolist(), strict=True)
                    if not isfinite(mean)
                ],
                "first_loss": _number(learning[0, index, best].mean()),
                "median_first_loss": _number(learning[0, index, best].median()),
                "loss_when_learnt": [_number(losses[i, t].mean()) for t, i in enumerate(at)],
                "standard_error_when_learnt": [
                    _number(losses[i, t].std() / sqrt(settings.num_seeds)) for t, i in enumerate(at)
                ],
                "final_loss_of_tasks": [_number(value) for value in losses[-1].mean(-1)],
                "final_loss": _number(losses[-1].mean()),
                "by_seed": {
                    "first_loss": _numbers(learning[0, index, best]),
                    "loss_while_learnt": _numbers(learning[later, index, best].mean(0)),
                    "loss_when_learnt": _numbers(ends[:, index, best].mean(0)),
                    "final_loss": _numbers(losses[-1].mean(0)),
                },
            }
        )
    return rows


def being_learnt(settings: Settings, curves: Curves) -> Tensor:
    """Return the loss on the current task at each measurement, [M, initialisation, rate, seed]."""
    tasks = [min(step // settings.steps, len(TASKS) - 1) for step in curves.steps]
    return curves.stacked[torch.arange(len(tasks)), torch.tensor(tasks)]


def _table(settings: Settings, curves: Curves, rows: Sequence[dict[str, Any]]) -> str:
    learning, lines = being_learnt(settings, curves), []
    for index, row in enumerate(rows):
        best = list(settings.learning_rates).index(row["learning_rate"])
        losses = learning[:, index, best]
        errors = losses.std(1) / sqrt(settings.num_seeds)
        for step, mean, error in zip(curves.steps, losses.mean(1).tolist(), errors.tolist(), strict=True):
            lines.append((row["initialisation"], row["learning_rate"], step, f"{mean:.5g}", f"{error:.5g}"))
    columns = ["initialisation", "learning_rate", "step", "loss", "standard_error"]
    return pandas.DataFrame(lines, columns=columns).to_csv(index=False, lineterminator="\n")


def _numbers(values: Tensor) -> list[float | None]:
    """Round each seed's value to four significant digits for JSON; None if not finite."""
    return [float(f"{value:.4g}") if isfinite(value) else None for value in values.tolist()]


def _number(value: Tensor) -> float | None:
    """Convert a number for JSON; None if not finite."""
    return float(value) if isfinite(float(value)) else None


@style.styled()
def draw(run_dir: Path) -> Path:
    """Draw a run's `losses.png` from its files: loss on the current task, mean and standard error (Figure 4).

    One panel per task. Four initialisations are highlighted: both hyperfan ones, the paper's baseline that trains
    (Kaiming's fan-out), and of the others the one with the smallest loss when learnt. The rest are grey, without bands,
    and named above the legend, as are those that diverged. The loss before the first step, which would dwarf
    everything else, is in the legend.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    curves = dict(list(pandas.read_csv(run_dir / "losses.csv").groupby("initialisation")))
    rows, length = {row["initialisation"]: row for row in summary["rows"]}, summary["settings"]["steps"]
    shown, others, diverged = sorted_out(summary["rows"])
    num_tasks = len(summary["rows"][0]["loss_when_learnt"])
    drawn = style.new_figure(7.0, 3.0)
    panels = drawn.subplots(1, num_tasks, sharey=True)
    for task, axes in enumerate(panels):
        for rank, name in enumerate([*shown, *others]):
            curve = curves[name]
            # A task's first measurement precedes its training.
            part = curve[(curve.step > task * length) & (curve.step < (task + 1) * length + (task == num_tasks - 1))]
            x, mean, error = part.step - task * length, part.loss, part.standard_error
            if name in others:
                axes.plot(x, mean, color="0.8", linewidth=0.8, zorder=1)
                continue
            line = {"color": style.PALETTE[rank], "linestyle": style.DASHES[rank]}
            axes.plot(x, mean, **line, linewidth=1.3, label=label(rows[name]))
            # On a logarithmic axis the band must stay above 0.
            low = (mean - error).clip(lower=mean.min() / 3)
            axes.fill_between(x, low, mean + error, color=line["color"], alpha=0.15, linewidth=0)
        axes.set(title=f"task {task + 1}", xlim=(0, length), xlabel="step of the task")
    style.log_axis(panels[0])
    panels[0].set_ylabel("training loss of the task")
    handles, names = panels[0].get_legend_handles_labels()
    n = summary["settings"]["num_seeds"]
    note = f"lines: means over n = {n} seeds, each at its best rate; bands: one standard error"
    if others:
        handles += panels[0].plot([], [], color="0.8", linewidth=0.8)
        names.append(f"{len(others)} others")
        note += f"; others: {', '.join(others)}"
    if diverged:
        note += f"; diverged at every rate: {', '.join(diverged)}"
    if summary["settings"].get("lookahead"):
        note += "; the regulariser uses a lookahead step"
    style.legend_below(drawn, handles, names, 2, note=note)
    return style.save(drawn, run_dir / "losses.png")


def sorted_out(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str], list[str]]:
    """Split initialisations into highlighted ones (at most four), others, and those that diverged."""
    trained = {row["initialisation"]: row for row in rows if None not in row["loss_when_learnt"]}
    shown = [name for name in ("hyperfan_in", "hyperfan_out", "kaiming_out") if name in trained]
    others = [name for name in trained if name not in shown]
    shown += sorted(others, key=lambda name: sum(trained[name]["loss_when_learnt"]))[: 4 - len(shown)]
    diverged = [row["initialisation"] for row in rows if row["initialisation"] not in trained]
    return shown, [name for name in trained if name not in shown], diverged


def label(row: dict[str, Any]) -> str:
    """Format a row of the summary for the legend and the terminal."""
    if None in row["loss_when_learnt"]:
        return f"{row['initialisation']}: diverged at every rate"
    return f"{row['initialisation']}, lr {row['learning_rate']:g}, median first loss {row['median_first_loss']:.2g}"
