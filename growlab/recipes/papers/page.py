"""The page of the docs that holds every table and figure of the papers against our rows."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from growlab.base.files import FAILURE
from growlab.lab.analysis.results import Run, open_run
from growlab.lab.analysis.tables import summarise
from growlab.recipes.papers.paper_table import paper_table
from growlab.recipes.papers.published import published_for
from growlab.recipes.papers.registry import Item, Job, Registry, Rows
from growlab.recipes.papers.verdicts import CONTRADICTED, HOLDS, ONE_RUN, UNDECIDED, Outcome, outcome, signed

_INTRODUCTION = """# The papers, line by line

Every table, figure and appendix experiment of the three papers that growlab is built on: its command, what is kept of
it in `notebooks/results`, what the paper says and what our rows say. This page is made from the registry
(`growlab/recipes/papers/entries`), the published values (`published.csv` beside it) and those rows by

    python -m growlab reproduce --page notebooks/results -o notebooks/docs/pages/papers.md

and a test makes it again. A difference is the first less the second over equal seeds, with Student's 95 % interval, not
corrected for the number of comparisons; where all seeds give the same number there is none. A number of a study that a
statement bounds is the mean over its networks, with such an interval, or the largest of them. A statement *holds* or is
*contradicted* where the interval says so, else it is *undecided*; *one run* has no interval. That two things are equal
holds where the whole interval lies within a margin, and is contradicted where none of it does; the margins, which stand
in the statements, were chosen after most of the rows were made, one for all accuracies (0.5 points). Most rows of the
first paper are of 8 to 16 epochs where it trains for 160 or 200: they decide nothing about its tables, and say so. All
rows of CIFAR-10 are of images re-encoded as JPEG (quality 75): their accuracies are not those of the original
images. Rows are counted by the runs that the command makes: those of its length, *shortened* ones, and *others*, which
it does not make and which statements use (another method, network, data set or seed). `python -m growlab reproduce
NAME` trains what is missing, and resumes what has begun. Tables name methods as one types them: `ours +
stagewise_norm` is what figures call "ours (variance transfer + rates by age)", the first paper's whole method, and
`ours` is "variance transfer" alone.
"""


@dataclass(frozen=True)
class Standing:
    """An entry beside what is there of it.

    Attributes:
        item: the entry.
        results: the folder of the rows that are kept, such as `notebooks/results`; None where there is none.
        seeds: count runs of these alone; None: of those that the commands name.
    """

    item: Item
    results: Path | None
    seeds: tuple[int, ...] | None = None

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """Outcome of each statement."""
        return [] if self.results is None else [outcome(check, self.results) for check in self.item.checks]

    @cached_property
    def kept(self) -> list[tuple[Rows, list[Run]]]:
        """The runs that are kept, by folder; a study's folder has none."""
        return [] if self.results is None else [(rows, _runs(self.results, rows)) for rows in self.item.rows]

    @cached_property
    def jobs(self) -> list[Job]:
        """The runs that the commands make."""
        return self.item.jobs(self.seeds)

    def _of_kind(self, kind: str) -> list[Run]:
        """The kept runs of a kind, of the seeds that are asked for."""
        runs = [run for rows, of_folder in self.kept if rows.kind == kind for run in of_folder]
        return [run for run in runs if self.seeds is None or run.results["seed"] in self.seeds]

    @cached_property
    def num_whole(self) -> int:
        """Number of runs that are kept and of the paper's length; a study is one."""
        studies = [
            rows for rows, runs in self.kept if rows.kind == "whole" and self._is_study(rows) and not runs
        ]
        return len(self._of_kind("whole")) + len(studies)

    def _is_study(self, rows: Rows) -> bool:
        return self.results is not None and (self.results / rows.folder / "summary.json").is_file()

    @cached_property
    def num_diverged(self) -> int:
        """Number of runs in full length whose loss became infinite or NaN."""
        folders = [rows.folder for rows in self.item.rows if rows.kind == "whole"] if self.results else []
        failures = [
            json.loads(path.read_text(encoding="utf-8"))
            for folder in folders
            for path in (self.results or Path()).glob(f"{folder}/*/{FAILURE}")
        ]
        return sum(
            "NaN or infinite" in failure["reason"]
            and (self.seeds is None or any(f"seed={seed}" in failure["overrides"] for seed in self.seeds))
            for failure in failures
        )

    @property
    def num_left(self) -> int:
        """Number of runs that the commands make and that are not kept in the paper's length, nor known to diverge."""
        return len(self.jobs) - self.num_whole - self.num_diverged

    @property
    def rows_text(self) -> str:
        """Numbers of the runs that are there, of shorter ones and of others."""
        beside = sum(map(self.item.is_beside_table, self.jobs))
        there = sum(_is_at_equal_flops(run) for run in self._of_kind("whole"))
        at_equal_flops = (
            f", of these {there} of {beside} at equal FLOPs, which the paper does not have" if beside else ""
        )
        parts = [f"{self.num_whole} of {len(self.jobs)}{at_equal_flops}"]
        if self.num_diverged:
            parts.append(f"{self.num_diverged} diverged")
        for kind, word in (("shortened", "shortened"), ("other", "others")):
            if runs := self._of_kind(kind):
                epochs = sorted({run.results["epochs"] for run in runs})
                between = f"{epochs[0]}" if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}"
                parts.append(f"{len(runs)} {kind if len(runs) == 1 else word} ({between} epochs)")
        parts += [rows.note for rows in self.item.rows if rows.note and self.results is not None]
        return "; ".join(parts)

    def _is_of_shorter(self, one: Outcome) -> bool:
        """True if a statement is compared with shortened rows alone."""
        whole, shorter = (
            {rows.folder for rows in self.item.rows if (rows.kind == "whole") == kind}
            for kind in (True, False)
        )
        sides = {side.partition("/")[0] for side in (one.check.first, one.check.second) if side}
        return sides <= shorter - whole

    @property
    def verdict(self) -> str:
        """In a few words, and what is left to run."""
        stated = [one for one in self.outcomes if not one.check.ours]
        at_length = [one for one in stated if not self._is_of_shorter(one)]
        said = _counted(at_length)
        if not self.num_whole:
            parts = ["not run at this length" if stated or self._of_kind("shortened") else "not run"]
        elif not at_length:
            parts = [
                f"{self.num_whole} run at this length" if stated else "run; the paper states nothing of it"
            ]
        elif all(one.verdict == HOLDS for one in at_length):
            parts = ["reproduced"]
        else:
            in_part = f" {HOLDS}" in said and CONTRADICTED not in said
            parts = [f"reproduced in part: {said}" if in_part else said]
        if shortened := _counted(one for one in stated if self._is_of_shorter(one)):
            parts.append(f"shortened: {shortened}")
        if ours := _counted(one for one in self.outcomes if one.check.ours):
            parts.append(f"of what we asked: {ours}")
        if self.num_left:
            epochs = sorted({job.epochs for job in self.jobs if job.epochs})
            *first, last = map(str, epochs or [0])
            length = (
                f" of {' or '.join([*([', '.join(first)] if first else []), last])} epochs" if epochs else ""
            )
            parts.append(f"it takes {self.num_left} run{'' if self.num_left == 1 else 's'}{length}")
        return "; ".join(parts)


def _is_at_equal_flops(run: Run) -> bool:
    return "method=equal_flops" in run.results["overrides"]


def _counted(outcomes: Iterable[Outcome]) -> str:
    """Number of outcomes with each verdict, in words."""
    verdicts = [one.verdict for one in outcomes]
    words = (HOLDS, CONTRADICTED, UNDECIDED, ONE_RUN)
    return ", ".join(f"{verdicts.count(word)} {word}" for word in words if word in verdicts)


def standings(registry: Registry, results: Path | None, seeds: Sequence[int] | None = None) -> list[Standing]:
    """Every entry beside what is there of it, of these seeds or of those that its commands name."""
    asked = None if seeds is None else tuple(seeds)
    return [Standing(item, results, asked) for item in registry.items.values()]


def page(registry: Registry, results: Path) -> str:
    """The whole page as Markdown.

    Args:
        registry: all entries.
        results: the folder of the rows.
    """
    all_standings = standings(registry, results)
    every = [(s.item, one) for s in all_standings for one in s.outcomes]
    outcomes = [(item, one) for item, one in every if not one.check.ours]
    own = [(item, one) for item, one in every if one.check.ours]
    against = [(item, one) for item, one in outcomes if one.verdict == CONTRADICTED]
    away = [(item, one) for item, one in outcomes if one.verdict == ONE_RUN and one.points_away]
    undecided = [(item, one) for item, one in outcomes if one.verdict == UNDECIDED]
    parts = [
        _INTRODUCTION,
        "## What our rows contradict\n",
        "Statements of the papers, at the length that the column of epochs says, and at no other.\n",
        _statements(against, grouped=True),
        "## What one run points away from\n\nNo interval: another seed may turn it round.\n",
        _statements(away, grouped=True),
        "## What our rows do not decide\n",
        _statements(undecided, grouped=True),
        "## What we asked beside them\n",
        "No paper states these: other data and rates, and algorithms that a paper gives without an experiment.\n",
        _statements(own, verdict=True),
    ]
    for paper, about in registry.papers.items():
        entries = [standing for standing in all_standings if standing.item.paper == paper]
        parts += [f"## {about['title']}\n", _entries(entries)]
        parts += [about["note"] + "\n"] if "note" in about else []
        held = [(s.item, one) for s in entries for one in s.outcomes if not one.check.ours]
        if held:
            parts += ["Statements and rows:\n", _statements(held, verdict=True)]
        for standing in entries:
            if standing.item.table and standing.kept:
                parts += [_beside(standing)]
    return "\n".join(parts)


def _entries(own: Sequence[Standing]) -> str:
    head = ["what", "published", "command", "our rows", "verdict"]
    rows = []
    for standing in own:
        item = standing.item
        commands = "<br>".join(f"`python -m growlab -m {command}`" for command in item.commands)
        rows.append(
            [
                item.title,
                item.claim,
                f"`python -m growlab reproduce {item.name}`<br>{commands}",
                standing.rows_text,
                standing.verdict,
            ]
        )
    return _table(head, rows)


def _like(outcomes: Iterable[tuple[Item, Outcome]]) -> Iterable[list[tuple[Item, Outcome]]]:
    """Statements of a study that differ in the second initialisation alone, together."""
    groups: dict[tuple[str, ...], list[tuple[Item, Outcome]]] = {}
    for item, one in outcomes:
        check = one.check
        of = (check.first, check.quantity, check.study[0]) if check.study else (check.says,)
        groups.setdefault((item.name, *of), []).append((item, one))
    return groups.values()


def _statements(
    outcomes: Iterable[tuple[Item, Outcome]], verdict: bool = False, grouped: bool = False
) -> str:
    """A table of statements, of which those about the same initialisation take a line if they are grouped."""
    outcomes = list(outcomes)
    if not outcomes:
        return "Nothing.\n"
    head = ["entry", "statement", "ours", "epochs", "published difference", *(["verdict"] if verdict else [])]
    rows: list[list[str]] = []
    for (item, one), *others in _like(outcomes) if grouped else ([pair] for pair in outcomes):
        epochs = "" if one.epochs is None else str(one.epochs)
        if one.published_epochs not in (None, one.epochs):
            epochs += f" (published: {one.published_epochs})"
        theirs = "" if one.published is None else signed(one.published)
        if one.within is not None:
            theirs += ", in our interval" if one.within else ", outside our interval"
        says = ", ".join(
            [one.says(), *(f"`{other.check.study[1]}`" for _, other in others if other.check.study)]
        )
        # A difference and its interval stay in one line, however narrow the column.
        ours = "<br>".join(
            each.text().replace(" ", "\u00a0") for each in (one, *(other for _, other in others))
        )
        # A long name breaks behind an underscore, and nowhere else.
        row = [f"<code>{item.name.replace('_', '_<wbr>')}</code>", says, ours, epochs, theirs]
        rows.append([*row, one.verdict] if verdict else row)
    return _table(head, rows)


def _beside(standing: Standing) -> str:
    """A table of the rows of the paper's length, and one of shorter ones: their numbers do not compare."""
    tables, compared = [], False
    for whole in (True, False):
        runs = [
            run for rows, of_folder in standing.kept if (rows.kind == "whole") == whole for run in of_folder
        ]
        if runs:
            rows = summarise(runs, lambda sentence: None)
            compared |= any(published_for(row.group) for row in rows)
            # A table of several networks would be wider than the page.
            for task in dict.fromkeys((row.group.model, row.group.data) for row in rows):
                own = [row for row in rows if (row.group.model, row.group.data) == task]
                tables.append(paper_table(own).markdown() + "\n")
    beside = (
        "beside the published values"
        if compared
        else "our rows alone: the paper has none of this network and data"
    )
    return "\n".join([f"### {standing.item.title}, {beside}\n", *tables])


def _runs(results: Path, rows: Rows) -> list[Run]:
    folders = sorted(path for one in rows.select.split(" + ") for path in (results / rows.folder).glob(one))
    return [open_run(path) for path in folders if (path / "results.json").is_file()]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )
