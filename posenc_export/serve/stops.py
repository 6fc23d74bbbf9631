"""Stop strings: text that may be the start of a stop string is held back."""

from typing import Sequence


class Stops:
    """Cuts the text of one row, given in pieces, at the first stop string.

    Args:
        strings: stop strings; the text does not include them.

    Attributes:
        found: whether a stop string was found.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.found, self._held = tuple(strings), False, ""

    def push(self, piece: str) -> str:
        """Add a piece. Return the text that cannot be part of a stop string any more."""
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
        """Return the text that was held back, at the end of the row."""
        held, self._held = self._held, ""
        return held
