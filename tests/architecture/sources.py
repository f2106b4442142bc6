"""The files that the rules are about, each read and parsed once for all of them."""

import ast
import functools
import gc
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Source:
    """One Python file: `name` as messages have it, `nodes` as `ast.walk` gives them."""

    def __init__(self, name, text):
        self.name = name
        self.text = text
        self.lines = text.splitlines()

    @functools.cached_property
    def tree(self):
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self):
        return list(ast.walk(self.tree))

    def functions(self):
        return [
            each for each in self.nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        ]


@functools.cache
def _sources_under(folder):
    sources = tuple(
        Source(str(path.relative_to(ROOT)), path.read_text())
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    # Half a million objects that live to the end: looking for garbage among them, in every test
    # that comes after, takes longer than to parse them.
    gc.disable()
    for each in sources:
        each.nodes  # noqa: B018 - parses it
    gc.freeze()
    gc.enable()
    return sources


def files_of_the_package():
    return _sources_under("kclrun")


def our_modules():
    # The files of a starter project are data: no module imports them.
    return tuple(each for each in files_of_the_package() if "/templates/" not in each.name)


def sample_processors():
    return _sources_under("processors")


@functools.cache
def text_of_tests(names="*.py"):
    """The text of the tests and of what they are made with, or of the files with such names."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob(names)))


def imports(source):
    """The line and the top-level package of each import."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module.split(".")[0]


def broken(rule, sources):
    """Each place that breaks a rule, as `file:line: words`; a rule yields (line, words)."""
    return [f"{each.name}:{line}: {words}" for each in sources for line, words in rule(each)]


def lines_with(pattern, source):
    """The lines that a pattern matches, with what it matched."""
    return [
        (number, f"{found[0]!r}")
        for number, line in enumerate(source.lines, 1)
        if (found := re.search(pattern, line))
    ]
