"""Rank cells: notebook cells that run on real ranks. `%load_ext scratch_ddp` loads nbdistributed's magics, made safe.

Three kinds of processes: the kernel (`kernel/`), the ranks (`rank/`), and the launcher (`launcher.py`), which forks the
ranks. They talk through `channel.py`. Ranks on other machines have an agent in between (`hosts/`).

The path of a cell: `magics.py` takes its text, `words.py` reads which ranks its first line names, and
`kernel/execution.py` sends it to them (they belong to a `Cluster`). In each rank `rank/worker.py` runs it in the
IPython shell of `rank/shell.py`. What it writes leaves through the pipe of `rank/output_streams.py`;
`kernel/reader.py` reads it, and `kernel/output.py` shows the text in the notebook. If the cell does not end well,
`kernel/diagnosis.py` has the words for it.

The path of a Stop: `kernel/stop.py` makes an event of it, and `rank/stop.py` raises KeyboardInterrupt in the cell. A
rank that waits in a collective is freed because its process group can be interrupted (`rank/interruptible_group.py`).
"""

from typing import Any

_loaded: Any = None  # the magics of this kernel's shell


def load_ipython_extension(shell: Any) -> None:
    """Register the magics. Loading again changes nothing: a running cluster stays."""
    global _loaded
    if _loaded is not None:
        return
    import nbdistributed

    from scratch_ddp.cells.magics import RankMagics

    _loaded = RankMagics(shell)
    shell.register_magics(_loaded)
    nbdistributed.load_ipython_extension = _keep_ours


def _keep_ours(shell: Any) -> None:
    print("scratch_ddp is loaded, and its magics stay. For bare nbdistributed restart the kernel and load it first.")
