"""From a stopped query back to the fleet: what its checkpoint says, as positions of leases.

Holds: Spark's own files (`checkpoint_files.py`), a position as a lease can say it (`standing.py`),
and which rows to write (`plan.py`). May not know: how rows are written, PySpark. Rule: no record
that the query has not committed lies below a position that is written.
"""
