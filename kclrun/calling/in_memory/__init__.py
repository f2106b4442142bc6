"""A processor without a lease: its rows, its state and its checkpoints are in memory.

The test kit and the redrive of letters run user code so. The time of such a run does not pass: the
pauses of `on_error` are left out.
"""
