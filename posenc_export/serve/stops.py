"""Stop strings: text is held back as long as it may be the beginning of one."""

from typing import Sequence


class Stops:
    """Text of one row, in pieces, up to the first stop string.

    Args:
        strings: that end the text; they are not part of it.

    Attributes:
        found: whether a stop string was seen.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.found, self._held = tuple(strings), False, ""

    def push(self, piece: str) -> str:
        """The text that is certain with this piece."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for place in (text.find(string) for string in self.strings) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((size for string in self.strings for size in range(1, len(string)) if text.endswith(string[:size])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What was held back, at the end of the row."""
        held, self._held = self._held, ""
        return held
