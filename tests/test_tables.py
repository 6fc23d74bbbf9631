"""Tables as the terminal shows them."""

from posenc_export.tables import aligned


def test_columns_are_aligned_and_numbers_stand_right() -> None:
    assert aligned(("name", "n"), [("a", "5"), ("long", "120")]) == ["name    n", "a       5", "long  120"]


def test_the_widest_cells_are_wrapped_where_a_line_would_be_too_long() -> None:
    assert aligned(("name", "what"), [("a", "one two three"), ("b", "four")], 12) == ["name  what", "a     one", "      two", "      three", "b     four"]


def test_a_word_that_is_longer_than_a_line_stays_whole() -> None:
    assert aligned(None, [("folder", "/some/long/path")], 10) == ["folder  /some/long/path"]
