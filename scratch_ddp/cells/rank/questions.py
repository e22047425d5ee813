"""What the kernel asks a rank between cells: completions, the description of an object, a value, its calls."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.utils.tokenutil import token_at_cursor

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.cells.rank.shell import RankShell


def answer(shell: RankShell, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question; {} if it is not known."""
    kinds = {"complete": _complete, "inspect": _inspect, "pull": _pull, "calls": _calls}
    return kinds[question["kind"]](shell, question)


def _complete(shell: RankShell, question: dict[str, Any]) -> dict[str, Any]:
    code, cursor = question["code"], question["cursor"]
    shell.Completer.use_jedi = False  # it reads code, which the kernel can do as well
    with provisionalcompleter():
        found = list(rectify_completions(code, shell.Completer.completions(code, cursor)))
    if not found:
        return {}
    return {"matches": [one.text for one in found], "start": found[0].start, "end": found[0].end}


def _inspect(shell: RankShell, question: dict[str, Any]) -> dict[str, Any]:
    name = token_at_cursor(question["code"], question["cursor"])
    try:
        return {"data": shell.object_inspect_mime(name, detail_level=question["detail"])}
    except KeyError:
        return {}


def _pull(shell: RankShell, question: dict[str, Any]) -> dict[str, Any]:
    if question["name"] not in shell.user_ns:
        return {"missing": True}
    path = Path(question["folder"]) / f"value in process {os.getpid()}"
    try:
        with path.open("wb") as file:
            _Pickler(file).dump(shell.user_ns[question["name"]])
    except BaseException as error:  # also the interrupt
        path.unlink(missing_ok=True)
        return {"error": f"{type(error).__name__}: {error}"}
    return {"file": str(path)}


def _calls(shell: RankShell, question: dict[str, Any]) -> dict[str, Any]:
    return interruptible_group.open_calls(patience=0.2)


class _Pickler(pickle.Pickler):
    """Tensors travel as they are in main memory, without their gradients' history and the rest of their storage."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.nn.Parameter:
            return torch.nn.Parameter, (value.detach(), value.requires_grad)
        if type(value) is torch.Tensor:
            return value.detach().cpu().clone().__reduce_ex__(2)
        return NotImplemented
