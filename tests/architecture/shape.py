"""Measures the shape of the code: sizes, words, calls that leave their file.

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
# A file is a subject. Above 600 lines it is probably two; 700 is the most.
MODULE_LINES_MAX = 700
# The pure packages, between whose files a call is counted as crossing.
PURE = ("leases", "lease", "operating", "traffic", "protocol", "lifecycle", "model")
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


# The rooms and their packages. "top" is the files of `kclrun/` itself.
ROOMS = {
    "the public face": ("top",),
    "model, protocol, codec": ("model", "protocol", "codec"),
    "leases": ("leases",),
    "the life of one lease": ("lease",),
    "calling": ("calling",),
    "lifecycle, traffic": ("lifecycle", "traffic"),
    "state, outputs, producing": ("state", "outputs", "producing", "reading", "files"),
    "aws": ("aws",),
    "manager, worker, ipc": ("manager", "worker", "ipc"),
    "observe, config": ("observe", "config"),
    "cli, operating, page": ("cli", "operating", "page"),
    "spark": ("spark",),
    "local, simulation": ("local", "simulation"),
    "testing, pytest_plugin, compat": ("testing", "pytest_plugin", "compat", "samples"),
}
# A feature and the names of the modules that are about it: how many packages it is spread over.
FEATURES = {
    "outputs": re.compile(r"(?:^|_)(?:outputs?|outbox|rolls?|emitted|destinations|opening)(?:_|$)"),
    "keyed state": re.compile(r"(?:^|_)(?:keyed|states?(?!_machine)|versions?_store)(?:_|$)"),
    "dead letters": re.compile(r"(?:^|_)(?:letters?|redriv\w*)(?:_|$)"),
}
# What decides about the calls of user code: of batches, of single records, of other methods. The
# module that makes one drives user code.
DECIDES_ABOUT_CALLS = ("BatchRun", "RecordWindow", "Attempts")
# More than these needs a reason (design, sizes).
METHODS_MAX, CONSTRUCTOR_MAX, PARAMETERS_MAX, LINES_OF_ONE_SUBJECT = 25, 10, 8, 600


class Module:
    """One file of `kclrun/`, read once."""

    def __init__(self, source):
        self.path = ROOT / source.name
        self.name = _dotted(self.path)
        self.text = source.text
        self.tree = source.tree
        self.nodes = source.nodes
        self.lines = self.text.count("\n")

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

    @functools.cached_property
    def imports_of_code(self):
        """The modules of `kclrun` that this one imports, at its start or later, but for types."""
        for_types = {
            node
            for block in self.nodes
            if isinstance(block, ast.If) and getattr(block.test, "id", None) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        named = self._named_by(
            node
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in for_types
        )
        # A package's face, which imports its modules at their first use.
        return named - {self.name.rpartition(".")[0], "kclrun"}

    @property
    def package(self):
        parts = self.path.relative_to(ROOT / "kclrun").parts
        return parts[0] if len(parts) > 1 else "top"

    def parameters(self):
        """(name, number of its parameters without `self`) of each function."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = [*node.args.posonlyargs, *node.args.args]
                has_self = bool(named) and named[0].arg in ("self", "cls")
                yield node.name, len(named) + len(node.args.kwonlyargs) - has_self

    def methods(self):
        """How many methods each class has."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                yield sum(isinstance(part, ast.FunctionDef) for part in node.body)

    @property
    def starred(self):
        """Stars before a tuple display: its values can stand there themselves."""
        return sum(
            isinstance(part, ast.Starred) and isinstance(part.value, ast.Tuple)
            for node in self.nodes
            if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Call)
            for part in ast.iter_child_nodes(node)
        )

    @property
    def named_alike(self):
        return len(re.findall(r'"""As `[^`]+`\."""', self.text))

    @property
    def over_each(self):
        loops = (node for node in self.nodes if isinstance(node, ast.For | ast.comprehension))
        return sum(getattr(loop.target, "id", None) == "each" for loop in loops)

    def makes(self, names):
        return any(
            isinstance(node, ast.Call)
            and not {getattr(node.func, "id", None), getattr(node.func, "attr", None)}.isdisjoint(
                names
            )
            for node in self.nodes
        )

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


@functools.cache
def modules():
    """Every module of `kclrun/`, sorted by path."""
    return tuple(Module(source) for source in our_modules())


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


def circles():
    """Modules that import each other, however indirectly: each circle sorted."""
    imports = {module.name: module.imports_of_code for module in modules()}
    reached = {}
    for name, imported in imports.items():
        seen, open_names = set(), [*imported]
        while open_names:
            other = open_names.pop()
            if other not in seen:
                seen.add(other)
                open_names += imports[other]
        reached[name] = seen
    return {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }


def spread(feature):
    """The packages with a module whose name says that it is about this feature."""
    return {
        module.package
        for module in modules()
        if FEATURES[feature].search(module.name.rpartition(".")[2])
    }


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


def _more_than_a_reader_holds(everything):
    parameters = [each for module in everything for each in module.parameters()]
    return {
        "classes above 25 methods": sum(
            count > METHODS_MAX for module in everything for count in module.methods()
        ),
        "constructors above 10 arguments": sum(
            name == "__init__" and count > CONSTRUCTOR_MAX for name, count in parameters
        ),
        "functions above 8 parameters": sum(count > PARAMETERS_MAX for _, count in parameters),
        "files above 600 lines": sum(module.lines > LINES_OF_ONE_SUBJECT for module in everything),
    }


def figures():
    """Name to figure: the table."""
    everything = modules()
    functions = sorted(lines for module in everything for lines in module.function_lines)
    tests = [path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")]
    result = {
        "lines in kclrun/": sum(module.lines for module in everything),
        "code lines a file": sum(m.code_lines for m in everything) / len(everything),
        "longest file": max(module.lines for module in everything),
        "function lines, p95": functions[len(functions) * 95 // 100],
        "modules that no entry point reaches": len(unreached()),
        "lines in tests/": sum(tests),
        **_more_than_a_reader_holds(everything),
        "circles of imports": len(circles()),
        "stars before a tuple display": sum(module.starred for module in everything),
        "docstrings that only name another": sum(module.named_alike for module in everything),
        "loops over each": sum(module.over_each for module in everything),
        "packages that drive user code": len(
            {module.package for module in everything if module.makes(DECIDES_ABOUT_CALLS)}
        ),
        "README lines": (ROOT / "README.md").read_text().count("\n"),
    }
    result |= {f"{rule}, per 10,000 words": share for rule, share in prose().items()}
    for feature in FEATURES:
        result[f"packages of {feature}"] = len(spread(feature))
    by_package = Counter()
    for module in everything:
        by_package[module.package] += module.lines
    for room, packages in ROOMS.items():
        result[f"lines: {room}"] = sum(by_package.pop(package, 0) for package in packages)
    result["lines: in no room"] = by_package.total()
    for name, step in STEPS.items():
        result[f"crossing: {name}, %"] = crossing(step)[0]
    return result


if __name__ == "__main__":
    for figure, value in figures().items():
        print(
            f"{figure:60} {value:10,.1f}" if isinstance(value, float) else f"{figure:60} {value:8,}"
        )
