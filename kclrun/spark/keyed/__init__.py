"""Keyed state of processors on Spark [K21]: the names of its versions, the state of a range in a
task, and what the driver keeps of a query's state.

Must not know: PySpark, user code.
"""
