"""Core 1: the decisions of a lease manager. Events in, commands out.

May know: the model. Must not know: clocks, chance, threads, DynamoDB, pids; `now` and `chance` are
arguments. Rule: the outcome of every command comes back as an event, whatever the outcome.
"""
