"""Data-parallel training from scratch: the classes that the lessons build, ready to be used under torchrun."""


def load_ipython_extension(shell) -> None:
    """`%load_ext scratch_ddp`: cells that run on ranks (see `scratch_ddp.cells`)."""
    from scratch_ddp.cells import load_ipython_extension as load

    load(shell)
