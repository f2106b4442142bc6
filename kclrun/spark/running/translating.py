"""What PySpark raises in this process, as an error of ours.

The JVM may be gone as well as angry: every call to it can fail. Look next: `failures.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kclrun.spark.running.failures import failure_of

__all__ = ["told_as_ours"]


@contextmanager
def told_as_ours() -> Iterator[None]:
    """Raises: the KclrunError that an exception of PySpark or of its way to the JVM stands for."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        raise failure_of(str(error) or f"the JVM is gone ({type(error).__name__})") from error
