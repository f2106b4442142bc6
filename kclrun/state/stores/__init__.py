"""The stores of keyed state: versions on a file system, a host's own copy, and their restore.

The rest of `kclrun/state/` is pure; what is here acts.
"""
