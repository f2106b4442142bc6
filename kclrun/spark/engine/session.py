"""Makes one Spark session with kclrun's settings: quiet, in UTC, with this Python and the format.

`settled_conf` decides the settings and is pure; `open_session` applies them. A setting of the user,
in `conf` or by spark-submit, wins.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kclrun.errors import SettingsError
from kclrun.spark.engine.java import SUBMITTED, launch_jvm, provide_java
from kclrun.spark.engine.versions import installed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Puts the files of `--py-files` also on the path of the process that plans a query.
#
# Spark puts those files on the path of every Python worker except the worker of a streaming source
# on the driver. The path of that worker has a folder `streaming_job` below the files, which Spark
# does not create (seen in 4.0 to 4.3). So we make a link of that name to the folder with the files.
_LOOKED_FOR: Final = "streaming_job"


def has_context() -> bool:
    """Whether this process has a Spark session with a JVM."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None  # noqa: SLF001 - there is no public way


def show_shipped_files_to_planners() -> None:
    """For the session of this process; may be called again. With Spark Connect it does nothing,
    because the files are elsewhere."""
    from pyspark import SparkFiles

    if not has_context():
        return
    link = Path(SparkFiles.getRootDirectory()) / _LOOKED_FOR
    with contextlib.suppress(FileExistsError):
        link.symlink_to(link.parent)


_ALIAS: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}\Z")
# The data source of an installed package cannot be registered again.
_KNOWN_ALREADY: Final = "DATA_SOURCE_ALREADY_EXISTS"


def register(spark: SparkSession, alias: str | None = None) -> None:
    """Make `format("kclrun")` known to this session, and under `alias` too where one is given.

    An installed kclrun is known already to every session on a driver that has it installed. This
    function is for drivers that get kclrun only by `--py-files`, and for other names, such as
    `kinesis` where the platform has no format of that name. May be called again.
    Raises: SettingsError for PySpark below 4.0, or a name that is not valid.
    """
    installed()
    from pyspark.errors import AnalysisException

    from kclrun.spark.source import KclrunDataSource

    show_shipped_files_to_planners()
    try:
        spark.dataSource.register(KclrunDataSource)
    except AnalysisException as error:
        if error.getCondition() != _KNOWN_ALREADY:
            raise
    if alias is not None:
        spark.dataSource.register(_aliased(KclrunDataSource, alias))


def _aliased(source: type[Any], alias: str) -> type[Any]:
    if not _ALIAS.match(alias):
        raise SettingsError(
            f"{alias[:60]!r} is not a name for a format: expected a letter, then letters, digits,"
            " '_', '.' and '-'"
        )
    # The class is not in any module, so it travels to the planner by value.
    return type("AliasedDataSource", (source,), {"name": classmethod(lambda _cls: alias)})


_LOCAL: Final = re.compile(r"local(?:\[(\*|\d+)\])?\Z")
_CORES: Final = re.compile(r"local\[(\*|\d+)[,\]]")
# A cluster's default (spark.task.maxFailures); local[N] would give up at the first failure.
_TASK_ATTEMPTS: Final = 4
_LOOPBACK: Final = "127.0.0.1"

_EVERYWHERE: Final = {
    "spark.sql.session.timeZone": "UTC",
    # transformWithState needs this provider; its state need not fit into memory.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.ui.showConsoleProgress": "false",
    # Pass the filters of `where` to batch reads. PySpark 4.0 ignores this setting.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Keep the external id of a role out of plans and of the event log.
    "spark.sql.redaction.options.regex": "(?i)url|externalid",
}
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
# Spark's own configuration would log twenty lines of warnings before the first record.
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

    `master` None means that of `conf` or of spark-submit, else `local[*]`. A new session has UTC as
    its time zone, RocksDB for state, four attempts a task; a local one listens on loopback only,
    without Spark's web page, and leaves nothing in the working folder. `conf` wins over all that.
    An active session is used as it is.
    Raises: SettingsError if PySpark is too old or missing, or if no Java is found.
    """
    version = installed().version
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        session = _start(application, master, dict(conf or {}), version)
    register(session)
    return session


def settled_master(master: str | None, conf: Mapping[str, str], *, submitted: bool) -> str | None:
    """The master to request; None leaves it to spark-submit. Local ones try a task four times."""
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
    """The settings of a new session: ours first, the user's over them; `cores` of a local one.

    A local session shuffles into one partition a core: two hundred stores of state, Spark's
    default, take seconds a batch there. `warehouse` is the folder for tables without a location:
    Spark would otherwise create it in the working folder.
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
    _require_localhost()
    if not submitted:
        _require_own_address()
    settled = settled_master(master, conf, submitted=submitted)
    cores = _cores(settled)
    if not submitted:
        os.environ["JAVA_HOME"] = str(provide_java(os.environ, version))
    if cores is not None:
        # Spark asks for the address of the machine's name before it reads `spark.driver.host`, and
        # ends with UnknownHostException where the name has none, as in a slim container.
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
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


def _require_localhost() -> None:
    """PySpark opens its own sockets on that name, and would end with a traceback."""
    try:
        socket.getaddrinfo("localhost", None)
    except OSError as error:
        raise SettingsError(
            f"this machine does not know localhost, which PySpark needs: {error.strerror}\n"
            "Add the line `127.0.0.1 localhost` to /etc/hosts"
        ) from None


# Where both are set, Spark gives them to Hadoop, and asks for the address of the machine's name to
# say where they come from (SparkHadoopUtil.appendS3CredentialsFromEnvironment). SPARK_LOCAL_IP does
# not change that.
_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def _require_own_address() -> None:
    """Spark would end with UnknownHostException, and PySpark would not repeat it."""
    if not all(name in os.environ for name in _KEYS):
        return
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise SettingsError(
            f"the name of this machine, {name}, has no address, which Spark needs where"
            f" {_KEYS[0]} is set: {error.strerror}\n"
            f"Add the line `127.0.1.1 {name}` to /etc/hosts, or give the credentials in another way"
        ) from None


def _cores(master: str | None) -> int | None:
    """The cores of a local master; None for a cluster."""
    match = _CORES.match(master or "")
    if match is None:
        return None
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])


def _use_this_python(conf: Mapping[str, str]) -> None:
    """Workers run the Python of this process, unless the user names another: the first `python3`
    of the PATH may lack kclrun. Only spark-submit reads the setting; a session reads the variable.
    """
    if named := conf.get("spark.pyspark.python"):
        os.environ["PYSPARK_PYTHON"] = named
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
