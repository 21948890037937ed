"""Sentences with numbers on the pages, as templates, and functions that compute the numbers from runs.

A template filled with its numbers must be on its page, word for word.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, floor

from numpy import interp

from growlab.growth import make_schedule
from growlab.lab.analysis.paired import interval
from growlab.lab.analysis.results import Run, load_runs, metric_of, open_run
from growlab.lab.analysis.schedules import times_to_scores
from growlab.lab.analysis.tables import summarise
from growlab.recipes.papers.paper_table import published
from tests.command_line import ROOT

sys.path.insert(0, str(ROOT / "notebooks" / "docs"))
from verdicts import score

RESULTS = ROOT / "notebooks" / "results"
README = "README.md"
MEASURED = "notebooks/docs/pages/guide/measured.md"
ISOTROPIC = "notebooks/docs/pages/guide/isotropic.md"
ROWS = "notebooks/results/README.md"
OVERABUNDANCE = "conf/experiment/papers/isotropic_overabundance.yaml"


Numbers = Callable[[], Iterable[str]]
"""Function that returns the numbers of a sentence, formatted as on the page."""


@dataclass(frozen=True)
class Stated:
    """A sentence, or a part of one, with its numbers.

    Attributes:
        page: file that contains the sentence.
        template: text with `{}` for each number.
        values: function that returns the numbers.
    """

    page: str
    template: str
    values: Numbers

    @property
    def text(self) -> str:
        """The template filled with its numbers."""
        return plain(self.template.format(*self.values()))


def plain(text: str) -> str:
    """Remove line breaks, bold marks and comment signs."""
    return re.sub(r"\s+", " ", re.sub(r"^# ", "", text.replace("**", ""), flags=re.M))


@cache
def runs(pattern: str) -> dict[int, Run]:
    """Finished runs of a pattern, by seed."""
    paths = [path for path in sorted(RESULTS.glob(pattern)) if (path / "results.json").is_file()]
    found = [open_run(path) for path in paths]
    assert found, f"no run {pattern}"
    by_seed = {run.results["seed"]: run for run in found}
    assert len(by_seed) == len(found), f"two runs {pattern} of one seed"
    return by_seed


def mean(pattern: str, digits: int = 2) -> str:
    """Mean test score over seeds, rounded as in tables."""
    results = [run.results for run in runs(pattern).values()]
    metric = metric_of(results)
    return f"{metric.scale * statistics.fmean(one[f'test_{metric.key}'] for one in results):.{digits}f}"


def scores(pattern: str, digits: int = 2) -> str:
    """Mean and standard deviation over seeds."""
    deviation = statistics.stdev(score(run) for run in runs(pattern).values())
    return f"{mean(pattern, digits)} ± {deviation:.{digits}f}"


def cost(pattern: str, digits: int = 1) -> str:
    """Training FLOPs in percent of the fixed-size network's."""
    return f"{statistics.fmean(run.results['train_cost_percent'] for run in runs(pattern).values()):.{digits}f}"


def seconds(pattern: str) -> str:
    """Mean seconds of a run."""
    return f"{statistics.fmean(run.results['seconds'] for run in runs(pattern).values()):.0f}"


def differences(first: str, second: str) -> list[float]:
    """Differences (first - second) of the seeds that both have."""
    firsts, seconds_ = runs(first), runs(second)
    return [score(firsts[seed]) - score(seconds_[seed]) for seed in sorted(set(firsts) & set(seconds_))]


def gap(first: str, second: str, digits: int = 1) -> str:
    """Mean of the paired differences."""
    return f"{statistics.fmean(differences(first, second)):.{digits}f}"


def reach(first: str, second: str, digits: int = 1) -> str:
    """95 % interval of the paired differences."""
    found = interval(differences(first, second))
    assert found is not None
    return f"{found[0]:.{digits}f} to {found[1]:.{digits}f}"


def gain(first: str, second: str, digits: int = 1) -> tuple[str, str]:
    """Mean and 95 % interval of the paired differences."""
    return gap(first, second, digits), reach(first, second, digits)


@cache
def ratio(folder: str, what: str, method: str, level: float) -> str:
    """Cost or seconds to reach `level` (in the metric's unit), relative to the fixed-size network."""
    rows = summarise(load_runs([RESULTS / folder]), lambda sentence: None)
    scale = rows[0].metric.scale
    (one,) = [
        one
        for one in times_to_scores(rows)
        if re.fullmatch(method, one.series.name) and abs(scale * one.level - level) < 0.006
    ]
    return f"{getattr(one, f'{what}_ratio').value:.2f}"


def width(pattern: str) -> str:
    """Final width, equal in all runs."""
    folders = [path for path in sorted(RESULTS.glob(pattern)) if (path / "results.json").is_file()]
    (one,) = {open_run(path).width_path[-1] for path in folders}
    return str(one)


# At equal cost ---------------------------------------------------------------------------------------------

TEST, PLAIN, ALONE = "testbed_cifar10", "testbed_cifar10_plain", "testbed_cifar10_plain_seconds"
TEXT, DIGITS, NINE = "llama_text", "digits", "resnet20_cifar10_16_epochs"
ARMS = {
    "`method=smaller`: one block a stage, never grown": "smaller",
    "`method=grown_depth`: from one block a stage to two": "grown_depth",
    "`method=grown_both`": "grown_both",
    "`method=grown_width`: from half the width": "grown_width",
    "`method=fixed_size`: the full network": "fixed_size",
}


WINDOWS = "llama_text_inputs"
COMPUTED = {
    "one layer of six, windows grown from 32 to 128 tokens": "smaller_grown_context",
    "one layer of six, never grown": "smaller",
    "`method=grown_depth`: from one layer to six": "grown_depth",
    "windows of 32 tokens throughout, tested on such": "context_32",
    "batches of 4 windows throughout": "batch_4",
    "batches grown from 4 over 8 to 16 windows": "grown_batch",
    "windows grown from 32 to 128 tokens": "grown_context",
    "the full network: windows of 128 tokens, batches of 16": "full",
    "two shared layers, run twice": "repeats_2",
    "two shared layers, run twice, three and four times": "grown_repeats",
    "two shared layers, run four times": "repeats_4",
}


def fewer_bits(first: str, second: str, passes: str = "0.03", digits: int = 2) -> tuple[str, str]:
    """Reduction of bits per byte from the second arm to the first, with its interval."""
    return gain(f"{WINDOWS}/b{passes}_{second}_s*", f"{WINDOWS}/b{passes}_{first}_s*", digits)


def line(head: str, *cells: str) -> tuple[str, Callable[[], tuple[str, ...]]]:
    """Row of a table with mean and deviation of each pattern."""
    return f"| {head} |" + " {} |" * len(cells), lambda: tuple(scores(cell) for cell in cells)


def text_line(head: str, arm: str) -> tuple[str, Callable[[], tuple[str, ...]]]:
    """Row of the language model's table: costs and bits per byte at both budgets."""
    at = [f"{TEXT}/b0.03_{arm}_s*", f"{TEXT}/b0.1_{arm}_s*"]
    return f"| {head} | {{}}, {{}} | {{}} | {{}} |", lambda: (
        *(cost(one, 0) for one in at),
        *(scores(one, 3) for one in at),
    )


def over(folder: str, budget: str, arm: str, than: str = "fixed_size") -> tuple[str, str]:
    """Gain of an arm at a budget, with its interval."""
    return gain(f"{folder}/b{budget}_{arm}_s*", f"{folder}/b{budget}_{than}_s*")


def bits(budget: str, arm: str) -> tuple[str, str]:
    """Reduction of bits per byte from the full network to an arm, with its interval."""
    return gain(f"{TEXT}/b{budget}_fixed_size_s*", f"{TEXT}/b{budget}_{arm}_s*", 2)


def at_30(arm: str) -> tuple[str, str]:
    """Lead of the full network at 30 epochs for both seeds, the smaller first."""
    first, second = sorted(differences(f"{TEST}/b30_fixed_size_s*", f"{TEST}/b30_{arm}_s*"))
    return f"{first:.1f}", f"{second:.1f}"


def tables() -> Iterator[Stated]:
    """Yield the rows of tables in measured.md."""
    for head, arm in ARMS.items():
        yield Stated(MEASURED, *line(head, *(f"{TEST}/b{b}_{arm}_s*" for b in ("1.2", "3.6", "10", "30"))))
        short = head.partition(":")[0]
        yield Stated(MEASURED, *line(short, *(f"{PLAIN}/b{b}_{arm}_s*" for b in ("1.2", "3.6"))))
    for head, arm in {
        "`method=smaller`: one layer of six, never grown": "smaller",
        "`method=grown_width`: from half the width": "grown_width",
        "`method=grown_depth`: from one layer to six": "grown_depth",
        "`method=grown_both`": "grown_both",
        "`method=fixed_size`: the full network": "fixed_size",
    }.items():
        yield Stated(MEASURED, *text_line(head, arm))
    for head, arm in COMPUTED.items():
        patterns = [f"{WINDOWS}/b{budget}_{arm}_s*" for budget in ("0.03", "0.1", "0.3")]
        yield Stated(
            MEASURED,
            f"| {head} | {{}} | {{}} | {{}} |",
            # Not all arms were trained at the largest budget.
            lambda patterns=patterns: tuple(scores(one, 3) if any(RESULTS.glob(one)) else "" for one in patterns),
        )
    for head, arm in {
        "`method=ours`": "ours",
        "`method=equal_flops`: the full network, stopped at about that cost": "equal_flops",
        "`method=fixed_size`: the full network": "fixed",
    }.items():
        yield Stated(
            MEASURED,
            f"| {head} | {{}} | {{}} |",
            lambda arm=arm: (cost(f"{DIGITS}/{arm}_s*", 0), scores(f"{DIGITS}/{arm}_s*")),
        )


def by_budget(folder: str, arm: str, *budgets: str, digits: int = 2) -> tuple[str, ...]:
    """Means at several budgets."""
    return tuple(mean(f"{folder}/b{budget}_{arm}_s*", digits) for budget in budgets)


def seconds_by_seed(folder: str, arm: str) -> tuple[str, ...]:
    """Seconds of an arm relative to the full network, by seed."""
    grown, full = runs(f"{folder}/{arm}_s*"), runs(f"{folder}/fixed_size_s*")
    return tuple(f"{grown[s].results['seconds'] / full[s].results['seconds']:.2f}" for s in sorted(grown))


WIDTH, BOTH = "pairs, (?!grown in depth).*from 1/2 of the width.*", ".*grown in depth and from 1/2.*"
DEPTH, SMALLER = "pairs, grown in depth.*(?<!width), T_0 = 75 %", "fixed-size, fewer blocks.*"
BUDGETS = ("1.2", "3.6", "10")
EQUAL_COST: dict[str, dict[str, Numbers]] = {
    MEASURED: {
        "by {} points at 1.2 epochs (95 % interval {}) and by {} "
        "at 3.6 ({}); at 10 epochs {} points ({}) are left.": lambda: tuple(
            one for budget in BUDGETS for one in over(TEST, budget, "grown_depth")
        ),
        "the smaller one that never grows is better still, by {} ({}), {} ({}) and {} points ({}).": lambda: tuple(
            one for b in BUDGETS for one in over(TEST, b, "smaller", "grown_depth")
        ),
        "the full network ends at {} %, the smaller one at {}, the network grown in depth at 20, 30 and 40 % of the "
        "cost at {}, {} and {}: {} ({}), {} ({}) and {} ({}) points below the full network.": lambda: in_between(),
        "Within 3 % of a pass, growth gains over the full network: {} bits ({}) with windows, {} ({}) with batches, "
        "and {} ({}) with shared layers; and it is behind what never grows, by {} ({}), {} ({}) and {} ({}).": lambda: (
            tuple(
                number
                for pair in (
                    *(("grown_context", "full"), ("grown_batch", "full"), ("grown_repeats", "repeats_4")),
                    *(("context_32", "grown_context"), ("batch_4", "grown_batch"), ("repeats_2", "grown_repeats")),
                )
                for number in fewer_bits(*pair)
            )
        ),
        "whose windows grow is best of all, {} bits ahead of the same with whole windows within 3 % of a pass ({}) and "
        "{} within 10 % ({}).": lambda: (
            *fewer_bits("smaller_grown_context", "smaller", digits=3),
            *fewer_bits("smaller_grown_context", "smaller", "0.1", 3),
        ),
        "Within 10 % of a pass windows gain {} bits ({}), batches {} ({}) and shared layers {} ({}) over the full "
        "network. Windows and shared layers are {} ({}) and {} ({}) behind what never grows; batches that grow cannot "
        "be distinguished from small ones throughout ({}).": lambda: (
            *(
                number
                for pair in (
                    *(("grown_context", "full"), ("grown_batch", "full"), ("grown_repeats", "repeats_4")),
                    *(("context_32", "grown_context"), ("repeats_2", "grown_repeats")),
                )
                for number in fewer_bits(*pair, "0.1")
            ),
            fewer_bits("batch_4", "grown_batch", "0.1")[1],
        ),
        "Within 30 % of a pass windows gain {} bits ({}) over the full network and growth in depth {} ({}); the "
        "smaller network gains {} ({}) as it is, and {} more ({}) if its windows grow.": lambda: tuple(
            number
            for pair in (
                *(("grown_context", "full"), ("grown_depth", "full"), ("smaller", "full")),
                ("smaller_grown_context", "smaller"),
            )
            for number in fewer_bits(*pair, "0.3", 3)
        ),
        "Growing in width gains {} points ({}) at 1.2 epochs; there is no significant effect at 3.6 ({}, three "
        "seeds) or at 10 ({}, two seeds), nor for growth in both at 10 ({}).": lambda: (
            *over(TEST, "1.2", "grown_width"),
            over(TEST, "3.6", "grown_width")[1],
            *(over(TEST, "10", arm)[1] for arm in ("grown_width", "grown_both")),
        ),
        "the full network leads in both seeds, by {} and {} points over growth in depth, {} and {} over the smaller "
        "network, {} and {} over growth in width and {} and {} over growth in both.": lambda: tuple(
            one for arm in ("grown_depth", "smaller", "grown_width", "grown_both") for one in at_30(arm)
        ),
        "Grown in depth the network gains {} points (95 % interval {}) and {} ({}) over the full one, a little less "
        "than with shifted images; in both, {} ({}) "
        "and {} ({}), in width {} ({}) and {} ({}).": lambda: tuple(
            one
            for arm in ("grown_depth", "grown_both", "grown_width")
            for budget in ("1.2", "3.6")
            for one in over(PLAIN, budget, arm)
        ),
        "at 2.4 epochs' cost the network grown in depth ends at "
        "{} %, the full one at 3.6 epochs' at {} (three seeds": lambda: (
            scores(f"{ALONE}/grown_depth_s*"),
            scores(f"{ALONE}/fixed_size_s*"),
        ),
        "and {} s on average against {}, by seed {}, {} and {} of the seconds": lambda: (
            *(seconds(f"{ALONE}/grown_depth_s*"), seconds(f"{ALONE}/fixed_size_s*")),
            *seconds_by_seed(ALONE, "grown_depth"),
        ),
        "{} of the cost to the full network's accuracy at 3.6 epochs, the smaller network that never grows {} of the "
        "cost and {} of the seconds.": lambda: (
            ratio(PLAIN, "cost", DEPTH, 69.39),
            *(ratio(PLAIN, what, SMALLER, 69.39) for what in ("cost", "seconds")),
        ),
        "growth in depth takes {} of the cost and the smaller network {} at 3.6 epochs, {} and {} at 10.": lambda: (
            tuple(ratio(TEST, "cost", arm, at) for at in (65.06, 75.74) for arm in (DEPTH, SMALLER))
        ),
        "in depth {} bits per byte (95 % interval {}) at 3 % and {} ({}) at 10 %, in width {} ({}) and {} ({}), in "
        "both {} ({}) and {} ({}).": lambda: tuple(
            one
            for arm in ("grown_depth", "grown_width", "grown_both")
            for budget in ("0.03", "0.1")
            for one in bits(budget, arm)
        ),
        "the full network took {} s, the one grown in depth {} s, in width {} s, in both {} s and the smaller one {} "
        "s at {} % of the cost": lambda: (
            *(
                seconds(f"testbed_cifar10_seconds/{arm}")
                for arm in ("fixed_size", "grown_depth", "grown_width", "grown_both", "smaller")
            ),
            cost("testbed_cifar10_seconds/smaller", 0),
        ),
        "the full network's {} bits per byte take {} of its cost when it grows in depth, {} in width and {} in both; "
        "the smaller network is there at its smallest budget already, {}.": lambda: (
            mean(f"{TEXT}/b0.1_fixed_size_s*", 3),
            *(ratio(TEXT, "cost", arm, 1.974) for arm in (DEPTH, WIDTH, BOTH, SMALLER)),
        ),
    },
}

# The paper's schedule and other rows -----------------------------------------------------------------------

RATE, TEN, LONG = "resnet20_cifar10_16_epochs_output_rate", "resnet20_cifar10_10_epochs", "table2_resnet20"
INPUTS, SHORT = "resnet20_cifar10_inputs", "table2_short"


def inputs_gain(first: str, second: str) -> tuple[str, str]:
    """Mean difference of two arms on small images, and its interval."""
    return gain(f"{INPUTS}/{first}_s?", f"{INPUTS}/{second}_s?")


def in_between() -> tuple[str, ...]:
    """Accuracies at 17 epochs, then the lead of the full network over grown ones, with intervals."""
    arms, folder = ("full", "smaller", "grown_20", "grown_30", "grown_40"), "testbed_cifar10_depth"
    return (
        *(scores(f"{folder}/{arm}_s?") for arm in arms),
        *(number for arm in arms[2:] for number in gain(f"{folder}/full_s?", f"{folder}/{arm}_s?")),
    )


def on_inputs(*arms: str) -> tuple[str, ...]:
    """Mean and deviation of arms on small images, over runs with and without CUDA graphs."""
    return tuple(scores(f"{INPUTS}/{arm}_s?") for arm in arms)


CLASSES, EIGHT, ADAPTIVE = "cifar10_incremental", "resnet20_cifar10_8_epochs", "resnet20_cifar10_adaptive"
MULTI, OVER, GRID = "multi30k_table5", "isotropic_overabundance", "isotropic_mlp_cifar10"


def one_run(*patterns: str) -> Callable[[], tuple[str, ...]]:
    """Return a function for scores of single runs, or means over seeds."""
    return lambda: tuple(mean(pattern) for pattern in patterns)


def by_seconds() -> tuple[str, ...]:
    """Accuracies in percent after 13 s on a GPU, means of two seeds."""
    rows = json.loads((RESULTS / "gpu/NVIDIA-H200/training.json").read_text())["rows"]
    ways = dict.fromkeys(row["way"] for row in rows)
    found = {way: [row["accuracy"] for row in rows if row["way"] == way] for way in ways}
    return tuple(f"{100 * statistics.fmean(accuracies):.2f}" for accuracies in found.values())


def overabundance() -> tuple[str, ...]:
    """Differences from 32 to 16 neurons against 16 throughout: the twelve new seeds, then all sixteen."""
    new = differences(f"{OVER}/iso_w32_t16_s*", f"{OVER}/iso_w16_t16_s*")
    every = new + differences(f"{GRID}/iso_w32_t16_s*", f"{GRID}/iso_w16_t16_s*")
    found = []
    for values in (new, every):
        low, high = interval(values) or (0.0, 0.0)
        found += [f"{statistics.fmean(values):.2f}", f"{low:.2f} to {high:.2f}"]
    assert len(new) == 12 and len(every) == 16 and float(found[-1].split()[-1]) <= 0.3
    return tuple(found)


SHORT_ARMS = {
    "growing by pairs": "pairs_40",
    "Net2Net": "net2net_40",
    "pairs, rates by region": "pairs_ra_40",
    "variance transfer, one rate": "ours_no_ra_40",
    "`ours`": "ours_40",
    "Table 1 literally: logits shrink (`growth.as_published=true`)": "ours_published_40",
    "output layer's rate not divided (`lr_adapt.divide_output_lr_by_fan_in=false`)": "ours_no_fan_in_40",
    "output weights of variance 1 / C' (`UsualOutput`)": "ours_usual_output_40",
    "both of these": "ours_usual_output_no_fan_in_40",
    "norm of W_0 as drawn (`InitialNorm`)": "ours_initial_norm_40",
    "norms per element (`PerElement`)": "ours_per_element_40",
    "weight decay at the base rate (`DecayAtBaseRate`)": "ours_decay_at_base_rate_40",
    "momentum carried (`optimizer_state=inherit`)": "ours_momentum_40",
    "no noise (`growth.noise_std=0`)": "ours_quiet_40",
    "a hundred times the noise (`growth.noise_std=0.1`)": "ours_noisy_40",
    "Theorem A.1 (`growth.rule=constraint`)": "ours_constraint_40",
    "spread of the network's own weights (`growth.new_weights=as_network`)": "ours_as_network_40",
    "channels rounded up to even": "ours_wider_40",
    "channels rounded down to even": "ours_narrower_40",
    "`trainer.precision=bf16-mixed`, all three": "ours_bf16_40",
    "`model.shortcut=B`, all three": "ours_shortcut_b_40",
    "rate by cost (`schedule.learning_rate.progress_unit=cost`)": "ours_cost_40",
    "rate by cost, one for all regions (`method=growing_vt_cost`)": "vt_cost_40",
    "16 epochs": "ours_16",
    "16 epochs, momentum carried": "ours_momentum_16",
    "16 epochs, no noise": "ours_quiet_16",
    "16 epochs, Theorem A.1": "ours_constraint_16",
    "80 epochs": "ours_80",
    "80 epochs, rate by cost, one for all regions": "vt_cost_80",
}


def short_table(arm: str) -> tuple[str, ...]:
    """Score, then the lead of the full network: trained as long, and stopped at the same cost."""
    epochs = arm.rpartition("_")[2]
    ending = next((f"{one}_{epochs}" for one in ("bf16", "shortcut_b") if one in arm), epochs)
    behind = [gain(f"{SHORT}/{base}_{ending}_s*", f"{SHORT}/{arm}_s*") for base in ("fixed", "flops")]
    return scores(f"{SHORT}/{arm}_s*"), *behind[0], *behind[1]


def costs_of_rounding() -> tuple[str, str, str]:
    """Training cost of ResNet-20 in nine stages: published, with channels rounded up, and rounded to even numbers."""
    epochs = make_schedule(160, 128).epochs

    def percent(rounded: Callable[[float], int]) -> str:
        widths = [[rounded(full / 4 * 1.2**stage) for full in (16, 32, 64)] for stage in range(8)] + [[16, 32, 64]]
        flops = [9216 * (3 * a + 6 * a * a) + 2304 * (a + 5 * b) * b + 576 * (b + 5 * c) * c for a, b, c in widths]
        return f"{sum(100 * n * one for n, one in zip(epochs, flops, strict=True)) / (160 * flops[-1]):.1f}"

    (paper,) = {o.cost_percent for o in published() if (o.table, o.model, o.row) == ("Table 2", "resnet20", "Ours")}
    return f"{paper:.2f}", percent(ceil), percent(lambda width: 2 * floor(width / 2 + 0.5))


def others_behind() -> tuple[str, str]:
    """Smallest and largest lead of fixed size at equal FLOPs over the grown networks other than `ours`."""
    base = statistics.fmean(score(run) for run in runs(f"{NINE}/fixedflops_s*").values())
    names = {path.name.rpartition("_s")[0] for path in RESULTS.glob(f"{NINE}/*_s0")}
    grown = names - {"fixed", "fixedflops", "ours"}
    behind = [base - statistics.fmean(score(r) for r in runs(f"{NINE}/{n}_s[0-9]*").values()) for n in grown]
    return f"{min(behind):.1f}", f"{max(behind):.1f}"


def below_fixed(pattern: str) -> tuple[float, float, float]:
    """Cost in epochs of the full network, accuracy, and the interpolated lead of fixed size."""

    def point(pattern: str) -> tuple[float, float]:
        found = list(runs(pattern).values())
        costs = [run.results["train_cost_percent"] * run.reference_epochs / 100 for run in found]
        return statistics.fmean(costs), statistics.fmean(map(score, found))

    fixed = ("fixed_4", "fixed_5", "fixed_24")
    patterns = (*(f"{SCHEDULES}/{one}" for one in fixed), f"{EIGHT}/hyperfan8_fixed", f"{NINE}/fixed_s*")
    costs, accuracies = zip(*sorted(map(point, (*patterns, f"{NINE}/fixedflops_s*"))), strict=True)
    cost, accuracy = point(pattern)
    return cost, accuracy, float(interp(cost, costs, accuracies)) - accuracy


def below_fixed_text(pattern: str) -> tuple[str, ...]:
    """`below_fixed` with two decimals."""
    return tuple(f"{value:.2f}" for value in below_fixed(pattern))


def distances() -> tuple[str, ...]:
    """Distances of schedules below fixed size: with short first stages, then with longer ones."""
    early = [below_fixed(one)[2] for one in (*FROM_A_QUARTER, f"{SCHEDULES}/s2_half_first_16")]
    longer = [below_fixed(f"{SCHEDULES}/s2_half_{one}")[2] for one in ("16", "8", "early_8")]
    alone = [below_fixed(f"{SCHEDULES}/{one}")[2] for one in ("s3_half_8", "s2_quarter_8")]
    values = (min(early), max(early), alone[0], min(longer), max(longer), alone[1])
    return tuple(f"{value:.1f}" for value in values)


SCHEDULES = "resnet20_cifar10_schedules"
FROM_A_QUARTER = (f"{EIGHT}/hyperfan8_ours", f"{NINE}/ours_s*")
SETTINGS_OF = {
    "s2_half_16": "total_epochs=16 epoch_growth_rate=0 initial_fraction=0.5 initial_width=0.5 num_stages=2",
    "s2_half_8": "total_epochs=8 epoch_growth_rate=0 initial_fraction=0.5 initial_width=0.5 num_stages=2",
    "s2_half_early_8": "total_epochs=8 epoch_growth_rate=0 initial_fraction=0.25 initial_width=0.5 num_stages=2",
    "s2_half_first_16": "total_epochs=16 initial_width=0.5 num_stages=2",
    "s2_quarter_8": "total_epochs=8 epoch_growth_rate=0 initial_fraction=0.5 initial_width=0.25 num_stages=2",
    "s3_half_8": "total_epochs=8 epoch_growth_rate=0 initial_fraction=0.35 initial_width=0.5 num_stages=3",
}


def spread(*patterns: str) -> tuple[str, str]:
    """Smallest and largest score of all runs."""
    values = [score(run) for pattern in patterns for run in runs(pattern).values()]
    return f"{min(values):.1f}", f"{max(values):.1f}"


def widths(pattern: str) -> tuple[str, ...]:
    """Final widths of the runs, in ascending order."""
    return tuple(map(str, sorted({run.width_path[-1] for run in runs(pattern).values()})))


def shrunk() -> tuple[str, ...]:
    """Upper bound of the loss from 32 to 16 neurons against 32 throughout, rounded up, and both means."""
    pair = (f"{GRID}/iso_w32_t16_s*", f"{GRID}/iso_w32_t32_s*")
    found = interval(differences(*pair))
    assert found is not None
    return (f"{ceil(10 * -found[0]) / 10:.1f}", *map(mean, pair))


def on_digits() -> tuple[str, ...]:
    """Scores, costs and differences of the default experiment."""
    ours, stopped, full = (f"{DIGITS}/{arm}_s*" for arm in ("ours", "equal_flops", "fixed"))
    return (
        *(mean(ours), cost(ours, 0), cost(stopped, 0), mean(stopped)),
        *(*gain(ours, stopped), mean(full), reach(ours, full)),
    )


OTHERS: dict[str, dict[str, Numbers]] = {
    README: {
        "3.6 epochs of CIFAR-10: {} % smaller, {} grown in depth, {} full": lambda: tuple(
            by_budget(TEST, arm, "3.6")[0] for arm in ("smaller", "grown_depth", "fixed_size")
        ),
        "at 3.6 epochs, {} points above the full network (95 % interval {})": lambda: over(TEST, "3.6", "grown_depth"),
        "30 epochs: {} % full, {} grown; 80 epochs by the paper's schedule (ResNet-14): {} % grown, {} points below "
        "the full network stopped at that cost (95 % interval "
        "{}), {} if the rate follows the cost ({})": lambda: (
            *(by_budget(TEST, arm, "30")[0] for arm in ("fixed_size", "grown_depth")),
            *(mean(f"{SHORT}/ours_80_s*"), *gain(f"{SHORT}/flops_80_s*", f"{SHORT}/ours_80_s*")),
            *gain(f"{SHORT}/flops_80_s*", f"{SHORT}/vt_cost_80_s*"),
        ),
        "a Llama of one layer in a short budget: {} bits per byte fewer if its windows grow from 32 to 128 tokens "
        "({})": lambda: gain(f"{WINDOWS}/b0.03_smaller_s*", f"{WINDOWS}/b0.03_smaller_grown_context_s*", 3),
        "ResNet-20, cost of ten epochs: {} % grown from 16x16 over 24x24 to 32x32, {} full (95 % interval of the "
        "difference {}), {} with 24x24 throughout ({})": lambda: (
            *(mean(f"{INPUTS}/{arm}_s?") for arm in ("grown_16_24_32", "full")),
            inputs_gain("grown_16_24_32", "full")[1],
            *(mean(f"{INPUTS}/small_24_s?"), inputs_gain("grown_16_24_32", "small_24")[1]),
        ),
    },
    MEASURED: {
        "`ours` ends at {} % for {} % of the FLOPs. Stopped at {} %, the full network has {} %, {} points less (five "
        "seeds, paired 95 % interval {}). In full it has "
        "{} %: not distinguishable with five seeds ({}).": on_digits,
        "of `ours` by {} points (three seeds, 95 % interval {}), of the others by {} to {}.": lambda: (
            *gain(f"{NINE}/fixedflops_s*", f"{NINE}/ours_s*"),
            *others_behind(),
        ),
        "all with a first stage of 5 % of the training: {} to {} points below, which is within the spread over "
        "seeds. With longer first stages the difference is larger: {} points for three stages from half the width, "
        "{} to {} for two, {} for two from a quarter.": distances,
        "GradMax, not in that table, reaches {}, and TINY, which grows shared channels by pairs, reaches {}.": lambda: (
            mean(f"{NINE}/gradmax_s0", 1),
            mean(f"{NINE}/tiny_s0", 1),
        ),
        "Variance transfer (by the current rule, see below) gives {} points over growing by pairs ({}), rate "
        "adaptation {} on top ({})": lambda: (
            *gain(f"{RATE}/ours_nora_s*", f"{NINE}/pairs_s*"),
            *gain(f"{NINE}/ours_s*", f"{RATE}/ours_nora_s*"),
        ),
        "the fixed-size network ends at {} %, `ours` at {} % for {} % of the cost, Net2Net at {} %, the fixed-size "
        "network at equal FLOPs (85 epochs) at {} %": lambda: (
            *(mean(f"{LONG}/fixed_size_s0"), mean(f"{LONG}/ours_s0"), cost(f"{LONG}/ours_s0")),
            *(mean(f"{LONG}/net2net_s0"), mean(f"{LONG}/equal_flops_s0")),
        ),
        **{
            f"| {label} | {{}} | {{}} ({{}}) | {{}} ({{}}) |": partial(short_table, arm)
            for label, arm in SHORT_ARMS.items()
        },
        "`ours` is {} points below the full network after 16 epochs, {} after 40 and {} after 80; it was {} after "
        "160 (ResNet-20, one seed)": lambda: (
            *(gap(f"{SHORT}/fixed_{n}_s*", f"{SHORT}/ours_{n}_s*") for n in (16, 40, 80)),
            gap(f"{LONG}/fixed_size_s0", f"{LONG}/ours_s0"),
        ),
        "less than stopping early, by {}, {}, {} and {} points": lambda: (
            *(gap(f"{SHORT}/flops_{n}_s*", f"{SHORT}/ours_{n}_s*") for n in (16, 40, 80)),
            gap(f"{LONG}/equal_flops_s0", f"{LONG}/ours_s0"),
        ),
        "stopped at the same cost ({} % of 40 epochs, {} % of 80, {} % of 16)": lambda: tuple(
            cost(f"{SHORT}/ours_{n}_s*") for n in (40, 80, 16)
        ),
        "bought with more training ({} % of the cost, rounded down {})": lambda: (
            cost(f"{SHORT}/ours_wider_40_s*"),
            cost(f"{SHORT}/ours_narrower_40_s*"),
        ),
        "The published cost of {} % is that of channels rounded up to whole numbers ({}; to the nearest even number, "
        "as here, {})": costs_of_rounding,
        "variance transfer gains {} points ({}) over `ours`, and is {} below stopping early ({}). After 80 epochs it "
        "gains {} ({}) and is {} below ({}).": lambda: tuple(
            number
            for n in (40, 80)
            for pair in ((f"vt_cost_{n}", f"ours_{n}"), (f"flops_{n}", f"vt_cost_{n}"))
            for number in gain(*(f"{SHORT}/{arm}_s*" for arm in pair))
        ),
        "the clock is worth {} points ({})": lambda: gain(f"{SHORT}/ours_cost_40_s*", f"{SHORT}/ours_40_s*"),
        "`ours` with one rate ends at {} (three seeds": lambda: (f"{scores(RATE + '/ours_nora_s*')}",),
        "ends at {} %, the full network at {} (three seeds each): {} points more (95 % interval {}), in {}, {} and "
        "{} of the seconds by seed": lambda: (
            *(scores(f"{TEN}/grown_resolution_s*"), scores(f"{TEN}/fixed_size_s*")),
            *gain(f"{TEN}/grown_resolution_s*", f"{TEN}/fixed_size_s*"),
            *seconds_by_seed(TEN, "grown_resolution"),
        ),
        "ResNet-20 on 24x24 pixels from beginning to end has {} %, grown from 24x24 to 32x32 {}, grown from 16x16 "
        "over 24x24 to 32x32 {}, the full network {}": lambda: on_inputs(
            "small_24", "grown_24_32", "grown_16_24_32", "full"
        ),
        "From 16x16 it is {} points above the full network (95 % interval {}) and {} above 24x24 throughout ({}); "
        "from 24x24, {} above the latter ({}). ResNet-14, with two blocks a stage, has {} on 24x24 pixels and {} "
        "grown from them to 32x32 ({}, {}).": lambda: (
            *inputs_gain("grown_16_24_32", "full"),
            *(*inputs_gain("grown_16_24_32", "small_24"), *inputs_gain("grown_24_32", "small_24")),
            *on_inputs("blocks2_24", "blocks2_24_32"),
            *inputs_gain("blocks2_24_32", "blocks2_24"),
        ),
        "two runs at a time, ResNet-20 has {} %, ResNet-8 {}, ResNet-20 grown in depth {} and grown in its images {} "
        "(two seeds each).": by_seconds,
        "Grown in depth at 60 % of the cost it ends at {}, the network with one block a stage at {} (two seeds "
        "each), grown at 11 % of the cost at {} (one seed): all "
        "behind the full network's {} and {} with those seeds.": lambda: (
            *(scores(f"{TEN}/grown_depth_s*"), scores(f"{TEN}/smaller_s*")),
            *(mean(f"{TEN}/{one}") for one in ("grown_depth_early_s0", "fixed_size_s0", "fixed_size_s1")),
        ),
        "`ours` {} and {}, Net2Net {} and {}.": one_run(
            *(f"cifar10_8_epochs/{m}_{g}" for g in ("ours", "net2net") for m in ("vgg11", "mobilenetv1"))
        ),
        "state inherited {} and {}, reset {} and {}, inherited with rate adaptation {} and {}.": one_run(
            *(f"{ADAPTIVE}/{o}_{s}" for s in ("inherit", "reset", "ra") for o in ("adam", "avagrad"))
        ),
        "by class, fixed-size {}, `ours` {} at {} % of the cost, with dynamic OSGD {} at {} %; by image {}, {} and "
        "{}.": lambda: (
            *(mean(f"{CLASSES}/classes_fixed_size_s0"), mean(f"{CLASSES}/classes_ours_s0")),
            *(cost(f"{CLASSES}/classes_ours_s0"), mean(f"{CLASSES}/classes_ours_osgd_s0")),
            cost(f"{CLASSES}/classes_ours_osgd_s0"),
            *(mean(f"{CLASSES}/images_{one}_s0") for one in ("fixed_size", "ours", "ours_osgd")),
        ),
        "BLEU {} with rate adaptation, {} and {} without it "
        "(state kept and reset), Net2Net {}, fixed-size {}.": one_run(
            *(f"{MULTI}/{one}" for one in ("ours_adam", "ours_with_state", "ours_without_state")),
            *(f"{MULTI}/{one}" for one in ("net2net", "fixed_size")),
        ),
        "one seed, at {} % of the cost ([rows](../results/multi30k_table5/table.md)):": lambda: (
            cost(f"{MULTI}/ours_adam"),
        ),
        "(Yuan et al. 2023, Table 2: ours {}, Net2Net {}, fixed-size {}).": lambda: tuple(
            f"{one.value:.2f}"
            for name in ("Ours", "Net2Net", "Large Baseline")
            for one in published()
            if (one.table, one.model, one.row) == ("Table 2", "resnet20", name)
        ),
        "The full network ended at {} with a cosine over epochs": one_run(f"{NINE}/fixedflops_s*"),
        "hyperfan {}, ours {}, Net2Net {}, fixed-size {}.": one_run(
            *(f"{EIGHT}/hyperfan8_{one}" for one in ("hyperfan", "ours", "net2net", "fixed"))
        ),
    },
    ROWS: {
        **{
            f"| `{name}` | `{settings}` | {{}} | {{}} | {{}} |": lambda name=name: below_fixed_text(
                f"{SCHEDULES}/{name}"
            )
            for name, settings in SETTINGS_OF.items()
        },
        "The grown network ends at {} % for {} % of the FLOPs, fixed-size stopped at {} % of them at {}, in full at "
        "{}. In seconds it saves nothing: {} against {} and {},": lambda: (
            *(mean(f"{DIGITS}/ours_s*"), cost(f"{DIGITS}/ours_s*", 0), cost(f"{DIGITS}/equal_flops_s*", 0)),
            *(mean(f"{DIGITS}/{arm}_s*") for arm in ("equal_flops", "fixed")),
            *(seconds(f"{DIGITS}/{arm}_s*") for arm in ("ours", "fixed", "equal_flops")),
        ),
        "32 to 16 ends within {} points of 32 all along ({} and {} %);": shrunk,
        "All six end with {} neurons and {} to {} %,": lambda: (
            width("isotropic_scaffold_cifar10/w*_s*"),
            *spread("isotropic_scaffold_cifar10/w4_s*", "isotropic_scaffold_cifar10/w64_s*"),
        ),
        "{} or {} neurons in three layers from 8 each, {} or {} from 64 each": lambda: (
            *widths("isotropic_revised/width8_s*"),
            *widths("isotropic_revised/width64_s*"),
        ),
        "five stages from a quarter {}, {}, {}, and nine {}, {}, {} (three seeds).": lambda: tuple(
            value for one in FROM_A_QUARTER for value in below_fixed_text(one)
        ),
        "the twelve seeds that were run to decide it differ by {} points (95 % interval {}), all sixteen by {} ({}), "
        "which excludes an advantage above 0.3 points": overabundance,
        "Fixed size ends at {} %, at equal FLOPs at {} %, `ours` at {} %, Net2Net at {} %": one_run(
            *(f"{LONG}/{one}_s0" for one in ("fixed_size", "equal_flops", "ours", "net2net"))
        ),
        "Growing gives up {} points by class and {} by image, with dynamic OSGD {} and {};": lambda: tuple(
            gap(f"{CLASSES}/{mode}_fixed_size_s0", f"{CLASSES}/{mode}_{one}_s0", 2)
            for one in ("ours", "ours_osgd")
            for mode in ("classes", "images")
        ),
        "At 62 % of its cost hyperfan comes to {} %, ours to {}, Net2Net to {}, the fixed-size network to {}.": one_run(
            *(f"{EIGHT}/hyperfan8_{one}" for one in ("hyperfan", "ours", "net2net", "fixed"))
        ),
        "At {} % of the cost of the fixed-size network ({}), rate adaptation with state comes to {}, ours without "
        "state to {}, with state to {}, Net2Net to {}.": lambda: (
            *(cost(f"{MULTI}/net2net"), mean(f"{MULTI}/fixed_size"), mean(f"{MULTI}/ours_adam")),
            *(mean(f"{MULTI}/{one}") for one in ("ours_without_state", "ours_with_state", "net2net")),
        ),
        "Inheriting the optimizer's state gives {} and {} points, as in the paper (0.17 and 0.56); rate adaptation "
        "costs {} and {} here": lambda: tuple(
            gap(f"{ADAPTIVE}/{optimizer}_{first}", f"{ADAPTIVE}/{optimizer}_{second}", 2)
            for first, second in (("inherit", "reset"), ("inherit", "ra"))
            for optimizer in ("adam", "avagrad")
        ),
    },
    ISOTROPIC: {
        "model.width=2 # seconds: finds {} neurons; {} from model.width=64": lambda: (
            width("isotropic_digits/width2_s*"),
            width("isotropic_digits/width64_s*"),
        ),
        "model.width=64 # CIFAR-10: {} neurons, from 4 as well": lambda: (width("isotropic_scaffold_cifar10/w*_s*"),),
        "the twelve seeds that were run to decide it differ by {} points (95 % interval {}), all sixteen by {} ({}), "
        "which excludes an advantage above 0.3 points": overabundance,
    },
    OVERABUNDANCE: {
        "the twelve seeds that were run to decide it differ by {} points (95 % interval {}), all sixteen by {} ({}), "
        "which excludes an advantage above 0.3 points": overabundance,
    },
}


def listed(pages: Mapping[str, Mapping[str, Numbers]]) -> list[Stated]:
    """Return the sentences of each page."""
    return [Stated(page, template, values) for page, own in pages.items() for template, values in own.items()]


def stated() -> list[Stated]:
    """Return all sentences of this module."""
    return [*tables(), *listed(EQUAL_COST), *listed(OTHERS)]
