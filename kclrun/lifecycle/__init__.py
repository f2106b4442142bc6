"""Decisions of a manager about itself and its processes: when to stop, which processes are stalled,
how to answer the EC2 instance's notices, and whether every record is read. Pure: no clock, no
chance, no I/O.
"""
