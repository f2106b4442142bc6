"""What an installation makes known to every Spark session: the format `kclrun`.

PySpark looks through the top level of the driver's path for modules named `pyspark_…` and registers
their `DefaultSource`. This file is installed a second time as `pyspark_kclrun` for that.
May not import what an installation without the `spark` extra lacks: PySpark imports it for every
user of data sources in Python, whether they use this one or not.
"""

from kclrun.spark.source import KclrunDataSource as DefaultSource

__all__ = ["DefaultSource"]
