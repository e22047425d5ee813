"""How a notebook's outputs are saved, and `refresh`, which saves them."""

import base64
import io
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from scratch_ddp.commands import outputs, refresh
from tests.notebooks.files import save, stream


@pytest.mark.parametrize(
    ("written", "saved"),
    [
        (["a", "b\n", "c\n"], "ab\nc\n"),
        (["abc\b\b\bxyz\n"], "xyz\n"),
        (["first\nwaits" + "\b" * 5 + " " * 5 + "\b" * 5], "first\n"),
        (["  0%|  |\r 50%|# |\r100%|##|\n"], "100%|##|\n"),
        (["waits\r     \rdone\n"], "done\n"),
        (["kept  \n"], "kept  \n"),
        (['scratch_ddp/mesh.py:12: Warn\n  File "scratch_ddp/zero/o.py", line 7, in f'], None),
        ([f"\x1b[32m{sys.prefix}/x {outputs.ROOT}/a.py\x1b[39m"], "\x1b[32m.venv/x ./a.py\x1b[39m"),
        ([f"/tmp/ipykernel_12/34.py:1: UserWarning\n{Path.home()}/data\n"], "<cell>:1: UserWarning\n~/data\n"),
    ],
)
def test_text_is_saved_as_a_terminal_shows_it_without_paths_and_line_numbers(written, saved):
    (output,) = outputs.clean_outputs([stream(text) for text in written])
    assert output.text == (saved or 'scratch_ddp/mesh.py: Warn\n  File "scratch_ddp/zero/o.py", in f')


def test_streams_stay_apart_and_what_has_gone_from_the_screen_scripts_and_widgets_leave_nothing():
    cleaned = outputs.clean_outputs([stream("a"), stream("w", "stderr"), stream("c")])
    assert [(output.name, output.text) for output in cleaned] == [("stdout", "a"), ("stderr", "w"), ("stdout", "c")]
    assert outputs.clean_outputs([stream("rank 1 waits"), stream("\b \b" * 12), stream("x\r \r", "stderr")]) == []
    script = new_output("display_data", data={"application/javascript": "alert()", "text/plain": "<Javascript>"})
    widget = new_output("display_data", data={outputs.WIDGET: {"model_id": "a1"}, "text/plain": "IntSlider(value=3)"})
    (cleaned,) = outputs.clean_outputs([script, widget])
    assert cleaned.data == {"text/plain": "IntSlider(value=3)"}


def test_refresh_saves_what_strict_nbval_then_compares(tmp_path):
    """A waiting line that comes in one run only is no difference; another number is."""
    waits = "import sys\nfrom pathlib import Path\nif Path('ran').exists():\n    print('waits', end='\\b' * 5)"
    cells = [waits + "\nPath('ran').touch()\nprint('done', sys.prefix)", "raise ValueError('mine')", "6 * 7"]
    path = save(tmp_path / "00_x.ipynb", *cells, tags={1: "raises-exception"})
    assert refresh.refresh(path) is True and refresh.refresh(path) is False
    saved = nbformat.read(path, as_version=4)
    assert saved.cells[0].outputs[0].text == "done .venv\n" and saved.cells[1].outputs[0].evalue == "mine"
    assert [cell.execution_count for cell in saved.cells] == [1, 2, 3]
    assert set(saved.metadata) == {"kernelspec", "language_info"} and saved.cells[1].metadata.keys() == {"tags"}
    path.write_text(path.read_text().replace('"42"', '"43"'))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--nbval", "-q", str(path)]
    done = subprocess.run(command, cwd=outputs.ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr


def test_a_failing_cell_is_shown_and_the_file_stays(tmp_path):
    path = save(tmp_path / "00_x.ipynb", "x = 1", "print('so far')\nraise ValueError('wrong shape')", "x")
    before = path.read_bytes()
    with pytest.raises(CellExecutionError, match=r"print\('so far'\)(.|\n)*ValueError.*: wrong shape"):
        refresh.refresh(path)
    assert path.read_bytes() == before


def test_pictures_are_saved_with_a_palette_and_look_the_same():
    written = io.BytesIO()
    Image.effect_mandelbrot((64, 48), (-2, -1.5, 1, 1.5), 60).convert("RGBA").save(written, "PNG")
    data = {"image/png": base64.b64encode(written.getvalue()).decode()}
    notebook = new_notebook(cells=[new_code_cell("", outputs=[new_output("display_data", data=data)])])
    pictures = [written.getvalue()]
    for _ in range(2):  # one with a palette stays as it is
        outputs.clean_notebook(notebook)
        pictures.append(base64.b64decode(notebook.cells[0].outputs[0].data["image/png"]))
    assert pictures[1] == pictures[2] and len(pictures[1]) < len(pictures[0])
    both = [Image.open(io.BytesIO(picture)).convert("RGB").tobytes() for picture in pictures[:2]]
    assert max(abs(a - b) for a, b in zip(*both, strict=True)) <= 4
