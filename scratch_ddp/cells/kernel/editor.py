"""The ranks' objects in the hands of an editor and of the kernel: completion, inspection, %pull and %dist_run."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scratch_ddp.cells.kernel.cluster import Cluster
from scratch_ddp.cells.words import ClusterError, name_ranks

_PATIENCE = 1.0  # seconds that an editor's question may take
_PULL_LIMIT = 600.0  # seconds


def answer_from_rank_0(kernel: Any, ask: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Complete and inspect what only ranks have. What `ask` does not know is left to the kernel, as before."""
    complete, inspect = kernel.do_complete, kernel.do_inspect

    def do_complete(code: str, cursor_pos: int) -> Any:
        found = ask(code, {"kind": "complete", "cursor": cursor_pos})
        if not found:
            return complete(code, cursor_pos)
        places = {"cursor_start": found["start"], "cursor_end": found["end"], "metadata": {}, "status": "ok"}
        return {"matches": found["matches"], **places}

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        found = ask(code, {"kind": "inspect", "cursor": cursor_pos, "detail": detail_level})
        if not found:
            return inspect(code, cursor_pos, detail_level, omit_sections)
        return {"status": "ok", "data": found["data"], "metadata": {}, "found": True}

    kernel.do_complete, kernel.do_inspect = do_complete, do_inspect


def ask_rank_0(cluster: Cluster, code: str, question: dict[str, Any]) -> dict[str, Any]:
    """A question about code that is meant for ranks; {} if it is not known in time."""
    return cluster.ask([0], {"code": code, **question}, _PATIENCE).get(0, {})


def pull(cluster: Cluster, name: str) -> dict[int, Any]:
    """{rank: its value of that name}, for the ranks that have it. Raises ClusterError.

    A value travels in a file in the cluster's folder, which only this user can read and write.
    """
    if any(rank.host for rank in cluster.ranks):
        raise ClusterError(
            "%pull: nothing that comes from another machine is unpickled here. Print the value, or save it on its host."
        )
    question = {"kind": "pull", "name": name, "folder": str(cluster.folder)}
    answers = cluster.ask(range(cluster.world_size), question, _PULL_LIMIT)
    problems: dict[str, list[int]] = {}
    values = {}
    for rank, answer in sorted(answers.items()):
        if "file" in answer:
            path = Path(answer["file"])
            try:
                with path.open("rb") as file:
                    values[rank] = pickle.load(file)
            except Exception as error:  # a class that exists on the ranks alone, say
                answer = {"error": f"{type(error).__name__}: {error}"}
            path.unlink()
        if "error" in answer:
            problems.setdefault(re.sub(" at 0x[0-9a-f]+", "", answer["error"]), []).append(rank)
    if problems:
        told = "; ".join(f"{name_ranks(ranks)}: {name} can't be sent ({text})" for text, ranks in problems.items())
        raise ClusterError(told)
    if not values:
        raise ClusterError(f"no rank has {name}.")
    return values


def script_cell(words: list[str]) -> str:
    """The code of a cell that runs a script. Raises ClusterError."""
    if not words:
        raise ClusterError("%dist_run needs a file: %dist_run train.py --lr 0.1")
    path = Path(words[0]).expanduser().absolute()
    if not path.is_file():
        raise ClusterError(f"%dist_run: there is no file {words[0]} in {Path.cwd()}.")
    return f"from scratch_ddp.cells.rank.adapted import run_script as _run\n_run({str(path)!r}, {words[1:]!r})"
