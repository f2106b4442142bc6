"""Outputs and dead letters in one run: flights into a table and into Parquet at once.

`flights.py` makes the records and computes their rows without kclrun, `rig.py` runs the application
and its misfortunes and compares, `command.py` is `bin/chaos outcomes`.
"""
