"""Stop strings in streamed text, for one sequence.

Knows no tokens and no tokenizer. The rule: the stop string that is complete first, reading the text
character by character, ends it; where two are complete at the same character, the longer one (which
began earlier). So what is sent depends neither on how the text is split over tokens, steps or
messages, nor on anything that comes after the match.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings and holds back text that may be the beginning of one.

    At most `max(len(stop)) - 1` characters are held back; they are released as soon as they can no
    longer become a stop string. With `include` the matched string stays in the text, and then
    nothing is held back. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._tail = ""
        """The end of the text so far that is the beginning of some stop string."""
        self._stopped = False

    def add(self, text: str) -> tuple[str, str | None]:
        """Take the next piece. Returns (text to send, the stop string that was met or None). After
        a match everything more is dropped.
        """
        if self._stopped:
            return "", None
        if not self._stops:
            return text, None
        match = self._first(self._tail + text, len(self._tail))
        if match is None:
            return self._keep(text), None
        start, stop = match
        seen, sent = self._tail + text, len(self._tail) if self._include else 0
        self._stopped = True
        self._tail = ""
        return seen[sent : start + len(stop) if self._include else start], stop

    def pass_over(self, text: str) -> str:
        """Take a piece in which no stop string counts. One that only begins in it still does: its
        beginning is held back as ever. Returns the text to send.
        """
        return text if not self._stops else self._keep(text)

    def flush(self) -> str:
        """The text has ended: return what was held back."""
        rest = "" if self._include else self._tail
        self._tail = ""
        return rest

    @property
    def held(self) -> int:
        """Characters held back now."""
        return 0 if self._include else len(self._tail)

    def _keep(self, text: str) -> str:
        """Text to send where nothing has matched."""
        seen, sent = self._tail + text, len(self._tail) if self._include else 0
        kept = self._open_end(seen)
        self._tail = seen[len(seen) - kept :]
        return seen[sent : len(seen) if self._include else len(seen) - kept]

    def _first(self, text: str, n_old: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that is complete first, the longest of those. One that
        is complete within the first n_old characters was passed over.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, n_old - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), start, stop)
                if best is None or found[:2] < best[:2]:
                    best = found
        return None if best is None else (best[1], best[2])

    def _open_end(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
