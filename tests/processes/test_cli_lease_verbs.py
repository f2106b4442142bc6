"""`lag`, `leases release` and `leases move` against a table of an embedded AWS.

Here they reach real services and real managers. All that the verbs say, write and end with is
tested with rows in memory: tests/unit/cli/test_cli_lease_verbs.py and test_cli_lag.py.
"""

import itertools
import json
import threading
import time

import pytest

from kclrun.cli.startup import open_world
from kclrun.model.lease import ANYBODY, OFFERED, Lease, OwnerId
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol.writes import Applied, CreateLease, Offer, Renew, Take
from tests.patience import HUNG_S, until
from tests.processes.cli_rig import Program, Site, called
from tests.support.build import key

pytestmark = pytest.mark.slow
NUMBERS = itertools.count()
A, B, JAVA = map(OwnerId, ("kclrun:az1:host1:nonce", "kclrun:az2:host2:nonce", "java-worker"))
FAILOVER_S = 1.0


class Table:
    """The rows of one application; with `live` owners renew and answer in the background."""

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

    def live(self, owners):
        """From now on these owners renew, and give away what is asked for."""
        self._thread = threading.Thread(target=self._live, args=(owners,))
        self._thread.start()

    def _live(self, owners):
        while not self._is_over.wait(FAILOVER_S / 4):
            for page in self.rows.scan():
                for row in page.leases:
                    if row.owner not in owners:
                        continue
                    if row.handoff is not None:
                        self.offer(row)
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

    table.live({A, B})
    code, out, reported = leases(table, "release", key(0), "--yes")
    assert code == 0, reported
    assert out.splitlines()[-1] == f"{key(0)}: {B} has it now"
    assert table.row(0).owner == B


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
    for two seconds does not take it, and the owner takes it back [P17]."""
    over = time.monotonic() + HUNG_S
    while True:
        code, out, reported = leases(table, *verb, "--yes")
        if code == 0:
            return out.splitlines()[-1]
        assert code == 1
        assert " still has it: " in reported
        assert time.monotonic() < over


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
        assert manager.end() == 0, manager.reported


# lag


def lag(table, *arguments):
    return called("lag", "--config", table.site.config, *arguments)


def lag_of(table, *arguments):
    code, out, reported = lag(table, "--json", *arguments)
    assert code == 0, reported
    whole = json.loads(out)
    return whole, {shard["shard"]: shard for shard in whole["shards"]}


def test_the_lag_is_the_age_of_what_is_not_checkpointed(table):
    site = table.site
    lower = site.open_shards()[0]
    put_at = []
    for number in range(40):
        began = time.time()
        site.put([(f"key{number}", str(number))])
        put_at.append((began, time.time()))
    iterator = site.aws.reader.iterator(lower.shard_id, StartPoint(IteratorType.TRIM_HORIZON))
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
