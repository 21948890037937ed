"""Tables of text as Markdown, LaTeX or CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Also what turns the direction of writing around.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_FORMULAS = tuple("=+-@＝＋－＠")
# Perhaps with a deviation, a unit and a number of runs: signs and digits, which call nothing.
_NUMBER = re.compile(r"[+-]?(\d|\.\d|inf|nan)[\d.,eE±%x() +-]*")
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
}


@dataclass(frozen=True)
class Grid:
    """A table before it becomes text.

    Attributes:
        header: names of the columns.
        rows: cells, in Markdown: `**...**` is bold, ± and − stand for themselves.
        num_text: this many columns on the left hold words, the others numbers.
        caption: what stands below it.
        groups: names that span several columns above the header, (name, number of columns) from the left.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int = 1
    caption: str = ""
    groups: Sequence[tuple[str, int]] = ()

    def markdown(self) -> str:
        """A Markdown table, padded so that it reads well as plain text too; `groups` go into the header."""
        header = [
            f"{group} {name}".strip()
            for group, name in zip(self._group_of_column(), self.header, strict=True)
        ]
        lines = [[visible(cell).replace("|", "\\|") for cell in line] for line in (header, *self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        padded = [
            "| "
            + " | ".join(
                cell.ljust(width) if i < self.num_text else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            + " |"
            for line in lines
        ]
        rule = "|".join(
            "-" * (width + 2) if i < self.num_text else "-" * (width + 1) + ":"
            for i, width in enumerate(widths)
        )
        text = "\n".join([padded[0], f"|{rule}|", *padded[1:]]) + "\n"
        return text + (f"\n{visible(self.caption)}\n" if self.caption else "")

    def latex(self) -> str:
        """A LaTeX `table` with rules of the package booktabs."""
        columns = "l" * self.num_text + "r" * (len(self.header) - self.num_text)
        lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        if self.groups:
            spans = [
                rf"\multicolumn{{{n}}}{{c}}{{{_latex(name)}}}" if name else " & " * (n - 1)
                for name, n in self.groups
            ]
            lines.append(" & ".join(spans) + r" \\")
        lines.append(" & ".join(map(_latex, self.header)) + r" \\")
        lines.append(r"\midrule")
        lines += [" & ".join(map(_latex, row)) + r" \\" for row in self.rows]
        lines += [r"\bottomrule", r"\end{tabular}"]
        if self.caption:
            lines.append(rf"\caption{{{_latex(self.caption)}}}")
        return "\n".join([*lines, r"\end{table}"]) + "\n"

    def csv(self) -> str:
        """Comma-separated cells as shown, bold left out; without the caption."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        header = zip(self._group_of_column(), self.header, strict=True)
        writer.writerow(inert(f"{group} {name}".strip()) for group, name in header)
        writer.writerows([inert(cell.replace("**", "")) for cell in row] for row in self.rows)
        return text.getvalue()

    def _group_of_column(self) -> list[str]:
        names = [name for name, n in self.groups for _ in range(n)]
        return names or [""] * len(self.header)


def visible(text: str) -> str:
    r"""Text with its control characters written out, such as a terminal's escape codes: `\x1b`."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def inert(cell: str) -> str:
    """A cell of CSV that no spreadsheet takes for a formula: an apostrophe in front, but of numbers."""
    cell = visible(cell)
    return f"'{cell}" if cell.lstrip()[:1] in _FORMULAS and not _NUMBER.fullmatch(cell) else cell


def _latex(text: str) -> str:
    """One cell for LaTeX: special characters escaped, bold and mathematical signs as commands."""
    text = re.sub("|".join(map(re.escape, _LATEX)), lambda match: _LATEX[match[0]], visible(text))
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
