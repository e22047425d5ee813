"""What must be the same on all hosts of a cluster: Python, torch, and this package."""

import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]  # scratch_ddp/


@functools.cache
def own_versions() -> dict[str, str]:
    """This host's: Python to the minor version, torch without its build (+cpu), this package with a digest of its code.

    torch is not imported for it: that takes seconds.
    """
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _installed("torch").split("+")[0],
        "scratch_ddp": f"{_installed('scratch-ddp')} (code {_digest(_PACKAGE)})",
    }


def describe_difference(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """ "it has torch 2.11.0, and the notebook 2.13.0"; empty if all are the same."""
    return "; ".join(
        f"it has {name} {theirs.get(name, 'of unknown version')}, and the notebook {mine}"
        for name, mine in ours.items()
        if theirs.get(name) != mine
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its folder, without having been installed
        return "not installed"


def _digest(folder: Path) -> str:
    code = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        code.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return code.hexdigest()[:8]
