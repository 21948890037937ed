"""Words of error sentences: how they end, what they list, and what is left of the messages of libraries."""

from collections.abc import Iterable
from difflib import get_close_matches


def choices(names: Iterable[str]) -> str:
    """The names in alphabetical order, `none` first, those for internal use (`_name`) left out."""
    return ", ".join(sorted((n for n in names if not n.startswith("_")), key=lambda n: (n != "none", n)))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of the names, else nothing."""
    near = get_close_matches(name, [n for n in names if not n.startswith("_")], n=1, cutoff=0.55)
    return f"; did you mean '{near[0]}'?" if near else ""


def sentence(text: str) -> str:
    """The text on one line, with an end."""
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def then(text: str, label: str, names: Iterable[str]) -> str:
    """The text and then the valid names, as one line: `text. Label: a, b` or `question? Label: a, b`."""
    listed = choices(names)
    return f"{sentence(text)} {label}: {listed}" if listed else text


def first_lines(text: str) -> str:
    """The message without OmegaConf's and Hydra's trailing lines about their own objects."""
    dropped = ("full_key:", "object_type=", "reference_type=", "See https:", "Config search path")
    # PyTorch writes where in its own code it was.
    lines = [line.strip() for line in text.partition("Exception raised from ")[0].splitlines()]
    kept = []
    for line in lines:
        if line.startswith(dropped):
            break
        if line:
            kept.append(line)
    return " ".join(kept)
