"""Tables of text as Markdown, LaTeX or CSV."""

import csv
import io
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from growlab.base.command_parser import columns_of

# Includes characters that change the direction of text.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Places where a cell may be wrapped.
_BREAKS = re.compile(r"(\s+|(?<=[.=,_])(?=[a-z]))")
# Least width of a column of wrapped names.
_NAME = 15
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_FORMULAS = tuple("=+-@＝＋－＠")
# A number, possibly with a deviation, a unit and a number of runs, which no spreadsheet evaluates.
_NUMBER = re.compile(r"[+-]?(\d|\.\d|inf|nan)[\d.,eE±%x() +-]*")
_LATEX = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {"±": r"$\pm$", "−": "$-$", "×": r"$\times$"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}"}


@dataclass(frozen=True)
class Grid:
    """Table that can be formatted as Markdown, LaTeX or CSV.

    Attributes:
        header: names of the columns.
        rows: cells in Markdown: `**...**` is bold.
        num_text: number of text columns on the left; the others are numeric.
        caption: text below the table.
        groups: spanning headers, (name, number of columns) from the left.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int = 1
    caption: str = ""
    groups: Sequence[tuple[str, int]] = ()

    def markdown(self) -> str:
        """Format as Markdown, padded to be readable as plain text; `groups` become part of the header."""
        return self._drawn([[[cell] for cell in line] for line in self._lines()])

    def shown(self) -> str:
        """Format as Markdown for standard output, fitted to its width if it is a terminal."""
        columns = columns_of(sys.stdout)
        return self.fitted(columns) if columns else self.markdown()

    def fitted(self, columns: int) -> str:
        """Format as Markdown for a terminal: wrap names, and split the table if numbers do not fit."""
        text = self.markdown()
        if max(map(len, text.partition("\n\n")[0].splitlines())) <= columns:
            return text
        lines, first = self._lines(), self.num_text
        heads = [max(map(len, name.split())) for name in lines[0]]
        widths = [
            max(head, *map(len, column)) for head, column in zip(heads, zip(*lines[1:], strict=True), strict=True)
        ]
        room = columns - 1 - sum(width + 3 for width in widths[first:])
        if room < sum(min(width, _NAME) + 3 for width in widths[:first]) and len(widths) - first > 1:
            half = (first + len(widths) + 1) // 2
            parts = [
                [[*line[:first], *line[part]] for line in (self._names(), *self.rows)]
                for part in (slice(first, half), slice(half, None))
            ]
            captions = ("", self.caption)
            return "\n".join(
                Grid(part[0], part[1:], first, caption).fitted(columns)
                for part, caption in zip(parts, captions, strict=True)
            )
        # Narrowest first, so that wider columns share the remaining room.
        for left, i in enumerate(sorted(range(first), key=widths.__getitem__), -first):
            widths[i] = min(widths[i], room // -left - 3)
            room -= widths[i] + 3
        return self._drawn(
            [[_wrapped(cell, width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        )

    def _lines(self) -> list[list[str]]:
        """Return header and rows, escaped for Markdown."""
        return [[_markdown(cell).replace("|", "\\|") for cell in line] for line in (self._names(), *self.rows)]

    def _drawn(self, lines: Sequence[Sequence[Sequence[str]]]) -> str:
        """Format cells of one or more lines each as Markdown."""
        widths = [max(len(part) for cell in column for part in cell) for column in zip(*lines, strict=True)]

        def padded(line: Sequence[Sequence[str]]) -> str:
            text = ""
            for parts in itertools.zip_longest(*line, fillvalue=""):
                cells = [
                    part.ljust(width) if i < self.num_text else part.rjust(width)
                    for i, (part, width) in enumerate(zip(parts, widths, strict=True))
                ]
                text += f"| {' | '.join(cells)} |\n"
            return text

        ends = ["-"] * self.num_text + [":"] * (len(widths) - self.num_text)
        rule = "|".join("-" * (width + 1) + end for width, end in zip(widths, ends, strict=True))
        text = padded(lines[0]) + f"|{rule}|\n" + "".join(map(padded, lines[1:]))
        return text + (f"\n{_markdown(self.caption)}\n" if self.caption else "")

    def latex(self) -> str:
        """Format as a LaTeX `table` with rules of the package booktabs."""
        columns = "l" * self.num_text + "r" * (len(self.header) - self.num_text)
        lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        if self.groups:
            spans = [
                rf"\multicolumn{{{n}}}{{c}}{{{_latex(name)}}}" if name else " & " * (n - 1) for name, n in self.groups
            ]
            lines.append(" & ".join(spans) + r" \\")
        head, *body = (_latex_row(row) for row in (self.header, *self.rows))
        lines += [head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
        if self.caption:
            lines.append(rf"\caption{{{_latex(self.caption)}}}")
        return "\n".join([*lines, r"\end{table}"]) + "\n"

    def csv(self) -> str:
        """Format as CSV, without bold and the caption."""
        return as_csv([inert(cell.replace("**", "")) for cell in line] for line in (self._names(), *self.rows))

    def _names(self) -> list[str]:
        """Return the header with each column's group in front."""
        groups = [name for name, n in self.groups for _ in range(n)] or [""] * len(self.header)
        return [f"{group} {name}".strip() for group, name in zip(groups, self.header, strict=True)]


def as_csv(lines: Iterable[Sequence[Any]]) -> str:
    """Format lines of cells as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def visible(text: str) -> str:
    r"""Escape control characters, such as a terminal's escape codes: `\x1b`."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def _wrapped(cell: str, width: int) -> list[str]:
    """Wrap a cell at spaces; longer words, such as names of settings, also after a dot or underscore."""
    whole = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    parts = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    parts.wordsep_simple_re = _BREAKS
    return [part for line in whole.wrap(cell) for part in parts.wrap(line)] or [""]


def inert(cell: str) -> str:
    """Prefix a CSV cell with an apostrophe if a spreadsheet could read it as a formula."""
    cell = visible(cell)
    return f"'{cell}" if cell.lstrip()[:1] in _FORMULAS and not _NUMBER.fullmatch(cell) else cell


def _markdown(text: str) -> str:
    """Escape tags of HTML for Markdown."""
    return _TAG.sub(r"\\<", visible(text))


def _latex_row(cells: Sequence[str]) -> str:
    row = " & ".join(map(_latex, cells)) + r" \\"
    # After a row's end or a rule, LaTeX would take [ and * as an argument.
    return "{}" + row if row.startswith(("[", "*")) else row


def _latex(text: str) -> str:
    """Convert a cell to LaTeX: escape special characters; bold and mathematical signs become commands."""
    text = re.sub("|".join(map(re.escape, _LATEX)), lambda match: _LATEX[match[0]], visible(text))
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
