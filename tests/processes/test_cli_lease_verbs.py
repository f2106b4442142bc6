"""`lag`, `leases release`, `leases move` and `leases --explain` against a table of planted rows.

The owners are the test's own: it renews, and answers an ask as a lease process would. What the
verbs write and say is what is tested here; that real managers answer is the fleet's tests.
"""

import itertools
import json
import threading
import time

import pytest

from kclrun.cli.world import open_world
from kclrun.local.server import start_embedded
from kclrun.model.lease import ANYBODY, OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.record import IteratorType
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol.writes import Applied, CreateLease, End, Offer, Release, Renew, Take
from tests.patience import HUNG_S
from tests.processes.cli_rig import Program, Site, called

pytestmark = pytest.mark.slow
NUMBERS = itertools.count()
A, B, JAVA = map(OwnerId, ("kclrun:az1:host1:nonce", "kclrun:az2:host2:nonce", "java-worker"))
FAILOVER_S = 1.0


def key(number):
    return LeaseKey(f"shardId-{number:012d}")


class Table:
    """The rows of one application; `answers` lets owners renew and answer in the background."""

    def __init__(self, site):
        self.site = site
        self.rows = site.aws.table
        self._is_over = threading.Event()
        self._thread = None
        open_world(site.aws.settings)

    def plant(self, number, owner=None, checkpoint=TRIM_HORIZON, **more):
        lease = Lease(key=key(number), checkpoint=checkpoint, **more)
        assert isinstance(self.rows.write(CreateLease(lease)), Applied)
        if owner is not None:
            take = Take(lease.key, owner, None, 0, failover_s=FAILOVER_S, start="TRIM_HORIZON")
            assert isinstance(self.rows.write(take), Applied)

    def row(self, number):
        return self.rows.read(key(number))

    def live(self, owners, *, answer=None):
        """From now on these owners renew; `answer(row)` is what one does about an ask."""
        self._thread = threading.Thread(target=self._live, args=(owners, answer))
        self._thread.start()

    def _live(self, owners, answer):
        while not self._is_over.wait(FAILOVER_S / 4):
            for page in self.rows.scan():
                for row in page.leases:
                    if row.owner not in owners:
                        continue
                    if row.handoff is not None and answer is not None:
                        answer(row)
                    else:
                        self.rows.write(Renew(row.key, row.owner, row.counter))

    def close(self):
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def offer(self, row):
        """Give it away as an owner does, and let the one it is meant for (or B) take it."""
        to = None if row.handoff.to == ANYBODY else row.handoff.to
        position = row.checkpoint
        offer = Offer(row.key, row.owner, row.counter, position, position, offered_to=to)
        assert isinstance(self.rows.write(offer), Applied)
        taken = Take(row.key, to or B, OFFERED, row.counter + 1, FAILOVER_S, "TRIM_HORIZON")
        assert isinstance(self.rows.write(taken), Applied)

    def release(self, row):
        """As an owner does that sees no other kclrun owner."""
        position = row.checkpoint
        self.rows.write(Release(row.key, row.owner, row.counter, position, position))

    def drop(self, row):
        self.rows.write(Renew(row.key, row.owner, row.counter, drops_ask=True))

    def ends(self, row):
        self.rows.write(End(row.key, row.owner, row.counter, last=row.checkpoint))


@pytest.fixture(scope="module")
def endpoint():
    with start_embedded() as embedded:
        yield embedded.endpoint


@pytest.fixture
def table(endpoint, tmp_path):
    opened = Table(Site(tmp_path, endpoint, f"verbs-{next(NUMBERS)}", 2))
    yield opened
    opened.close()


def leases(table, *arguments):
    return called("leases", "--config", table.site.config, *arguments)


def test_a_release_shows_its_plan_and_with_yes_waits_for_the_new_owner(table):
    table.plant(0, A)
    table.plant(1, B)

    code, out, _ = leases(table, "release", key(0))
    assert (code, "Nothing was changed" in out) == (0, True)
    assert f"{A} has it" in out
    assert table.row(0).handoff is None

    table.live({A, B}, answer=table.offer)
    code, out, told = leases(table, "release", key(0), "--yes")
    assert code == 0, told
    assert out.splitlines()[-1] == f"{key(0)}: {B} has it now"
    assert table.row(0).owner == B


def test_a_move_asks_for_the_named_owner_once_it_is_seen_alive(table):
    table.plant(0, B)
    table.plant(1, A)
    table.live({A, B}, answer=table.offer)

    code, out, told = leases(table, "move", key(0), "--to", "host1", "--yes")

    assert code == 0, told
    assert out.splitlines()[-1] == f"{key(0)}: {A} has it now"
    assert table.row(0).owner == A


def test_a_move_to_a_dead_owner_changes_nothing(table):
    table.plant(0, A)
    table.plant(1, B)
    table.live({A})

    code, _, told = leases(table, "move", key(0), "--to", B, "--yes")

    assert code == 1
    assert f"{B} has renewed nothing for 1 s" in told
    assert table.row(0).handoff is None


def test_an_ask_that_nobody_answers_is_given_up_and_said_so(table):
    table.plant(0, A)

    code, _, told = leases(table, "release", key(0), "--yes", "--wait", "1s")

    assert code == 1
    assert f"still with {A} after 1 s" in told
    assert table.row(0).handoff.to == ANYBODY
    code, _, told = leases(table, "release", key(0), "--yes")
    assert (code, "was asked for by an operator already" in told) == (1, True)


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ("release", 0, "released; it has no owner"),
        ("drop", 1, "still has it: it dropped the request, or no other owner took the lease"),
        ("ends", 0, "the shard ended meanwhile"),
    ],
)
def test_each_way_an_ask_can_go_is_told(table, answer, code, said):
    table.plant(0, A)
    table.live({A}, answer=getattr(table, answer))

    ended_with, out, told = leases(table, "release", key(0), "--yes")

    assert ended_with == code
    assert said in out + told


def test_a_lease_that_goes_elsewhere_is_no_move_as_asked(table):
    table.plant(0, A)
    table.plant(1, B)
    third = OwnerId("kclrun:az3:host3:nonce")

    def to_a_third(row):
        position = row.checkpoint
        table.rows.write(Offer(row.key, row.owner, row.counter, position, position, offered_to=B))
        table.rows.write(Take(row.key, third, OFFERED, row.counter + 1, FAILOVER_S, "TRIM_HORIZON"))

    table.live({A, B}, answer=to_a_third)
    code, out, _ = leases(table, "move", key(0), "--to", B, "--yes")

    assert (code, out.splitlines()[-1]) == (1, f"{key(0)}: {third} has it now")


def test_what_cannot_be_asked_for_is_refused_in_words(table):
    table.plant(0)
    table.plant(1, JAVA)
    table.plant(2, A)

    assert leases(table, "release", key(0))[::2] == (
        1,
        f"{key(0)}: has no owner: the next manager with room takes it by itself\n",
    )
    code, _, told = leases(table, "move", key(1), "--to", A)
    assert (code, "java-worker, which is not a kclrun manager" in told) == (1, True)
    code, _, told = leases(table, "move", key(2), "--to", JAVA, "--yes")
    assert (code, f"{A}  (leases: 1)" in told) == (64, True)
    code, _, told = leases(table, "release", key(9))
    assert (code, "no lease for" in told) == (66, True)


def test_explained_is_what_each_live_owner_would_do_and_one_that_joins(table):
    for number in range(4):
        table.plant(number, A)
    table.plant(4)
    table.plant(5, B)
    table.live({A})

    code, out, told = leases(table, "--explain")
    assert code == 0, told
    assert out.startswith(f"{A} (4 leases)\n")
    assert B not in out.splitlines()[0]
    # Two shards are nobody's, one of them because B was seen not to renew it.
    assert f"take shard {key(4)}" in out
    assert f"take shard {key(5)}" in out

    code, out, _ = leases(table, "--explain", "--owner", "new", "--json")
    (new,) = json.loads(out)
    assert (code, new["leases"]) == (0, 0)
    assert {each["key"] for each in new["decisions"]} >= {key(4), key(5)}
    assert leases(table, "--explain", "--owner", "nobody")[0] == 64
    assert leases(table, "--owner", A)[0] == 64


# Real managers

PROCESSOR = """
from kclrun import RecordProcessor

class Mine(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass
"""


@pytest.fixture
def managers(table, tmp_path):
    """Two managers of one application, settled at one of its two leases each."""
    (tmp_path / "mine.py").write_text(PROCESSOR)
    config = table.site.config
    config.write_text(config.read_text().replace("kclrun.samples.hello:Hello", "mine:Mine"))
    started = [Program("run", "--config", config) for _ in range(2)]
    try:
        until(lambda: len(owners(table)) == 2)
        yield started
    finally:
        for program in started:
            program.close()


def owners(table):
    """Who has which shard, once both belong to somebody."""
    rows = [table.row(0), table.row(1)]
    has_owner = all(row is not None and row.owner not in (None, OFFERED) for row in rows)
    return {row.owner: row.key for row in rows} if has_owner else {}


def until_taken(table, *verb):
    """The last line of the verb, once another manager has the lease. One that the machine holds up
    for two seconds does not take it, and the owner takes it back (DESIGN P17)."""
    over = time.monotonic() + HUNG_S
    while True:
        code, out, told = leases(table, *verb, "--yes")
        if code == 0:
            return out.splitlines()[-1]
        assert code == 1
        assert " still has it: " in told
        assert time.monotonic() < over


def until(holds):
    over = time.monotonic() + HUNG_S
    while not holds():
        assert time.monotonic() < over
        time.sleep(0.05)


def test_real_managers_hand_over_what_an_operator_moves_or_releases(table, managers):
    first, second = owners(table)
    shard = owners(table)[first]

    said = until_taken(table, "move", shard, "--to", second)
    assert said == f"{shard}: {second} has it now"

    # With two more than the other, the fleet evens that out by itself.
    until(lambda: len(owners(table)) == 2)
    (owner, held), *_ = owners(table).items()
    said = until_taken(table, "release", held)
    assert said.endswith(" has it now")
    assert owner not in said
    for manager in managers:
        assert manager.end() == 0, manager.told


# lag


def lag(table, *arguments):
    return called("lag", "--config", table.site.config, *arguments)


def lag_of(table, *arguments):
    code, out, told = lag(table, "--json", *arguments)
    assert code == 0, told
    whole = json.loads(out)
    return whole, {shard["shard"]: shard for shard in whole["shards"]}


def test_before_the_first_start_every_shard_is_measured_from_where_it_will_begin(table):
    began = time.time()
    table.site.put([("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")])
    table.site.put([("e", "5")] * 3)

    whole, shards = lag_of(table)

    assert len(shards) == 2
    assert 0 < whole["behind_s_max"] <= time.time() - began + 1
    assert {shard["state"] for shard in shards.values()} == {"no lease"}
    tip, _ = lag_of(table, "--set", "start=LATEST")
    assert tip["behind_s_max"] == 0.0


def test_the_lag_is_the_age_of_what_is_not_checkpointed(table):
    site = table.site
    lower = site.open_shards()[0]
    put_at = []
    for number in range(40):
        began = time.time()
        site.put([(f"key{number}", str(number))])
        put_at.append((began, time.time()))
    iterator = site.aws.reader.iterator(lower.shard_id, IteratorType.TRIM_HORIZON)
    in_lower = site.aws.reader.fetch(iterator, 1_000).records
    done, unread = in_lower[4], in_lower[5]
    table.plant(0, A, checkpoint=ExtendedSequenceNumber(done.sequence_number))
    table.plant(1, checkpoint=LATEST)

    asked_at = time.time()
    whole, shards = lag_of(table)
    now = time.time()

    behind_s = shards[key(0)]["behind_s"]
    earliest, latest = put_at[int(unread.data)]
    # A service dates by the second or finer: one second either way.
    assert asked_at - latest - 1 <= behind_s <= now - earliest + 1
    assert shards[key(0)]["loss_in_s"] == pytest.approx(86_400 - behind_s, abs=0.01)
    assert shards[key(0)]["owner"] == A
    assert shards[key(1)]["behind_s"] is None
    assert (whole["unknown"], whole["behind_s_max"]) == (1, behind_s)


def test_a_monitor_is_answered_by_the_exit_code(table):
    table.site.put([(f"key{number}", "x") for number in range(40)])
    table.plant(0, A)
    table.plant(1, B)

    assert lag(table, "--max-behind", "10m")[0] == 0
    code, out, told = lag(table, "--max-behind", "1ms")
    assert code == 1
    assert "Further behind than 1ms" in told
    assert "first loss in 23h 59m" in out.splitlines()[-1] or "1d" in out.splitlines()[-1]


def test_children_that_wait_and_parents_that_are_done_are_told_apart(table):
    site = table.site
    lower, upper = site.open_shards()
    site.put([(f"key{number}", "x") for number in range(40)])
    site.split(lower)
    site.merge(*site.open_shards()[-2:])
    table.plant(0, A)
    table.plant(4)

    _, shards = lag_of(table)

    # The merged shard 4 has a lease, so its parents 1 and 3 were read; 2 waits for 0's end.
    assert list(shards) == [key(0), key(2), key(4)]
    assert shards[key(2)]["note"] == f"no lease yet: it is made when {key(0)} ended"
    assert upper.shard_id == key(1)
