"""An `event_time` that is never called is named, in the kit and at the start of a lease."""

import pytest

from kclrun import RecordProcessor
from kclrun.methods import unused_event_time
from kclrun.testing import EventTimeWarning, make_record, run_processor


class Timed(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass

    def event_time(self, record):
        return 5.0


class Firing(Timed):
    def on_timer(self, timer, checkpointer):
        pass


class Plain(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass


def test_an_event_time_without_timers_is_warned_of():
    with pytest.warns(EventTimeWarning, match="defines event_time and no on_timer") as warned:
        run_processor(Timed, [make_record("x")])
    assert warned[0].filename == __file__


@pytest.mark.parametrize("processor", [Firing, Plain, Firing(), Plain()])
def test_one_that_is_called_is_not(processor):
    assert unused_event_time(processor) == ""
