"""Runs `engine: spark`: the application of one file as one Structured Streaming query.

It does not know the command line or the lease manager.
"""
