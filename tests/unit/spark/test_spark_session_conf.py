"""What a session is made with follows from the master and what the user set, which wins."""

import os
import re
from urllib.parse import unquote

import pytest
from pyspark.sql import SparkSession

from kclrun.spark.engine import session
from kclrun.spark.engine.session import open_session, settled_conf, settled_master


@pytest.mark.parametrize(
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
def test_a_session_is_opened_with_what_was_asked_for_or_is_the_active_one(monkeypatch, active):
    asked, registered = [], []
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: active)
    monkeypatch.setattr(session, "_start", lambda *given: asked.append(given[:3]) or "a new one")
    monkeypatch.setattr(session, "register", registered.append)

    opened = open_session(application="a", master="local", conf={"spark.sql.x": "1"})

    assert opened == (active or "a new one")
    assert registered == [opened]
    assert asked == ([] if active else [("a", "local", {"spark.sql.x": "1"})])
