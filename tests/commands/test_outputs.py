"""How a notebook's outputs are saved, and `refresh`, which saves them."""

import base64
import io
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from scratch_ddp.commands import outputs, refresh
from scratch_ddp.commands.execution import CellFailed
from tests.notebooks.files import save, stream


def test_streams_are_merged_only_where_they_follow_one_another():
    cleaned = outputs.clean_outputs([stream("a"), stream("b\n"), stream("w", "stderr"), stream("c")])
    assert [(output.name, output.text) for output in cleaned] == [("stdout", "ab\n"), ("stderr", "w"), ("stdout", "c")]


@pytest.mark.parametrize(
    ("written", "saved"),
    [
        ("plain\n", "plain\n"),
        ("abc\b\b\bxyz\n", "xyz\n"),
        ("first\nwaits" + "\b" * 5 + " " * 5 + "\b" * 5, "first\n"),
        ("  0%|  |\r 50%|# |\r100%|##|\n", "100%|##|\n"),
        ("long line\rshort\n", "shortline\n"),
        ("dos\r\nends\r\n", "dos\nends\n"),
        ("waits\r     \rdone\n", "done\n"),
        ("kept  \n", "kept  \n"),
    ],
)
def test_text_is_saved_as_a_terminal_shows_it(written, saved):
    assert outputs.clean_outputs([stream(written)])[0].text == saved


def test_a_line_that_waited_and_went_leaves_nothing():
    assert outputs.clean_outputs([stream("rank 1 waits"), stream("\b \b" * 12), stream("x\r \r", "stderr")]) == []


def test_paths_scripts_and_widgets_do_not_get_into_a_notebook():
    frames = [f"File {sys.prefix}/lib/x.py", f"File \x1b[32m{outputs.ROOT}/a.py:1\x1b[39m"]
    error = new_output("error", ename="E", evalue="e", traceback=frames)
    warning = stream(f"/tmp/ipykernel_12/34.py:1: UserWarning\n{Path.home()}/data\n", "stderr")
    script = new_output("display_data", data={"application/javascript": "alert()", "text/plain": "<Javascript>"})
    widget = new_output("display_data", data={outputs.WIDGET: {"model_id": "a1"}, "text/plain": "IntSlider(value=3)"})
    picture = new_output("display_data", data={"image/png": "aGk=", "text/plain": "<Figure>"})
    cleaned = outputs.clean_outputs([error, warning, script, widget, picture])
    assert cleaned[0].traceback == ["File .venv/lib/x.py", "File \x1b[32m./a.py\x1b[39m"]
    assert cleaned[1].text == "<cell>:1: UserWarning\n~/data\n"
    assert cleaned[2].data == {"text/plain": "IntSlider(value=3)"}
    assert cleaned[3:] == [picture]


def traceback(place: str, before: str, arrow: str) -> str:
    """A file's frame between two of cells, as IPython writes them."""
    cell = (
        "\x1b[36mCell\x1b[39m \x1b[32mIn[2]\x1b[39m\x1b[32m, line 2\x1b[39m\n"
        "\x1b[32m      1\x1b[39m x = 1\n"
        "\x1b[32m----> \x1b[39m\x1b[32m2\x1b[39m get(x)\n"
    )
    file = (
        f"\x1b[36mFile \x1b[39m\x1b[32mscratch_ddp/mesh.py{place}\x1b[39m, in \x1b[36mget\x1b[39m(what)\n"
        f"\x1b[32m{before}\x1b[39m n = 12\n"
        f"\x1b[32m{arrow}\x1b[39m     \x1b[38;5;28;01mraise\x1b[39;00m\n"
    )
    return "\n".join([cell, file, cell, "E: in 3 of 4"])


@pytest.mark.parametrize("split", [str.splitlines, lambda text: text.split("\n\n"), lambda text: [text]])
def test_a_frame_of_a_file_loses_its_line_numbers_and_frames_of_cells_keep_them(split):
    """The rank cells hand over a traceback line by line, a plain kernel in frames."""
    raised = split(traceback(":100", "     99", "--> \x1b[39m\x1b[32m100"))
    error = new_output("error", ename="E", evalue="e", traceback=raised)
    assert outputs.clean_outputs([error])[0].traceback == split(traceback("", "       ", "-----> "))


def test_text_names_a_file_of_the_package_without_the_line():
    said = 'scratch_ddp/mesh.py:12: UserWarning\n  File "./scratch_ddp/zero/owners.py", line 7, in f\n'
    saved = 'scratch_ddp/mesh.py: UserWarning\n  File "./scratch_ddp/zero/owners.py", in f\n'
    assert outputs.clean_outputs([stream(said, "stderr")])[0].text == saved


def test_a_cleaned_notebook_says_the_same_on_every_machine():
    def executed(first_count: int, seconds: str) -> str:
        result = new_output("execute_result", data={"text/plain": "2"}, execution_count=first_count + 1)
        cells = [new_code_cell("1 + 0"), new_code_cell(""), new_code_cell("1 + 1", outputs=[result])]
        cells[0].execution_count, cells[2].execution_count = first_count, first_count + 1
        cells[2].metadata = nbformat.from_dict({"execution": {"iopub.status.busy": seconds}, "tags": ["keep"]})
        metadata = {"language_info": {"name": "python", "version": seconds}, "widgets": {}, "kept": 1}
        notebook = new_notebook(cells=[*cells, new_markdown_cell("x")], metadata=metadata)
        notebook.nbformat_minor = 4  # which had no ids
        for cell in notebook.cells:
            del cell["id"]
        outputs.clean_notebook(notebook)
        nbformat.validate(notebook)
        return outputs.to_text(notebook)

    text = executed(5, "3.11.7")
    assert text == executed(1, "3.13.0") and text.endswith("}\n")
    saved = nbformat.reads(text, as_version=4)
    assert [cell.get("execution_count") for cell in saved.cells] == [1, None, 2, None]
    assert saved.cells[2].outputs[0].execution_count == 2 and saved.cells[2].metadata == {"tags": ["keep"]}
    assert len({cell.id for cell in saved.cells}) == 4
    assert set(saved.metadata) == {"kernelspec", "kept", "language_info"}


def test_ids_stay_and_doubles_part():
    notebook = new_notebook(cells=[new_code_cell("a", id="mine"), new_code_cell("a"), new_code_cell("b")])
    notebook.cells[1].id, third = "mine", notebook.cells[2].id
    outputs.clean_notebook(notebook)
    first, second, last = (cell.id for cell in notebook.cells)
    assert first == "mine" != second and last == third


def test_refresh_saves_what_the_cells_say_and_a_second_time_changes_nothing(tmp_path):
    path = save(
        tmp_path / "00_x.ipynb",
        "import os\nprint('waiting', end='\\b' * 7 + ' ' * 7 + '\\b' * 7)\nprint(os.path.basename(os.getcwd()))",
        "1 / 0",
        "41 + 1",
        tags={1: "raises-exception"},
    )
    assert refresh.refresh(path) is True
    saved = nbformat.read(path, as_version=4)
    assert saved.cells[0].outputs[0].text == f"{tmp_path.name}\n"
    assert saved.cells[1].outputs[0].ename == "ZeroDivisionError"
    assert saved.cells[2].outputs[0].data["text/plain"] == "42"
    assert [cell.execution_count for cell in saved.cells] == [1, 2, 3]
    assert refresh.refresh(path) is False
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_line_that_moves_in_a_file_does_not_change_what_is_saved(tmp_path):
    path = save(tmp_path / "00_x.ipynb", "import helper\nhelper.f()", tags={0: "raises-exception"})
    helper = tmp_path / "helper.py"
    helper.write_text("def f():\n    raise ValueError('mine')\n")
    refresh.refresh(path)
    saved = "\n".join(nbformat.read(path, as_version=4).cells[0].outputs[0].traceback)
    assert "helper.py" in saved and "-----> " in saved and "line 2" in saved
    helper.write_text("# new\n" * 120 + helper.read_text())
    assert refresh.refresh(path) is False


def test_a_failing_cell_is_named_and_the_file_stays(tmp_path):
    path = save(tmp_path / "00_x.ipynb", "x = 1", "print('so far')\nraise ValueError('wrong shape')", "x")
    before = path.read_bytes()
    with pytest.raises(CellFailed, match=r"cell 2 \(print\('so far'\)\)(.|\n)*ValueError: wrong shape"):
        refresh.refresh(path)
    assert path.read_bytes() == before


def test_strict_nbval_compares_what_refresh_saved(tmp_path):
    """A waiting line that comes in one run only is no difference; another number is."""
    waits = "import sys\nfrom pathlib import Path\nif Path('ran').exists():\n    print('waits', end='\\b' * 5)"
    path = save(tmp_path / "00_x.ipynb", waits + "\nPath('ran').touch()\nprint('done', sys.prefix)", "6 * 7")
    refresh.refresh(path)
    (tmp_path / "01_y.ipynb").write_text(path.read_text().replace('"42"', '"43"'))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--nbval", "-q", str(tmp_path)]
    done = subprocess.run(command, cwd=outputs.ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr


def test_pictures_are_saved_with_a_palette_and_look_the_same():
    written = io.BytesIO()
    Image.effect_mandelbrot((64, 48), (-2, -1.5, 1, 1.5), 60).convert("RGBA").save(written, "PNG")
    data = {"image/png": base64.b64encode(written.getvalue()).decode()}
    notebook = new_notebook(cells=[new_code_cell("", outputs=[new_output("display_data", data=data)])])
    sizes = []
    for _ in range(2):  # one with a palette stays as it is
        outputs.clean_notebook(notebook)
        saved = base64.b64decode(notebook.cells[0].outputs[0].data["image/png"])
        sizes.append(len(saved))
    assert sizes[0] == sizes[1] < len(written.getvalue())
    pairs = zip(
        Image.open(io.BytesIO(saved)).convert("RGB").tobytes(),
        Image.open(written).convert("RGB").tobytes(),
        strict=True,
    )
    assert max(abs(a - b) for a, b in pairs) <= 4
