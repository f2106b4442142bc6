"""Story and live detail on the page of a shard: what they show, and how seldom they are read."""

import os
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.cli.leases.why import gathered
from kclrun.cli.page.details import DetailReader, OnDemand, RecentObjects
from kclrun.config.load import settings_of
from kclrun.manager.locks import state_folder
from kclrun.model.time import WallTime
from kclrun.observe.endpoint import Answer, HttpEndpoint
from kclrun.observe.health import KeyBody, TrafficBody
from kclrun.observe.members import ErrorBody, LeaseDetail
from kclrun.observe.story import StoryRing
from kclrun.operating.story import Sentence, present, story_of
from kclrun.page.detail_view import AskedOwner, LetterLine, LettersRead, StoryRead, why_not_asked
from kclrun.page.server import routes
from kclrun.traffic.hot_shards import HotShard
from tests.patience import HUNG_S
from tests.support.tables import over_rows
from tests.unit.page.fleet import ABOUT, JAVA, NOW, A, key, lease, snapshot_of

HOSTILE = "<script>alert(1)</script>"
DETAIL = LeaseDetail(
    application="orders",
    owner=A,
    shard=key(0),
    state="failing",
    note=HOSTILE,
    records_per_s=12.5,
    dead_letters_total=2,
    traffic=TrafficBody(2e6, 900.0, 0.97, 1.0, 0.0, 60.0, 0.01, (KeyBody("123", 0.61),)),
    hot=HotShard("one key has 61 %", "splitting cannot help"),
    errors=(
        ErrorBody(NOW, "processor_raised", "ValueError: bad row", "mine.py:7", "9", 3, "Trace\n x"),
    ),
)


class Given:
    """Details that are these, and which of them were asked for."""

    def __init__(self, story=None, asked=None):
        self.reported, self.answer, self.calls = story, asked, []

    def story(self, lease):
        self.calls.append(("story", lease.key))
        return self.reported

    def letters(self):
        return None

    def ended(self):
        return frozenset()

    def warned(self):
        return {}

    def asked(self, lease):
        self.calls.append(("asked", lease.key))
        return self.answer


def shown(details, *leases, **query):
    snapshot = snapshot_of(*(leases or (lease(0),)))
    answer = routes(ABOUT, lambda: snapshot, details=details)["/shard"]({"key": key(0)} | query)
    return answer.body.decode()


def test_the_story_is_reported_with_its_times_and_what_the_row_says_now():
    reported = StoryRead(
        sentences=(Sentence(NOW, "It began."), Sentence(WallTime(NOW + 1), f"Died: {HOSTILE}")),
        before=7,
        now=("Now: at 1.",),
        read_at=NOW,
        problem="The stories in S3 cannot be read: denied",
    )

    page = shown(Given(reported))

    assert page.index("It began.") < page.index("Died: &lt;script&gt;") < page.index("Now: at 1.")
    assert "7 sentences come before these" in page
    assert f"kclrun why {key(0)} --all" in page
    assert "cannot be read: denied" in page
    assert page.count("<script") == 1


def test_a_story_with_a_time_that_is_not_one_is_shown_all_the_same():
    broken = StoryRead(
        sentences=(Sentence(WallTime(1e300), "Broken."), Sentence(NOW, "It began.")),
        read_at=WallTime(-1e300),
    )

    page = shown(Given(broken))

    assert page.index("not a time") < page.index("Broken.") < page.index("It began.")


def test_the_owners_answer_shows_rates_heavy_keys_and_errors_with_their_stacks():
    page = shown(Given(asked=AskedOwner(detail=DETAIL, read_at=NOW)))

    for part in ("12.5 records/s", "2 dead letters", "Hot: one key has 61 %", "61%", "ValueError"):
        assert part in page
    assert "mine.py:7, record 9, call 3" in page
    assert ">Trace\n x</pre>" in page
    assert page.count("<script") == 1


def test_only_the_page_of_that_shard_asks_for_details_and_an_ended_lease_has_no_owner_to_ask():
    details = Given()
    paths = routes(ABOUT, lambda: snapshot_of(lease(0)), details=details)
    for path in ("/", "/shards", "/lineage", "/outputs", "/settings"):
        paths[path]({})
    assert details.calls == []
    assert "It is being read." in shown(details)
    assert details.calls == [("asked", key(0)), ("story", key(0))]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (lease(0, None), "no owner"),
        (lease(0, JAVA, endpoint="10.0.0.1:9464"), "no owner"),
        (lease(0, A), "observe.listen"),
        (lease(0, A, endpoint="10.0.0.1:9464"), ""),
    ],
)
def test_the_page_says_why_an_owner_is_not_asked(row, words):
    assert words in why_not_asked(row)
    assert bool(words) == bool(why_not_asked(row))


def test_a_value_is_read_once_however_many_look_and_the_former_one_is_seen_meanwhile():
    reads, may_end = [], threading.Event()
    kept = OnDemand(0.0, at_once=1)

    def read():
        reads.append(1)
        if len(reads) > 1:
            assert may_end.wait(HUNG_S)
        return len(reads)

    assert kept.look("a", read, HUNG_S) == 1
    assert [kept.look("a", read, HUNG_S) for _ in range(20)] == [1] * 20
    # The place is taken: another key waits for its turn.
    assert kept.look("b", read, 0.0) is None
    may_end.set()
    over = time.monotonic() + HUNG_S
    while kept.look("a", read, HUNG_S) < 2:
        assert time.monotonic() < over
    assert OnDemand(60.0, at_once=1).look("a", read, HUNG_S) is not None


def test_a_value_is_kept_for_its_time_and_after_much_work_no_other_is_read():
    reads = []

    def read():
        reads.append(1)
        began = time.thread_time()
        while time.thread_time() - began < 0.002:
            pass
        return len(reads)

    lasting = OnDemand(60.0, at_once=4)
    assert {lasting.look("a", read, HUNG_S) for _ in range(10)} == {1}
    resting = OnDemand(0.0, at_once=4, rest=1e6)
    assert resting.look("a", read, HUNG_S) == 2
    assert resting.look("b", read, 0.0) is None
    assert resting.look("a", read, HUNG_S) == 2


class Objects:
    """A bucket: names that sort by their times, each of so many bytes."""

    def __init__(self, count, size):
        self.there = {f"{n:013d}-a-000001.story": bytes([n % 251]) * size for n in range(count)}
        self.read = []

    def names(self, since, pages_max):
        after = f"{max(0, int(since * 1000)):013d}"
        found = sorted(name for name in self.there if name > after)
        return found[: 1_000 * pages_max], len(found) <= 1_000 * pages_max

    def get(self, name):
        self.read.append(name)
        return self.there[name]


def test_of_a_large_bucket_the_newest_objects_are_read_first_each_once_and_within_a_limit():
    bucket = Objects(500, 10)
    recent = RecentObjects(bucket, clock=lambda: 1.0)

    first = list(recent.contents())
    assert (len(first), recent.left) == (200, 300)
    assert bucket.read[0] == max(bucket.there)
    assert len(list(recent.contents())) == 400
    assert len(list(recent.contents())) == 500
    list(recent.contents())
    assert len(bucket.read) == len(set(bucket.read)) == 500

    large = RecentObjects(Objects(60, 1024 * 1024), clock=lambda: 1.0)
    assert sum(map(len, large.contents())) <= 4 * 1024 * 1024
    assert large.left >= 56


def test_of_too_many_objects_to_list_the_last_hour_is_listed():
    bucket = Objects(0, 0)
    day = {f"{n * 10_000:013d}-a-000001.story": b"" for n in range(8_640)}
    bucket.there = day
    recent = RecentObjects(bucket, clock=lambda: 86_400.0)

    list(recent.contents())

    assert bucket.read[0] == max(day)


def letter(number, **fields):
    return LetterLine(
        given_up_at=NOW,
        stream="orders",
        shard_id=key(0),
        position=str(number),
        error=f"ValueError: {HOSTILE}",
        calls=3,
        **fields,
    )


@over_rows(
    ("reported", "parts"),
    [
        (None, ("They are being read.",)),
        (LettersRead(read_at=NOW), ("There are none.",)),
        (
            LettersRead(read_at=NOW, is_here=False, waiting="About 12 are in the queue."),
            ("About 12 are in the queue. The page does not list them", "dead-letters --config"),
        ),
        (LettersRead(read_at=NOW, problem="They cannot be read: x"), ("cannot be read: x",)),
        (
            LettersRead(
                read_at=NOW,
                lines=(letter(1, raised_at="mine.py:7", stack="Trace"), letter(2)),
                are_more=True,
            ),
            (
                ">Trace</pre>",
                "at mine.py:7",
                "2 dead letters",
                "there are more",
                "ValueError: &lt;script&gt;",
                ">3</td>",
            ),
        ),
        (
            LettersRead(read_at=NOW, lines=(letter(1, partition_key="user-7", payload=HOSTILE),)),
            ("user-7", '<td class="words">&lt;script&gt;'),
        ),
    ],
)
def test_dead_letters_are_listed_and_payloads_only_where_they_are_given(reported, parts):
    details = Given()
    details.letters = lambda: reported
    page = routes(ABOUT, lambda: snapshot_of(lease(0)), details=details)["/outputs"]({})

    for part in (*parts, ABOUT.letters):
        assert part in page.body.decode()
    if reported is not None and not any(line.payload for line in reported.lines):
        assert "payload" not in page.body.decode()


def test_the_story_is_that_of_the_verb_and_the_owner_is_asked_at_its_published_address(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("KCLRUN_STATE_DIR", str(tmp_path))
    text = "application: orders\nstream: orders\nprocessor: kclrun.samples.hello:Hello\n"
    settings = settings_of(text, environment={}, now=NOW)
    ring = StoryRing(state_folder("orders", os.environ) / "story", A, clock=lambda: NOW)
    for event, fields in (("lease_taken", {"position": "1"}), ("lease_claimed", {"position": "1"})):
        ring.note(event, key(0), fields)
        ring.note(event, key(1), fields)
    ring.close()
    aws = SimpleNamespace(settings=settings, story=None)
    details = DetailReader(aws, letters=None)
    mine = msgspec.structs.replace(DETAIL, errors=())
    server = HttpEndpoint("127.0.0.1", 0, {"/lease": lambda _: Answer(msgspec.json.encode(mine))})
    try:
        row = lease(0, endpoint=server.published)
        over = time.monotonic() + HUNG_S
        while (reported := details.story(row)) is None or (asked := details.asked(row)) is None:
            assert time.monotonic() < over
    finally:
        server.close()

    expected = story_of(key(0), gathered(aws).entries.values())
    assert reported.sentences == expected.sentences
    assert len(reported.sentences) == 2
    assert reported.now == tuple(present(row, expected))
    assert asked.detail == mine
    elsewhere = details.asked(lease(0, endpoint="8.8.8.8:9464"))
    assert elsewhere.detail is None
    assert "observe.members" in elsewhere.why
