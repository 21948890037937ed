"""Appendices C and D of G. Bird, "On De-Individuated Neurons", and two choices that the paper does not specify.

Appendix C states that normalising vectors to unit length between isotropic layers makes a network affine. Appendix D
states that factorised weights, and the free outgoing weights of new neurons, change a network's further training but
not its outputs. The choices: neurons are removed by incoming or by outgoing weights (Section 2.3.2), and the intrinsic
length may be negative (Section 3.1).
"""

import copy
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor, nn

from growlab.growth.method import generator
from growlab.lab.analysis import style
from growlab.parts.isotropic import ChiNorm, Choices, IsotropicActivation, change_width, isotropic_mlp
from growlab.parts.isotropic.resize import COLUMNS, DIRECTIONS, watch
from growlab.parts.isotropic.spectrum import decompose
from growlab.recipes.papers import studies
from growlab.widths import WidthGraph, replace_tensors, tensors_of, trace

_SAMPLES = 2000  # points of the rings, for training and again for measuring
#: Factory of the normaliser between a layer and its activation, and True if layers have biases.
NETWORKS: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    "plain": (lambda width: nn.Identity(), True),
    "chi": (ChiNorm, True),
    "shell": (lambda width: Shell(), True),
    "shell without biases": (lambda width: Shell(), False),
}
#: Initial intrinsic lengths: name -> (length, kind).
LENGTHS: dict[str, tuple[float, str]] = {
    "trained": (0.01, "trained"),
    "constant": (0.01, "constant"),
    "signed": (0.01, "signed"),
    "signed, below 0": (-0.5, "signed"),
}


class Shell(nn.Module):
    """Normalises every vector to unit length, which Appendix C warns against."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x / ||x||; zero vectors stay zero."""
        return nn.functional.normalize(x, dim=1)


def isotropic_appendices(
    run_dir: Path,
    seed: int,
    data: Any,
    width: int,
    epochs: int,
    lr: float,
    removed: Sequence[int],
    divergence_steps: int,
    num_seeds: int,
) -> None:
    """Train small networks and measure each statement in float64; write tables, a summary and a figure.

    Networks train with Adam. Pairs that compute the same then train with SGD, at ten times the rate.
    """
    data.setup()
    test = tuple(torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    test = (test[0].double(), test[1])
    tables: dict[str, list[dict[str, Any]]] = {}
    for number in range(seed, seed + num_seeds):
        rows = {"collapse": list(collapsed(number, data, test, width, epochs, lr))}
        network, graph = _trained(number, data, width, epochs, lr)
        batches = studies.batches_of(data, epochs, divergence_steps)
        rows["divergence"] = list(diverging(network, graph, test[0], batches, 10 * lr))
        rows["directions"] = list(directions(network, graph, batches[0][0].double(), test, removed))
        rows["lengths"] = [lengths(name, number, data, test, width, epochs, lr) for name in LENGTHS]
        for table, of_seed in rows.items():
            tables.setdefault(table, []).extend({"seed": number, **row} for row in of_seed)
    studies.write(run_dir, tables, summarise, draw)


def collapsed(
    seed: int, data: Any, test: tuple[Tensor, Tensor], width: int, epochs: int, lr: float
) -> Iterator[dict[str, Any]]:
    """Train networks with each normaliser on two rings, which no affine map separates, and on the data."""
    rings = [_rings(generator(seed, number, "rings")) for number in (0, 1)]
    for name in NETWORKS:
        torch.manual_seed(seed)
        network = built(name, 2, width, 2).double()
        studies.train(network, torch.optim.Adam(network.parameters(), 0.01), [rings[0]] * 300)
        yield {"task": "rings", "network": name, **_affinity(network, *rings[1])}
        torch.manual_seed(seed)
        network = built(name, test[0][0].numel(), width, data.num_classes).double()
        optimizer = torch.optim.Adam(network.parameters(), lr)
        for epoch in range(epochs):
            studies.train(network, optimizer, studies.epoch_of(data, epoch))
        yield {"task": "data", "network": name, **_affinity(network, *test)}


def built(name: str, in_features: int, width: int, num_classes: int) -> nn.Sequential:
    """Return a network with two isotropic layers and a normaliser of `NETWORKS`, without intrinsic lengths."""
    normaliser, biases = NETWORKS[name]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (in_features, width):
        layers += [nn.Linear(inputs, width, bias=biases), normaliser(width), IsotropicActivation(length=None)]
    return nn.Sequential(*layers, nn.Linear(width, num_classes, bias=biases))


def _affinity(network: nn.Module, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the spread of gains, and the share of output variance that no affine map of x, or x / ||x||, explains."""
    gains: list[Tensor] = []
    activations = [module for module in network.modules() if isinstance(module, IsotropicActivation)]
    handles = [a.register_forward_hook(lambda m, i, o: gains.append(m.gain(i[0]))) for a in activations]
    with torch.no_grad():
        logits = network.eval()(x)
    for handle in handles:
        handle.remove()
    centred = logits - logits.mean(0)

    def unexplained(inputs: Tensor) -> float:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
        explained = inputs @ torch.linalg.lstsq(inputs, logits, driver="gelsd").solution
        return float((logits - explained).square().sum() / centred.square().sum())

    return {
        "gain_spread": max(float((gain.std() / gain.mean()).detach()) for gain in gains),
        "not_affine": unexplained(x.flatten(1)),
        "not_affine_unit": unexplained(nn.functional.normalize(x.flatten(1), dim=1)),
        "accuracy": studies.accuracy(logits, labels),
    }


def _rings(source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw points of two rings [B, 2], and their ring [B]: 0 at radius 1, 1 at radius 2."""
    angle = 2 * torch.pi * torch.rand(_SAMPLES, generator=source, dtype=torch.float64)
    outer = torch.arange(_SAMPLES) % 2
    radius = 1 + outer + 0.1 * torch.randn(_SAMPLES, generator=source, dtype=torch.float64)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), outer


def diverging(
    network: nn.Module, graph: WidthGraph, x: Tensor, batches: Sequence[tuple[Tensor, Tensor]], lr: float
) -> Iterator[dict[str, Any]]:
    """Continue training a network, and twins with equal outputs, by SGD; yield their relative differences.

    In the twin "product", the first layer is S V^T followed by U, as if the diagonal form had not been multiplied out
    (Eqs. 49-52). In the twins of `COLUMNS`, the second layer has four new neurons with these outgoing weights (Eqs.
    53-56); the norm of their incoming weights is also measured.
    """
    group = list(graph.isotropic)[1]
    old = graph.full_widths[group]
    twins: dict[str, Any] = {"product": _factored(network)}
    for columns in COLUMNS:
        twins[columns] = copy.deepcopy(network)
        change = change_width(
            graph, tensors_of(network, graph), graph.full_widths, group, old + 4, Choices(columns, rotate=False)
        )
        replace_tensors(twins[columns], graph, change.tensors)
    for name, twin in twins.items():
        pair = (copy.deepcopy(network), twin)
        for step, difference in studies.diverging(pair, partial(torch.optim.SGD, lr=lr), x, batches):
            moved = 0.0 if name == "product" else float(twin.get_submodule(group).weight[old:].detach().norm())
            yield {"twin": name, "step": step, "relative_difference": difference, "new_weights": moved}


def _factored(network: nn.Module) -> nn.Module:
    """Return a copy whose first layer W x + b is two layers, U (S V^T x) + b."""
    copied: Any = copy.deepcopy(network)
    first = copied.hidden[0]
    left, values, right = decompose(first.weight)
    inner = nn.Linear(first.in_features, len(values), bias=False).to(first.weight)
    outer = nn.Linear(len(values), first.out_features).to(first.weight)
    with torch.no_grad():
        inner.weight.copy_(values[:, None] * right.T)
        outer.weight.copy_(left)
        outer.bias.copy_(first.bias)
    copied.hidden[0] = nn.Sequential(inner, outer)
    return copied


def directions(
    network: nn.Module, graph: WidthGraph, seen: Tensor, test: tuple[Tensor, Tensor], removed: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Remove neurons of the second layer by incoming or outgoing weights, with corrections from the samples `seen`."""
    group, (x, labels) = list(graph.isotropic)[1], test
    tensors, observed = tensors_of(network, graph), watch(network, graph, (seen,))
    before = network(x).detach()
    for direction, count in itertools.product(DIRECTIONS, removed):
        copied, choices = copy.deepcopy(network), Choices(direction=direction)
        new_width = graph.full_widths[group] - count
        change = change_width(graph, tensors, graph.full_widths, group, new_width, choices, observed=observed)
        replace_tensors(copied, graph, change.tensors)
        after = copied(x).detach()
        yield {"direction": direction, "removed": count, **studies.changed(after, before, labels)}


def lengths(
    name: str, seed: int, data: Any, test: tuple[Tensor, Tensor], width: int, epochs: int, lr: float
) -> dict[str, Any]:
    """Return the intrinsic lengths and accuracy after training with an entry of `LENGTHS`."""
    length, kind = LENGTHS[name]
    network, _ = _trained(seed, data, width, epochs, lr, length=length, length_kind=kind)
    trained = [m.intrinsic_length for m in network.modules() if isinstance(m, IsotropicActivation)]
    last = {f"length_{index}": float(o.detach()) for index, o in enumerate(trained) if o is not None}
    return {
        "lengths": name,
        "start": length,
        **last,
        "accuracy": studies.accuracy(network(test[0]).detach(), test[1]),
    }


def _trained(seed: int, data: Any, width: int, epochs: int, lr: float, **options: Any) -> tuple[nn.Module, WidthGraph]:
    torch.manual_seed(seed)
    network = isotropic_mlp(data.image_shape, data.num_classes, width, depth=2, **options).double()
    optimizer = torch.optim.Adam(network.parameters(), lr)
    for epoch in range(epochs):
        studies.train(network, optimizer, studies.epoch_of(data, epoch))
    example = next(iter(studies.epoch_of(data, 0)))[0][:2].double()
    return network, trace(network, example, follow_norms=True)


def summarise(tables: Mapping[str, pandas.DataFrame]) -> dict[str, Any]:
    """Summarise over networks: means, the largest errors, and the smallest final divergence and length."""
    collapse, divergence, directions, lengths = tables.values()
    mean, last = statistics.fmean, divergence["step"].max()

    def over(rows: pandas.DataFrame, key: str, how: Callable[[Any], float], *by: str) -> dict[str, float]:
        groups = rows.groupby(list(by), sort=False)[key]
        return {", ".join(map(str, names)): float(how(values)) for names, values in groups}

    start, end = (divergence[divergence["step"] == step] for step in (0, last))

    return {
        "num_networks": collapse["seed"].nunique(),
        **{
            key: over(collapse, key, max if key == "gain_spread" else mean, "task", "network")
            for key in ("gain_spread", "not_affine", "not_affine_unit", "accuracy")
        },
        "divergence_steps": int(last),
        "difference_at_start": over(start, "relative_difference", max, "twin"),
        "difference_at_end": over(end, "relative_difference", min, "twin"),
        "new_weights_at_end": over(end, "new_weights", max, "twin"),
        "removal_error": over(directions, "relative_error", max, "direction", "removed"),
        "removal_accuracy": over(directions, "accuracy", mean, "direction", "removed"),
        "accuracy_of_lengths": over(lengths, "accuracy", mean, "lengths"),
        "smallest_length": float(lengths.filter(regex="^length_").min(axis=None)),
    }


@style.styled()
def draw(run_dir: Path) -> Path:
    """Draw `appendices.png` from a run's tables: collapse by normaliser, divergence over steps, error by direction."""
    collapse, divergence, directions = (
        pandas.read_csv(run_dir / f"{name}.csv") for name in ("collapse", "divergence", "directions")
    )
    drawn = style.new_figure(7.2, 4.2)
    left, middle, right = drawn.subplots(1, 3)
    _draw_collapse(left, collapse[collapse["task"] == "rings"])
    one_seed = divergence[divergence["seed"] == divergence["seed"].min()]
    for index, twin in enumerate(("product", *COLUMNS)):
        own = one_seed[one_seed["twin"] == twin]
        line: dict[str, Any] = {"color": style.PALETTE[index], "linestyle": style.DASHES[index % len(style.DASHES)]}
        label = "weights kept as U (S V$^T$)" if twin == "product" else f"new columns: {twin}"
        # "orthogonal" and "random" coincide; draw dashes over the solid line.
        above, y = 2 if line["linestyle"] == "-" else 2.1, own["relative_difference"].clip(lower=1e-17)
        middle.plot(own["step"], y, **line, linewidth=1.3, label=label, zorder=above)
    middle.set(title="two networks that compute the same", xlabel="steps of SGD on both")
    middle.set(ylabel="relative difference of outputs")
    for index, direction in enumerate(DIRECTIONS):
        line = {"color": style.PALETTE[index], "linestyle": style.DASHES[index], "linewidth": 1}
        label = f"chosen by {'incoming' if direction == 'forward' else 'outgoing'} weights"
        for rank, (_, own) in enumerate(directions[directions["direction"] == direction].groupby("seed")):
            right.plot(own["removed"], own["relative_error"], **line, label=None if rank else label)
    right.set(title="removing neurons", xlabel="neurons removed", ylabel="relative change of outputs")
    for axes in (middle, right):
        axes.set_yscale("log")
    for axes, low in ((left, -0.42), (middle, -0.2), (right, -0.2)):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, low), fontsize=7)
    n = directions["seed"].nunique()
    note = f"left, right: a mark or line for each of n = {n} seeds; middle: one seed; all in float64"
    # On a line below the legends.
    drawn.supxlabel(f"\n{note}", fontsize=7)
    return style.save(drawn, run_dir / "appendices.png")


def _draw_collapse(axes: Any, rings: pandas.DataFrame) -> None:
    """Draw the share of variance that is not affine, and the accuracy, of each normaliser on the rings."""
    shown = {"not_affine": "variance of the outputs that\nno affine map explains", "accuracy": "accuracy"}
    for index, (key, label) in enumerate(shown.items()):
        look: dict[str, Any] = {
            "color": style.PALETTE[index],
            "marker": "os"[index],
            "linestyle": "none",
            "markersize": 4,
        }
        for place, name in enumerate(NETWORKS):
            own = rings[rings["network"] == name][key]
            places = [place + 0.2 * index - 0.1] * len(own)
            axes.plot(places, own, **look, markerfacecolor="none", label=label if place == 0 else None)
    ticks = ["none", "ChiNorm", "x / ||x||", "x / ||x||,\nno biases"]
    axes.set_xticks(range(len(NETWORKS)), ticks, fontsize=7, rotation=45)
    axes.set(ylim=(0, 1.05), title="two rings to tell apart", xlabel="normaliser", ylabel="share")
