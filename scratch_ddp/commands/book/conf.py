"""Sphinx's settings for the book. Sphinx reads this file in the book's own environment, without the package."""

from docutils.nodes import SkipNode
from ipython_pygments_lexers import IPython3Lexer
from latex2mathml.converter import convert
from pygments.lexer import RegexLexer, bygroups, inherit, using
from pygments.lexers import PythonLexer
from pygments.token import Generic, Name, Number, Operator, Text

project = "Distributed training from scratch"
html_title = project
language = "en"
extensions = ["myst_nb"]
exclude_patterns = [".cache"]
suppress_warnings = ["myst.header"]  # a lesson may have its first exercise before its first section
highlight_language = "none"

html_theme = "furo"
html_static_path = ["book.css"]
html_css_files = ["book.css"]
html_copy_source = False
html_use_index = False
html_show_copyright = False
html_show_sphinx = False
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "github-dark"

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_error_lexer = "rank-error"
myst_heading_anchors = 4  # as JupyterLab and GitHub name them
myst_enable_extensions = ["dollarmath", "html_image"]
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]  # plain text in JupyterLab


class RankCellLexer(IPython3Lexer):
    """Python with magics, which knows that the body of a `%%rank` cell is Python too."""

    name = "Rank cell"
    tokens = {
        "root": [
            (r"\A(%%rank)([^\n]*\n)((?:.|\n)*)", bygroups(Operator, Text, using(PythonLexer))),
            inherit,
        ]
    }


class RankErrorLexer(RegexLexer):
    """What a cell shows when ranks have raised: for each group of ranks a heading and IPython's traceback."""

    name = "Rank error"
    tokens = {
        "root": [
            (r"^── .* ──$", Generic.Heading),
            (r"^-+> *\d+", Name.Exception),
            (r"^ +\d+", Number.Integer),
            (r"^[A-Z]\w+(?=:| +Traceback)", Name.Exception),
            (r".+|\n", Text),
        ]
    }


def show_math(self, node) -> None:
    """Write a formula as MathML, which browsers draw themselves: no script, no font."""
    block = node.tagname == "math_block"
    formula = convert(node.astext(), display="block" if block else "inline")
    self.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise SkipNode


def setup(app) -> None:
    app.add_lexer("rank-cell", RankCellLexer)
    app.add_lexer("rank-error", RankErrorLexer)
    app.add_html_math_renderer("mathml", inline_renderers=(show_math, None), block_renderers=(show_math, None))
