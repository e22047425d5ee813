"""Packages that only some parts of scratch_ddp need: what to install where one is missing."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Around the imports of packages from one extra of pyproject.toml: `with extra("text"): import datasets`.

    Raises ModuleNotFoundError that says how to install the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "scratch_ddp"):
            raise
        message = f"{missing} is not installed; in the clone of scratch_ddp: pip install '.[{name}]'"
        raise ModuleNotFoundError(message, name=missing) from None
