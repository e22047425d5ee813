"""Small notebooks for tests, written by hand."""

from pathlib import Path

from nbformat.v4 import new_code_cell, new_notebook, new_output

from scratch_ddp.commands import outputs


def save(path: Path, *sources: str, tags: dict[int, str] | None = None) -> Path:
    cells = [new_code_cell(source) for source in sources]
    for index, tag in (tags or {}).items():
        cells[index].metadata["tags"] = [tag]
    path.write_text(outputs.to_text(new_notebook(cells=cells)))
    return path


def stream(text: str, name: str = "stdout"):
    return new_output("stream", name=name, text=text)
