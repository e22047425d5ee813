"""A number in a lesson's prose stands in a cell, too: who changes the cell hears which sentence no longer fits.

Cells fit on a screen, and lines into a cell.
"""

import re

import nbformat
import pytest

from scratch_ddp.commands.notebooks import lesson_paths

NOT_IN_A_CELL = {  # lesson: {number: where it comes from}
    "02_inside_all_reduce": {"1011": "10⁰ + 10¹ + 10³", "999": "the last of arange(1000)", "2009": "a paper's year"},
    "04_seeding_checks": {"0.32": "(3/4)⁴", "256": "SHA-256"},
    "06_no_sync_accumulation": {"7.5": "15 / 2"},
    "07_communication_cost": {
        "4000000": "bytes of 1_000_000 elements",
        "0.125": "GB in a Gb",
        "450": "900 / 2",
        "480": "published",
        "366": "published",
        "32": "published",
        "360": "a model's name",
        "269": "published",
        "900": "GB/s, of the data sheet",
    },
    "08_overlap": {"1.5": "the mean of 1 and 2"},
    "09_bucketing": {"0.498": "published", "40": "million, Megatron's default"},
    "11_zero_and_fsdp": {
        "520": "2 × 260",
        "240": "80 + 160, of 0.080 and 0.160 s",
        "192": "24 × 8",
        "1.8": "(240 + 192) / 240",
    },
    "14b_context_and_experts": {
        "4096": "tokens, set in course/pages/split_model.py",
        "125": "TFLOP/s, set there too",
    },
    "15_accounting": {
        "818": "published",
        "17543808": "published",
        "0.02": "percent, 17,543,808 for 17,547,264",
        "989": "TFLOP/s of an H100, set in instruments/cost/layouts.py",
        "450": "GB/s, set there too",
        "180": "GB/s, set there too",
        "7.5": "billion, a model's name",
        "2021": "a year",
        "2024": "a year",
        "2018": "a year",
        "2.7": "published",
        "500": "W, published",
        "700": "W, published",
        "2.50": "dollars, set in layouts.py",
    },
    "16_many_machines": {
        "405": "billion, a model's name",
        "0.75": "(n - 1) / n for 4 ranks",
        "72": "ms, measured",
        "92": "ms, measured",
        "135712": "an issue's number",
    },
    "17_together": {"512": "16 × 4 × 8"},
    "18_seldom": {"2.48": "2 × 1.24", "500": "published", "200": "2 × 100", "150": "200 × 3/4"},
}

LINES, WIDTH = 25, 103  # of a cell; characters that JupyterLab shows of a line in a window of 1250 pixels
NUMBER = re.compile(r"(?<![\w.^])\d[\d,_]*(?:\.\d+)?")


def numbers_in(text: str) -> list[str]:
    return [found[0].replace(",", "").replace("_", "") for found in NUMBER.finditer(text)]


def prose_of(cell) -> str:
    """Without what a link points to, and without HTML tags."""
    return re.sub(r"<[^>]*>", "", re.sub(r"\]\([^)]*\)", "]", cell.source))


def shown_by(cell) -> str:
    texts = [cell.source]
    for output in cell.outputs:
        texts += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
    return "\n".join(texts)


def stands_in(number: str, values: list[float]) -> bool:
    decimals = len(number.partition(".")[2])
    return any(round(value, decimals) == float(number) for value in values)


@pytest.mark.parametrize("path", lesson_paths(), ids=lambda path: path.stem)
def test_numbers_in_the_prose_stand_in_a_cell(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    for lines in (cell.source.splitlines() for cell in code):
        assert len(lines) <= LINES and max(map(len, lines), default=0) <= WIDTH, lines[0]
    values = [float(n) for cell in code for n in numbers_in(shown_by(cell))]
    prose = [number for cell in cells if cell.cell_type == "markdown" for number in numbers_in(prose_of(cell))]
    precise = [number for number in prose if "." in number or len(number) > 2]
    lonely = {number for number in precise if not stands_in(number, values)}
    assert lonely <= set(NOT_IN_A_CELL.get(path.stem, ()))  # times that a cell printed may equal one of these
