"""`book`: write the pages' sources, let Sphinx make the site of them, and check its links."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from scratch_ddp.commands import environment
from scratch_ddp.commands.book.links import complaints
from scratch_ddp.commands.book.sources import write_sources
from scratch_ddp.commands.lessons import ROOT

HERE = Path(__file__).parent
SITE = ROOT / "book"


def main(arguments: list[str]) -> int:
    """Build the site; returns 1 if Sphinx warns of anything or if a link leads nowhere."""
    parser = argparse.ArgumentParser(prog="python3 -m scratch_ddp book", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=SITE, help=f"the site's folder (default: {SITE.name})")
    site = parser.parse_args(arguments).folder.absolute()
    try:
        return build(site, tool())
    except environment.SetupFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1


def tool() -> Path:
    """The Python that has Sphinx. It has an environment of its own, beside the one that the lessons run in."""
    venv = Path(f"{environment.folder()}-book")
    environment.update(venv, HERE / "requirements.txt")
    return environment.python_of(venv)


def build(site: Path, python: Path) -> int:
    """Make the site with the Sphinx of this Python; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        sphinx = [str(python), "-m", "sphinx", "--fresh-env", "--fail-on-warning", "--quiet"]
        cache = f"{folder}/.cache"
        if subprocess.call([*sphinx, "-c", str(HERE), "-d", cache, folder, str(site)]) != 0:
            return 1
    wrong = complaints(site)
    print("\n".join(wrong) or f"The book is in {site}: open index.html in a browser.", flush=True)
    return 1 if wrong else 0
