"""Whether a learner's ticks are earned: `check` is the course's, and the answers are not the package's own functions.

This is read from the text of the cells. A notebook that hides on purpose what it does is not found out.
"""

import ast
import symtable
from collections.abc import Collection, Iterable, Iterator

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from scratch_ddp.course.exercise import Exercise

PACKAGE, COURSE = "scratch_ddp", ("scratch_ddp.course", "scratch_ddp.course.check")
TOOLS = {"check", "get", "reveal", "solution"}  # of the package, and free to use in an answer


def unearned(
    notebook: NotebookNode, exercises: dict[str, Exercise], lesson: NotebookNode | None = None
) -> dict[str, str]:
    """Why an exercise's ticks do not count, by its name: `cell 7 uses scratch_ddp.collectives.ring_all_reduce`.

    An answer may use what its stub in `exercises` uses. Cells that stand in `lesson`, the original, are trusted.
    """
    given = {cell.source for cell in lesson.cells} if lesson else set()
    trees = [_parsed(cell.source) if cell.cell_type == "code" else ast.Module([], []) for cell in notebook.cells]
    names = set().union(*map(_checked, trees))
    reasons: dict[str, str] = {}
    imported: dict[str, str] = {}  # a name that the cells so far know, and what of the package it means
    for number, (cell, tree) in enumerate(zip(notebook.cells, trees, strict=True), start=1):
        bound, from_package = _bound(tree.body), _imports(tree.body)
        imported = {name: meaning for name, meaning in imported.items() if name not in bound} | from_package
        reasons |= {name: f"cell {number} checks {imported[name]}" for name in _checked(tree) if name in imported}
        if cell.source in given:
            continue
        if "check" in _without_course(tree):
            return dict.fromkeys(names, f"cell {number} redefines check")
        if _changes(tree, imported):
            return dict.fromkeys(names, f"cell {number} changes {PACKAGE}")
        for name in names if "*" in from_package else bound & names:
            borrowed = _borrowed(tree, name, imported) - _used_by_stub(exercises.get(name))
            reasons |= {name: f"cell {number} uses {', '.join(sorted(borrowed))}"} if borrowed else {}
    return reasons


def _parsed(source: str) -> ast.Module:
    """A cell's statements without its magics; none if it is not Python."""
    first, _, rest = source.partition("\n")
    try:
        tree = ast.parse(TransformerManager().transform_cell(rest if first.startswith("%%") else source))
        _bound(tree.body)  # which refuses what only the compiler would
    except SyntaxError:
        return ast.Module([], [])
    return tree


def _bound(statements: list[ast.stmt]) -> set[str]:
    """The global names that statements assign, define or import, also inside functions."""
    return {each.get_name() for each in _globals(statements) if each.is_assigned() or each.is_imported()}


def _read(statements: list[ast.stmt]) -> set[str]:
    """The global names that statements read, also inside functions."""
    return {each.get_name() for each in _globals(statements) if each.is_referenced()}


def _globals(statements: list[ast.stmt]) -> Iterator[symtable.Symbol]:
    tables = [symtable.symtable(ast.unparse(ast.Module(statements, [])), "cell", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        yield from (each for each in table.get_symbols() if each.is_global())


def _without_course(tree: ast.Module) -> set[str]:
    """The names that a cell binds other than by importing them from the course."""
    others = [each for each in tree.body if not _is_of_course(each)]
    return _bound(others)


def _is_of_course(statement: ast.stmt) -> bool:
    plain = isinstance(statement, ast.ImportFrom) and not any(each.asname for each in statement.names)
    return plain and statement.module in COURSE


def _imports(statements: Iterable[ast.AST]) -> dict[str, str]:
    """The names that import statements bind to something of the package, and its full name."""
    found = {}
    for node in statements:
        if isinstance(node, ast.Import):
            full = {each.asname or PACKAGE: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        else:
            continue
        found |= {name: meaning for name, meaning in full.items() if meaning.split(".")[0] == PACKAGE}
    return found


def _checked(tree: ast.Module) -> set[str]:
    """The names in the cell's calls `check(NAME)`; of `check(module.name)` the module's."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "check"]
    return {ast.unparse(call.args[0]).split(".")[0] for call in calls if call.args}


def _changes(tree: ast.Module, imported: Collection[str]) -> bool:
    """Whether a cell assigns to an attribute of the package, as in `course.check = ...`."""
    changed = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return any(ast.unparse(node).split(".")[0] in imported for node in changed)


def _borrowed(tree: ast.Module, name: str, imported: dict[str, str]) -> set[str]:
    """What of the package the answer `name` in a cell uses.

    Of a cell that defines the answer, only functions and classes count: below them a learner may try it out.
    """
    definitions = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    answer = definitions if name in {each.name for each in definitions} else tree.body
    return {each for each in _used(answer, imported) if each.rpartition(".")[2] not in TOOLS - {name}}


def _used_by_stub(exercise: Exercise | None) -> set[str]:
    return _used(ast.parse(exercise.stub_cell()).body, {}) if exercise else set()


def _used(statements: list[ast.stmt], imported: dict[str, str]) -> set[str]:
    """What of the package statements import, or read under a name in `imported`."""
    inside = {meaning for statement in statements for meaning in _imports(ast.walk(statement)).values()}
    return inside | {imported[each] for each in _read(statements) if each in imported}
