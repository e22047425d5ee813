"""Sphinx's settings for the book. Sphinx reads this file in the book's own environment, without the package."""

project = "Distributed training from scratch"
html_title = project
language = "en"
extensions = ["myst_nb"]
exclude_patterns = [".cache"]
root_doc = "README"
# A lesson may have its first exercise before its first section; a test follows all links in the clone.
suppress_warnings = ["myst.header", "myst.xref_missing"]
highlight_language = "none"

html_theme = "furo"
html_static_path = ["book.css"]
html_css_files = ["book.css"]
html_copy_source = False
html_use_index = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_error_lexer = "none"
myst_heading_anchors = 4  # as JupyterLab and GitHub name them
myst_enable_extensions = ["dollarmath", "html_image"]
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]  # plain text in JupyterLab
