"""Watches a simulated fleet and checks the promises that it must keep.

It sees the world from outside: rows as they are written, permits as they are given, batches as they
begin. It never asks a core for its state. `watch.py` passes each event to the rules. Each watched
fact costs a constant time an event.
"""
