"""The shape of the code, as failing tests: sizes, exports, docstrings, banned words."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kclrun"
MODULES = sorted(PACKAGE.rglob("*.py"))
USER_CODE = sorted((ROOT / "processors").rglob("*.py"))
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
BLOB_BYTES_MAX = 200_000
# A boundary that catches everything and goes on says why on its line.
REASON_TO_CATCH_ALL = re.compile(r"# noqa: [A-Z0-9, ]*BLE001[A-Z0-9, ]* - \w")
# Queues and locks of multiprocessing are measured to hang for good after a SIGKILL.
DANGEROUS_MODULES = {"pickle", "marshal", "shelve", "dill", "multiprocessing"}


def name(path):
    return str(path.relative_to(ROOT))


def functions(tree):
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def lines_of_code(node):
    """Without the docstring: a contract may be longer than what keeps it."""
    docstring = node.body[0] if ast.get_docstring(node) else None
    described = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return node.end_lineno - node.lineno + 1 - described


@pytest.mark.parametrize("path", MODULES + USER_CODE, ids=name)
def test_a_module_fits_into_a_head(path):
    assert len(path.read_text().splitlines()) <= MODULE_LINES_MAX


@pytest.mark.parametrize("path", MODULES + USER_CODE, ids=name)
def test_a_function_fits_on_a_screen(path):
    too_long = [
        (node.name, lines_of_code(node))
        for node in functions(ast.parse(path.read_text()))
        if lines_of_code(node) > FUNCTION_LINES_MAX
    ]

    assert too_long == []


def test_most_modules_are_small():
    sizes = sorted(len(path.read_text().splitlines()) for path in MODULES)

    assert sizes[len(sizes) // 2] <= 130


@pytest.mark.parametrize("path", MODULES + USER_CODE, ids=name)
def test_a_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name not in {"__init__.py", "__main__.py"}], ids=name
)
def test_the_exports_are_sorted_and_are_the_public_names(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    exported = module.__all__

    assert exported == sorted(exported, key=lambda each: (not each.isupper(), each))
    assert [each for each in exported if not hasattr(module, each)] == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_public_classes_and_functions_with_a_contract_have_a_docstring(path):
    tree = ast.parse(path.read_text())
    exported = set(getattr(_literal_all(tree), "elts", ()) and _names(tree))
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in exported and not ast.get_docstring(node)
    ]

    assert silent == []


@pytest.mark.parametrize("path", MODULES + USER_CODE, ids=name)
def test_nothing_is_swallowed_wholesale_without_a_reason(path):
    lines = path.read_text().splitlines()
    offending = [
        handler.lineno
        for handler in ast.walk(ast.parse(path.read_text()))
        if isinstance(handler, ast.ExceptHandler)
        and _catches_everything(handler)
        and not isinstance(handler.body[-1], ast.Raise)
        and not REASON_TO_CATCH_ALL.search(lines[handler.lineno - 1])
    ]

    assert offending == []


@pytest.mark.parametrize("path", MODULES + USER_CODE, ids=name)
def test_what_is_dangerous_does_not_occur(path):
    text = path.read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])

    assert imported & DANGEROUS_MODULES == set()
    assert not re.search(r"yaml\.load\(|shell=True|\beval\(|\bexec\(", text)
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)


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
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    tracked = [ROOT / each for each in listed.stdout.decode().split("\0") if each]
    large = [
        name(path) for path in tracked if path.exists() and path.stat().st_size > BLOB_BYTES_MAX
    ]

    assert large == []


def _literal_all(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return node.value
    return None


def _names(tree):
    value = _literal_all(tree)
    return [element.value for element in value.elts] if value is not None else []


def _catches_everything(handler):
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        each is None or (isinstance(each, ast.Name) and each.id in {"Exception", "BaseException"})
        for each in caught
    )
