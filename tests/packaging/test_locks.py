"""config/requirements: exact versions with hashes, of all that pyproject.toml asks for."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "config" / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("3.11.0", "3.12.0", "3.13.0", "3.14.0")


def locked(name):
    """(requirement, hashes) of each entry."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / f"{name}.lock").read_text(), flags=re.MULTILINE)
    for entry in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = re.split(r"\s+--hash=", entry.strip())
        yield Requirement(requirement), hashes


# Extras that only work on kclrun itself needs.
DEVELOPMENT = {"dev", "docs", "test"}


def wanted(name):
    project = PROJECT["project"]
    if name == "release":
        lines = (FOLDER / "release.in").read_text().splitlines()
        return [Requirement(line.partition("#")[0]) for line in lines if line[0] != "#"]
    without = {"base": set(project["optional-dependencies"]), "runtime": DEVELOPMENT}.get(name, ())
    extras = [
        listed for extra, listed in project["optional-dependencies"].items() if extra not in without
    ]
    build = [] if name == "runtime" else PROJECT["build-system"]["requires"]
    listed = [Requirement(each) for each in sum(extras, project["dependencies"] + build)]
    # An extra that rests on another one of this project.
    return [requirement for requirement in listed if requirement.name != project["name"]]


def environment_of(python, machine):
    return {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def is_for(requirement, environment):
    return requirement.marker is None or requirement.marker.evaluate(environment)


def versions_on(name, environment):
    there = {}
    for requirement, _ in locked(name):
        if is_for(requirement, environment):
            [pin] = requirement.specifier
            assert pin.operator == "=="
            assert there.setdefault(canonicalize_name(requirement.name), pin.version) == pin.version
    return there


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", ["base", "everything", "runtime", "release"])
def test_a_lock_has_a_version_of_each_dependency_that_pyproject_allows(name, python, machine):
    environment = environment_of(python, machine)
    there = versions_on(name, environment)

    for requirement in wanted(name):
        if not is_for(requirement, environment):
            continue
        version = there.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement}: run bin/lock"
        assert requirement.specifier.contains(version), f"{requirement}, {version}: run bin/lock"


@pytest.mark.parametrize("name", ["base", "everything", "runtime", "release"])
def test_each_entry_has_hashes_and_no_place_to_fetch_it_from(name):
    for requirement, hashes in locked(name):
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes)
        assert requirement.url is None
    text = (FOLDER / f"{name}.lock").read_text()
    assert "://" not in text
    assert "--index" not in text


def test_what_users_may_have_is_pinned_as_it_is_tested():
    """A release lists runtime.lock; the suites run with everything.lock."""
    tested = {(requirement.name, str(requirement)) for requirement, _ in locked("everything")}

    assert [str(pin) for pin, _ in locked("runtime") if (pin.name, str(pin)) not in tested] == []


def test_ci_installs_from_the_lock():
    assert "KCLRUN_LOCKED=1" in (ROOT / ".ci" / "run").read_text()
