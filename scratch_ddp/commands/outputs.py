"""The form in which a notebook is saved: the same text on every machine and on every run.

`clean_outputs` is applied to what is saved and, through conftest.py, to what a strict nbval run compares with it.
"""

import base64
import io
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from scratch_ddp.commands.environment import ROOT

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
SCRIPT = "application/javascript"
PICTURE = "image/png"
PICTURE_COLOURS = 128  # a chart has far fewer, and smooth edges
WIDGET = "application/vnd.jupyter.widget-view+json"


def clean_notebook(notebook: NotebookNode) -> None:
    """Bring a notebook that was just executed to the form that is committed, in place. Of metadata, tags stay."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key == "tags"})
        if cell.cell_type == "code":
            cell.outputs = clean_outputs(cell.outputs)
            for output in cell.outputs:
                if PICTURE in output.get("data", {}):
                    output.data[PICTURE] = _with_few_colours(output.data[PICTURE])


def clear_outputs(notebook: NotebookNode) -> None:
    """Make a notebook as if it had never been run, in place."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def to_text(notebook: NotebookNode) -> str:
    """The notebook's JSON: keys sorted, one newline at the end."""
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def clean_outputs(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs without what differs from run to run or with an edit elsewhere.

    That is: pieces of one stream, overwritten text, paths, line numbers of the package's files, scripts, widgets.
    """
    cleaned: list[NotebookNode] = []
    for output in outputs:
        output, last = nbformat.from_dict(_without_paths(output)), cleaned[-1] if cleaned else {}
        if output.output_type == "stream" and output.name == last.get("name"):
            last.text += output.text
        elif SCRIPT not in output.get("data", {}):
            output.get("data", {}).pop(WIDGET, None)
            cleaned.append(output)
    for output in cleaned:
        if output.output_type == "stream":
            output.text = _as_a_terminal_shows(output.text)
    return [output for output in cleaned if output.get("text", "something")]


def _with_few_colours(picture: str) -> str:
    """A picture, in base64, with a palette: a third of the bytes. One that has a palette, or is transparent, stays."""
    from PIL import Image  # matplotlib needs it, so whoever has drawn a picture has it

    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.mode not in ("RGB", "RGBA") or (image.mode == "RGBA" and image.getextrema()[3][0] < 255):
        return picture
    smaller = io.BytesIO()
    image.convert("RGB").quantize(PICTURE_COLOURS, dither=Image.Dither.NONE).save(smaller, "PNG", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode("ascii")


def _as_a_terminal_shows(text: str) -> str:
    """The text without what backspaces and carriage returns have wiped out."""
    while (shorter := re.sub(r"[^\n\b][\b]", "", text)) != text:
        text = shorter
    return re.sub(r"[^\n]*\r(?!\n)", "", text).replace("\b", "")


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        for pattern, replacement in PATHS:
            value = pattern.sub(replacement, value)
        return value
    if isinstance(value, dict):
        return {key: item if str(key).startswith("image/") else _without_paths(item) for key, item in value.items()}
    return [_without_paths(item) for item in value] if isinstance(value, list) else value


_START = r"(?:(?<![\w/.~-])|(?<=\dm))"  # not inside of a longer path; \dm ends a colour code
PATHS = [
    (re.compile(r"/\S*/ipykernel_\d+/\d+\.py"), "<cell>"),
    *(
        (re.compile(_START + re.escape(str(folder)) + r"(?=/|\b)"), name)
        for folder, name in [(Path(sys.prefix), ".venv"), (ROOT, "."), (Path.home(), "~")]
        if len(folder.parts) > 1  # a folder such as / would match too much
    ),
    # Where in the package a warning comes from, or a frame of a traceback that was printed.
    (re.compile(r'(scratch_ddp/[\w/]+\.py"?)(?::\d+|, line \d+)'), r"\1"),
]
