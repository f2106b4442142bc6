"""Spark itself: its session, the Java it runs on, its versions, and that it finds kclrun.

Holds: `session.py` over `java.py` (which Java) and `jvm.py` (its process), `versions.py` (what each
PySpark can do), `registering.py` and `shipped.py` (the format's name, on the driver and in the
planners). May not know: Kinesis.
"""
