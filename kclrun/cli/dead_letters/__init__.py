"""`kclrun dead-letters`; its `redrive` runs the processor over letters.

`command.py` has the verbs. `redrive.py` chooses the letters and removes them; user code runs in a
process of its own (`user_process.py`), which writes the rows where they belong (`rows.py`) before
it reports that a letter is done.
"""
