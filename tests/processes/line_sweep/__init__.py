"""A lease process killed at every line between a fetch and its acknowledged checkpoint.

`traced/sitecustomize.py` is what the killed processes run, `sweeping.py` what the test holds.
"""
