"""Two versions of kclrun beside each other: the last release and the code under test.

`versions.py` gets the older one out of the history, `mixed_fleet.py` runs managers of both on one
application, `fixtures.py` ends them. `last_release` names the older one until there is a tag. Rule:
each lease process says which code it runs, and no test believes anything else.
"""
