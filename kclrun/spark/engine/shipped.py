"""What `--py-files` brought, on the path of the process that plans a query, too.

Spark puts those files on the path of every Python worker but that of a streaming source on the
driver: to that one it names a folder `streaming_job` below them, which nobody makes (seen in 4.0
to 4.3). So there is a link of that name, to where the files are.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

__all__ = ["show_shipped_files_to_planners"]

_LOOKED_FOR: Final = "streaming_job"


def show_shipped_files_to_planners() -> None:
    """For the session of this process; may be called again. Spark Connect has its files elsewhere:
    nothing is done there."""
    from pyspark import SparkContext, SparkFiles

    if SparkContext._active_spark_context is None:  # noqa: SLF001 - there is no public way to ask
        return
    link = Path(SparkFiles.getRootDirectory()) / _LOOKED_FOR
    with contextlib.suppress(FileExistsError):
        link.symlink_to(link.parent, target_is_directory=True)
