"""Makes the format `kclrun` known to every Spark session of an installation.

PySpark searches the top level of the driver's path for modules named `pyspark_…` and registers
their `DefaultSource`. For that, this file is installed a second time as `pyspark_kclrun`. It must
not import modules that an installation without the `spark` extra lacks: PySpark imports it for
every user of data sources in Python, also where none of them is kclrun's.
"""

from kclrun.spark.source import KclrunDataSource as DefaultSource

__all__ = ["DefaultSource"]
