"""The test kit for processors: run one over records you make, without AWS, files or processes.

    from kclrun.testing import make_record, replay, run_processor

Holds: `records.py` (records from whatever a test has), `ledger.py` (what was delivered, processed
and checkpointed, and which rows that covers), `runs.py` (`run_processor`, `replay`).
May know: the public interface and the model. May not know: the lease process; it keeps the same
contract, and the contracts of `kclrun.processor` are what both are measured by.
"""

from kclrun.testing.records import make_aggregate, make_record, make_records
from kclrun.testing.runs import Call, Crash, Run, replay, run_processor

__all__ = [
    "Call",
    "Crash",
    "Run",
    "make_aggregate",
    "make_record",
    "make_records",
    "replay",
    "run_processor",
]
