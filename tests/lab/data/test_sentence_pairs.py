"""`text_files` finds the two sides of a split by name."""

from pathlib import Path

import pytest

from growlab.recipes.translation.sentence_pairs import text_files


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # Lines of different test sets are not translations of each other.
        (("test_2015.en", "test_2016.de", "test_2016.en"), ("test_2016.de", "test_2016.en")),
        (("test_2016.de", "test_2016.en", "test_2017.de", "test_2017.en"), ("test_2016.de", "test_2016.en")),
        (("test.a.de", "test.a.en", "test.de", "test.en.gz"), ("test.de", "test.en.gz")),
        (("test.de", "test.tok.de", "test.tok.en"), ("test.tok.de", "test.tok.en")),
        (("test.de", "test.lower.en"), ("test.de", "test.lower.en")),
        (("test.de", "test.de.gz", "train.en"), ("test.de", None)),
    ],
)
def test_the_sides_of_a_split_have_the_same_name(
    tmp_path: Path, names: tuple[str, ...], expected: tuple[str | None, str | None]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = text_files(tmp_path, "test", ("de", "en"))
    assert tuple(found) == ("de", "en")
    assert tuple(path and path.name for path in found.values()) == expected
