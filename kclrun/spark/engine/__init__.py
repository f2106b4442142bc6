"""Spark itself: its session and format name, its Java, and the capabilities of each PySpark.

It does not know Kinesis.
"""
