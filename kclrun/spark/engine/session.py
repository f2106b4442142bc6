"""One Spark session as kclrun wants it: quiet, in UTC, with this Python, a Java, the data source.

What is set is decided by `settled_conf`, which is pure; `open_session` does it. Rule: what the user
set, in `conf` or by spark-submit, wins.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kclrun.spark.engine.java import provide_java
from kclrun.spark.engine.jvm import SUBMITTED, launch_jvm
from kclrun.spark.engine.registering import register
from kclrun.spark.engine.versions import installed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["open_session", "settled_conf", "settled_master"]

_LOCAL: Final = re.compile(r"local(?:\[(\*|\d+)\])?\Z")
_CORES: Final = re.compile(r"local\[(\*|\d+)[,\]]")
# What a cluster does by default (spark.task.maxFailures); local[N] would give up at the first.
_TASK_ATTEMPTS: Final = 4
_LOOPBACK: Final = "127.0.0.1"

_EVERYWHERE: Final = {
    "spark.sql.session.timeZone": "UTC",
    # transformWithState runs on no other; its state need not fit into memory.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.ui.showConsoleProgress": "false",
}
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
# Spark's own would log twenty lines of warnings before the first record.
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")
_LOGGING_OPTION: Final = "-Dlog4j2.configurationFile="
_LOCALLY: Final = {
    "spark.ui.enabled": "false",
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
}


def open_session(
    *, application: str, master: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """The active session, or a new one; the format `kclrun` is registered with it.

    `master` None is that of `conf` or of spark-submit, else `local[*]`. A new session has UTC as
    its time zone, RocksDB for state, four attempts a task; a local one listens on loopback only,
    without Spark's web page, and leaves nothing in the working folder. `conf` wins over all that.
    An active session is used as it is.
    Raises: SettingsError if PySpark is too old or missing, or there is no Java.
    """
    version = installed().version
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        session = _start(application, master, dict(conf or {}), version)
    register(session)
    return session


def settled_master(master: str | None, conf: Mapping[str, str], *, submitted: bool) -> str | None:
    """The master to ask for; None leaves it to spark-submit. Local ones try a task four times."""
    asked = master or conf.get("spark.master")
    if asked is None:
        if submitted:
            return None
        asked = "local[*]"
    match = _LOCAL.match(asked)
    return f"local[{match[1] or 1},{_TASK_ATTEMPTS}]" if match else asked


def settled_conf(
    conf: Mapping[str, str], *, cores: int | None, warehouse: str | None
) -> dict[str, str]:
    """What a session is made with: ours first, the user's over it; `cores` of a local one.

    A local one shuffles into a partition a core: two hundred stores of state, Spark's default,
    take seconds a batch there. `warehouse` is a folder for tables that nobody gave a place: it
    would otherwise be made in the working folder.
    """
    ours = dict(_EVERYWHERE)
    if cores is not None:
        ours |= _LOCALLY | {"spark.sql.shuffle.partitions": str(cores)}
        options = conf.get(_JAVA_OPTIONS, "")
        if _LOGGING_OPTION not in options:
            logging = f"{_LOGGING_OPTION}{_LOGGING.as_uri()}"
            conf = {**conf, _JAVA_OPTIONS: f"{logging} {options}".strip()}
        if warehouse is not None:
            ours["spark.sql.warehouse.dir"] = warehouse
    return {**ours, **conf}


def _start(
    application: str, master: str | None, conf: dict[str, str], version: str
) -> SparkSession:
    from pyspark.sql import SparkSession

    submitted = SUBMITTED in os.environ
    settled = settled_master(master, conf, submitted=submitted)
    cores = _cores(settled)
    if not submitted:
        os.environ["JAVA_HOME"] = str(provide_java(os.environ, version))
    _use_this_python(conf)
    warehouse = None
    if cores is not None and "spark.sql.warehouse.dir" not in conf:
        warehouse = tempfile.mkdtemp(prefix="kclrun-warehouse-")
        atexit.register(shutil.rmtree, warehouse, ignore_errors=True)
    builder = SparkSession.Builder().appName(application)
    if settled is not None:
        builder = builder.master(settled)
    whole = settled_conf(conf, cores=cores, warehouse=warehouse)
    launch_jvm(whole | ({"spark.master": settled} if settled is not None else {}))
    for name, value in whole.items():
        if name != "spark.master":
            builder = builder.config(name, value)
    return builder.getOrCreate()


def _cores(master: str | None) -> int | None:
    """Those of a local master; None for a cluster."""
    match = _CORES.match(master or "")
    if match is None:
        return None
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])


def _use_this_python(conf: Mapping[str, str]) -> None:
    """Workers run the Python that runs this, unless the user says another: the first `python3` of
    the PATH may have no kclrun. Only spark-submit reads the setting; a session, the variable."""
    if said := conf.get("spark.pyspark.python"):
        os.environ["PYSPARK_PYTHON"] = said
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
