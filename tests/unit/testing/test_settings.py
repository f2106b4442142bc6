"""The settings of a run of the test kit, and the keywords of before 1.0 that they replace."""

import inspect
import warnings

import msgspec
import pytest
import yaml

from kclrun import RecordProcessor
from kclrun.errors import ProcessorError, SettingsError
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.testing import Claim, Faults, make_records, replay, run_processor
from kclrun.testing.plans import REPLACED, Plan, Replaced, plan_of
from tests.support.tables import over_rows

AT = ExtendedSequenceNumber("12", 3)


class Quiet(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer): ...


class Order(msgspec.Struct):
    total: int


RUN = run_processor(Quiet, ["a"])
# Each keyword of before, a value of it, and the call of today that means the same.
SAME = {
    "options": ({"a": 1}, {"settings": {"options": {"a": 1}}}),
    "checkpoint": ("batch", {"settings": {"checkpoint": {"every": "batch"}}}),
    "batch_max": (3, {"settings": {"fetch": {"batch_max": 3}}}),
    "uncheckpointed_max": (7, {"settings": {"checkpoint": {"uncheckpointed_max": 7}}}),
    "retries": (2, {"settings": {"on_error": {"retries": 2}}}),
    "then": ("dead-letter", {"settings": {"on_error": {"then": "dead-letter"}}}),
    "application": ("shop", {"settings": {"application": "shop"}}),
    "stream": ("orders", {"settings": {"stream": "orders"}}),
    "decode": (Order, {"settings": {"decode": Order}}),
    "schema": (
        {"late": "n long"},
        {"settings": {"outputs": {"late": {"schema": "n long"}}}, "outputs": None},
    ),
    "outputs": (["late"], {"settings": {"output": {}, "outputs": {"late": {}}}}),
    "concurrency": (4, {"settings": {"concurrency": {"records": 4}}}),
    "order": ("none", {"settings": {"concurrency": {"order": "none"}}, "concurrency": None}),
    "timeout_s": (3.0, {"settings": {"concurrency": {"timeout": "3s"}}, "concurrency": None}),
    "lateness_s": (2.5, {"settings": {"watermark": {"lateness": "2500ms"}}}),
    "every_s": (2.0, {"settings": {"watermark": {"every": "2s"}}}),
    "idle_s": (30.0, {"settings": {"watermark": {"idle": "30s"}}}),
    "crash_after": (2, {"faults": Faults(crash_after=2)}),
    "crash_at_checkpoint": (1, {"faults": Faults(crash_at_checkpoint=1)}),
    "seed": (9, {"faults": Faults(seed=9)}),
    "position": (AT, {"claim": Claim(position=AT)}),
    "state": ({"k": {"n": 1}}, {"claim": Claim(state={"k": {"n": 1}})}),
    "after": (RUN, {"claim": Claim(after=RUN)}),
    "shard_id": ("shardId-9", {"claim": Claim(shard_id="shardId-9")}),
    "fencing_token": (5, {"claim": Claim(fencing_token=5)}),
}


def test_the_table_of_keywords_is_that_of_the_signature_and_of_a_plan():
    assert set(REPLACED) == set(Replaced.__annotations__) == {*SAME, "first_arrival_s"}
    assert set(REPLACED) <= set(Plan.__struct_fields__)
    named = inspect.signature(run_processor).parameters
    assert len(named) <= 8
    assert not set(REPLACED) & set(named)


@pytest.mark.parametrize("name", SAME)
def test_a_keyword_of_before_works_and_says_what_to_write(name):
    value, today = SAME[name]
    # What the form of today sets as well, and the keyword alone did not.
    only_today = {key: today[key] for key in today.keys() - {"settings", "faults", "claim"}}
    with pytest.warns(DeprecationWarning, match="from before kclrun 1.0") as warned:
        before = plan_of(Quiet, **{name: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now = plan_of(Quiet, **{key: today[key] for key in today.keys() - only_today.keys()})

    assert msgspec.structs.replace(now, **only_today) == before
    (warning,) = warned
    assert str(warning.message) == (
        f"run_processor({name}=…) is from before kclrun 1.0, and goes in 2.0: write"
        f" {REPLACED[name]}"
    )
    assert warning.filename == __file__


def test_the_first_arrival_is_one_of_the_records():
    with pytest.warns(DeprecationWarning, match=r"make_records\(records, first_arrival_s=…\)"):
        before = run_processor(Quiet, ["a"], first_arrival_s=5.0)
    now = run_processor(Quiet, make_records(["a"], first_arrival_s=5.0))
    assert before.watermark == now.watermark


def test_a_keyword_that_there_never_was_is_refused():
    with pytest.raises(TypeError, match="no keyword 'batchmax'"):
        run_processor(Quiet, ["a"], batchmax=3)


TEXT = """
application: shop
streams:
  - {name: orders, processor: "shop:Orders", options: {a: 1}}
  - {name: returns, processor: "shop:Quiet", options: {a: 2}, on_error: {retries: 4}}
checkpoint: {every: batch}
fetch: {batch_max: 2}
on_error: {retries: 3, then: skip}
output: {path: out}
outputs: {late: {sqs: q, schema: n long}}
"""


def test_the_text_of_a_file_and_its_settings_mean_the_same():
    (processor,) = run_processor(Quiet, ["a", "b", "c"], settings=TEXT).processors
    assert processor.context.options == {"a": 2}, "the stream whose processor it is"
    assert (processor.context.application, processor.context.stream) == ("shop", "returns")

    by_text = plan_of(Quiet, settings=TEXT)
    assert plan_of(Quiet, settings=yaml.safe_load(TEXT)) == by_text
    assert (by_text.retries, by_text.then, by_text.batch_max) == (4, "skip", 2)
    assert (by_text.checkpoint, by_text.outputs) == ("batch", {"output", "late"})


@over_rows(
    ("settings", "words"),
    [
        ({"fetch": {"batchmax": 2}}, "fetch.batchmax: no such setting; did you mean batch_max?"),
        ("fetch:\n  batchmax: 2", "line 2"),
        ("- a", "expected settings"),
        ("a: [", "line 1"),
        ({"checkpoint": {"every": "often"}}, "checkpoint.every: expected a duration"),
        ({"outputs": {"late": {"schema": "n lung"}}}, "outputs.late.schema"),
        ({"options": {"password": "x"}}, "password"),
    ],
)
def test_settings_are_checked_as_those_of_a_file(settings, words):
    with pytest.raises(SettingsError) as refused:
        run_processor(Quiet, ["a"], settings=settings)
    assert words in str(refused.value)


def test_objects_of_a_test_may_stand_among_the_options():
    fake = object()
    (processor,) = run_processor(Quiet, [], settings={"options": {"client": fake}}).processors
    assert processor.context.options["client"] is fake


def test_a_run_goes_on_where_its_claim_says():
    class Manual(Quiet):
        def process_records(self, batch, checkpointer):
            pass

    with pytest.raises(ProcessorError):
        run_processor(
            Manual, "abc", settings={"checkpoint": {"every": "manual", "uncheckpointed_max": 1}}
        )
    first = run_processor(Quiet, "abc", faults=Faults(crash_after=2))
    second = run_processor(Quiet, "abc", claim=Claim(position=first.position))
    assert (first.crashed, second.delivered) == (True, 3)
    whole = replay(
        Quiet,
        "abc",
        settings={"checkpoint": {"every": "batch"}, "fetch": {"batch_max": 1}},
        faults=Faults(crash_after=2),
    )
    assert whole.delivered == 4
