"""Tables in the terminal."""

from posenc_export.shared.tables import aligned, counted


def test_one_thing_has_no_plural() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_columns_are_aligned_and_numbers_are_right_aligned() -> None:
    assert aligned(("name", "n"), [("a", "5"), ("long", "120")]) == [
        "name    n",
        "a       5",
        "long  120",
    ]


def test_the_widest_cells_of_long_lines_are_wrapped() -> None:
    assert aligned(("name", "what"), [("a", "one two three"), ("b", "four")], 12) == [
        "name  what",
        "a     one",
        "      two",
        "      three",
        "b     four",
    ]


def test_a_word_that_is_longer_than_a_line_is_not_split() -> None:
    assert aligned(None, [("folder", "/some/long/path")], 10) == ["folder  /some/long/path"]
