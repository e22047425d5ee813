"""The IPython shell in which a rank's cells run. Displays, magics, `!`, await and getsource work as in any notebook.

Between cells the kernel asks it for completions, the description of an object, a value, its calls.
"""

import base64
import builtins
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.tokenutil import token_at_cursor
from traitlets.config import Config

from scratch_ddp.cells.rank import interruptible_group

Send = Callable[[dict[str, Any]], None]  # takes {"data": …, "metadata": …}

_OWN_FOLDER = str(Path(__file__).parents[1])


class _Publisher(DisplayPublisher):
    send: Send

    def publish(self, data: dict, metadata: dict | None = None, **_: Any) -> None:
        self.send({"data": {kind: _as_text(value) for kind, value in data.items()}, "metadata": metadata or {}})

    def clear_output(self, wait: bool = False) -> None:
        """Does nothing: what a rank has shown stays, since other ranks' output stands around it."""


class _ValueHook(DisplayHook):
    """Shows the value of a cell's last expression as a display."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict, md_dict: dict | None = None) -> None:
        self.shell.display_pub.publish(format_dict, md_dict)

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankShell(InteractiveShell):
    """Runs cells in a rank's namespace. `failure`: the traceback of what the last cell raised, as lines of text."""

    displayhook_class = _ValueHook
    display_pub_class = _Publisher
    failure: list[str] | None = None
    # Called as soon as an exception has left the cell. Returns whether it is that of a Stop.
    on_failure: Callable[[BaseException], bool] = staticmethod(lambda error: False)

    ask_person: Callable[[str], str] = staticmethod(lambda prompt: _refuse_input())  # one line of input
    last_error: BaseException | None = None

    system = InteractiveShell.system_raw  # the other choice is a terminal, which ends lines with \r\n

    def enable_gui(self, gui: str | None = None) -> None:
        pass

    def init_io(self) -> None:
        pass

    def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:
        self.failure = list(stb)

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Keep the traceback as text, without the frames of this package."""
        etype, value, tb = self._get_exc_info(exc_tuple)
        stopped = self.on_failure(value)
        self.failure = []
        if stopped or issubclass(etype, KeyboardInterrupt):
            return  # the kernel says where it was. A traceback through an unfinished import can take seconds
        if issubclass(etype, SystemExit):
            kwargs["exception_only"] = False  # IPython would hint at %tb
        self.last_error = value
        if not issubclass(etype, SyntaxError):
            value.__traceback__ = tb = _without_own_frames(tb)
        super().showtraceback((etype, value, tb), *args, **kwargs)

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        """For IPython's history, which nobody reads in a rank: do not render the traceback a second time."""
        return {"ename": type(exception).__name__, "evalue": str(exception), "traceback": self.failure or []}

    def debug_last_error(self) -> None:
        """IPython's debugger where the last exception was raised, until the person leaves it by q."""
        if self.last_error is None or self.last_error.__traceback__ is None:
            print("There was no exception to look at on this rank.")
            return
        before, builtins.input = builtins.input, self.ask_person
        try:
            debugger = self.debugger_cls(completekey=None)
            debugger.use_rawinput = True
            debugger.reset()
            debugger.interaction(None, _without_own_frames(self.last_error.__traceback__))
        finally:
            builtins.input = before

    def ask_exit(self) -> None:
        raise RuntimeError("exit() would end this rank. %dist_shutdown ends all of them.")

    def show_usage_error(self, exc: BaseException) -> None:
        self.failure = [f"UsageError: {exc}"]


def make_shell(namespace: dict[str, Any], send: Send) -> RankShell:
    """The only shell of a rank. What its cells display goes to `send`."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "neutral"
    warnings.filterwarnings("ignore", "To exit: use")  # IPython's hint after sys.exit(), which is wrong in a rank
    shell = RankShell.instance(config=config, user_ns=namespace)
    shell.display_pub.send = send
    builtins.input = _refuse_input
    _show_figures(shell)
    return shell


def _without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    if tb is None:
        return None
    rest = _without_own_frames(tb.tb_next)
    if tb.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        return rest
    return TracebackType(rest, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)


def _refuse_input(prompt: str = "") -> str:
    raise RuntimeError(
        "input() does not work in a rank cell: nobody can type on several ranks at once. Set a variable in the cell "
        "instead, or ask in a cell that begins with a magic (it runs in the kernel)."
    )


def _show_figures(shell: RankShell) -> None:
    """Show matplotlib's figures at the end of a cell, without importing matplotlib before a cell needs it."""

    if os.environ.get("SCRATCH_DDP_RETINA"):  # `lab` sets it; lessons are saved with smaller pictures
        from matplotlib_inline.config import InlineBackend

        InlineBackend.instance(parent=shell).figure_formats = {"retina"}

    def show() -> None:
        if "matplotlib.pyplot" in sys.modules:
            from matplotlib_inline.backend_inline import flush_figures

            flush_figures()

    shell.events.register("post_execute", show)


def _as_text(value: Any) -> Any:
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value


# Questions


def answer(shell: RankShell, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question of the kernel between cells; {} if it is not known."""
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
