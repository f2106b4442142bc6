"""Measures the shape of the code: sizes, headers, importers, words, calls that leave their file.

    bin/shape            prints the table that the ratchets are about

`tests/architecture/test_shape.py` holds the figures to the ratchets of `ratchets.yaml`.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter

from kclrun import spark
from kclrun.cli import program
from tests.architecture.sources import ROOT, our_modules
from tests.architecture.traced_steps import STEPS

# What is started or imported from outside: programs, verbs, and what users import.
ENTRIES = (
    "kclrun.__main__",
    *map(program.module_of, program._VERBS),
    "kclrun.compat",
    "kclrun.errors",
    "kclrun.processor",
    "kclrun.samples",
    "kclrun.pytest_plugin.registration",
    "kclrun.spark.registration",
    *(f"kclrun.spark.{home}" for home in spark._HOMES.values()),
    "kclrun.testing",
    "kclrun.windows",
)
# A file is a subject, not a paragraph: 150 to 450 lines are usual, and 700 the most.
MODULE_LINES_MAX = 700
# The pure packages, between whose files a call is counted as crossing.
PURE = ("leases", "consuming", "protocol", "lifecycle", "model")
# Words a reader stumbles over, each with the most that 10,000 words of prose may hold.
PROSE_RULES = {
    "whoever, nobody, somebody, anybody": re.compile(
        r"\b(?:whoever|whomever|nobody|somebody|anybody|no one|no-one)\b", re.IGNORECASE
    ),
    "what/who without a noun": re.compile(
        r"\b(?:what|who|whom) (?:is|are|was|has|had|to)\b", re.IGNORECASE
    ),
    "is no": re.compile(r"\b(?:is|are|was|were) no\b(?! longer| more)", re.IGNORECASE),
    "people in the code": re.compile(
        r"\b(?:hands?|dead(?![\s_-]+letter)|farewells?|told|tells|heard|hears)\b", re.IGNORECASE
    ),
}


class Module:
    """One file of `kclrun/`, read once."""

    def __init__(self, source):
        self.path = ROOT / source.name
        self.name = _dotted(self.path)
        self.text = source.text
        self.tree = source.tree
        self.nodes = source.nodes
        self.lines = self.text.count("\n")

    @property
    def package(self):
        folder = self.path.relative_to(ROOT / "kclrun").parent
        return folder.parts[0] if folder.parts else "(top)"

    @functools.cached_property
    def docstring_lines(self):
        """The numbers of the lines that docstrings fill."""
        return {
            line
            for node in self.nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
            for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
        }

    @functools.cached_property
    def comments(self):
        """Line number to comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    @functools.cached_property
    def code_lines(self):
        lines = enumerate(self.text.splitlines(), 1)
        return sum(
            1
            for number, line in lines
            if line.strip()
            and not line.lstrip().startswith("#")
            and number not in self.docstring_lines
        )

    @functools.cached_property
    def header_lines(self):
        """Imports, `__all__` and the module's docstring, blank lines between them not counted."""
        return sum(node.end_lineno - node.lineno + 1 for node in self.tree.body if _is_header(node))

    @functools.cached_property
    def function_lines(self):
        return [
            node.end_lineno - node.lineno + 1
            for node in self.nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]

    @functools.cached_property
    def imports(self):
        """The modules of `kclrun` that this one names: imports at any depth, and texts of names."""
        return self._named_by(self.nodes)

    @functools.cached_property
    def imports_at_once(self):
        """Those that are imported as soon as this one is."""
        return self._named_by(self.tree.body)

    def _named_by(self, nodes):
        named = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named.add(node.module)
                named |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"kclrun(?:\.\w+)+", node.value))
        return (named & _names()) - {self.name}

    @property
    def is_program(self):
        """Whether it is started as a process of its own."""
        return '\nif __name__ == "__main__":' in self.text

    @property
    def prose(self):
        docstrings = [
            ast.get_docstring(node)
            for node in self.nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        return "\n".join([*filter(None, docstrings), *self.comments.values()])


@functools.cache
def _names():
    return frozenset(_dotted(ROOT / source.name) for source in our_modules())


def _dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_header(node):
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
    )


@functools.cache
def modules():
    """Every module of `kclrun/`, sorted by path."""
    return tuple(Module(source) for source in our_modules())


def header_share_by_package():
    """Package to the share of its lines that are file headers, in per cent."""
    header, lines = Counter(), Counter()
    for module in modules():
        header[module.package] += module.header_lines
        lines[module.package] += module.lines
    return {package: 100 * header[package] / lines[package] for package in sorted(lines)}


def one_importer_modules():
    """Modules that exactly one module imports, one of the same package, each with its importer."""
    importers = {}
    for module in modules():
        for name in module.imports:
            importers.setdefault(name, set()).add(module)
    by_name = {module.name: module for module in modules()}
    single = {
        by_name[name]: next(iter(found)) for name, found in importers.items() if len(found) == 1
    }
    return {
        module: importer
        for module, importer in single.items()
        if module.path.name != "__init__.py"
        and importer.package == module.package
        and importer.path.name != "__init__.py"
    }


def foldable_modules():
    """The one-importer modules that could be a paragraph of their importer. Left out are:

    - a verb, or a program of its own: it is found by its name;
    - a module whose name is that of another library (`amazon_kclpy`);
    - one that is imported within a function: its own imports are not to run before it is needed;
    - one that does not fit: with it the file of its importer would be longer than a file may be.
    """
    return sorted(
        module.name
        for module, importer in one_importer_modules().items()
        if not (module.name in ENTRIES or module.is_program or ".amazon_kclpy." in module.name)
        and module.name in importer.imports_at_once
        and module.lines - module.header_lines + importer.lines <= MODULE_LINES_MAX
    )


def unreached():
    """Modules that no program, child process or public package imports, however indirectly."""
    by_name = {module.name: module for module in modules()}
    reached, open_names = set(), [name for name in ENTRIES if name in by_name]
    while open_names:
        name = open_names.pop()
        if name in reached:
            continue
        reached.add(name)
        open_names += by_name[name].imports
        # A package's own file runs before its modules.
        parent = name.rpartition(".")[0]
        open_names += [parent] if parent in by_name else []
    return sorted(set(by_name) - reached)


def prose():
    """Rule to how often 10,000 words of comments and docstrings break it."""
    text = "\n".join(module.prose for module in modules())
    words = len(text.split())
    return {rule: 1e4 * len(each.findall(text)) / words for rule, each in PROSE_RULES.items()}


def crossing(step):
    """Of the calls that one step of a core makes to pure functions: those that leave their file, in
    per cent; how many calls and how many files there are."""
    run = step()
    next(run)
    calls, files = Counter(), set()
    roots = tuple(str(ROOT / "kclrun" / package) for package in PURE)

    def count(frame, event, _):
        if event != "call" or frame.f_code.co_name.startswith("<"):
            return
        callee, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        if callee.startswith(roots):
            files.add(callee)
            if caller.startswith(roots):
                calls[callee != caller] += 1

    sys.setprofile(count)
    try:
        next(run, None)
    finally:
        sys.setprofile(None)
    total = calls.total()
    return 100 * calls[True] / total, total, len(files)


def figures():
    """Name to figure: the table."""
    everything = modules()
    functions = sorted(lines for module in everything for lines in module.function_lines)
    tests = [path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")]
    shares = header_share_by_package()
    result = {
        "lines in kclrun/": sum(module.lines for module in everything),
        "files in kclrun/": len(everything),
        "code lines a file": sum(m.code_lines for m in everything) / len(everything),
        "header share, %": 100
        * sum(m.header_lines for m in everything)
        / sum(m.lines for m in everything),
        "header share of the worst package, %": max(shares.values()),
        "longest file": max(module.lines for module in everything),
        "files in the fullest folder": max(Counter(m.path.parent for m in everything).values()),
        "function lines, p95": functions[len(functions) * 95 // 100],
        "one-importer modules": len(one_importer_modules()),
        "one-importer modules that fit into their importer": len(foldable_modules()),
        "modules that no entry point reaches": len(unreached()),
        "lines in tests/": sum(tests),
        "README lines": (ROOT / "README.md").read_text().count("\n"),
    }
    result |= {f"{rule}, per 10,000 words": share for rule, share in prose().items()}
    for name, step in STEPS.items():
        result[f"crossing: {name}, %"] = crossing(step)[0]
    return result


if __name__ == "__main__":
    for figure, value in figures().items():
        print(
            f"{figure:60} {value:10,.1f}" if isinstance(value, float) else f"{figure:60} {value:8,}"
        )
