"""Write the docs' pages that compare every table and figure of the papers with our results.

python notebooks/docs/paper_pages.py
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from verdicts import CONTRADICTED, HOLDS, ONE_RUN, UNDECIDED, Outcome, checks_of, outcome, signed

from growlab.base.files import FAILURE, write_text
from growlab.lab.analysis.results import Run, open_run
from growlab.lab.analysis.tables import summarise
from growlab.recipes.papers.paper_table import paper_table, published_for
from growlab.recipes.papers.registry import Item, Job, Registry, Rows, registry

_VERDICTS = (HOLDS, CONTRADICTED, UNDECIDED, ONE_RUN)
_HERE = Path(__file__).parent
_INTRODUCTION = _HERE / "papers_introduction.md"


@dataclass(frozen=True)
class Standing:
    """An entry of the registry and our results for it.

    Attributes:
        results: folder of the kept runs, such as `notebooks/results`; None without one.
        seeds: count only runs with these seeds; None: those that the commands name.
    """

    item: Item
    results: Path | None
    seeds: tuple[int, ...] | None = None

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """Outcome of each statement."""
        return [] if self.results is None else [outcome(check, self.results) for check in checks_of(self.item)]

    @cached_property
    def kept(self) -> list[tuple[Rows, list[Run]]]:
        """The kept runs by folder; none for a study."""
        return [] if self.results is None else [(rows, _runs(self.results, rows)) for rows in self.item.rows]

    @cached_property
    def jobs(self) -> list[Job]:
        """The runs of the commands."""
        return self.item.jobs(self.seeds)

    def _of_kind(self, kind: str) -> list[Run]:
        """The kept runs of a kind and of the requested seeds."""
        runs = [run for rows, of_folder in self.kept if rows.kind == kind for run in of_folder]
        return [run for run in runs if self.seeds is None or run.results["seed"] in self.seeds]

    @cached_property
    def num_whole(self) -> int:
        """Number of kept runs of the paper's length; a study counts as one."""
        empty = [rows.folder for rows, runs in self.kept if rows.kind == "whole" and not runs]
        studies = [(self.results or Path()) / folder / "summary.json" for folder in empty]
        return len(self._of_kind("whole")) + sum(path.is_file() for path in studies)

    @cached_property
    def num_diverged(self) -> int:
        """Number of full-length runs whose loss became infinite or NaN."""
        folders = [rows.folder for rows, _ in self.kept if rows.kind == "whole"]
        paths = [path for each in folders for path in (self.results or Path()).glob(f"{each}/*/{FAILURE}")]
        failures = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        wanted = None if self.seeds is None else {f"seed={seed}" for seed in self.seeds}
        return sum(
            "NaN or infinite" in one["reason"] and (wanted is None or bool(wanted & {*one["overrides"]}))
            for one in failures
        )

    @property
    def num_left(self) -> int:
        """Number of runs still to be done: not kept in full length, and not known to diverge."""
        return len(self.jobs) - self.num_whole - self.num_diverged

    @property
    def rows_text(self) -> str:
        """Count the kept runs, shorter ones and others, in words."""
        parts = [f"{self.num_whole} of {len(self.jobs)}"]
        if added := sum(map(self.item.is_added, self.jobs)):
            there = sum("method=equal_flops" in run.results["overrides"] for run in self._of_kind("whole"))
            parts[0] += f", of these {there} of {added} at equal FLOPs, which the paper does not have"
        if self.num_diverged:
            parts.append(f"{self.num_diverged} diverged")
        for kind, word in (("shortened", "shortened"), ("other", "others")):
            if runs := self._of_kind(kind):
                epochs = sorted({run.results["epochs"] for run in runs})
                between = " to ".join(map(str, dict.fromkeys((epochs[0], epochs[-1]))))
                parts.append(f"{len(runs)} {kind if len(runs) == 1 else word} ({between} epochs)")
        parts += [rows.note for rows, _ in self.kept if rows.note]
        return "; ".join(parts)

    def _is_of_shorter(self, one: Outcome) -> bool:
        """True if a statement is compared with shortened rows alone."""
        whole = {rows.folder for rows in self.item.rows if rows.kind == "whole"}
        sides = {side.partition("/")[0] for side in (one.check.first, one.check.second) if side}
        return sides <= {rows.folder for rows in self.item.rows} - whole

    @property
    def verdict(self) -> str:
        """Summary of the verdicts, and the number of runs still to be done."""
        stated = [one for one in self.outcomes if not one.check.ours]
        at_length = [one for one in stated if not self._is_of_shorter(one)]
        counts = _counted(at_length)
        if not self.num_whole:
            parts = ["not run at this length" if stated or self._of_kind("shortened") else "not run"]
        elif not at_length:
            parts = [f"{self.num_whole} run at this length" if stated else "run; the paper makes no statement about it"]
        elif all(one.verdict == HOLDS for one in at_length):
            parts = ["reproduced"]
        else:
            in_part = f" {HOLDS}" in counts and CONTRADICTED not in counts
            parts = [f"reproduced in part: {counts}" if in_part else counts]
        if shortened := _counted(one for one in stated if self._is_of_shorter(one)):
            parts.append(f"shortened: {shortened}")
        if ours := _counted(one for one in self.outcomes if one.check.ours):
            parts.append(f"our own questions: {ours}")
        if self.num_left:
            epochs = [str(one) for one in sorted({job.epochs for job in self.jobs if job.epochs})]
            listed = " or ".join([*([", ".join(epochs[:-1])] if epochs[:-1] else []), *epochs[-1:]])
            length = f" of {listed} epochs" if epochs else ""
            parts.append(f"it takes {self.num_left} run{'' if self.num_left == 1 else 's'}{length}")
        return "; ".join(parts)


def _counted(outcomes: Iterable[Outcome]) -> str:
    """Number of outcomes with each verdict, in words."""
    verdicts = [one.verdict for one in outcomes]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in _VERDICTS if word in verdicts)


def standings(registry: Registry, results: Path | None, seeds: Sequence[int] | None = None) -> list[Standing]:
    """Return every entry with our results, of these seeds or of those that its commands name."""
    asked = None if seeds is None else tuple(seeds)
    return [Standing(item, results, asked) for item in registry.items.values()]


def pages(registry: Registry, results: Path) -> dict[str, str]:
    """Return the pages as Markdown, by file name: `index.md`, and one of each paper."""
    by_paper: dict[str, list[Standing]] = {paper: [] for paper in registry.papers}
    for standing in standings(registry, results):
        by_paper[standing.item.paper].append(standing)
    contents, against, made = [], [], {}
    for paper, entries in by_paper.items():
        about = registry.papers[paper]
        every = [(one.item, each) for one in entries for each in one.outcomes]
        stated = [(item, one) for item, one in every if not one.check.ours]
        own = [(item, one) for item, one in every if one.check.ours]
        against += [(item, one) for item, one in stated if one.verdict == CONTRADICTED]
        verdicts = [one.verdict for _, one in stated]
        counts = [str(verdicts.count(word)) for word in _VERDICTS]
        contents.append([f"[{about['title']}]({paper}.md)", *counts])
        parts = [f"# {about['title']}\n", "The [overview](index.md) explains terms and counts.\n", _entries(entries)]
        parts += [about["note"] + "\n"] if "note" in about else []
        if stated:
            parts += ["## Statements\n", _statements(stated, verdict=True)]
        if own:
            parts += ["## Our own questions\n", "The paper does not state these.\n", _statements(own, verdict=True)]
        parts += [_with_published(one) for one in entries if one.item.table and one.kept]
        made[f"{paper}.md"] = "\n".join(parts)
    parts = [
        _INTRODUCTION.read_text(encoding="utf-8"),
        _table(["paper", *_VERDICTS], contents),
        "## Statements that our results contradict\n",
        "Compared at the number of epochs that the table gives, and at no other.\n",
        _statements(against, grouped=True),
    ]
    return {"index.md": "\n".join(parts), **made}


def _entries(own: Sequence[Standing]) -> str:
    rows = []
    for standing in own:
        item = standing.item
        commands = [f"reproduce {item.name}", *(f"-m {command}" for command in item.commands)]
        cell = "<br>".join(f"`growlab {command}`" for command in commands)
        rows.append([item.title, item.claim, cell, standing.rows_text, standing.verdict])
    return _table(["what", "published", "command", "our rows", "verdict"], rows)


def _statements(outcomes: Sequence[tuple[Item, Outcome]], verdict: bool = False, grouped: bool = False) -> str:
    """Table of statements; those of a study that differ only in the second initialisation may share a row."""
    if not outcomes:
        return "Nothing.\n"
    lines: dict[tuple[object, ...], list[tuple[Item, Outcome]]] = {}
    for number, (item, one) in enumerate(outcomes):
        check = one.check
        of = (check.first, check.quantity, check.study[0]) if check.study else (check.says,)
        lines.setdefault((item.name, *of) if grouped else (number,), []).append((item, one))
    rows: list[list[str]] = []
    for (item, one), *others in lines.values():
        epochs = "" if one.epochs is None else str(one.epochs)
        if one.published_epochs not in (None, one.epochs):
            epochs += f" (published: {one.published_epochs})"
        theirs = "" if one.published is None else signed(one.published)
        if one.within is not None:
            theirs += ", in our interval" if one.within else ", outside our interval"
        more = [f"`{other.check.study[1]}`" for _, other in others if other.check.study]
        # Keep a difference and its interval on one line.
        every = (one, *(other for _, other in others))
        ours = "<br>".join(each.text().replace(" ", "\u00a0") for each in every)
        # Long names may break only after an underscore.
        name = f"<code>{item.name.replace('_', '_<wbr>')}</code>"
        rows.append([name, ", ".join([one.says(), *more]), ours, epochs, theirs])
        rows[-1] += [one.verdict] if verdict else []
    head = ["entry", "statement", "ours", "epochs", "published difference", *(["verdict"] if verdict else [])]
    return _table(head, rows)


def _with_published(standing: Standing) -> str:
    """Return a table of runs of the paper's length, and one of shorter runs, which are not comparable."""
    tables, compared = [], False
    for whole in (True, False):
        runs = [run for rows, own in standing.kept if (rows.kind == "whole") == whole for run in own]
        rows = summarise(runs, lambda sentence: None)
        compared |= any(published_for(row.group) for row in rows)
        # A table of several networks would be wider than the page.
        for _, own in groupby(rows, lambda row: row.group.task):
            tables.append(paper_table(list(own)).markdown() + "\n")
    none = "our results alone: the paper has none for this network and data"
    words = "with the published values" if compared else none
    return "\n".join([f"## {standing.item.title}, {words}\n", *tables])


def _runs(results: Path, rows: Rows) -> list[Run]:
    folders = sorted(path for one in rows.select.split(" + ") for path in (results / rows.folder).glob(one))
    return [open_run(path) for path in folders if (path / "results.json").is_file()]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (head, ["---"] * len(head), *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    for name, text in pages(registry(), _HERE.parent / "results").items():
        write_text(_HERE / "pages" / "papers" / name, text)
