"""What a session is made with follows from the master and what the user set, which wins."""

import atexit
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from pyspark import SparkContext, SparkFiles
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from kclrun.errors import SettingsError
from kclrun.spark.engine import session
from kclrun.spark.engine.session import open_session, register, settled_conf, settled_master
from tests.support.tables import over_rows


@over_rows(
    ("master", "conf", "submitted", "expected"),
    [
        (None, {}, False, "local[*,4]"),
        ("local", {}, False, "local[1,4]"),
        ("local[2]", {}, False, "local[2,4]"),
        ("local[*]", {}, False, "local[*,4]"),
        ("local[2,1]", {}, False, "local[2,1]"),
        ("local-cluster[2,1,1024]", {}, False, "local-cluster[2,1,1024]"),
        ("yarn", {}, False, "yarn"),
        (None, {"spark.master": "local[3]"}, False, "local[3,4]"),
        ("local[2]", {"spark.master": "yarn"}, False, "local[2,4]"),
        (None, {}, True, None),
        ("local[2]", {}, True, "local[2,4]"),
    ],
)
def test_a_task_is_tried_four_times_also_on_this_machine(master, conf, submitted, expected):
    assert settled_master(master, conf, submitted=submitted) == expected


def test_a_local_session_stays_on_loopback_and_out_of_the_working_folder():
    conf = settled_conf({}, cores=2, warehouse="/tmp/w")

    assert conf["spark.driver.bindAddress"] == conf["spark.driver.host"] == "127.0.0.1"
    assert conf["spark.ui.enabled"] == "false"
    assert conf["spark.sql.warehouse.dir"] == "/tmp/w"
    assert conf["spark.sql.shuffle.partitions"] == "2"
    assert "log4j2.properties" in conf["spark.driver.extraJavaOptions"]


def test_a_cluster_keeps_its_addresses_its_page_and_its_logging():
    conf = settled_conf({}, cores=None, warehouse=None)

    assert sorted(conf) == [
        "spark.sql.python.filterPushdown.enabled",
        "spark.sql.redaction.options.regex",
        "spark.sql.session.timeZone",
        "spark.sql.streaming.stateStore.providerClass",
        "spark.ui.showConsoleProgress",
    ]
    assert conf["spark.sql.session.timeZone"] == "UTC"


@pytest.mark.parametrize("option", ["roleExternalId", "roleexternalid", "endpointUrl"])
def test_the_plan_shows_neither_external_ids_nor_urls(option):
    withheld = settled_conf({}, cores=None, warehouse=None)["spark.sql.redaction.options.regex"]

    assert re.search(withheld, option)
    assert not re.search(withheld, "streamName")


def test_what_the_user_set_wins():
    users = {
        "spark.sql.session.timeZone": "Europe/Berlin",
        "spark.ui.enabled": "true",
        "spark.sql.warehouse.dir": "/data",
        "spark.driver.extraJavaOptions": "-Dlog4j2.configurationFile=mine.xml",
    }

    assert settled_conf(users, cores=1, warehouse="/tmp/w").items() >= users.items()


def test_java_options_of_the_user_stand_beside_ours():
    conf = settled_conf({"spark.driver.extraJavaOptions": "-Xss2m"}, cores=1, warehouse=None)

    ours, users = conf["spark.driver.extraJavaOptions"].split()
    assert ours.startswith("-Dlog4j2.configurationFile=file:")
    assert os.access(unquote(ours.partition("file://")[2]), os.R_OK)
    assert users == "-Xss2m"


@pytest.mark.parametrize("active", [None, "the active one"])
@pytest.mark.parametrize("conf", [None, {"spark.sql.x": "1"}])
def test_a_session_is_opened_with_what_was_asked_for_or_is_the_active_one(
    monkeypatch, active, conf
):
    asked, registered = [], []
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: active)
    monkeypatch.setattr(session, "_start", lambda *given: asked.append(given[:3]) or "a new one")
    monkeypatch.setattr(session, "register", registered.append)

    opened = open_session(application="a", master="local", conf=conf)

    assert opened == (active or "a new one")
    assert registered == [opened]
    assert asked == ([] if active else [("a", "local", conf or {})])


class Starting(dict):
    """The environment of a driver; Spark's builder, its JVM and what ends with the process."""

    def __init__(self, monkeypatch, folder):
        super().__init__(PATH="")
        self.settings, self.jvm, self.at_exit = {}, None, []
        self.folder = folder / "warehouse"
        for owner, name, value in [
            (os, "environ", self),
            (os, "cpu_count", lambda: self.cpus),
            (SparkSession, "Builder", lambda: self),
            (SparkSession, "getActiveSession", lambda: None),
            (session, "provide_java", lambda _, version: f"java of {version}"),
            (session, "launch_jvm", lambda conf: setattr(self, "jvm", conf)),
            (session, "register", lambda _: None),
            (session, "installed", lambda: SimpleNamespace(version="4.1")),
            (session.tempfile, "mkdtemp", lambda prefix: str(self.folder)),
            (atexit, "register", lambda *call, **named: self.at_exit.append((call, named))),
        ]:
            monkeypatch.setattr(owner, name, value)

    def appName(self, name):
        self.settings["name"] = name
        return self

    def master(self, master):
        self.settings["spark.master"] = master
        return self

    def config(self, name, value):
        self.settings[name] = value
        return self

    def getOrCreate(self):
        return "made"

    def of(self, master, conf=None, *, cpus=8, **environment):
        self.cpus = cpus
        self.update(environment)
        assert open_session(application="a", master=master, conf=conf) == "made"
        chosen = {"name": "a", **self.jvm}
        assert chosen == self.settings, "the JVM starts with what the session has"
        partitions = chosen.get("spark.sql.shuffle.partitions")
        return chosen.get("spark.master"), partitions, chosen.get("spark.sql.warehouse.dir")


@pytest.mark.parametrize(
    ("master", "environment", "address"),
    [
        ("local[2]", {}, "127.0.0.1"),
        (None, {}, "127.0.0.1"),
        ("local[2]", {"SPARK_LOCAL_IP": "10.0.0.7"}, "10.0.0.7"),
        ("spark://there:7077", {}, None),
    ],
)
def test_a_local_session_starts_on_a_machine_whose_name_has_no_address(
    monkeypatch, tmp_path, master, environment, address
):
    starting = Starting(monkeypatch, tmp_path)
    starting.of(master, **environment)

    assert starting.get("SPARK_LOCAL_IP") == address


def test_a_machine_without_localhost_is_told_what_to_add(monkeypatch, tmp_path):
    def unknown(name, port):
        raise socket.gaierror(socket.EAI_NONAME, f"{name} is not known")

    starting = Starting(monkeypatch, tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    with pytest.raises(SettingsError, match=r"localhost is not known\n.*127.0.0.1 localhost"):
        starting.of("local[2]")


def test_keys_in_the_environment_of_a_machine_whose_name_has_no_address_are_told(
    monkeypatch, tmp_path
):
    def only_localhost(name, port):
        if name != "localhost":
            raise socket.gaierror(socket.EAI_NONAME, f"{name} is not known")

    starting = Starting(monkeypatch, tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", only_localhost)
    monkeypatch.setattr(socket, "gethostname", lambda: "slim")
    starting.of("local[2]", AWS_ACCESS_KEY_ID="AKIDEXAMPLE")

    with pytest.raises(SettingsError, match=r"slim is not known\n.*`127.0.1.1 slim`") as refused:
        starting.of("local[2]", AWS_SECRET_ACCESS_KEY="not-to-be-shown")
    assert "not-to-be-shown" not in str(refused.value)


OTHERS = {"spark.sql.warehouse.dir": "/data", "spark.pyspark.python": "/theirs"}


@pytest.mark.parametrize(
    ("asked", "cpus", "environment", "started", "java"),
    [
        ((None,), 8, {}, ("local[*,4]", "8", "OURS"), "java of 4.1"),
        ((None,), None, {}, ("local[*,4]", "1", "OURS"), "java of 4.1"),
        (("local[3]", OTHERS), 8, {}, ("local[3,4]", "3", "/data"), "java of 4.1"),
        (("yarn",), 8, {}, ("yarn", None, None), "java of 4.1"),
        ((None,), 8, {session.SUBMITTED: "1"}, (None, None, None), None),
        (("local[2]",), 8, {session.SUBMITTED: "1"}, ("local[2,4]", "2", "OURS"), None),
    ],
)
def test_a_new_session_has_a_core_a_partition_and_a_folder_that_ends_with_the_process(
    monkeypatch, tmp_path, asked, cpus, environment, started, java
):
    starting = Starting(monkeypatch, tmp_path)
    started = tuple(str(starting.folder) if each == "OURS" else each for each in started)

    assert starting.of(*asked, cpus=cpus, **environment) == started

    assert starting.get("JAVA_HOME") == java
    theirs = OTHERS in asked
    assert starting["PYSPARK_PYTHON"] == ("/theirs" if theirs else sys.executable)
    assert starting["PYSPARK_DRIVER_PYTHON"] == sys.executable
    removed = ((session.shutil.rmtree, str(starting.folder)), {"ignore_errors": True})
    assert starting.at_exit == ([removed] if str(starting.folder) in started else [])


class Refused(AnalysisException):
    def __init__(self, condition):
        self.getCondition = lambda: condition


@pytest.mark.parametrize("condition", [None, "DATA_SOURCE_ALREADY_EXISTS", "OTHER"])
def test_the_format_is_registered_where_it_is_not_installed_and_under_its_other_name(
    monkeypatch, tmp_path, condition
):
    names, checked = [], []
    monkeypatch.setattr(session, "installed", lambda: checked.append("PySpark"))
    monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: str(tmp_path))
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)

    def registered(source):
        if condition and source.name() == "kclrun":
            raise Refused(condition)
        names.append(source.name())

    spark = SimpleNamespace(dataSource=SimpleNamespace(register=registered))
    if condition == "OTHER":
        with pytest.raises(Refused):
            register(spark, "kinesis")
        return
    register(spark)
    assert list(tmp_path.iterdir()) == [], "without a context the files are elsewhere"
    monkeypatch.setattr(SparkContext, "_active_spark_context", "one")
    register(spark, "kinesis")
    register(spark, "k-2.x_")

    installs = condition is None
    assert names == [*["kclrun"] * (2 * installs), "kinesis", *["kclrun"] * installs, "k-2.x_"]
    assert checked == ["PySpark"] * 3
    link = tmp_path / "streaming_job"
    assert link.is_symlink()
    assert link.resolve() == Path(tmp_path)
    for wrong in ("", "1k", "k" * 65, "a b"):
        with pytest.raises(SettingsError, match="is not a name for a format"):
            register(spark, wrong)
