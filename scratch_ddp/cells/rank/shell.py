"""The IPython shell in which a rank's cells run. Displays, magics, `!`, await and getsource work as in any notebook.

Between cells an editor asks it for completions, or for the description of an object.
"""

import os
import sys
import warnings
from base64 import b64encode
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import IPython
from IPython.core.async_helpers import get_asyncio_loop
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.contexts import preserve_keys
from IPython.utils.tokenutil import token_at_cursor
from traitlets.config import Config

Send = Callable[[dict[str, Any]], None]  # takes {"data": …, "metadata": …}

_OWN_FOLDERS = str(Path(__file__).parents[1]), str(Path(IPython.__file__).parent)


class _Publisher(DisplayPublisher):
    send: Send

    def publish(self, data: dict, metadata: dict | None = None, **_: Any) -> None:
        data = {kind: b64encode(each).decode() if isinstance(each, bytes) else each for kind, each in data.items()}
        self.send({"data": data, "metadata": metadata or {}})

    def clear_output(self, wait: bool = False) -> None:
        """Does nothing: what a rank has shown stays, since other ranks' output stands around it."""


class _ValueHook(DisplayHook):
    """Shows the value of a cell's last expression as a display."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict, md_dict: dict | None = None) -> None:
        self.shell.display_pub.publish(format_dict, md_dict)


class RankShell(InteractiveShell):
    """Runs cells in a rank's namespace. `failure`: the traceback of what the last cell raised, as lines of text."""

    displayhook_class = _ValueHook
    display_pub_class = _Publisher
    failure: list[str] | None = None
    own_names: Collection[str] = ()  # that every rank has: rank, device, …
    # Called as soon as an exception has left the cell. Returns whether it is that of a Stop.
    on_failure: Callable[[BaseException], bool] = staticmethod(lambda error: False)

    system = InteractiveShell.system_raw  # the other choice is a terminal, which ends lines with \r\n

    def enable_gui(self, gui: str | None = None) -> None:
        pass

    def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:
        self.failure = list(stb)

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Keep the traceback as text, without the frames of this package and of IPython."""
        etype, value, tb = self._get_exc_info(exc_tuple)
        stopped = exc_tuple is None and self.on_failure(value)  # else a __repr__ has failed, and the cell goes on
        self.failure = []
        if stopped or issubclass(etype, KeyboardInterrupt):
            return  # the kernel says where it was. A traceback through an unfinished import can take seconds
        if issubclass(etype, SystemExit):
            kwargs["exception_only"] = False  # IPython would hint at %tb
        if not issubclass(etype, SyntaxError):
            value.__traceback__ = tb = _without_own_frames(tb)
        super().showtraceback((etype, value, tb), *args, **kwargs | {"tb_offset": 0})

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        """For IPython's history, which nobody reads in a rank: do not render the traceback a second time."""
        return {"ename": type(exception).__name__, "evalue": str(exception), "traceback": self.failure or []}

    def safe_execfile(self, fname: str, *where: Any, **options: Any) -> None:
        """For %run: what the script raises is the cell's error."""
        super().safe_execfile(fname, *where, **options | {"raise_exceptions": True})

    def run_script(self, line: str) -> None:
        """What %run does, but the names that every rank has keep their values (for %dist_run)."""
        with preserve_keys(self.user_ns, *self.own_names):
            self.run_line_magic("run", line)

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
    shell = RankShell.instance(config=config, user_ns=namespace, loop_runner=_run_to_its_end)
    shell.display_pub.send = send
    shell.own_names = list(namespace)
    _show_figures(shell)
    return shell


def _run_to_its_end(cell: Coroutine) -> Any:
    """Run a cell that awaits. After a Stop the next one, in the same loop, must not go on with it."""
    loop = get_asyncio_loop()
    task = loop.create_task(cell)
    try:
        return loop.run_until_complete(task)
    finally:
        if task.cancel():  # if it has not ended
            loop.run_until_complete(task)


def _without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    frames = []
    while tb is not None:  # no recursion: there may be no room for it, which is the error then
        if not tb.tb_frame.f_code.co_filename.startswith(_OWN_FOLDERS):
            frames.append(tb)
        tb = tb.tb_next
    for each in reversed(frames):
        tb = TracebackType(tb, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return tb


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


def answer(shell: RankShell, question: dict[str, Any]) -> dict[str, Any]:
    """The reply to an editor's request: completions at the cursor, or what stands there; {} if that is not known."""
    code, cursor, reply = question["code"], question["cursor"], {"status": "ok", "metadata": {}}
    if question["kind"] == "inspect":
        try:
            data = shell.object_inspect_mime(token_at_cursor(code, cursor), detail_level=question["detail"])
        except KeyError:
            return {}
        return reply | {"data": data, "found": True}
    shell.Completer.use_jedi = False  # it reads code, which the kernel can do as well
    with provisionalcompleter():
        found = list(rectify_completions(code, shell.Completer.completions(code, cursor)))
    if not found:
        return {}
    return reply | {"matches": [one.text for one in found], "cursor_start": found[0].start, "cursor_end": found[0].end}
