"""`kclrun dead-letters`; its `redrive` runs the processor over letters.

`command.py` has the verbs. `redrive.py` chooses the letters and removes them; user code runs in a
process of its own (`user_process.py`), which writes the rows before it reports a letter as done.
"""
