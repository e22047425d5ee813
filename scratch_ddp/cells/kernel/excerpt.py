"""What is kept of output that is longer than anybody reads: its beginning and its end."""

_FIRST, _LAST = 1 << 20, 1 << 16


class Excerpt:
    """Keeps the first and the last bytes of a stream. Of one that is short nothing is left out."""

    def __init__(self, first: int = _FIRST, last: int = _LAST):
        self._room, self._last = first, last
        self._beginning, self._end = bytearray(), bytearray()
        self._bytes = self._lines = 0  # left out

    def add(self, data: bytes) -> None:
        first = data[: self._room]
        self._room -= len(first)
        self._beginning += first
        self._end += data[len(first) :]
        if len(self._end) > 2 * self._last:
            self._leave_out(len(self._end) - self._last)

    def take(self) -> bytes:
        """The beginning, as far as it has not been taken yet."""
        beginning, self._beginning = self._beginning, bytearray()
        return bytes(beginning)

    def rest(self) -> bytes:
        """What follows on the beginning: a line that tells what was left out, and the end, from a new line on."""
        if not self._bytes and len(self._end) <= self._last:
            return bytes(self._end)
        earliest = len(self._end) - self._last
        self._leave_out(self._end.find(b"\n", earliest) + 1 or earliest)
        return f"\n… {self._lines:,} lines ({self._bytes / 1e6:.1f} MB) left out …\n".encode() + self._end

    def _leave_out(self, count: int) -> None:
        self._bytes += count
        self._lines += self._end.count(b"\n", 0, count)
        del self._end[:count]
