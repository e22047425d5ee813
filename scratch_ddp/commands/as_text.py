"""A notebook as text, for `git diff`: its cells and what they say, without pictures, colours and metadata.

`lab` tells git to use it: `python -m scratch_ddp.commands.as_text NOTEBOOK`. Only the standard library, to be quick.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def as_text(notebook: dict[str, Any]) -> str:
    """Each cell under a line with its type and tags, and its outputs below."""
    lines = []
    for cell in notebook["cells"]:
        tags = "".join(f" {tag}" for tag in cell["metadata"].get("tags", []))
        lines += [f"── {cell['cell_type']}{tags}", "".join(cell["source"])]
        lines += [f"→ {_said(output)}" for output in cell.get("outputs", [])]
    return "\n".join(lines) + "\n"


def _said(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        text = output["text"]
    elif output["output_type"] == "error":
        text = "\n".join(output["traceback"])
    else:
        text = output["data"].get("text/plain", "")
    return COLOUR.sub("", "".join(text)).rstrip("\n")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    content = Path(sys.argv[1]).read_text(encoding="utf-8")
    try:
        print(as_text(json.loads(content)), end="")
    except (ValueError, KeyError, TypeError):  # no notebook, say in the middle of a merge
        print(content, end="")
