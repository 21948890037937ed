"""Text as a terminal shows it."""

import re
import shutil
import sys
import textwrap

# Columns that a paragraph keeps beside its indent.
_LEAST = 24


def wrapped(text: str) -> str:
    """Break lines between words where the terminal would break them anywhere; a file or a pipe gets them as they are.

    A line goes on below the second of its columns (two spaces end the first), else two columns further in.
    Rows of a Markdown table stay whole.
    """
    if not sys.stdout.isatty():
        return text
    return "\n".join(_within(line, shutil.get_terminal_size().columns) for line in text.split("\n"))


def _within(line: str, width: int) -> str:
    """One line in several of at most so many columns.

    Examples:
        >>> print(_within("  depth       1 of 2 BasicBlock (layer2.1) may come in later", 40))
          depth       1 of 2 BasicBlock
                      (layer2.1) may come in
                      later
    """
    if len(line) <= width or line.startswith("|"):
        return line
    first = re.match(r" *\S+(?: \S+)*  +", line) or re.match(r" *", line)
    assert first is not None
    behind = first.end() if first.end() > len(line) - len(line.lstrip()) else first.end() + 2
    if behind > width - _LEAST:
        behind = min(len(line) - len(line.lstrip()) + 2, width - 1)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * behind,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )
