"""Where a cell runs: in the kernel if it begins with a magic, else on the ranks."""

import re
from collections.abc import Callable
from typing import Any


class Routing:
    """An input transformer: a plain cell becomes a cell for every rank, `%%rank[0]` becomes `%%rank [0]`."""

    def __init__(self, shell: Any, to_ranks: Callable[[], bool]):
        self._to_ranks = to_ranks  # whether plain cells are for the ranks
        self._under_way = 0  # cells; more than one where a magic such as %%capture runs its body as a cell
        shell.input_transformers_cleanup.append(self.transform)
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)

    def _begin(self) -> None:
        self._under_way += 1

    def _end(self) -> None:
        self._under_way = max(0, self._under_way - 1)

    def transform(self, lines: list[str]) -> list[str]:
        first = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), None)
        if first is None:
            return lines
        if lines[first].startswith("%%"):
            head = re.sub(r"^%%rank(?=\[)", "%%rank ", lines[first])
            ours = re.match(r"%%(rank|distributed)\b", head)
            return [head, *_body(lines, first)] if ours else lines
        if self._to_ranks() and not self._under_way and not lines[first].lstrip().startswith("%"):
            return ["%%distributed\n", *lines]
        return lines


def _body(lines: list[str], head: int) -> list[str]:
    """What a rank runs. The lines above it become comments, so that line 3 of a message is line 3 of the cell."""
    body = lines[head + 1 :]
    if next((line for line in body if line.strip()), "").startswith("%%"):
        return body  # a magic of the rank's own, such as %%capture, has to stand first
    return [line if line.startswith("#") else f"# {line.strip()}\n" for line in lines[: head + 1]] + body
