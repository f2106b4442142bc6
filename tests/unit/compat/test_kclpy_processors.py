"""Processors of amazon_kclpy under the runtime's contracts: calls, checkpoints, errors."""

import base64
import importlib.util
import sys
from pathlib import Path

import pytest

from kclrun.compat.kclpy import adapted
from kclrun.errors import (
    LeaseLost,
    LimitExceeded,
    NotFound,
    ProcessorLoadError,
    SinkError,
    StaleCheckpoint,
    Throttled,
)
from kclrun.model.record import RecordBatch
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.processor import Checkpointer, RecordProcessor
from kclrun.testing import Claim, make_aggregate, make_record, run_processor

SHARD = "shardId-000000000000"
NUMBER = make_record("x").sequence_number


def load_consumers():
    spec = importlib.util.spec_from_file_location(
        "kclpy_consumers", Path(__file__).with_name("kclpy_consumers.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.consumers


@pytest.fixture
def interfaces(amazon_kclpy):
    kcl, _, v2, v3 = amazon_kclpy
    return dict(zip((1, 2, 3), load_consumers()(kcl, v2, v3), strict=True))


def noted(run):
    return run.processors[-1]._processor_of_user.noted


def run(interface, records=("a", "b"), *, retries=0, **more):
    settings = {"checkpoint": {"every": "manual"}, "on_error": {"retries": retries}}
    return run_processor(adapted(interface), list(records), settings=settings, **more)


BEGINNINGS = {
    1: ("initialize", SHARD),
    2: ("initialize", SHARD, "TRIM_HORIZON"),
    3: ("initialize", SHARD, "TRIM_HORIZON", 0),
}
ENDS = {1: ("shutdown", "TERMINATE"), 2: ("shutdown", "TERMINATE"), 3: ("shard_ended",)}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_processor_gets_its_shard_its_records_and_its_end(interfaces, version):
    done = run(interfaces[version])

    story = noted(done)
    assert story[0] == BEGINNINGS[version]
    assert story[1:3] == [(b"a", "key"), (b"b", "key")]
    assert story[3][0] == "checkpointed"
    assert story[4] == ENDS[version]
    assert [str(each) for each in done.checkpoints] == [f"{NUMBER[:-1]}1", "SHARD_END"]


def test_a_processor_may_import_the_package_as_late_as_when_it_is_made(interfaces):
    class Late(interfaces[3]):
        def __init__(self):
            super().__init__()
            self.interface = importlib.import_module("amazon_kclpy.v3.processor")

    for name in [each for each in sys.modules if each.startswith("amazon_kclpy")]:
        del sys.modules[name]

    made = run(Late).processors[-1]._processor_of_user

    assert made.interface.RecordProcessorBase in interfaces[3].mro()


@pytest.mark.parametrize(
    ("version", "asked"), [(1, "shutdownRequested"), (2, None), (3, "shutdown_requested")]
)
def test_a_lease_that_is_given_away_asks_for_a_last_checkpoint(interfaces, version, asked):
    done = run(interfaces[version], end_of_shard=False)

    last = [each[0] for each in noted(done)[4:]]
    assert last == ([asked, "checkpointed"] if asked else [])
    assert not done.position.is_sentinel


@pytest.mark.parametrize(
    ("version", "reported"),
    [
        (1, [("shutdown", "ZOMBIE"), ("refused", "ShutdownException", "'ShutdownException'")]),
        (2, [("shutdown", "ZOMBIE"), ("refused", "ShutdownException", "'ShutdownException'")]),
        (3, [("lease_lost",)]),
    ],
)
def test_a_lost_lease_is_reported_and_refuses_checkpoints(interfaces, version, reported):
    done = run(interfaces[version], end_of_shard=False)
    before = len(noted(done))

    done.processors[-1].lease_lost()

    assert noted(done)[before:] == reported


def test_a_checkpoint_inside_an_aggregate_is_where_initialize_begins(interfaces):
    records = make_aggregate(["a", "b", "c"])

    done = run(interfaces[3], records, claim=Claim(position=records[0].position))

    assert noted(done)[0] == ("initialize", SHARD, NUMBER, 0)
    assert noted(done)[1:3] == [(b"b", "key"), (b"c", "key")]
    assert [str(each) for each in done.checkpoints] == [f"{NUMBER}/2", "SHARD_END"]


# Checkpoints.

FORMS = {
    "nothing": (lambda c, r: c.checkpoint(), None),
    "None": (lambda c, r: c.checkpoint(None, None), None),
    "a text": (lambda c, r: c.checkpoint(r.sequence_number), 0),
    "a number": (lambda c, r: c.checkpoint(int(r.sequence_number)), 0),
    "a record": (lambda c, r: c.checkpoint(r), 2),
    "number and sub": (lambda c, r: c.checkpoint(r.sequence_number, 2), 2),
    "by their names": (
        lambda c, r: c.checkpoint(sequence_number=r.sequence_number, sub_sequence_number=1),
        1,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_in_each_form_is_written_where_it_says(amazon_kclpy, form):
    call, sub = FORMS[form]
    written = []

    class Consumer(amazon_kclpy[3].RecordProcessorBase):
        def initialize(self, given):
            pass

        def process_records(self, given):
            call(given.checkpointer, given.records[-1])

        lease_lost = shard_ended = shutdown_requested = initialize

    processor = started(Consumer)
    records = RecordBatch(make_aggregate(["a", "b", "c"]))
    processor.process_records(records, Checkpointer(written.append))

    assert written == [None if sub is None else ExtendedSequenceNumber(NUMBER, sub)]


def started(consumer):
    """The adapter, as a lease process has it after `initialize`."""
    return run_processor(adapted(consumer), [], end_of_shard=False).processors[0]


@pytest.mark.parametrize(
    ("raised", "value"),
    [
        (LeaseLost("x"), "ShutdownException"),
        (StaleCheckpoint("x"), "IllegalArgumentException"),
        (LimitExceeded("x"), "IllegalArgumentException"),
        (Throttled("x"), "ThrottlingException"),
        (NotFound("x"), "InvalidStateException"),
        (SinkError("x"), "KinesisClientLibDependencyException"),
    ],
)
def test_a_refused_checkpoint_has_the_name_that_the_java_library_gives_it(
    interfaces, raised, value
):
    processor = started(interfaces[3])

    def refuse(_position):
        raise raised

    processor.shutdown_requested(Checkpointer(refuse))

    assert ("refused", value, repr(value)) in processor._processor_of_user.noted


def test_what_is_no_sequence_number_is_refused_as_the_java_library_does(interfaces):
    processor = started(interfaces[3])
    errors = []

    class Careless(interfaces[3]):
        def shutdown_requested(self, given):
            try:
                given.checkpointer.checkpoint("None", None)
            except Exception as error:
                errors.append(error.value)

    processor = started(Careless)
    processor.shutdown_requested(Checkpointer(lambda position: None))

    assert errors[-1] == "IllegalArgumentException"


def test_what_a_processor_raises_is_raised_and_its_records_are_given_again(interfaces):
    class Stumbling(interfaces[3]):
        tries = 0

        def process_records(self, given):
            type(self).tries += 1
            if self.tries == 1:
                raise ValueError("not yet")
            super().process_records(given)

    done = run(Stumbling, retries=1)

    assert Stumbling.tries == 2
    assert (b"a", "key") in noted(done)
    assert done.position == SHARD_END


# Records.


def test_a_record_has_the_fields_of_the_daemons_json(amazon_kclpy):
    delivered = amazon_kclpy[1].DeliveredRecord(
        make_record(b"\x00\xff", "k", sub_sequence_number=3, arrived_at_s=1_700_000_000.125)
    )
    as_json = {
        "action": "record",
        "data": base64.b64encode(b"\x00\xff").decode(),
        "partitionKey": "k",
        "sequenceNumber": NUMBER,
        "subSequenceNumber": 3,
        "approximateArrivalTimestamp": 1_700_000_000_125,
    }
    made = amazon_kclpy[1].Record(as_json)

    assert {name: delivered.get(name) for name in as_json} == as_json
    assert delivered["data"] == made["data"]
    for name in (
        *("data", "binary_data", "partition_key", "sequence_number", "sub_sequence_number"),
        *("timestamp_millis", "approximate_arrival_timestamp"),
    ):
        assert getattr(delivered, name) == getattr(made, name)
    assert delivered.approximate_arrival_timestamp.tzinfo is None
    with pytest.raises(KeyError):
        delivered.get("explicitHashKey")


def test_a_payload_is_not_encoded_for_the_sake_of_another_field(amazon_kclpy, monkeypatch):
    delivered = amazon_kclpy[1].DeliveredRecord(make_record(b"x", "k"))
    monkeypatch.delattr(base64, "b64encode")

    assert delivered.get("partitionKey") == "k"


# What is refused before a shard is touched.


def test_a_class_that_needs_arguments_is_refused_with_what_to_do(interfaces):
    class Needy(interfaces[3]):
        def __init__(self, table):
            super().__init__()

    with pytest.raises(ProcessorLoadError, match=r"without arguments: .*'table'\nName a function"):
        adapted(Needy)


def test_a_class_of_no_interface_is_refused(interfaces):
    class Own(RecordProcessor):
        def process_records(self, batch, checkpointer):
            pass

    with pytest.raises(ProcessorLoadError, match=r"named without kclpy:"):
        adapted(Own)


def test_a_class_that_lacks_a_method_of_its_interface_is_refused():
    class Half:
        version = 3

        def initialize(self, given):
            pass

    with pytest.raises(
        ProcessorLoadError, match=r"has no process_records, lease_lost, shard_ended, shutdown"
    ):
        adapted(Half)


def test_a_function_that_makes_the_processor_will_do(interfaces):
    def make():
        return interfaces[2]()

    done = run_processor(adapted(make), ["a"], settings={"checkpoint": {"every": "manual"}})

    assert noted(done)[1] == (b"a", "key")
