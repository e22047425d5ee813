"""Rank cells: notebook cells that run on real ranks (nbdistributed's magics, made safe). `%load_ext scratch_ddp`."""

from typing import Any

_loaded: Any = None  # the magics of this kernel's shell


def load_ipython_extension(shell: Any) -> None:
    """Register the magics. Loading again changes nothing: a running cluster stays."""
    global _loaded
    if _loaded is not None:
        return
    import nbdistributed

    from scratch_ddp.cells.kernel.magics import RankMagics

    theirs = shell.magics_manager.registry.get("DistributedMagic")
    if theirs is not None and theirs._process_manager is not None:
        from scratch_ddp.cells.kernel.reports import ClusterError

        raise ClusterError("nbdistributed's own ranks are running: %dist_shutdown first, or restart the kernel.")
    _loaded = RankMagics(shell)
    shell.register_magics(_loaded)
    nbdistributed.load_ipython_extension = _keep_ours


def _keep_ours(shell: Any) -> None:
    print("scratch_ddp is loaded, and its magics stay. For bare nbdistributed restart the kernel and load it first.")
