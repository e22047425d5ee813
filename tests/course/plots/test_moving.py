"""The book's moving figures, in a real browser without a network: each is drawn, and follows its controls."""

import shutil

import nbformat
import pytest

from scratch_ddp.commands.notebooks import lesson_paths
from scratch_ddp.course.plots import moving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LARGEST_LESSON = 300_000  # bytes of a lesson's page without its figure
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt install chromium)")


def test_every_figure_stands_in_one_lesson():
    cells = [cell for path in lesson_paths() for cell in nbformat.read(path, as_version=4).cells]
    tags = [tag for cell in cells for tag in cell.metadata.get("tags", []) if tag.startswith(moving.TAG)]
    assert sorted(tags) == sorted(moving.TAG + name for name in moving.FIGURES)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    library = moving.library()
    (folder / moving.LIBRARY).write_text(library)
    (folder / "notebooks").mkdir()
    for name in moving.FIGURES:
        page = f"<!doctype html><meta charset='utf-8'><body>{moving.html(name)}</body>"
        (folder / "notebooks" / f"{name}.html").write_text(page)
        assert len(page) + len(library) + LARGEST_LESSON < 1_500_000, name
    return folder


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_each_figure_fits_the_page_and_changes_when_a_control_is_moved(site, width, scheme):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        page, errors = context.new_page(), []
        page.on("pageerror", lambda error: errors.append(error))
        for name in moving.FIGURES:
            page.goto((site / "notebooks" / f"{name}.html").as_uri())
            drawing = page.locator(f"#moving-{name} svg")
            drawing.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for control in page.locator(f"#moving-{name} .vega-bind").all():
                before = drawing.inner_html()
                move(control)
                page.wait_for_timeout(200)
                assert drawing.inner_html() != before, f"{name}: {control.inner_text()}"
        browser.close()
    assert not errors


def move(control) -> None:
    if (slider := control.locator("input[type=range]")).count():
        slider.focus()
        slider.press("ArrowRight")
    elif (box := control.locator("input[type=checkbox]")).count():
        box.click()
    else:
        control.locator("select").select_option(index=0)
