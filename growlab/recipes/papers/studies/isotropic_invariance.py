"""Changes that preserve a trained isotropic network: added and removed neurons, diagonal layers, other bases.

Measures statements of G. Bird, "On De-Individuated Neurons", that have no table: growth changes nothing and removal
little (Section 3, Eqs. 27-30), every other layer can be a vector (Section 2.3, Eq. 19), and a network in another basis
computes the same but learns differently with an optimizer that has per-entry state (Appendix D).
"""

import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor, nn

from growlab.lab.analysis import style
from growlab.parts.isotropic import Diagonal, change_width, diagonalise_partially, isotropic_mlp, sparsify, spectra
from growlab.parts.isotropic.resize import watch
from growlab.recipes.papers import studies
from growlab.widths import WidthGraph, replace_tensors, tensors_of, trace

OPTIMIZERS: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}


def isotropic_invariance(
    run_dir: Path,
    seed: int,
    data: Any,
    width: int,
    depth: int,
    epochs: int,
    lr: float,
    changes: Sequence[int],
    divergence_steps: int,
    num_seeds: int,
) -> None:
    """Train networks and measure, in float64, the effect of each reparameterisation; write tables, summary and figure.

    Networks train with Adam. Pairs in two bases also train with SGD, at ten times the rate.
    """
    data.setup()
    x, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    tables: dict[str, list[dict[str, Any]]] = {"changes": [], "spectra": [], "divergence": [], "sparsity": []}
    for number in range(seed, seed + num_seeds):
        torch.manual_seed(number)
        network = isotropic_mlp(data.image_shape, data.num_classes, width, depth).double()
        graph = trace(network, x[:2].double(), follow_norms=True)
        optimizer = torch.optim.Adam(network.parameters(), lr)
        for epoch in range(epochs + 1):
            if number == seed:
                tables["spectra"] += _spectrum(network, graph, epoch)
            if epoch < epochs:
                studies.train(network, optimizer, studies.epoch_of(data, epoch))
        test = (x.double(), labels)
        tables["changes"] += [{"seed": number, **row} for row in _resized(network, graph, test, changes)]
        tables["sparsity"].append({"seed": number, **_sparse(network, graph, test)})
        batches = studies.batches_of(data, epochs, divergence_steps)
        for name, make in OPTIMIZERS.items():
            make_at_lr = partial(make, lr=10 * lr if name == "SGD" else lr)
            rows = _diverge(network, graph, test[0], batches, make_at_lr)
            tables["divergence"] += [{"seed": number, "optimizer": name, **row} for row in rows]
    studies.write(run_dir, tables, summarise, draw)


def resized(network: nn.Module, graph: WidthGraph, x: Tensor, new_width: int) -> tuple[nn.Module, dict[str, int]]:
    """Return a copy whose second hidden layer has another width, and the widths of all groups.

    The second one, because its incoming weights have as many directions as neurons, unlike perhaps the first one's.
    """
    copied, group = copy.deepcopy(network), list(graph.isotropic)[1]
    observed = watch(copied, graph, (x,))
    widths = {**graph.full_widths, group: new_width}
    change = change_width(graph, tensors_of(copied, graph), graph.full_widths, group, new_width, observed=observed)
    replace_tensors(copied, graph, change.tensors)
    return copied, widths


def _resized(
    network: nn.Module, graph: WidthGraph, test: tuple[Tensor, Tensor], changes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    x, labels = test
    before = network(x).detach()
    full = graph.full_widths[list(graph.isotropic)[1]]
    for change in changes:
        after = resized(network, graph, x, full + change)[0](x).detach()
        yield {"change": change, **studies.changed(after, before, labels)}


def _sparse(network: nn.Module, graph: WidthGraph, test: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Turn every other map into a vector; parameters are counted over the square hidden maps, as in Eq. 19.

    In Eq. 19, D of 2 D + 1 maps of width N become vectors; here, k of m.
    """
    x, labels = test
    before, sparse = network(x).detach(), sparsify(network, graph)
    after = sparse(x).detach()
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    square = [module for module in linear if module.in_features == module.out_features]
    n, m, k = square[0].in_features, len(square), sum(isinstance(module, Diagonal) for module in sparse.modules())
    saved = sum(p.numel() for p in network.parameters()) - sum(p.numel() for p in sparse.parameters())
    of_square = sum(parameter.numel() for module in square for parameter in module.parameters())
    return {
        **studies.changed(after, before, labels),
        "share_of_parameters": 1 - saved / of_square,
        "share_by_equation_19": (2 * k * n + (m - k) * n * (n + 1)) / (m * n * (n + 1)),
    }


def _diverge(
    network: nn.Module, graph: WidthGraph, x: Tensor, batches: Sequence[tuple[Tensor, Tensor]], make: Any
) -> Iterator[dict[str, Any]]:
    """Yield relative differences between outputs of a network and its partially diagonalised copy over equal steps."""
    pair = [copy.deepcopy(network), copy.deepcopy(network)]
    for group in graph.isotropic:
        diagonalise_partially(pair[1], graph, group)
    for step, difference in studies.diverging(pair, make, x, batches):
        yield {"step": step, "relative_difference": difference}


def _spectrum(network: nn.Module, graph: WidthGraph, epoch: int) -> list[dict[str, Any]]:
    by_group = spectra(graph, tensors_of(network, graph), graph.full_widths)
    return [
        {"epoch": epoch, "group": group, "rank": rank, "singular_value": value}
        for group, values in by_group.items()
        for rank, value in enumerate(values.tolist())
    ]


def summarise(tables: Mapping[str, pandas.DataFrame]) -> dict[str, Any]:
    """Summarise: means over networks, largest errors, and the final divergence of the two bases."""
    changes, sparsity, divergence = (tables[name] for name in ("changes", "sparsity", "divergence"))
    last = divergence["step"].max()
    ends = divergence[divergence["step"] == last].groupby("optimizer")["relative_difference"].max()

    def of(rows: pandas.DataFrame, *means: str) -> dict[str, float]:
        averages = {name: statistics.fmean(rows[name]) for name in ("accuracy_before", "accuracy", *means)}
        return {"largest_relative_error": float(rows["relative_error"].max()), **averages}

    return {
        "changes": {f"{change:+d}": {**of(rows), "n": len(rows)} for change, rows in changes.groupby("change")},
        "num_networks": len(sparsity),
        "sparsity": {
            **of(sparsity, "share_of_parameters"),
            "share_by_equation_19": float(sparsity["share_by_equation_19"].iloc[0]),
        },
        "divergence": {name: float(ends[name]) for name in OPTIMIZERS},
        "divergence_steps": int(last),
    }


@style.styled()
def draw(run_dir: Path) -> Path:
    """Draw `invariance.png` from a run's tables: error over the change of width, spectra, and divergence."""
    changes, spectrum, divergence = (
        pandas.read_csv(run_dir / f"{name}.csv") for name in ("changes", "spectra", "divergence")
    )
    drawn = style.new_figure(7.2, 3.0)
    left, middle, right = drawn.subplots(1, 3)
    errors = changes.groupby("change")["relative_error"].max()
    # Removal and addition are separate lines: there is no width between one neuron fewer and one more.
    for own in (errors[errors.index < 0], errors[errors.index > 0]):
        left.plot(own.index, own, color=style.PALETTE[0], marker="o")
    left.set(title="second layer resized", xlabel="neurons removed (< 0) or added (> 0)")
    left.set(ylabel="largest relative change of outputs")
    for _, own in spectrum[spectrum["group"] == spectrum["group"].unique()[1]].groupby("rank"):
        middle.plot(own["epoch"], own["singular_value"], color="0.4", linewidth=0.4)
    middle.set(title="second layer while it trains", xlabel="epoch", ylabel="singular values, a line each")
    for index, name in enumerate(OPTIMIZERS):
        line = {"color": style.PALETTE[index], "linestyle": style.DASHES[index], "linewidth": 1}
        for rank, (_, own) in enumerate(divergence[divergence["optimizer"] == name].groupby("seed")):
            y = own["relative_difference"].clip(lower=1e-17)
            right.plot(own["step"], y, **line, label=None if rank else name)
    right.set(title="one network in two bases", xlabel="optimizer steps in either basis")
    right.set(ylabel="relative difference of outputs")
    right.legend()
    for axes in (left, right):
        axes.set_yscale("log")
    n = changes["seed"].nunique()
    note = f"left: largest of n = {n} networks; middle: one network; right: a line for each of n = {n}"
    drawn.supxlabel(f"{note}; all in float64", fontsize=7)
    return style.save(drawn, run_dir / "invariance.png")
