"""The JVM of a session: started apart from our process group, ended with us.

A signal for the whole group (Ctrl-C, `timeout`, a closed terminal) is ours to handle: Spark would
cancel its jobs on it, and the running batch could not be committed. So the JVM has a session of
its own. It ends when its standard input does, so also when this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SUBMITTED", "close_session", "launch_jvm"]

# Set by spark-submit, whose JVM runs already.
SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
# A JVM whose session is stopped has nothing left to do but its shutdown hooks.
_END_MAX_S: Final = 10.0


def launch_jvm(conf: Mapping[str, str]) -> None:
    """Start the JVM that PySpark will use, with the settings it must know at its start.

    Does nothing where there is one already: spark-submit's, or that of an earlier session.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SUBMITTED in os.environ or SparkContext._gateway is not None:  # noqa: SLF001 - see below
        return
    settled = SparkConf(loadDefaults=False).setAll(list(conf.items()))
    gateway = launch_gateway(settled, {"start_new_session": True})  # type: ignore[no-untyped-call]
    # `SparkContext(gateway=…)` would do it in public, but sessions are made by their builder.
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001


def close_session(spark: SparkSession) -> None:
    """Stop a session, and end the JVM that was started here; waits for it. It may be gone."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    gateway = SparkContext._gateway  # noqa: SLF001 - PySpark leaves its JVM to the end of Python
    with contextlib.suppress(Py4JError, ConnectionError):
        spark.stop()
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    if gateway is None or process is None:
        return
    with contextlib.suppress(Py4JError, ConnectionError):
        gateway.shutdown()
    assert process.stdin is not None, "PySpark gives it a pipe"
    process.stdin.close()
    try:
        process.wait(_END_MAX_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    SparkContext._gateway = None  # noqa: SLF001 - a later session starts another
    SparkContext._jvm = None  # noqa: SLF001
