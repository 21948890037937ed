"""Tables of text as Markdown, LaTeX or CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass


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
        lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, *self.rows)]
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
        return text + (f"\n{self.caption}\n" if self.caption else "")

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
        writer.writerow(
            f"{group} {name}".strip()
            for group, name in zip(self._group_of_column(), self.header, strict=True)
        )
        writer.writerows([cell.replace("**", "") for cell in row] for row in self.rows)
        return text.getvalue()

    def _group_of_column(self) -> list[str]:
        names = [name for name, n in self.groups for _ in range(n)]
        return names or [""] * len(self.header)


def _latex(text: str) -> str:
    """One cell for LaTeX: special characters escaped, bold and mathematical signs as commands."""
    text = re.sub(r"[&%$#_{}]", lambda match: "\\" + match[0], text)
    text = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
    for sign, command in (("±", r"$\pm$"), ("−", "$-$"), ("×", r"$\times$"), ("~", r"\textasciitilde{}")):
        text = text.replace(sign, command)
    return text
