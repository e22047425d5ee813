"""The IPython shell in which a rank's cells run: displays, magics, `!`, await and getsource work as in any notebook."""

import base64
import builtins
import sys
from collections.abc import Callable
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

Send = Callable[[dict[str, Any]], None]  # takes {"data": …, "metadata": …}


class _Publisher(DisplayPublisher):
    send: Send

    def publish(self, data: dict, metadata: dict | None = None, **_: Any) -> None:
        self.send({"data": {kind: _as_text(value) for kind, value in data.items()}, "metadata": metadata or {}})

    def clear_output(self, wait: bool = False) -> None:
        """Nothing: what a rank has shown stays (other ranks' output stands around it)."""


class _ValueHook(DisplayHook):
    """Shows the value of a cell's last expression as a display."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict, md_dict: dict | None = None) -> None:
        self.shell.display_pub.publish(format_dict, md_dict)

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankShell(InteractiveShell):
    """Runs cells in a rank's namespace; `failure` is the (frames, last line) of what the last cell raised."""

    displayhook_class = _ValueHook
    display_pub_class = _Publisher
    failure: list[str] | None = None
    on_failure: Callable[[], None] = staticmethod(lambda: None)  # called as soon as an exception has left the cell

    def enable_gui(self, gui: str | None = None) -> None:
        pass

    def init_io(self) -> None:
        pass

    def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:
        self.failure = list(stb)

    def showtraceback(self, exc_tuple: tuple | None = None, **kwargs: Any) -> None:
        self.on_failure()
        self.failure = []
        if not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # whoever pressed Stop is told by the kernel
            super().showtraceback(exc_tuple, **kwargs)

    def show_usage_error(self, exc: BaseException) -> None:
        self.failure = [f"UsageError: {exc}"]


def make_shell(namespace: dict[str, Any], send: Send) -> RankShell:
    """The rank's one shell. What its cells display goes to `send`."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "neutral"
    shell = RankShell.instance(config=config, user_ns=namespace)
    shell.display_pub.send = send
    builtins.input = _refuse_input
    _show_figures(shell)
    return shell


def _refuse_input(prompt: str = "") -> str:
    raise RuntimeError(
        "input() does not work in a rank cell: nobody can type on several ranks at once. Set a variable in the cell "
        "instead, or ask in a cell that begins with a magic (it runs in the kernel)."
    )


def _show_figures(shell: RankShell) -> None:
    """Show matplotlib's figures at the end of a cell, without importing matplotlib before a cell needs it."""

    def show() -> None:
        if "matplotlib.pyplot" in sys.modules:
            from matplotlib_inline.backend_inline import flush_figures

            flush_figures()

    shell.events.register("post_execute", show)


def _as_text(value: Any) -> Any:
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
