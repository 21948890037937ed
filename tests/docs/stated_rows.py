"""More sentences, of `notebooks/results/README.md`, smaller pages and notebooks: see `tests/docs/stated.py`."""

import csv
import json
import re
import statistics
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy
import pandas

from growlab.lab.analysis.paired import interval
from growlab.recipes.papers.paper_table import published
from tests.command_line import ROOT
from tests.docs.stated import (
    ALONE,
    EIGHT,
    GRID,
    ISOTROPIC,
    MEASURED,
    MULTI,
    NINE,
    RESULTS,
    ROWS,
    TEN,
    TEST,
    TEXT,
    Numbers,
    Stated,
    by_budget,
    cost,
    gain,
    gap,
    listed,
    mean,
    runs,
    seconds,
    spread,
    widths,
)

sys.path.insert(0, str(ROOT / "notebooks" / "docs"))
from verdicts import first_loss

LANGUAGE = "notebooks/docs/pages/guide/language_models.md"
OPTIMIZERS = "notebooks/docs/pages/guide/optimizers.md"
TRANSLATION = "notebooks/docs/pages/guide/translation.md"
TUTORIAL = "notebooks/01_your_network.ipynb"
SCAFFOLD = "isotropic_scaffold_cifar10"
SAFE = ("0.01", "0.02", "0.05")
CONVOLUTIONS, FADING = "isotropic_cnn_cifar10", "isotropic_cnn_cifar10_decay0.05"
SLOW, BATCHES = "isotropic_mlp_cifar10_lr0.001", "resnet20_cifar10_batches"
ALLCONV = "hyperfan_allconv"
MNIST, VARIANTS = "hyperfan_mnist", "hyperfan_mnist_variants"
CONTINUAL, LOOKAHEAD = "hyperfan_continual_regression", "hyperfan_continual_regression_lookahead"


def printed(table: str, model: str, *names: str, override: str = "") -> tuple[float, ...]:
    """Published value of each name."""
    found = {
        one.row: one.value
        for one in published()
        if (one.table, one.model) == (table, model) and override in " ".join(one.overrides)
    }
    return tuple(found[name] for name in names)


def two(values: Iterable[float]) -> tuple[str, ...]:
    """Format with two decimals."""
    return tuple(f"{value:.2f}" for value in values)


def ends(values: Iterable[float], digits: int = 1) -> tuple[str, str]:
    """Format the smallest and the largest value."""
    values = list(values)
    return f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"


# Multipliers of variance transfer under Adam ----------------------------------------------------------------

TRANSLATED, SHORT_LLAMA = "adam_multipliers_multi30k", "adam_multipliers_llama_text"
TREATMENTS = ("keep", "compensate", "fold")


def held_out(part: str, *names: str) -> tuple[str, ...]:
    """Validation or test losses of seed 0."""
    return tuple(f"{runs(f'{TRANSLATED}/{name}_s0')[0].results[f'{part}_loss']:.3f}" for name in names)


def treated(folder: str, rate: str, key: str) -> tuple[str, ...]:
    """Means over seeds, then paired differences with their 95 % intervals."""
    found = {
        name: {seed: run.results[key] for seed, run in runs(f"{folder}/{name}_lr{rate}_s*").items()}
        for name in TREATMENTS
    }
    texts = [f"{statistics.fmean(found[name].values()):.3f}" for name in TREATMENTS]
    for first, second in (("fold", "keep"), ("compensate", "keep"), ("fold", "compensate")):
        by_seed = [found[first][seed] - found[second][seed] for seed in sorted(found[first])]
        bounds = interval(by_seed)
        assert bounds is not None
        texts += [f"{statistics.fmean(by_seed):.3f}", "{:.3f} to {:.3f}".format(*bounds)]
    return tuple(texts)


# Isotropic networks ----------------------------------------------------------------------------------------


@cache
def moves(pattern: str) -> dict[str, list[float]]:
    """Changes of the held-out accuracy (points) from epoch 24 on, by the change of width before the epoch."""
    found: dict[str, list[float]] = {"more": [], "fewer": [], "below 16": [], "same": []}
    for path in sorted(RESULTS.glob(pattern)):
        if (path / "results.json").is_file():
            (run,) = runs(path.relative_to(RESULTS).as_posix()).values()
            widths, accuracy = run.width_path, run.held_out("accuracy")
            for epoch in range(24, len(widths)):
                change = numpy.sign(widths[epoch] - widths[epoch - 1])
                kind = {1: "more", 0: "same", -1: "fewer" if widths[epoch] >= 16 else "below 16"}[change]
                found[kind].append(100 * float(accuracy[epoch] - accuracy[epoch - 1]))
    return found


def moved(values: list[float]) -> tuple[str, str, str]:
    """Format mean, deviation and number."""
    return f"{statistics.fmean(values):.2f}", f"{statistics.stdev(values):.2f}", f"{len(values):,}"


def jumps() -> tuple[str, ...]:
    """Format `moves` of the grid at rate 0.08."""
    found = moves(f"{GRID}/iso_*")
    (more, more_by, n_more), (fewer, fewer_by, n_fewer), (same, same_by, n_same) = (
        moved(found[kind]) for kind in ("more", "fewer", "same")
    )
    return more, more_by, n_more, fewer, fewer_by, n_fewer, same, same_by, n_same


def jumps_slow() -> tuple[str, ...]:
    """Format `moves` of the part of the grid at rate 0.001."""
    found = moves(f"{SLOW}/iso_*")
    return (*moved([one for kind in ("more", "fewer", "below 16") for one in found[kind]]), *moved(found["same"]))


def to_widths() -> tuple[str, ...]:
    """Means of the grid: from others to 8, 8 throughout, all others; mean change at events below 16 neurons."""
    means = {(w, t): float(mean(f"{GRID}/iso_w{w}_t{t}_s*", 9)) for w in WIDTHS for t in WIDTHS}
    to_8 = [value for (start, end), value in means.items() if end == 8 and start != 8]
    others = [value for (_, end), value in means.items() if end != 8]
    below = statistics.fmean(moves(f"{GRID}/iso_*")["below 16"])
    return *ends(to_8), f"{means[8, 8]:.1f}", *ends(others), f"{below:.1f}"


def isotropic_and_tanh() -> tuple[str, ...]:
    """Smallest and largest mean of both."""
    isotropic = [float(mean(f"{GRID}/iso_w{w}_t{t}_s*", 9)) for w in WIDTHS for t in WIDTHS]
    return *ends(isotropic), *ends(float(mean(f"{GRID}/tanh_w{w}_s*", 9)) for w in WIDTHS)


WIDTHS = (8, 16, 24, 32)


def growth_error() -> tuple[str]:
    """Largest change of the output at an event that adds neurons."""
    events = [
        event
        for path in RESULTS.glob(f"{GRID}/iso_*/growth.json")
        for event in json.loads(path.read_text(encoding="utf-8"))["events"]
    ]
    adding = [one for one in events if one["num_params"] > one["num_params_before"]]
    assert len(adding) == 320
    return (re.sub("e-0", "e-", f"{max(one['parity_error_eval'] for one in adding):.0e}"),)


def at_0_001() -> tuple[str]:
    """Lead of isotropic tanh over tanh on CIFAR-10 at rate 0.001."""
    folder = "isotropic_data_sets"
    return (gap(f"{folder}/cifar10_isotropic_lr0.001_s*", f"{folder}/cifar10_elementwise_lr0.001_s*", 0),)


def one(name: str) -> str:
    """Score in the grid at rate 0.001, with one decimal."""
    return mean(f"{SLOW}/{name}", 1)


def summary(folder: str) -> dict[str, Any]:
    """Read the summary of a study."""
    return json.loads((RESULTS / folder / "summary.json").read_text(encoding="utf-8"))


def invariance() -> tuple[str, ...]:
    """Errors of a resized layer, and the share of parameters in diagonal layers."""
    found = summary("isotropic_invariance")
    errors = {name: change["largest_relative_error"] for name, change in found["changes"].items()}
    assert round(found["sparsity"]["share_by_equation_19"], 3) == round(found["sparsity"]["share_of_parameters"], 3)
    return (
        f"{errors['+75']:.1e}",
        re.sub("e-0", "e-", f"{errors['-1']:.0e}"),
        f"{100 * errors['-75']:.1f}",
        f"{100 * found['sparsity']['share_of_parameters']:.1f}",
    )


# Hypernetworks ---------------------------------------------------------------------------------------------

HYPER = ("classical", "xavier_in", "hyperfan_in", "hyperfan_out")


def layers(name: str, quantity: str, step: int = 0) -> dict[str, float]:
    """Standard deviation of a quantity in each layer; the mean for the loss and accuracy of the network."""
    table = next(iter(runs(f"{MNIST}/{name}").values())).layers
    rows = table[(table["quantity"] == quantity) & (table["step"] == step)]
    column = "mean" if quantity in ("loss", "accuracy") else "std"
    return {row["layer"]: float(row[column]) for _, row in rows.iterrows()}


def mnist_line(name: str) -> tuple[str, ...]:
    """Row of the table: losses at first, after 100 steps, at the end of training, in the test; accuracy."""
    (run,) = runs(f"{MNIST}/{name}").values()
    return (
        f"{first_loss(run):.2f}",
        f"{layers(name, 'loss', 100)['network']:.2f}",
        f"{run.results['train_loss']:.3f}",
        f"{run.results['test_loss']:.3f}",
        mean(f"{MNIST}/{name}"),
    )


def minutes(*patterns: str) -> tuple[str, ...]:
    """Minutes of the shortest and the longest run."""
    return ends((run.results["seconds"] / 60 for each in patterns for run in runs(each).values()), 0)


def short(value: float) -> str:
    """Format a large number with an exponent."""
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def allconv_first(name: str) -> str:
    """Loss before training."""
    (run,) = runs(f"{ALLCONV}/{name}").values()
    return short(first_loss(run))


def allconv_failed(*names: str) -> str:
    """Step at which runs of the grid of rates diverged, equal in all of them."""
    texts = [(RESULTS / f"{ALLCONV}_rates" / name / "failure.json").read_text(encoding="utf-8") for name in names]
    pattern = r"the training loss became NaN or infinite at step (\d+) "
    (step,) = {re.match(pattern, json.loads(text)["reason"])[1] for text in texts}
    return step


def allconv_losses(name: str, *rates: str) -> tuple[str, ...]:
    """Mean training losses in the grid of rates."""
    found = (next(iter(runs(f"{ALLCONV}_rates/{name}_lr{rate}").values())) for rate in rates)
    return tuple(f"{run.results['train_loss']:.3f}" for run in found)


def deviations() -> tuple[str, ...]:
    """Standard deviations of weights and activations before training, by initialisation."""
    weights, inputs = ({name: layers(name, quantity) for name in HYPER} for quantity in QUANTITIES)
    inner = [
        value
        for name in HYPER
        if name != "xavier_in"
        for layer, value in weights[name].items()
        if layer.startswith("hidden") and layer != "hidden.0"
    ]
    hidden = {name: [value for layer, value in inputs[name].items() if layer.startswith("hidden")] for name in HYPER}
    return (
        *ends(weights["xavier_in"].values()),
        *ends(inner, 2),
        *ends(hidden["xavier_in"], 0),
        *ends([*hidden["classical"], *hidden["hyperfan_in"]]),
        f"{inputs['hyperfan_out']['hidden.0']:.1f}",
    )


QUANTITIES = ("weight", "activation")


def variants() -> tuple[str, ...]:
    """Results with biases, and with ReLU."""
    (xavier,) = runs(f"{VARIANTS}/biases_xavier_in").values()
    scores = (mean(f"{VARIANTS}/{name}") for name in ("biases_xavier_in", "biases_hyperfan_in", "biases_hyperfan_out"))
    relu = (mean(f"{VARIANTS}/{name}") for name in ("relu_hyperfan_in", "relu_hyperfan_out", "relu_classical"))
    return f"{xavier.curve('train_loss')[0]:.2f}", *scores, *relu


@cache
def by_initialisation(folder: str) -> dict[str, dict[str, Any]]:
    """Rows of the continual study."""
    return {row["initialisation"]: row for row in summary(folder)["rows"]}


def continual() -> tuple[str, ...]:
    """Median first losses, then losses after each task."""
    rows = by_initialisation(CONTINUAL)
    first = {name: row["median_first_loss"] for name, row in rows.items()}
    return (
        f"{first['hyperfan_in']:.2f}",
        f"{first['hyperfan_out']:.1f}",
        f"{first['kaiming_in']:.0f}",
        f"{first['xavier_out']:.2f}",
        *(f"{loss:.3f}" for name in ("xavier_out", "hyperfan_in") for loss in rows[name]["loss_when_learnt"]),
    )


def lookahead() -> tuple[str, ...]:
    """Mean losses when learnt, with look-ahead and without."""
    found = {
        (name, folder): f"{statistics.fmean(by_initialisation(folder)[name]['loss_when_learnt']):.3f}"
        for name in ("hyperfan_in", "xavier_out")
        for folder in (LOOKAHEAD, CONTINUAL)
    }
    assert found["hyperfan_in", LOOKAHEAD] == found["hyperfan_in", CONTINUAL]
    return tuple(
        found[key] for key in (("hyperfan_in", CONTINUAL), ("xavier_out", LOOKAHEAD), ("xavier_out", CONTINUAL))
    )


# Growing networks ------------------------------------------------------------------------------------------


def batches() -> tuple[str, ...]:
    """Largest speed-up by larger batches, FLOPs of a quarter of the width, cost, and speed-up of the run."""
    fixed, ours, larger = (
        next(iter(runs(f"{BATCHES}/{one}").values())).results for one in ("fixed", "ours", "ours_batches")
    )
    gains = [
        b["samples_per_sec"] / a["samples_per_sec"] - 1 for a, b in zip(ours["stages"], larger["stages"], strict=True)
    ]
    assert larger["seconds"] > ours["seconds"]
    return (
        f"{100 * max(gains):.0f}",
        f"{100 * ours['stages'][0]['flops_per_sample'] / fixed['stages'][0]['flops_per_sample']:.1f}",
        f"{ours['train_cost_percent']:.0f}",
        f"{fixed['seconds'] / ours['seconds']:.2f}",
    )


def spread_of_seeds() -> tuple[str]:
    """Largest standard deviation over the three seeds of a method at 16 epochs."""
    names = ("ours", "fixed", "fixedflops", "net2net", "pairs")
    scores = ([100 * run.results["test_accuracy"] for run in runs(f"{NINE}/{n}_s*").values()] for n in names)
    return (f"{max(map(statistics.stdev, scores)):.1f}",)


def by_osgd() -> tuple[str, ...]:
    """Published gains by OSGD, by class and by image."""
    pairs = (
        printed("Table 14", "resnet18", "Ours-Dynamic-OSGD", "Ours", override=f"mode={mode}")
        for mode in ("classes", "images")
    )
    return tuple(f"{first - second:.1f}" for first, second in pairs)


def collapsed() -> tuple[str]:
    """Smallest accuracy of `growing_vt` by the earlier rule."""
    scores = [run.results["test_accuracy"] for run in runs("digits_methods/growing_vt_s*").values()]
    assert sum(score < 0.9 for score in scores) == 1 and len(scores) == 3
    return (f"{100 * min(scores):.0f}",)


def looking() -> tuple[str, str]:
    """Smallest and largest additional cost of methods that use data."""
    base = float(cost(f"{NINE}/ours_s*", 9))
    names = ("splitting", "firefly_split", "firefly", "gradmax", "tiny")
    return ends((float(cost(f"{NINE}/{name}_s0", 9)) - base for name in names), 0)


def a_flop() -> tuple[str, ...]:
    """Seconds per FLOP of arms on an idle machine, relative to the full network."""

    def pace(arm: str) -> float:
        results = runs(f"testbed_cifar10_seconds/{arm}")[0].results
        return results["seconds"] / results["train_cost_percent"]

    return tuple(
        f"{pace(arm) / pace('fixed_size'):.1f}" for arm in ("grown_depth", "grown_both", "grown_width", "smaller")
    )


def less_than_asked() -> tuple[str, ...]:
    """Unused cost of arms: the largest, and that of width and of the smaller network at 1.2 epochs."""
    costs = {
        (arm, budget): 100 - float(cost(f"{TEST}/b{budget}_{arm}_s*", 9))
        for arm in ("smaller", "grown_depth", "grown_both", "grown_width")
        for budget in ("1.2", "3.6", "10", "30")
    }
    width, smaller = costs.pop(("grown_width", "1.2")), costs.pop(("smaller", "1.2"))
    return f"{max(costs.values()):.0f}", f"{width:.0f}", f"{smaller:.0f}"


def share_of_small_images() -> tuple[str]:
    """Percentage of training FLOPs on the smaller images."""
    small, large = runs(f"{TEN}/grown_resolution_s0")[0].results["stages"]
    parts = [stage["epochs"] * stage["flops_per_sample"] for stage in (small, large)]
    return (f"{100 * parts[0] / sum(parts):.0f}",)


def largest_factor() -> tuple[str]:
    """Largest rate factor of all runs with rates.csv."""
    paths = RESULTS.glob("*/*/rates.csv")
    factors = (pandas.to_numeric(pandas.read_csv(path)["rate_factor"], errors="coerce").max() for path in paths)
    return (f"{max(factors):.1f}",)


def regional_on_gpu() -> tuple[str, ...]:
    """Time of steps with rates by region relative to torch's, on an H200."""
    path = RESULTS / "gpu/NVIDIA-H200/ratios_optimizers.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    ratios = {(row["what"], row["on"]): f"{row['value']:.1f}" for row in rows}
    fused, whole = "steps with rates by region / torch's fused", "rates by region / torch's SGD, steps"
    steps = [ratios[fused, f"{name}, ResNet-18"] for name in ("SGD", "AdamW")]
    return (*steps, *(ratios[whole, name] for name in ("ResNet-18", "Llama 120 M")))


def drift() -> tuple[str, ...]:
    """Seconds of runs of the same work."""
    return tuple(f"{run.results['seconds']:.0f}" for run in runs(f"{ALONE}/fixed_size_s*").values())


def windows() -> tuple[str, ...]:
    """Windows of text, rounded to hundreds, and steps of the full network at both budgets."""
    found = [runs(f"{TEXT}/b{budget}_fixed_size_s*")[0] for budget in ("0.03", "0.1")]
    steps = [int(run.curve("step")[-1]) for run in found]
    sizes = [run.results["batch_size"] for run in found]
    return (*(f"{round(step * size, -2):,}" for step, size in zip(steps, sizes, strict=True)), *map(str, steps))


def found_after() -> tuple[str, ...]:
    """Epochs after which a layer first has its final 10 neurons, from 4 and from 64."""
    first = {
        start: sorted({list(run.width_path).index(10) for run in runs(f"{SCAFFOLD}/w{start}_s*").values()})
        for start in (4, 64)
    }
    return *map(str, first[4]), *map(str, first[64])


def over_rates(method: str) -> tuple[str, str]:
    """Smallest and largest final training loss at the three rates of Figure 14 at which all methods train."""
    found = [run.results["train_loss"] for rate in SAFE for run in runs(f"figure14/{method}_lr{rate}").values()]
    return f"{min(found):.2f}", f"{max(found):.2f}"


def ours_below_equal_cost() -> tuple[str, str]:
    """Smallest and largest distance of ours below fixed size of equal cost, at these rates."""
    lost = [gap(f"figure14/equal_flops_lr{rate}", f"figure14/ours_lr{rate}") for rate in SAFE]
    return min(lost), max(lost)


def convolutions() -> tuple[str, ...]:
    """Isotropic convolutions: range of final summed widths from 8 and from 32 channels, and of accuracies."""
    narrow, wide = (widths(f"{CONVOLUTIONS}/w{start}_s*") for start in (8, 32))
    return (narrow[0], narrow[-1], wide[0], wide[-1], *spread(*(f"{CONVOLUTIONS}/w{start}_s*" for start in (8, 32))))


def together_from() -> str:
    """Epoch from which the summed widths of all runs differ by at most 4."""
    paths = [run.width_path for start in (8, 32) for run in runs(f"{CONVOLUTIONS}/w{start}_s*").values()]
    apart = [max(sums) - min(sums) for sums in zip(*paths, strict=True)]
    return str(next(epoch for epoch in range(len(apart)) if max(apart[epoch:]) <= 4))


def largest_removal() -> tuple[str]:
    """Largest change of the outputs by removed neurons, in percent."""
    found = [run for start in (8, 32) for run in runs(f"{CONVOLUTIONS}/w{start}_s*").values()]
    return (f"{100 * max(run.results['parity_max_error'] for run in found):.0f}",)


def fading() -> tuple[str, ...]:
    """Isotropic convolutions with less weight decay: accuracies and final widths from 8 and from 32 channels."""
    found = [runs(f"{FADING}/w{start}_s*")[0].results for start in (8, 32)]
    last = [str(width) for one in found for width in one["stages"][-1]["widths"].values()]
    return (*(f"{100 * one['test_accuracy']:.1f}" for one in found), *last)


def surveyed() -> tuple[str]:
    """Number of networks of torchvision and timm in the matrix."""
    return (str(len(json.loads((RESULTS / "matrix/matrix.json").read_text(encoding="utf-8"))["networks"])),)


@cache
def tutorial() -> dict[str, tuple[list[float], float]]:
    """Accuracies and share of FLOPs, in percent, of each method of the tutorial."""
    with (RESULTS / "your_network" / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        name: (
            [100 * float(row["test_accuracy"]) for row in rows if row["run"] == name],
            100 * float(next(row["flops_share"] for row in rows if row["run"] == name)),
        )
        for name in dict.fromkeys(row["run"] for row in rows)
    }


def tutorial_line(name: str) -> tuple[str, ...]:
    """Cost, mean and deviation of a method of the tutorial."""
    scores, share = tutorial()[name]
    return f"{share:.1f}", f"{statistics.fmean(scores):.1f}", f"{statistics.stdev(scores):.1f}"


def widening() -> tuple[str, ...]:
    """Mean test loss after each way of widening a trained network, in bits per byte."""
    kept = json.loads((RESULTS / "widening" / "results.json").read_text(encoding="utf-8"))["rows"]
    losses = {
        way: [row["test"] for row in kept if (row["width"], row.get("method"), row.get("noise_std")) == way]
        for way in dict.fromkeys((row["width"], row.get("method"), row.get("noise_std")) for row in kept[1:7])
    }
    copies, plain, pairs = (losses[2.0, *way] for way in (("hypercloning", 0.1), ("hypercloning", 0.0), ("pairs", 0.0)))
    assert all(a < b < c for a, b, c in zip(copies, plain, pairs, strict=True))
    return tuple(f"{statistics.fmean(each):.3f}" for each in losses.values())


def trained() -> tuple[str, ...]:
    """Mean test loss of each way to continue from a small trained network, in bits per byte, by kind and budget."""

    def losses(budget: int, kind: str) -> list[float]:
        path = RESULTS / "trained" / f"{budget}_{kind}.json"
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found = [row["test"] for row in kept if row["lr"] == kept[-1]["lr"]]
        assert len(found) == 3, path
        return found

    sizes, states = ("width", "depth", "both"), ("inherit", "reset", "newborn")
    kinds = ["small_small", *(f"small_{size}_{state}" for size in sizes for state in states)]
    kinds += [f"scratch_{size}" for size in sizes]
    for budget in (300, 900):
        for size in sizes:
            enlarged = [losses(budget, f"small_{size}_{state}") for state in states]
            for each in enlarged:
                ends = zip(losses(budget, "small_small"), each, losses(budget, f"scratch_{size}"), strict=True)
                assert all(a < b < c for a, b, c in ends)
            means = [*map(statistics.fmean, enlarged)]
            assert max(means) - min(means) < 0.03 and means[1] < means[0] + 0.003
    return tuple(f"{statistics.fmean(losses(budget, kind)):.3f}" for kind in kinds for budget in (300, 900))


def new_weights() -> tuple[str, ...]:
    """Mean test result of each network with both rules of new weights, at the best rate by validation."""
    kept = json.loads((RESULTS / "new_weights" / "results.json").read_text(encoding="utf-8"))["rows"]
    texts, signs = [], {}
    for network, best, form in (
        ("gpt", min, "{:.3f}"),
        ("llama", min, "{:.3f}"),
        ("resnet", max, "{:.1%}"),
        ("vit", max, "{:.1%}"),
    ):
        by_rule = {}
        for rule in ("as_network", "fan_in"):
            at: dict[float, list[tuple[float, float]]] = {}
            for row in kept:
                if (row["network"], row["new_weights"]) == (network, rule):
                    at.setdefault(row["lr"], []).append((row["validation"], row["test"]))
            chosen = best(at.values(), key=lambda runs: statistics.fmean(run[0] for run in runs))
            by_rule[rule] = [test for _, test in chosen]
            texts.append(form.format(statistics.fmean(by_rule[rule])).rstrip("%"))
        signs[network] = {new < old for new, old in zip(by_rule["as_network"], by_rule["fan_in"], strict=True)}
    assert signs == {"gpt": {True}, "llama": {True, False}, "resnet": {True, False}, "vit": {True}}
    return tuple(texts)


def pruning() -> tuple[str, ...]:
    """Numbers of networks: all, pruned exactly by Torch-Pruning, inexactly, not at all, errors, too slow."""
    kept = json.loads((RESULTS / "pruning" / "results.json").read_text(encoding="utf-8"))["rows"]
    errors = [row["error"] for row in kept if "error" in row]
    done = [row for row in kept if "error" not in row]
    whole = sum(row["parameters_left"] == 1.0 for row in done)
    equal = sum(row["difference"] < 1e-10 for row in done) - whole
    late = sum("not done after 60 s" in error for error in errors)
    return tuple(map(str, (len(kept), equal, len(done) - equal - whole, whole, len(errors) - late, late)))


def sharded() -> tuple[str, ...]:
    """Memory of an event by size of the network, in MiB and in largest tensors: the larger of both processes."""
    kept = json.loads((RESULTS / "sharded" / "results.json").read_text(encoding="utf-8"))["rows"]
    texts = []
    for pair in zip(kept[::2], kept[1::2], strict=True):
        row = max(pair, key=lambda one: one["above_MiB"])
        quarter = row["parameters"] / 4 * 12 / 2 / 2**20  # weights and two moments, on two processes
        texts += [
            f"{row['parameters'] / 1e6:.0f}",
            f"{row['above_MiB']:.0f}",
            f"{row['tensors_above']:.1f}",
            f"{quarter:.0f}",
        ]
        assert row["tensors_above"] < 2
    return tuple(texts)


def sharded_at_scale() -> tuple[str, ...]:
    """Passes of an event over all bytes, its computed cost for large networks, and seconds of their traces."""
    kept = json.loads((RESULTS / "sharded" / "results.json").read_text(encoding="utf-8"))
    passes = statistics.fmean(row["touched"] for row in kept["counts"])
    for row in kept["counts"]:
        assert abs(row["gathered_state"] - 3) < 0.01 and abs(row["gathered_forwards"] - 2) < 0.01
    texts = [f"{passes:.0f}"]
    for row, bandwidth in zip(kept["large"], (450e9, 50e9), strict=True):
        old, new = row["parameters_before"], row["parameters"]
        gathered = 12 * old + 8 * (old + new)
        above, aside = 2 * 4 * row["largest"], 12 * old / row["processes"]
        texts += [f"{old / 1e9:.1f}", f"{new / 1e9:.1f}", f"{gathered / 1e9:.0f}"]
        texts += [f"{above / 1e9:.1f}", f"{aside / 1e9:.1f}"]
        texts += [f"{gathered / bandwidth:.1f}", f"{passes * 12 * new / 3.35e12:.1f}", f"{new / 185e6:.0f}"]
    return (*texts, *(f"{row['trace_seconds']:.0f}" for row in kept["large"]))


def seed_on_meta() -> tuple[str, str]:
    """CPU seconds and peak memory for the seed of a large Llama."""
    (row,) = json.loads((RESULTS / "sharded" / "results.json").read_text(encoding="utf-8"))["seed"]
    assert row["cpu_seconds"] < 60 and row["peak_GB"] < 2
    return f"{row['cpu_seconds']:.0f}", f"{row['peak_GB']:.1f}"


def tutorial_differences() -> tuple[str, ...]:
    """Gain of the grown network over the shorter training, and of the longer one over it, with intervals."""
    grown, short, whole = (tutorial()[name][0] for name in ("grown", "fixed size, 5 epochs", "fixed size, 12 epochs"))
    texts = []
    for first, second in ((grown, short), (whole, grown)):
        by_seed = [a - b for a, b in zip(first, second, strict=True)]
        reach = interval(by_seed)
        assert reach is not None
        texts += [f"{statistics.fmean(by_seed):.1f}", "{:.1f} to {:.1f}".format(*reach)]
    return tuple(texts)


def table_10() -> dict[str, Numbers]:
    """Rows with published values of Table 10."""
    ends = {
        "reset": (" without buffer", " lr_adapt=none optimizer_state=reset"),
        "inherit": (" with buffer", " lr_adapt=none"),
        "ra": ("+our RA", ""),
    }
    return {
        f"| `{folder}_{end}` | `experiment=papers/resnet20_cifar10_{folder}{settings}` | {{}} |": (
            lambda row=f"{name}{row}": two(printed("Table 10", "resnet20", row))
        )
        for folder, name in (("adam", "Adam"), ("avagrad", "AvaGrad"))
        for end, (row, settings) in ends.items()
    }


MORE: dict[str, dict[str, Numbers]] = {
    ROWS: {
        **table_10(),
        "with seed 0 the loss of validation is {} kept at 0.0015, {} at 0.003 and {} at 0.006, folded {} at 0.003 "
        "and {} at 0.006.": lambda: held_out(
            "val", "keep_lr0.0015", "keep_lr0.003", "keep_lr0.006", "fold_lr0.003", "fold_lr0.006"
        ),
        "The mean test loss is {} kept, {} compensated and {} folded; folded less kept {} (95 % interval of the "
        "paired difference {}), compensated less kept "
        "{} ({}), folded less compensated {} ({}).": lambda: treated(TRANSLATED, "0.003", "test_loss"),
        "With three seeds it ends at {} bits per byte kept, {} compensated and {} folded; folded less kept {} (95 % "
        "interval {}), compensated less kept {} ({}), folded less compensated {} ({}).": lambda: treated(
            SHORT_LLAMA, "0.008", "test_bits_per_byte"
        ),
        "(published for fixed size, `ours` and Net2Net: {}, {} and {}, on the original images": lambda: two(
            printed("Table 2", "resnet20", "Large Baseline", "Ours", "Net2Net")
        ),
        "(accuracy moves by {} points, with a deviation of {}, in the {} epochs that begin with a new neuron, by {} "
        "and {} in the {} that begin with one removed down to "
        "16, by {} and {} in the {} others from epoch 24 on;": jumps,
        "only 8 neurons cost accuracy ({} to {} % from 16, 24 and 32, {} % at 8 all along, {} to {} % at all others; "
        "{} points an event below 16 neurons": to_widths,
        "isotropic tanh is far above tanh at this rate ({} to {} against {} to {} %)": isotropic_and_tanh,
        "The first four seeds above raised the question: they differ by {} points (95 % interval {}).": lambda: gain(
            f"{GRID}/iso_w32_t16_s*", f"{GRID}/iso_w16_t16_s*", 2
        ),
        "No jump here either ({} points with a deviation of {} in the {} epochs behind an event, {} and {} in the {} "
        "others from epoch 24 on);": jumps_slow,
        "8 neurons cost {} points ({} % from 32, {} all along), 32 to 16 nothing ({} and {} %), and 8 grown to 32 "
        "end with 32's {} %.": lambda: (
            gap(f"{SLOW}/iso_w32_t32_s0", f"{SLOW}/iso_w8_t8_s0"),
            *(one(f"iso_{name}_s0") for name in ("w32_t8", "w8_t8", "w32_t16", "w32_t32", "w8_t32")),
        ),
        "learns well at this rate: {} % with 32 neurons, {} points below the isotropic network; with 8 neurons it is "
        "four points below ({} %).": lambda: (
            one("tanh_w32_s0"),
            gap(f"{SLOW}/iso_w32_t32_s0", f"{SLOW}/tanh_w32_s0"),
            one("tanh_w8_s0"),
        ),
        "Up to 75 neurons come without any change of the output ({}); one that goes changes it by {}, 75 of 100 by "
        "{} %, and accuracy by nothing: the second layer uses few directions after so short a training. Diagonal "
        "layers keep {} % of the parameters": invariance,
        "growing changes the output by at most {});": growth_error,
        "to measure seconds (which drift: {}, {} and {} s for the same work)": drift,
        "All {} rows are here,": surveyed,
        "from 4 after {} epochs and from 64 after {} or {}. A weight decay": found_after,
        "end with {} to {} channels together from 8, 16 and 32, with {} to {} from 32, 64 and 128, at {} to {} %; "
        "all six runs lie within 4 of each other from epoch {} on": lambda: (*convolutions(), together_from()),
        "a removal changes the outputs by up to {} %.": largest_removal,
        "Of 30 runs {} diverge": lambda: (str(len([*RESULTS.glob("figure14/*/failure.json")])),),
        "training loss falls from variance transfer ({} to {}) over plain growing ({} to {}) to rate adaptation ({} "
        "to {})": lambda: [each for method in ("growing_vt", "growing", "ours") for each in over_rates(method)],
        "is below all of them ({} to {}), and above rate adaptation in accuracy by {} to {} points": lambda: (
            *over_rates("equal_flops"),
            *ours_below_equal_cost(),
        ),
        "{} and {} %, but only the last widths meet, {}, {} and "
        "{} from the narrow start, {}, {} and {} from the": fading,
        "under which one seed in three of `growing_vt` collapsed to {} %.)": collapsed,
        "On one core larger batches give up to {} % in the first stages and nothing in all: a core is just as poorly "
        "used by large batches of few channels. A quarter of the width needs {} % of the FLOPs and runs only twice "
        "as fast as the full network, so that {} % of "
        "the FLOPs become a factor of {} in time.": batches,
        "with SGD, seeds differ by {} points.": spread_of_seeds,
        "One seed: runs spread by {} points.": spread_of_seeds,
        "in the paper OSGD gains {} and {} points and ends above fixed size": by_osgd,
        "the fixed-size network translates the validation set with {}.": lambda: (
            f"{runs(f'{MULTI}/fixed_size')[0].curve('val_bleu')[2]:.2f}",
        ),
        **{
            f"| `{name}` | `{settings}` | {{}} | {{}} | {{}} | {{}} | {{}} |": lambda name=name: mnist_line(name)
            for name, settings in (
                ("classical", "model.sharing=none model.initialisation=xavier_in optimizer.lr=0.01"),
                *((name, f"model.initialisation={name}") for name in HYPER[1:]),
            )
        },
        "A hypernetwork took {} to {} minutes on a shared core, the classical network {} to {}.": lambda: (
            *minutes(*(f"{MNIST}_full/{name}_s*" for name in HYPER[1:])),
            *minutes(f"{MNIST}_full/classical_s*"),
        ),
        "`hyperfan_in` has {} % of the test images after the two epochs, `hyperfan_out` {} %. At 1e-11 `kaiming_out` "
        "begins at a loss of {} and has {} %; at 1e-15 `kaiming_in` "
        "begins at {} and has {} %: their losses": lambda: (
            *(mean(f"{ALLCONV}/{name}") for name in ("hyperfan_in", "hyperfan_out")),
            *(
                value
                for name in ("kaiming_out", "kaiming_in")
                for value in (allconv_first(name), mean(f"{ALLCONV}/{name}"))
            ),
        ),
        "the loss of `hyperfan_in` is not finite at step {}, those of `kaiming_in` and `kaiming_out` at step {}, and "
        "`hyperfan_out` has {} % of the test images.": lambda: (
            allconv_failed("hyperfan_in_lr5e-4"),
            allconv_failed("kaiming_in_lr5e-4", "kaiming_out_lr5e-4"),
            mean(f"{ALLCONV}_rates/hyperfan_out_lr5e-4", 1),
        ),
        "Mean training losses of `hyperfan_in` at 1e-4, 3e-5 and 1e-5 are {}, {} and {}, of `hyperfan_out` {}, {} "
        "and {}. At 1e-14 the loss of `kaiming_in` and at 1e-10 "
        "that of `kaiming_out` are not finite at step {};": lambda: (
            *allconv_losses("hyperfan_in", "1e-4", "3e-5", "1e-5"),
            *allconv_losses("hyperfan_out", "1e-4", "3e-5", "1e-5"),
            allconv_failed("kaiming_in_lr1e-14", "kaiming_out_lr1e-10"),
        ),
        "emits weights of deviation {} to {} in every layer ({} to {} in the hidden layers behind the first with "
        "hyperfan and in the classical network), and the hidden layers' inputs to tanh have deviations of {} to {} "
        "(classical and hyperfan-in {} to {}; hyperfan-out starts at {} because": deviations,
        "Xavier's hypernetwork has hardly recovered after these 600 steps ({} %)": lambda: (
            mean(f"{MNIST}/xavier_in", 0),
        ),
        "Xavier's fan-in starts at a loss of {} (mean of the first epoch) and ends at {} %, hyperfan-in at {} and "
        "hyperfan-out at {} %. With ReLU hyperfan-in reaches {} "
        "and hyperfan-out {} %, the classical network {} %;": variants,
        "(median first loss {} and {} against {}) and converges, while Kaiming's fan-in diverges in at least one "
        "seed even at 1e-5 (published: trainable at 1e-5 only). But hyperfan is not the best of all: Xavier's "
        "fan-out starts lower ({}) and is lower at the end of every task ({}, {}, {} against hyperfan-in's {}, {}, "
        "{})": continual,
        "(hyperfan-in's mean loss when learnt is {} with and "
        "without, Xavier's fan-out {} with and {} without)": lookahead,
    },
    MEASURED: {
        "the full network takes {} and {} windows of 128 tokens, in {} and {} steps.": windows,
        "(359 test images, so one image is {} points)": lambda: (f"{100 / 359:.2f}",),
        "All runs of a budget cost the same to within {} %, except growth in width ({} % less) and the smaller "
        "network ({} % less) at 1.2 epochs.": less_than_asked,
        "So a FLOP of growth in depth takes {} times as long as one of the full network, one of growth in both {}, "
        "in width {} and one of the smaller network {} times:": a_flop,
        "It does not pay in seconds ({}, {} and {}):": lambda: tuple(
            seconds(f"digits/{arm}_s*") for arm in ("ours", "equal_flops", "fixed")
        ),
        "Looking at data adds {} to {} % of cost.": looking,
        "from the middle of its epochs on ({} % of the cost)": share_of_small_images,
        "one seed, at {} % of the cost ([rows](../results/cifar10_8_epochs/table.md))": lambda: (
            cost("cifar10_8_epochs/vgg11_ours", 0),
        ),
        "ResNet-20 at 8 epochs and {} % (": lambda: (cost(f"{EIGHT}/hyperfan8_ours", 0),),
        "(The schedule behind the published {} is not given.)": lambda: (
            f"{max(o.cost_percent for o in published() if o.table == 'Table 13' and o.row == 'Ours'):.2f}",
        ),
    },
    ISOTROPIC: {
        "where tanh learns too, it is {} point above on CIFAR-10": at_0_001,
    },
    LANGUAGE: {
        "in bits per byte: the full network ends at {} and {}, grown in depth at {} and {}, in both at {} and {}, in "
        "width at {} and {}, and a smaller one that never grows at {} and {}": lambda: tuple(
            value
            for arm in ("fixed_size", "grown_depth", "grown_both", "grown_width", "smaller")
            for value in by_budget(TEXT, arm, "0.03", "0.1")
        ),
    },
    OPTIMIZERS: {
        "{} is the largest in the runs on digits and CIFAR-10.": largest_factor,
        "take {} (SGD) and {} (AdamW) times as long as torch's fused ones on ResNet-18. Training steps after one "
        "growth event take {} times as long as with torch's SGD on ResNet-18, and {} times on a Llama of 120 million "
        "parameters.": regional_on_gpu,
        "by {} points (ten seeds, paired 95 % interval {}).": lambda: gain(
            "digits_output_rate/ours_s*", "digits_output_rate/growing_vt_s*", 2
        ),
        "The paper reports +{} points for ResNet-20 on CIFAR-10 after 160 epochs (Table 6: {} with variance transfer "
        "alone, {} with both).": lambda: two(
            (
                printed("Table 2", "resnet20", "Ours")[0] - printed("Table 6", "resnet20", "Growing+VT")[0],
                printed("Table 6", "resnet20", "Growing+VT")[0],
                printed("Table 2", "resnet20", "Ours")[0],
            )
        ),
    },
    TRANSLATION: {
        "where the paper has {} without": lambda: (
            f"{next(o.cost_percent for o in published() if o.table == 'Table 5' and o.row == 'Net2Net'):.2f}",
        ),
    },
    TUTORIAL: {
        **{
            f"| {head} | {{}} % | {{}} ± {{}} % |": lambda name=name: tutorial_line(name)
            for head, name in (
                ("grown, 12 epochs", "grown"),
                *(((name, name)) for name in ("fixed size, 5 epochs", "fixed size, 12 epochs")),
            )
        },
        "against the 5 epochs it gains {} points (95 % interval of the paired difference {}), and against the 12 "
        "epochs it loses {} ({}).": tutorial_differences,
    },
    "notebooks/docs/pages/guide/networks.md": {
        "its test loss is {} bits per byte with HyperCloning, {} without noise and {} with pairs, in this order for "
        "every seed; at 1.5 times the width HyperCloning has {}, pairs {} and Net2Net {}.": widening,
        "Tests prune {} networks of torchvision and transformers by half, all equal to the masked network. "
        "Torch-Pruning's `BasePruner`, as `python notebooks/docs/pruning_rows.py` calls it (version 1.6.0, with the "
        "number of heads), is equal on {} of them, differs on {} (OPT, Phi-3), removes nothing of {} (GPT-2), ends "
        "in an error on {} (ShuffleNet, T5), and is not done "
        "after a minute on {} (Swin, Llama, Qwen3).": pruning,
    },
    "notebooks/docs/pages/guide/trained.md": {
        "| small network, not enlarged | {} | {} | | twice as wide, state carried | {} | {} | | twice as wide, state "
        "reset | {} | {} | | twice as wide, `Warmup` of new entries | {} | {} | | twice as deep, state carried | {} "
        "| {} | | twice as deep, state reset | {} | {} | | twice as deep, `Warmup` of new entries | {} | {} | | "
        "both, state carried | {} | {} | | both, state reset | {} | {} | | both, `Warmup` of new entries | {} | {} | "
        "| from scratch, twice as wide | {} | {} | | from scratch, twice as deep | {} | {} | | from scratch, both | "
        "{} | {} |": trained,
    },
    "notebooks/docs/pages/own_loop.md": {
        "a GPT over characters ends at {} bits per character in place of {}, a Llama at {} bits per byte in place of "
        "{} (by seed the sign differs), a ResNet-20 on digits at {} % in place of {} (likewise), but a small ViT on "
        "digits at {} % in place of {}, worse with every seed.": new_weights,
    },
    "notebooks/docs/pages/guide/sharded.md": {
        "| 512 x 8 | {} M | 2 | {} | {} | {} | | 1024 x 4 | {} M | 8 | {} | {} | {} | | 1024 x 8 | {} M | 8 | {} | "
        "{} | {} | | 2048 x 4 | {} M | 32 | {} | {} | {} |": sharded,
        "Each process computes all new tensors and keeps its pieces: operations read and write 12 M bytes about {} "
        "times. Memory above that of training is about two of the largest tensors, as in the table above, and the "
        "host gets the old pieces. For Llama 2 from half to full width, per process: | | processes | N | M | "
        "gathered, GB | memory above, GB | to the host, GB | network, s | arithmetic, s | noise, s | "
        "|---|---|---|---|---|---|---|---|---|---| | 7B | 8 | {} B | {} B | {} | {} | {} | {} | {} | {} | | 70B | 64 "
        "| {} B | {} B | {} | {} | {} | {} | {} | {} | N and M are counted in the traced network (tracing it on "
        "device meta took {} and {} s here, on a busy machine)": sharded_at_scale,
        "Llama 2 7B with a seed of a quarter of its width took {} s of CPU time and at most {} GB": seed_on_meta,
    },
}


def more() -> list[Stated]:
    """Return all sentences of this module."""
    return listed(MORE)
