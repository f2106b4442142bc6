"""Runs a `RecordProcessor` inside the reader: the rows that it emits are the DataFrame.

An instance continues only exactly at its own position; otherwise its lease is lost, and another
instance begins.
"""
