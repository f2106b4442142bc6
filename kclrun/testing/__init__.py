"""The test kit for processors: run one over records you make, without AWS, files or processes.

    from kclrun.testing import make_record, replay, run_processor

It knows the public interface and the model, and not the lease process. Both keep the contracts of
`kclrun.processor`.
"""

from kclrun.calling.in_memory.life import Call, Run
from kclrun.testing.contracts import (
    assert_any_order_gives_the_same,
    assert_idempotent,
    assert_order_independent,
)
from kclrun.testing.crashes import Crash
from kclrun.testing.plans import Claim, Faults
from kclrun.testing.promises import assert_output_contract
from kclrun.testing.records import make_aggregate, make_record, make_records
from kclrun.testing.runs import replay, run_processor
from kclrun.testing.traps import EventTimeWarning

__all__ = [
    "Call",
    "Claim",
    "Crash",
    "EventTimeWarning",
    "Faults",
    "Run",
    "assert_any_order_gives_the_same",
    "assert_idempotent",
    "assert_order_independent",
    "assert_output_contract",
    "make_aggregate",
    "make_record",
    "make_records",
    "replay",
    "run_processor",
]
