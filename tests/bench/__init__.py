"""What `bin/bench` measures: speed and memory, as ratios against a named thing in the same run.

Never a timed test: this machine is shared, so a figure is a median of interleaved rounds, printed
with its least and greatest. Rule: a client's CPU is the client's alone (user and system time of
its process); every server is a process of its own. Look next: `__main__.py` (the rows).
"""
