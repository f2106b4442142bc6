"""Which methods of a processor fit which settings."""

import pytest

from kclrun.calling.method_checks import require_fit
from kclrun.errors import ProcessorLoadError
from kclrun.model.policies import Concurrency
from kclrun.processor import RecordProcessor


class Batches(RecordProcessor):
    def process_records(self, batch, checkpointer): ...


class Single(RecordProcessor):
    def process_record(self, record, context): ...


class Timed(Batches):
    def on_timer(self, timer, checkpointer): ...


class TimedSingle(Single):
    def on_timer(self, timer, checkpointer): ...


UNORDERED = Concurrency(8, "none")
TIMED_OUT = Concurrency(8, "key", 1.0)


def fit(processor, concurrency=None, *, manual=False, **more):
    return require_fit(processor, "a:B", concurrency, is_manual=manual, **more)


@pytest.mark.parametrize(
    ("processor", "settings", "words"),
    [
        (Batches, {"concurrency": Concurrency()}, "concurrency: is for process_record"),
        (Timed, {"manual": True}, "on_timer is for checkpoints of the runtime"),
        (TimedSingle, {"manual": True}, "on_timer is for checkpoints of the runtime"),
        (Single, {"manual": True}, "manual is for process_records"),
        (Single, {"concurrency": UNORDERED, "has_state": True}, "state: needs concurrency.order"),
        (Single, {"concurrency": TIMED_OUT}, "is for `async def process_record`"),
    ],
)
def test_what_does_not_fit_is_named_with_the_processor(processor, settings, words):
    with pytest.raises(ProcessorLoadError) as raised:
        fit(processor, **settings)
    assert str(raised.value).startswith("a:B: ")
    assert words in str(raised.value)
