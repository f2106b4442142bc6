"""Messages over a model of a service that refuses, drops and answers late: what is committed is
there, in order per group."""

import collections
import json
import random
import threading

import msgspec
import pytest

from kclrun.errors import (
    AccessDenied,
    LimitExceeded,
    OutcomeUnknown,
    SinkError,
    Throttled,
    Unavailable,
)
from kclrun.model.output import Cursor, MessageLimits, OutputDestination, RowsOf
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.outputs.message_output import CONCURRENCY, GIVE_UP_AFTER_S, MessageOutput
from tests.patience import HUNG_S
from tests.support.tables import over_rows

START = Cursor(TRIM_HORIZON)
OF = RowsOf(
    application="orders",
    stream="clicks",
    stream_created_at=WallTime(1_700_000_000.0),
    shard_id="shardId-000000000007",
    generation=0,
    token=10,
)
FIFO = OutputDestination(name="output", sqs="rows.fifo", key=("k",))
PLAIN = OutputDestination(name="output", sqs="rows")


def at(number):
    return Cursor(ExtendedSequenceNumber(str(10**20 + number)))


class Service:
    """A queue. `meet` decides for each request: its results, or an error to raise."""

    where = "the queue rows"

    def __init__(self, place=FIFO, meet=lambda messages: [None] * len(messages)):
        self.limits = MessageLimits(
            message_bytes_max=200,
            batch_bytes_max=300,
            batch_messages_max=10,
            is_fifo=place is not PLAIN,
        )
        self.meet = meet
        self.taken = []
        self.requests = 0
        self.known = set()
        self._lock = threading.Lock()

    def look(self):
        pass

    def close(self):
        pass

    def send(self, messages):
        with self._lock:
            self.requests += 1
            assert 0 < len(messages) <= self.limits.batch_messages_max
            assert sum(each.size_bytes for each in messages) <= self.limits.batch_bytes_max
            groups = [each.group for each in messages if each.group is not None]
            assert len(set(groups)) == len(groups)
            results = self.meet(messages)
            is_lost = isinstance(results, OutcomeUnknown)
            if isinstance(results, Exception) and not is_lost:
                raise results
            for number, each in enumerate(messages):
                if number % 2 if is_lost else results[number] is None:
                    self._take(each)
            if is_lost:
                raise results
            return results

    def _take(self, message):
        if not message.deduplication_id or message.deduplication_id not in self.known:
            self.known.add(message.deduplication_id)
            self.taken.append(json.loads(message.body)["n"])


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


def output(service, place=FIFO, of=OF, clock=None):
    clock = clock or Clock()
    made = MessageOutput(
        place, of, service, clock=clock, wait=clock.wait, chance=random.Random(1).random
    )
    made.begin(START)
    return made


def add(sending, numbers, key=lambda n: n % 7, upto=None):
    encoded = [sending.encode({"n": n, "k": str(key(n))})[0] for n in numbers]
    sending.add(encoded, at(numbers[-1] if upto is None else upto))


def persist(sending):
    """As the host does: again after a failure."""
    for _ in range(10):
        try:
            return sending.commit()
        except SinkError:
            continue
    raise AssertionError("no commit in 10 tries")


@pytest.mark.parametrize("seed", range(106_000, 106_020))
@pytest.mark.parametrize("place", [FIFO, PLAIN], ids=["fifo", "standard"])
def test_whatever_is_refused_or_lost_all_rows_are_there_and_a_group_keeps_its_order(seed, place):
    chance = random.Random(seed)

    def meet(messages):
        match chance.choice(["good", "good", "partly", "none", "throttled", "lost"]):
            case "good":
                return [None] * len(messages)
            case "partly":
                return [chance.choice([None, "InternalError"]) for _ in messages]
            case "none":
                return ["ThrottlingException"] * len(messages)
            case "throttled":
                return Throttled("slower")
        return OutcomeUnknown("no answer")

    service = Service(place, meet)
    sending = output(service, place)
    count = 0
    for _ in range(20):
        more = chance.randint(1, 40)
        add(sending, range(count, count + more))
        count += more
        if chance.random() < 0.3:
            assert persist(sending) == at(count - 1)
            assert sending.unsent_bytes == 0
            assert set(service.taken) == set(range(count))
    persist(sending)
    sending.close()

    assert set(service.taken) == set(range(count))
    if place is FIFO:
        assert len(service.taken) == count, "the service drops what it has"
        for group in range(7):
            numbers = [n for n in service.taken if n % 7 == group]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("error", [Throttled("slower"), Unavailable("away"), AccessDenied("no")])
def test_a_commit_gives_up_within_bounds_and_the_next_one_sends_only_what_is_left(error):
    clock = Clock()
    service = Service()
    service.meet = lambda messages: [None if each.group == "1" else "Busy" for each in messages]
    sending = output(service, clock=clock)
    add(sending, [1, 2, 3])
    with pytest.raises(SinkError, match=r"the queue rows: 2 of 2 messages were refused: Busy \(2"):
        sending.commit()
    assert clock.now >= GIVE_UP_AFTER_S
    assert service.taken == [1]
    assert 0 < sending.unsent_bytes < 100

    service.meet = lambda _messages: error
    began = clock.now
    with pytest.raises(SinkError, match=f"the queue rows: {error}"):
        sending.commit()
    assert clock.now - began < (1 if isinstance(error, AccessDenied) else GIVE_UP_AFTER_S + 3)

    service.meet = lambda messages: [None] * len(messages)
    assert sending.commit() == at(3)
    assert sorted(service.taken) == [1, 2, 3]


def test_rows_are_sent_ahead_by_a_bounded_number_of_requests_while_add_returns():
    go, under_way = threading.Event(), threading.Semaphore(0)

    def slow(self, messages):
        under_way.release()
        assert go.wait(HUNG_S)
        return [None] * len(messages)

    service = Service(PLAIN)
    service.send = slow.__get__(service)
    sending = output(service, PLAIN)
    add(sending, range(1000))
    for _ in range(CONCURRENCY):
        assert under_way.acquire(timeout=HUNG_S)
    assert not under_way.acquire(blocking=False)
    assert sending.unsent_bytes > 0
    go.set()
    sending.commit()
    assert sending.unsent_bytes == 0
    sending.close()


def test_the_next_process_sends_the_same_ids_and_so_a_fifo_queue_has_each_row_once():
    """The first process sent rows beyond its last commit. The batches are cut differently."""
    service = Service()
    first = output(service)
    add(first, [0, 1, 2])
    first.commit()
    add(first, [3, 4])
    add(first, [5, 6])
    while len(service.taken) < 7:
        first.add([], at(6))
    second = output(service, of=msgspec.structs.replace(OF, token=11))
    assert second.begin(at(2)) == at(2)
    add(second, [3, 4, 5])
    add(second, [6, 7])
    second.commit()
    assert sorted(service.taken) == list(range(8))


@pytest.mark.parametrize(
    "changes", [{"generation": 1}, {"stream_created_at": WallTime(1.0)}, {"shard_id": "other"}]
)
def test_rows_of_another_origin_are_never_taken_for_a_repetition(changes):
    service = Service()
    for of in (OF, msgspec.structs.replace(OF, **changes)):
        sending = output(service, of=of)
        add(sending, [1])
        sending.commit()
    assert service.taken == [1, 1]


def test_equal_rows_are_all_there_and_another_row_in_the_place_of_one_is_not_lost():
    service = Service()
    sending = output(service)
    rows = [sending.encode({"n": 1, "k": "a"})[0]] * 3
    sending.add(rows[:2], at(1))
    sending.commit()
    sending.add(rows[2:], at(2))
    sending.commit()
    assert service.taken == [1, 1, 1]
    # A processor of another version emits something else for the same records.
    again = output(service)
    add(again, [9], upto=1)
    again.commit()
    assert service.taken == [1, 1, 1, 9]


def encoded(row, place=FIFO, **changes):
    made = output(Service(place), msgspec.structs.replace(place, **changes))
    return made.encode(row)[0]


@over_rows(
    ("row", "kind", "said"),
    [
        ({"k": "a", "text": "secret" * 40}, LimitExceeded, r"a row of 259 bytes does not fit"),
        ({"text": 1}, TypeError, "column k is missing"),
        ({"k": 1.5}, TypeError, "column k is of type float"),
        ({"k": True}, TypeError, "column k is of type bool"),
        ({"k": "a", "o": object()}, TypeError, "'o': "),
    ],
)
def test_a_row_that_can_never_be_sent_is_refused_with_its_column_or_size(row, kind, said):
    with pytest.raises(kind, match=said) as refused:
        encoded(row)
    assert "secret" not in str(refused.value)


def test_groups_are_those_that_the_service_takes():
    assert encoded({"k": "a-b"}).group == "a-b"
    assert encoded({"k": 17}).group == "17"
    odd = [encoded({"k": key}).group for key in ("ä b", "ä c", "x" * 129, "")]
    assert len(set(odd)) == 4
    assert {len(group) for group in odd} == {64}
    assert encoded({"n": 1}, key=()).group == OF.shard_id
    assert encoded({"n": 1}, PLAIN).group is None


def test_the_text_of_a_message_is_json_that_xml_can_hold():
    row = {"text": "a\u0000\n\ufffe\uffffé\U0001f600"}
    text = encoded(row, PLAIN).body
    assert json.loads(text) == row
    assert not {"\u0000", "\ufffe", "\uffff", "\n"} & set(text)
    assert encoded(row, PLAIN).size_bytes == len(text.encode())
    assert encoded({"n": 1}, PLAIN, sqs=None, firehose="f").body == '{"n":1}\n'


def test_requests_are_full_where_the_groups_allow_it():
    sizes = collections.Counter()

    def meet(messages):
        sizes[len(messages)] += 1
        return [None] * len(messages)

    service = Service(FIFO, meet)
    sending = output(service)
    sending._held_until = 1.0  # both adds wait, and leave together
    add(sending, range(20), key=lambda n: n)
    sending.commit()
    assert sizes == {10: 2}


def test_threads_are_started_once_however_often_the_lease_begins():
    before = set(threading.enumerate())
    sending = output(Service())
    sending.begin(START)
    sending.begin(START)

    assert len(set(threading.enumerate()) - before) == CONCURRENCY
    sending.close()
