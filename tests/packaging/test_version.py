"""The version stands in kclrun/__init__.py, and everything that shows one follows it."""

import ast
import re
import tomllib
from pathlib import Path

import yaml

import kclrun
from kclrun.aws.outputs import s3
from kclrun.cli.messages import versions
from kclrun.manager import metering, runtime
from kclrun.model.output import RollRecord

ROOT = Path(__file__).parents[2]


def test_the_package_is_built_with_the_version_of_the_code():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert "version" not in settings["project"]
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kclrun.__version__"}


def test_the_version_is_read_without_an_import_of_the_package():
    """A literal: setuptools would otherwise import kclrun where its dependencies are missing."""
    module = ast.parse((ROOT / "kclrun" / "__init__.py").read_text())
    [value] = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]

    assert isinstance(value, ast.Constant)


def test_what_shows_a_version_shows_that_of_the_code(monkeypatch):
    for module in ("kclrun.cli.messages", "kclrun.aws.outputs.s3"):
        monkeypatch.setattr(f"{module}.__version__", "7.8.9")

    assert versions().startswith("kclrun 7.8.9, ")
    record = RollRecord(end="e", commit="c", token=1, version=1, state="")
    assert s3._metadata(record)["kclrun-version"] == "7.8.9"
    assert runtime.__version__ is metering.__version__ is kclrun.__version__


def test_no_module_asks_the_installed_metadata_for_our_own_version():
    """They are those of another checkout where PYTHONPATH names this one."""
    asking = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "kclrun").rglob("*.py")
        if 'version("kclrun")' in path.read_text()
    ]

    assert asking == []


def test_the_chart_has_the_version_of_the_code():
    chart = yaml.safe_load((ROOT / "config" / "deploy" / "helm" / "Chart.yaml").read_text())

    assert chart["appVersion"] == chart["version"] == kclrun.__version__


def test_the_newest_section_of_the_changelog_is_about_the_version_of_the_code():
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert sections[0] == kclrun.__version__
