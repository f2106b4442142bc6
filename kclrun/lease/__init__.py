"""Core 2: one lease in its process. Events in, commands out.

May know: the model. Must not know: clocks, chance, threads, sockets, DynamoDB. Rule: the outcome of
every command comes back as an event, whatever the outcome.
"""
