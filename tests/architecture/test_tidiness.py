"""The shape of the code, as failing tests: sizes, exports, docstrings, banned words.

A test for each rule, not for each file: its message names each place that breaks the rule.
"""

import ast
import importlib
import re
import subprocess
import types
from pathlib import PurePath

import pytest

from kclrun.observe.events import CATALOGUE, FIELDS
from tests.architecture.shape import MODULE_LINES_MAX
from tests.architecture.sources import (
    ROOT,
    Source,
    broken,
    imports,
    lines_with,
    our_modules,
    sample_processors,
)
from tests.support.programs import needs, needs_spark
from tests.support.tables import over_rows

FUNCTION_LINES_MAX = 60
BLOB_BYTES_MAX = 200_000
# A boundary that catches everything and goes on says why on its line.
REASON_TO_CATCH_ALL = re.compile(r"# noqa: [A-Z0-9, ]*BLE001[A-Z0-9, ]* - \w")
# What users import besides the faces of packages. Inside, mypy refuses a name that a module only
# imported, so a list of exports would only repeat its definitions.
PUBLIC_MODULE = re.compile(
    r"kclrun/(errors|output|processor|windows|compat/kclpy/amazon_kclpy/.+)\.py"
)
# Queues and locks of multiprocessing are measured to hang for good after a SIGKILL.
DANGEROUS_MODULES = {"pickle", "marshal", "shelve", "dill", "multiprocessing"}
DANGEROUS_WORDS = r"yaml\.load\(|shell=True|\beval\(|\bexec\(|\b(TODO|FIXME|XXX)\b"


def lines_of_code(node):
    """Without the docstring: a contract may be longer than what keeps it."""
    docstring = node.body[0] if ast.get_docstring(node) else None
    described = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return node.end_lineno - node.lineno + 1 - described


def too_many_lines(source):
    if len(source.lines) > MODULE_LINES_MAX:
        yield len(source.lines), f"at most {MODULE_LINES_MAX} lines"


def long_functions(source):
    for node in source.functions():
        if (lines := lines_of_code(node)) > FUNCTION_LINES_MAX:
            yield node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def missing_docstring(source):
    if not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring"


def disordered_exports(source):
    if PurePath(source.name).name in {"__init__.py", "__main__.py"}:
        return
    module = importlib.import_module(source.name.removesuffix(".py").replace("/", "."))
    exported = getattr(module, "__all__", None)
    if not PUBLIC_MODULE.match(source.name):
        if exported is not None:
            yield 1, "only package faces and public modules have __all__"
        return
    if exported is None:
        yield 1, "the public module has no __all__"
        return
    line = getattr(literal_all(source.tree), "lineno", 1)
    if exported != sorted(exported, key=lambda each: (not each.isupper(), each)):
        yield line, "__all__ is not sorted, constants first"
    for each in exported:
        if not hasattr(module, each):
            yield line, f"__all__ names {each}, which the module does not have"


def silent_public_classes(source):
    for node in source.tree.body:
        if (
            isinstance(node, ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            yield node.lineno, f"the public class {node.name} has no docstring"


def swallowed_wholesale(source):
    for node in source.nodes:
        if (
            isinstance(node, ast.ExceptHandler)
            and catches_everything(node)
            and not isinstance(node.body[-1], ast.Raise)
            and not REASON_TO_CATCH_ALL.search(source.lines[node.lineno - 1])
        ):
            yield node.lineno, "everything is caught, and no reason stands on the line"


def dangerous_things(source):
    for line, module in imports(source):
        if module in DANGEROUS_MODULES:
            yield line, f"imports {module}"
    yield from lines_with(DANGEROUS_WORDS, source)


def literal_all(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return node.value
    return None


def catches_everything(handler):
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        each is None or (isinstance(each, ast.Name) and each.id in {"Exception", "BaseException"})
        for each in caught
    )


def everywhere():
    return our_modules() + sample_processors()


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        pytest.param(too_many_lines, everywhere, id="a module fits into a head"),
        pytest.param(long_functions, everywhere, id="a function fits on a screen"),
        pytest.param(missing_docstring, everywhere, id="a module says what it is"),
        pytest.param(
            disordered_exports, our_modules, id="exports are sorted and public", marks=needs_spark
        ),
        pytest.param(silent_public_classes, our_modules, id="public classes have a docstring"),
        pytest.param(swallowed_wholesale, everywhere, id="all is caught only for a reason"),
        pytest.param(dangerous_things, everywhere, id="what is dangerous does not occur"),
    ],
)
def test_each_rule_holds_everywhere(rule, sources):
    found = broken(rule, sources())

    assert not found, "\n".join(found)


LONG_FUNCTION = "def long():\n" + "    pass\n" * FUNCTION_LINES_MAX
PUBLIC_CLASS = '__all__ = ["Mine"]\n\n\nclass Mine:\n    pass\n'
CATCHES = "try:\n    go()\nexcept Exception:\n    pass\n"


@over_rows(
    ("rule", "text", "lines"),
    [
        (too_many_lines, "\n" * (MODULE_LINES_MAX + 1), [MODULE_LINES_MAX + 1]),
        (too_many_lines, "\n" * MODULE_LINES_MAX, []),
        (long_functions, f"\n{LONG_FUNCTION}", [2]),
        (long_functions, LONG_FUNCTION.removesuffix("    pass\n"), []),
        (missing_docstring, "import os\n", [1]),
        (silent_public_classes, PUBLIC_CLASS, [4]),
        (silent_public_classes, PUBLIC_CLASS.replace("pass", "'''Says it.'''"), []),
        (swallowed_wholesale, CATCHES, [3]),
        (swallowed_wholesale, CATCHES.replace("pass", "raise"), []),
        (swallowed_wholesale, CATCHES.replace("Exception", "(OSError, BaseException)"), [3]),
        (swallowed_wholesale, CATCHES.replace(":\n    pass", ":  # noqa: BLE001 - why\n  0"), []),
        (dangerous_things, "import os\nimport pickle\nfrom multiprocessing import Queue\n", [2, 3]),
        (dangerous_things, "one\nrun(x, shell=True)\nexec('1')  # TODO: later\n", [2, 3]),
    ],
)
def test_a_rule_finds_what_breaks_it_and_names_the_line(rule, text, lines):
    found = list(rule(Source("kclrun/some.py", text)))

    assert [line for line, _ in found] == lines


def test_the_message_names_each_file_and_each_line_that_breaks_a_rule():
    sources = [Source("a.py", CATCHES * 2), Source("b.py", ""), Source("c/d.py", CATCHES)]

    found = broken(swallowed_wholesale, sources)

    assert [each.rpartition(":")[0] for each in found] == ["a.py:3", "a.py:7", "c/d.py:3"]


@pytest.mark.parametrize(
    ("exports", "found"),
    [
        (["CONSTANT", "Class", "function"], 0),
        (["Class", "CONSTANT", "function"], 1),
        (["CONSTANT", "Class", "absent", "function"], 1),
    ],
)
def test_exports_out_of_order_or_of_nothing_are_found(monkeypatch, exports, found):
    class Module:
        __all__ = exports
        CONSTANT = Class = function = None

    monkeypatch.setattr(importlib, "import_module", {"kclrun.errors": Module}.__getitem__)

    source = Source("kclrun/errors.py", f"__all__ = {exports}\n")
    assert len(list(disordered_exports(source))) == found


def test_a_module_without_exports_is_found(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", {"kclrun.errors": object()}.__getitem__)

    found = broken(disordered_exports, [Source("kclrun/errors.py", "")])
    assert found == ["kclrun/errors.py:1: the public module has no __all__"]


def test_exports_of_a_module_that_is_not_public_are_found(monkeypatch):
    module = types.SimpleNamespace(__all__=["some"], some=None)
    monkeypatch.setattr(importlib, "import_module", {"kclrun.some": module}.__getitem__)

    found = broken(disordered_exports, [Source("kclrun/some.py", "")])
    assert found == ["kclrun/some.py:1: only package faces and public modules have __all__"]


def methods_of(sources):
    """Each method of a class, with its file and its class."""
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield source, node, each


def arguments_of(method):
    given = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
    return [each.arg for each in given if each.arg not in {"self", "cls"}]


def unused_arguments(method):
    read = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}
    return [name for name in arguments_of(method) if name not in read and not name.startswith("_")]


def is_stub(method):
    """It has no body to use an argument in."""
    stubs = ast.Pass, ast.Raise
    return all(
        isinstance(each, stubs)
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in method.body
    )


# Bases that give a class no method to overwrite.
PLAIN_BASES = {"Enum", "Generic", "IntEnum", "NamedTuple", "Protocol", "StrEnum", "Struct"}


def bases_of(owner):
    return {ast.unparse(each).partition("[")[0].rpartition(".")[2] for each in owner.bases}


def arguments_of_no_port(sources):
    """ruff's ARG002 would find the arguments of ports, too, which not every method needs."""
    ours, classes = set(PLAIN_BASES), {}
    for _, owner, method in methods_of(sources):
        ours.add(owner.name)
        for argument in arguments_of(method):
            classes.setdefault((method.name, argument), set()).add(owner)
    for source, owner, method in methods_of(sources):
        if is_stub(method) or not bases_of(owner) <= ours:  # what a library's class asks for
            continue
        for argument in unused_arguments(method):
            if len(classes[method.name, argument]) == 1:
                at = f"{source.name}:{method.lineno}"
                yield f"{at}: {owner.name}.{method.name} needs no {argument}"


def test_an_argument_that_a_method_does_not_use_is_one_of_a_port():
    assert list(arguments_of_no_port(our_modules())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class A:\n    def go(self, at): return 1\n", ["k.py:2: A.go needs no at"]),
        ("class A:\n    def go(self, at): return at\n", []),
        ("class A:\n    def go(self, at): ...\n", []),
        ("class A(click.Group):\n    def go(self, at): return 1\n", []),
        (
            "class A(msgspec.Struct):\n    def go(self, at): return 1\n",
            ["k.py:2: A.go needs no at"],
        ),
        (
            "class A:\n    def go(self, at): return 1\nclass B:\n    def go(self, at): return at\n",
            [],
        ),
    ],
)
def test_an_argument_of_no_port_is_found(text, found):
    assert list(arguments_of_no_port([Source("k.py", text)])) == found


def test_every_folder_with_tests_is_run_by_bin_test():
    script = (ROOT / "bin" / "test").read_text()
    folders = {
        path.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/**/test_*.py")
    }

    assert [each for each in sorted(folders) if f"tests/{each}" not in script] == []


def test_scripts_can_be_run():
    for script in [*(ROOT / "bin").iterdir(), ROOT / ".ci" / "run"]:
        assert script.stat().st_mode & 0o111, script


def test_no_large_file_is_tracked():
    needs("git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    tracked = [ROOT / each for each in listed.stdout.decode().split("\0") if each]
    if not tracked:
        pytest.skip("needs a git checkout, which knows the files that it tracks")
    large = [
        str(path.relative_to(ROOT))
        for path in tracked
        # A lock holds the hash of every platform's wheel.
        if path.suffix != ".lock" and path.exists() and path.stat().st_size > BLOB_BYTES_MAX
    ]

    assert large == []


def test_every_event_and_field_that_the_code_logs_is_in_the_catalogue():
    """So that no line of ours is written as unknown, and no field of ours withheld."""
    unknown = []
    for source in our_modules():
        for node in source.nodes:
            if isinstance(node, ast.Call):
                unknown += [f"{source.name}: {name}" for name in unknown_names(node)]

    assert unknown == []


def unknown_names(call):
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in {"note", "Note", "_note", "_note_change"} or not call.args:
        return
    event = call.args[0]
    if not isinstance(event, ast.Constant) or not isinstance(event.value, str):
        return
    if event.value not in CATALOGUE:
        yield event.value
    for keyword in call.keywords:
        if keyword.arg == "fields" and isinstance(keyword.value, ast.Dict):
            keys = [key.value for key in keyword.value.keys if isinstance(key, ast.Constant)]
            yield from (key for key in keys if key not in FIELDS and key != "owner")
        elif keyword.arg not in {"level", "shard", "key", "fields", "owner", None} | FIELDS:
            yield keyword.arg
