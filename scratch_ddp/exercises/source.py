"""One source for stub, reference and wrong answers: the reference, with its answer between two marker comments.

The learner gets the reference without what stands between the markers; `solution` shows it without the markers; a wrong
answer is an edit of it. So none of them can drift away from the others.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable

YOUR_CODE = "raise NotImplementedError  # your code"
_ANSWER = re.compile(r"^([ ]*)# answer: begin\n(.*?)^[ ]*# answer: end\n", re.MULTILINE | re.DOTALL)


def reference_source(reference: Callable) -> str:
    """The reference as it stands in the package, markers included, without decorators and flush left."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(reference)))
    first = ast.parse(text).body[0].lineno  # of `def` or `class`, below the decorators
    text = "".join(text.splitlines(keepends=True)[first - 1 :])
    if not _ANSWER.search(text) or "# answer:" in _ANSWER.sub("", text):
        raise ValueError(f"{reference.__name__}: the answer must stand between `# answer: begin` and `# answer: end`")
    return text


def stub(reference: Callable) -> str:
    """What the learner starts from: signature, docstring, whatever is outside of the markers, and where to write."""
    return _ANSWER.sub(lambda found: f"{found[1]}{YOUR_CODE}\n", reference_source(reference))


def answer(reference: Callable) -> str:
    """The reference as a learner might have written it: without the markers."""
    return _ANSWER.sub(lambda found: found[2], reference_source(reference))


def edited(reference: Callable, edits: dict[str, str]) -> str:
    """The answer with each key replaced by its value. A key that does not stand in it exactly once is refused."""
    text = reference_source(reference)
    found = _ANSWER.search(text)
    body = found[2]
    for old, new in edits.items():
        if body.count(old) != 1:
            raise ValueError(f"{reference.__name__}: {old!r} stands {body.count(old)} times in the answer, not once")
        body = body.replace(old, new)
    return text[: found.start()] + body + text[found.end() :]


def rewritten(reference: Callable, body: str) -> str:
    """The stub with `body` where the learner writes, indented as it has to be."""

    def fill(found: re.Match) -> str:
        return textwrap.indent(textwrap.dedent(body).strip("\n"), found[1]) + "\n"

    return _ANSWER.sub(fill, reference_source(reference))


def is_stub(function: Callable, reference: Callable) -> bool:
    """Whether `function` still does exactly what the stub does: its comments and its docstring may differ."""
    try:
        written = textwrap.dedent(inspect.getsource(function))
        return _meaning(written) == _meaning(stub(reference))
    except (OSError, TypeError, SyntaxError):  # no source to read: the call will tell
        return False


def _meaning(text: str) -> str:
    definition = ast.parse(text).body[0]
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:]
    return ast.dump(definition)
