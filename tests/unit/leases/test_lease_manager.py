"""One manager, event by event: each test a page of its life."""

import msgspec
import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ENDED_ROWS_STAY_S, ManagerPolicy
from kclrun.model.lease import Halt, Lease
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import (
    Applied,
    ConditionFailed,
    OutcomeUnknown,
    Refused,
    Throttled,
    Unavailable,
)
from tests.unit.leases.manager_life import Answers

replace = msgspec.structs.replace
ME = "kclrun:a:host:nonce"
OTHER = "kclrun:b:host:nonce"
WHOLE = HashRange(0, HASH_KEY_MAX)
HALVES = (HashRange(0, 2**127 - 1), HashRange(2**127, HASH_KEY_MAX))


def row(key="s0", **fields):
    fields = {"checkpoint": TRIM_HORIZON, "hash_range": WHOLE, **fields}
    return Lease(key=key, **fields)


def shard(key="s0", hash_range=WHOLE, *parents, ending=None):
    return Shard(key, hash_range, "1", ending, *parents)


class Life(Answers):
    """A manager under test: `say` feeds an event at `now` and remembers what it answers.

    Looking for offers has a rhythm of its own and tests of its own; it is left out of `said`.
    """

    def __init__(self, **policy):
        self.now = 100.0
        self.core = LeaseManager(ManagerPolicy(me=ME, **policy), lambda: 0.5)
        self.said = ()

    def say(self, event, *, after=0.0):
        self.now += after
        said = self.core.handle(event, self.now)
        unseen = c.FindOffers | c.PublishOthersInSight
        self.said = tuple(x for x in said if not isinstance(x, unseen))
        self.core.check()
        return self.said

    def scan(self, *rows, after=0.0, **fields):
        """Let the next scan come due, and answer it."""
        self.now = max(self.now + after, self.core.next_deadline(self.now))
        self.renew(self.core.handle(e.Ticked(), self.now))
        if self.core._scans.instant is not None:
            self.now = max(self.now, self.core._scans.instant)
            self.renew(self.core.handle(e.Ticked(), self.now))
        return self.say(e.LeasesScanned(rows, **fields))

    def renew(self, commands):
        """Answer the renewals among these commands."""
        self.said = commands
        for change in self.writes(ch.Renew):
            image = self.core.held_lease(change.key).row
            applied = Applied(replace(image, counter=image.counter + 1))
            self.core.handle(e.WriteResolved(change, applied), self.now)

    def resolve(self, change, outcome=None, *, after=0.0):
        return self.say(e.WriteResolved(change, outcome or Applied()), after=after)

    def commands_but_notes(self):
        return [command for command in self.said if not isinstance(command, c.Note)]

    def begin(self, *rows, **fields):
        self.say(e.Started(started_at=5100.0))
        self.say(e.LeasesScanned(rows, **fields))
        if not rows and not fields:
            self.say(e.Ticked(), after=0.15)  # the random wait of who finds the table empty
            self.say(e.LeasesScanned(()))
        return self.said


@pytest.fixture
def life():
    return Life()


def taken(life, before, *, parents_over=True):
    """Take `before` by a scan and let it apply; its parents, if any, are absent."""
    life.begin(before)
    take = life.writes(ch.Take)[0]
    after = replace(before, owner=ME, counter=before.counter + 1)
    life.resolve(take, Applied(after))
    if before.parents and parents_over:
        life.say(e.ParentsRead(before.key, (None,) * len(before.parents)))
    return after


def running(life, before=None):
    """A lease whose process has claimed."""
    after = taken(life, before or row())
    life.say(e.ProcessStarted(after.key, 7))
    life.say(
        e.ProcessReported(after.key, reports.LeaseClaimed(after.counter + 1, after.checkpoint))
    )
    assert life.state(after.key) == "running"
    return replace(after, counter=after.counter + 1)


def crash(life, key="s0", reason="killed by signal 9"):
    return life.say(e.ProcessExited(key, 7, reason), after=1.0)


def restarted(life, image, key="s0"):
    """From a read row to a started process, answering one renewal."""
    life.say(e.RowRead(key, image))
    while not life.asked(c.StartProcess):
        renewals = life.writes(ch.Renew)
        if not renewals:
            life.say(e.Ticked(), after=30.0)
            continue
        image = replace(image, counter=image.counter + 1)
        life.resolve(renewals[0], Applied(image))
    life.say(e.ProcessStarted(key, 7))
    return image


# Beginning: an empty table, a first take.


def test_an_empty_table_that_somebody_else_filled_meanwhile_is_not_listed_from_the_start(life):
    life.say(e.Started())
    life.say(e.LeasesScanned(()))

    life.say(e.Ticked(), after=0.15)
    life.say(e.LeasesScanned((row(owner=OTHER),)))

    assert c.ListShards(with_start=True) not in life.said


def test_an_empty_table_is_filled_and_then_scanned_at_once():
    life = Life(start=LATEST, start_text="LATEST")
    life.begin()

    shards = (shard("a", HALVES[0]), shard("b", HALVES[1]))
    life.say(e.ShardsListed(shards, 777.0, shards), after=1.0)
    creates = life.writes(ch.CreateLease)
    # Trace R2: LATEST is pinned as the row is created, by the service's clock.
    assert [(x.lease.key, x.lease.latest_pinned_at) for x in creates] == [
        ("a", 777.0),
        ("b", 777.0),
    ]
    assert life.core.caught_up.blockers()
    assert c.ScanTable() not in life.resolve(creates[0])
    assert life.resolve(creates[1], ConditionFailed(row("b"))) == (c.ScanTable(),)
    assert life.core.caught_up.blockers()


NATIVE = "CLIENT_VERSION_3X_WITH_ROLLBACK"


def test_a_kcl_3_fleet_that_leaves_the_shared_protocol_is_reported_once_with_what_to_do(life):
    mine = running(life)

    notes = []
    for mode in ("CLIENT_VERSION_UPGRADE_FROM_2X", NATIVE, NATIVE):
        life.scan(mine, kcl3_mode=mode)
        notes += [n for n in life.asked(c.Note) if n.event == "kcl3_native"]

    (reported,) = notes
    assert (reported.level, reported.fields["what"]) == ("error", str([NATIVE]))
    assert "migration tool" in reported.fields["reason"]
    assert life.core.native_mode == NATIVE
    assert life.state() == "running"


def test_a_fleet_that_was_rolled_back_is_silent_and_told_anew_when_it_leaves_again(life):
    mine = running(life)
    for mode in (NATIVE, "CLIENT_VERSION_2X"):
        life.scan(mine, kcl3_mode=mode)

    assert life.core.native_mode is None
    life.scan(mine, kcl3_mode=NATIVE)

    assert "kcl3_native" in life.notes()


def test_a_table_that_lost_all_rows_while_we_ran_is_not_filled_with_guessed_positions(life):
    life.begin(row(owner=OTHER))
    life.say(e.ShardsListed((shard(),), 1.0))
    life.scan()
    assert life.asked(c.ListShards)

    life.say(e.ShardsListed((shard(),), 1.0, (shard(),)))

    assert life.writes() == []
    assert "lost all its rows" in life.asked(c.Note)[0].fields["what"]
    assert life.core.next_deadline(life.now) > life.now + 1.0


def test_a_start_carries_the_counter_of_the_take_and_expires_a_failover_after_its_sending(life):
    life.begin(row(counter=41))
    sent = life.now

    life.resolve(life.writes()[0], Applied(row(owner=ME, counter=42)), after=2.0)

    assert life.asked(c.StartProcess) == [c.StartProcess("s0", 42, sent + 10.0)]


# Takes that do not simply apply.


def test_a_take_with_an_unknown_outcome_is_read_back_and_found_applied(life):
    life.begin(row())
    take = life.writes()[0]

    assert life.resolve(take, OutcomeUnknown("timed out")) == (c.ReadRow("s0"),)
    life.say(e.RowRead("s0", row(owner=ME, counter=1)))

    assert life.asked(c.StartProcess)[0].counter == 1


def test_a_take_still_unknown_is_sent_again_with_the_counter_it_expected(life):
    life.begin(row())
    take = life.writes()[0]
    sent = life.now
    life.resolve(take, OutcomeUnknown("timed out"))

    life.say(e.RowRead("s0", row()), after=1.0)
    assert life.writes() == [take]
    assert life.asked(c.WriteRow)[0].not_before > life.now
    life.resolve(take, ConditionFailed(row(owner=ME, counter=1)), after=0.5)

    # The earliest attempt may be the one that applied, so the permission counts from it [P7].
    assert life.asked(c.StartProcess) == [c.StartProcess("s0", 1, sent + 10.0)]


@pytest.mark.parametrize("outcome", [Throttled("slow"), Unavailable("no route")])
def test_a_take_that_never_arrived_is_tried_three_times_and_left_to_the_next_scan(life, outcome):
    life.begin(row())
    take = life.writes()[0]

    assert life.resolve(take, outcome)[0].change == take
    assert life.resolve(take, outcome)[0].change == take
    assert life.resolve(take, outcome) == ()
    assert life.state() is None
    life.scan(row())
    assert life.writes(ch.Take)


def test_a_refused_write_is_one_error_line_and_slow_repetition(life):
    life.begin(row("a", hash_range=HALVES[0]), row("b", hash_range=HALVES[1]))
    first, second = life.writes(ch.Take)

    life.resolve(first, Refused("AccessDeniedException", "not authorized"))
    assert life.notes() == ["write_refused"]
    assert life.asked(c.WriteRow) == [c.WriteRow(first, life.now + 10.0)]
    life.resolve(second, Refused("AccessDeniedException", "not authorized"))
    assert life.notes() == []


# Parents first.


def test_a_child_is_started_only_on_the_word_of_consistent_reads(life):
    child = row("c", parents=frozenset({"q", "p"}))
    life.begin(child)

    life.resolve(life.writes(ch.Take)[0], Applied(replace(child, owner=ME, counter=1)))
    assert life.asked(c.ReadParents) == [c.ReadParents("c", ("p", "q"))]
    assert life.asked(c.StartProcess) == []  # trace C2: the scan's rows start no child
    life.say(e.ParentsRead("c", (row("p", checkpoint=SHARD_END), row("q"))))
    assert life.asked(c.StartProcess) == []
    assert life.state("c") == "waiting"


def test_a_waiting_child_asks_again_when_a_scan_says_that_its_parents_are_over(life):
    child = row("c", parents=frozenset({"p"}))
    mine = taken(life, child, parents_over=False)
    life.say(e.ParentsRead("c", (row("p"),)))

    life.scan(mine, row("p", owner=OTHER))
    assert life.asked(c.ReadParents) == []
    life.scan(mine, row("p", checkpoint=SHARD_END))
    assert life.asked(c.ReadParents) == [c.ReadParents("c", ("p",))]


def test_a_child_that_waits_here_asks_as_soon_as_its_parent_ends_here(life):
    rows = [row("p", hash_range=WHOLE), row("c", parents=frozenset({"p"}), owner=ME)]
    life.begin(*rows)
    parent = life.writes(ch.Take)[0]
    life.renew(life.say(e.RowRead("c", rows[1])))
    life.resolve(parent, Applied(row("p", owner=ME, counter=1)))
    life.say(e.ProcessReported("p", reports.LeaseClaimed(2, TRIM_HORIZON)))
    life.say(e.ParentsRead("c", (row("p", owner=ME, counter=2),)))

    life.say(e.ProcessReported("p", reports.ShardEnded(("c",))), after=1.0)

    assert life.asked(c.ReadParents) == [c.ReadParents("c", ("p",))]
    assert life.asked(c.ScanTable)


def test_an_answer_about_parents_that_nobody_waits_for_changes_nothing(life):
    life.begin()

    assert life.say(e.ParentsRead("c", (None,))) == ()


# A process dies.


def test_seven_deaths_without_progress_halt_the_lease_where_nobody_else_can_try(life):
    image = running(life)
    for _ in range(6):
        crash(life)
        image = restarted(life, image)
    crash(life, reason="exit status 1")
    life.say(e.RowRead("s0", image))

    halting = life.writes(ch.HaltLease)[0]
    assert "died 7 times in a row" in halting.halt.reason
    assert "exit status 1" in halting.halt.reason
    assert halting.halt.halted_at == pytest.approx(life.now + 5000.0)
    life.resolve(halting, Applied(replace(image, counter=image.counter + 1, halt=halting.halt)))
    assert life.state() == "halted"
    assert life.notes() == ["lease_halted"]


def test_what_a_dead_process_left_in_its_ring_is_ignored_but_for_the_reason_of_a_halt(life):
    image = running(life)
    crash(life)

    assert life.say(e.ProcessReported("s0", reports.Checkpointed(TRIM_HORIZON, 3))) == ()
    assert (
        life.say(e.ProcessReported("s0", reports.ProcessorFailed("process_records", "KeyError", 1)))
        == ()
    )
    life.say(e.RowRead("s0", image))

    assert life.writes(ch.HaltLease)[0].halt.reason == "process_records failed once: KeyError"


@pytest.mark.parametrize(
    "event",
    [
        e.ProcessStarted("s0", 7),
        e.StartFailed("s0", "x"),
        e.ProcessExited("s0", 7, "x"),
        e.RowRead("s0", None),
        e.WriteResolved(ch.Renew("s0", ME, 1), Applied(row())),
        e.WriteResolved(ch.DeleteEnded("s0"), Applied()),
    ],
)
def test_an_event_that_cannot_happen_is_our_bug(life, event):
    life.begin()

    with pytest.raises(InvariantViolation):
        life.say(event)


def test_an_outcome_of_another_write_than_the_one_under_way_is_our_bug(life):
    life.begin(row())

    with pytest.raises(InvariantViolation, match="no write under way"):
        life.resolve(ch.Renew("s0", ME, 1), Applied(row()))


def test_a_success_without_the_row_is_our_bug(life):
    life.begin(row())

    with pytest.raises(InvariantViolation, match="without the row"):
        life.resolve(life.writes()[0], Applied(None))


# Halts.


def test_a_failed_processor_halts_its_lease_and_the_halt_is_renewed(life):
    image = running(life)
    life.say(e.ProcessReported("s0", reports.ProcessorFailed("process_records", "KeyError", 1)))
    crash(life)
    life.say(e.RowRead("s0", image))
    halting = life.writes()[0]
    assert halting == ch.HaltLease("s0", ME, image.counter, halting.halt)
    assert halting.halt.reason == "process_records failed once: KeyError"
    image = replace(image, counter=image.counter + 1, halt=halting.halt)
    life.resolve(halting, Applied(image))

    life.say(e.Ticked(), after=3.5)

    assert life.writes() == [ch.Renew("s0", ME, image.counter)]
    assert life.asked(c.StartProcess) == []


def test_a_checkpoint_forgets_since_when_records_waited_and_a_silent_death_does_not(life):
    running(life)
    held_lease = life.core.held_lease("s0")
    held_lease.waiting_since = 900.5
    life.say(e.ProcessReported("s0", reports.Checkpointed(TRIM_HORIZON, 3)))
    assert held_lease.waiting_since is None

    held_lease.waiting_since = 901.5
    crash(life)
    assert held_lease.waiting_since == 901.5


def test_a_halt_with_an_unknown_outcome_that_did_not_land_is_written_again(life):
    image = running(life)
    life.say(e.ProcessReported("s0", reports.ProcessorFailed("process_records", "KeyError", 1)))
    crash(life)
    life.say(e.RowRead("s0", image))
    life.resolve(life.writes()[0], OutcomeUnknown("reset"))

    moved = replace(image, counter=image.counter + 1)
    life.say(e.RowRead("s0", moved))

    assert life.writes()[0].seen_counter == moved.counter


def test_a_halted_row_that_was_ours_all_along_stays_halted(life):
    halted = row(owner=ME, counter=4, halt=Halt("poison", 1.0))
    life.begin(halted)
    assert life.asked(c.ReadRow)

    life.say(e.RowRead("s0", halted))

    assert life.state() == "halted"
    assert life.writes() == [ch.Renew("s0", ME, 4)]


# Renewals that do not simply apply.


def waiting(life):
    mine = taken(life, row("s0", parents=frozenset({"p"})), parents_over=False)
    life.say(e.Ticked(), after=3.4)
    return mine, life.writes(ch.Renew)[0]


def test_an_unmoved_counter_means_that_the_renewal_is_still_unknown(life):
    mine, renewal = waiting(life)
    life.resolve(renewal, OutcomeUnknown("reset"))

    life.say(e.RowRead("s0", mine))

    assert life.writes() == [renewal]


def test_renewals_settled_by_the_row_alone_are_sent_slower_each_time(life):
    mine, renewal = waiting(life)
    for counter in (2, 3, 4):
        life.resolve(renewal, OutcomeUnknown("reset"))
        life.say(e.RowRead("s0", replace(mine, counter=counter)))
        if not life.writes():
            life.say(e.Ticked(), after=3.4)
        renewal = life.writes()[0]

    assert life.asked(c.WriteRow)[0].not_before > life.now


# Scans: adoption, former owners, differences, rows that are not ours to judge.


def test_live_owners_with_other_settings_are_one_warning_each(life):
    theirs = row(owner=OTHER, failover_s=20.0, start="LATEST")
    life.begin(theirs)
    assert life.notes() == ["failover_differs", "start_differs"]

    life.scan(replace(theirs, counter=1))
    assert life.notes() == []


def test_a_difference_that_went_away_and_came_back_is_noted_again(life):
    theirs = row(owner=OTHER, failover_s=20.0)
    life.begin(theirs)
    life.scan(replace(theirs, counter=1, failover_s=10.0))
    assert life.notes() == []

    life.scan(replace(theirs, counter=2))

    assert life.notes() == ["failover_differs"]


def test_leases_that_nobody_takes_because_all_are_full_are_named_once():
    life = Life(leases_max=1)
    mine = running(life, row("a", hash_range=HALVES[0]))
    free = row("b", hash_range=HALVES[1])
    life.scan(mine, free)
    life.now += 40.0

    life.scan(mine, free)
    assert life.notes() == ["leases_left_unread"]
    assert life.asked(c.Note)[0].fields["keys"] == "b"
    life.scan(mine, free)
    assert "leases_left_unread" not in life.notes()


def test_broken_and_foreign_rows_are_noted_once_and_stop_nothing(life):
    life.begin(row(), broken=("bad-1",), foreign=3)
    assert life.writes(ch.Take)
    assert "rows_broken" in life.notes()

    life.scan(row(owner=OTHER), broken=("bad-1",), reasons={"bad-1": "checkpoint is missing"})
    assert life.notes() == []


def test_a_broken_row_is_noted_with_its_reason(life):
    life.begin(row(), broken=("bad-1", "bad-2"), reasons={"bad-1": "checkpoint is missing"})

    (note,) = [note for note in life.asked(c.Note) if note.event == "rows_broken"]

    assert note.fields["keys"] == "bad-1, bad-2"
    assert note.fields["reason"] == "bad-1: checkpoint is missing"


# Listing, creating and deleting.


def test_alone_a_manager_lists_after_every_scan_and_never_twice_at_once(life):
    life.begin(row(owner="java"))
    assert life.asked(c.ListShards) == [c.ListShards(with_start=False)]

    life.scan(row(owner="java", counter=1))
    assert life.asked(c.ListShards) == []
    life.say(e.ShardsListed((shard(),), 1.0))
    life.scan(row(owner="java", counter=2))
    assert life.asked(c.ListShards)


def crowd(**fields):
    """Ten kclrun owners with a tenth of the hash keys each: nobody needs to list."""
    width = (HASH_KEY_MAX + 1) // 10 + 1
    return [
        row(
            f"s{n}",
            owner=f"kclrun:z:h{n}:n",
            hash_range=HashRange(n * width, min(HASH_KEY_MAX, (n + 1) * width - 1)),
            **fields,
        )
        for n in range(10)
    ]


def test_in_a_crowd_a_manager_lists_only_when_chance_or_the_table_says_so(life):
    life.begin(*crowd())
    assert life.asked(c.ListShards) == []

    hole = crowd(counter=1)[1:]
    life.scan(*hole)
    assert life.asked(c.ListShards)


def test_a_missing_child_of_an_ended_parent_is_created_under_its_condition(life):
    ended = row("p", checkpoint=SHARD_END)
    life.begin(ended)
    shards = (shard("p", WHOLE, ending="9"), shard("a", HALVES[0], "p"), shard("b", HALVES[1], "p"))

    life.say(e.ShardsListed(shards, 1.0))

    healing = life.writes(ch.CreateChildren)[0]
    assert [child.key for child in healing.children] == ["a", "b"]
    assert healing.parents == (ch.EndedParent("p"),)  # trace C4: while it still stands
    assert life.resolve(healing, OutcomeUnknown("reset"), after=1.0) == (c.ScanTable(),)
    assert life.notes() == [], "nobody knows yet that it was done"


@pytest.mark.parametrize("begun_at", [TRIM_HORIZON, ExtendedSequenceNumber("7"), SHARD_END])
def test_a_shard_whose_children_have_begun_is_not_created_again(life, begun_at):
    # Somebody deleted the row of `a`, which had ended: its records came before those of its child.
    begun = row("c", checkpoint=begun_at, hash_range=HALVES[0], parents=frozenset({"a"}))
    life.begin(row("p", checkpoint=SHARD_END), row("b", hash_range=HALVES[1], owner=OTHER), begun)
    shards = (
        shard("p", WHOLE, ending="9"),
        shard("a", HALVES[0], "p", ending="9"),
        shard("b", HALVES[1], "p"),
        shard("c", HALVES[0], "a"),
    )

    life.say(e.ShardsListed(shards, 1.0))

    created = [child.key for made in life.writes(ch.CreateChildren) for child in made.children]
    assert created == (["a"] if begun_at == TRIM_HORIZON else [])


def test_what_was_healed_is_reported_once_it_was_done(life):
    life.begin(row("p", checkpoint=SHARD_END))
    shards = (shard("p", WHOLE, ending="9"), shard("a", HALVES[0], "p"), shard("b", HALVES[1], "p"))
    life.say(e.ShardsListed(shards, 1.0))

    life.resolve(life.writes(ch.CreateChildren)[0])

    assert life.notes() == ["children_healed"]


@pytest.mark.parametrize("outcome", [Refused("AccessDenied", "no"), Throttled("slow")])
def test_a_creation_that_was_refused_or_put_off_asks_for_no_scan_of_its_own(life, outcome):
    life.begin()
    life.say(e.ShardsListed((shard("a", WHOLE),), 1.0, (shard("a", WHOLE),)))
    creation = life.writes(ch.CreateLease)[0]

    commands = life.resolve(creation, outcome, after=1.0)

    assert c.ScanTable() not in commands
    assert "lease_created" not in life.notes()


def test_ended_rows_are_deleted_once_and_only_if_cleanup_is_on():
    rows = (
        row("p", checkpoint=SHARD_END, children=frozenset({"a"})),
        row("a", checkpoint=ExtendedSequenceNumber("5"), owner=OTHER),
    )
    keep, clean = Life(cleanup=False), Life()

    keep.begin(*rows)
    assert keep.writes() == []
    clean.begin(*rows)
    assert clean.writes(ch.DeleteEnded) == []
    ended_at = clean.now
    while not clean.writes(ch.DeleteEnded) and clean.now < ended_at + 2 * ENDED_ROWS_STAY_S:
        clean.scan(*rows)
    assert clean.writes(ch.DeleteEnded) == [ch.DeleteEnded("p")]
    clean.scan(*rows)
    assert clean.writes(ch.DeleteEnded) == []  # the first is still under way
    clean.resolve(ch.DeleteEnded("p"), Throttled("slow"))
    clean.scan(*rows)
    assert clean.writes(ch.DeleteEnded) == [ch.DeleteEnded("p")]


def test_the_ended_row_of_a_process_that_still_lives_is_not_deleted(life):
    mine = running(life)
    life.say(e.ProcessReported("s0", reports.ShardEnded(("a",))))
    rows = (
        replace(mine, checkpoint=SHARD_END, children=frozenset({"a"})),
        row("a", checkpoint=ExtendedSequenceNumber("5"), owner=OTHER),
    )

    life.scan(*rows)

    assert life.writes() == []


def test_a_trimmed_row_is_deleted_with_owner_and_counter_as_seen(life):
    rows = (row("p", owner="java", counter=3), row("a", owner=OTHER))
    life.begin(*rows)
    life.say(e.ShardsListed((shard("a"),), 1.0))
    assert life.writes() == []
    life.scan(*rows, after=5.0)
    life.say(e.ShardsListed((shard("a"),), 1.0), after=5.0)

    assert life.writes() == [ch.DeleteTrimmed("p", "java", 3)]
    life.resolve(ch.DeleteTrimmed("p", "java", 3))
    assert "trimmed_row_deleted" in life.notes()


def test_with_cleanup_off_not_even_a_trimmed_row_is_deleted():
    life = Life(cleanup=False)
    rows = (row("p", owner="java", counter=3), row("a", owner=OTHER))
    life.begin(*rows)
    for _ in range(4):
        life.say(e.ShardsListed((shard("a"),), 1.0))
        assert life.writes() == []
        life.scan(*rows, after=20.0)


def test_a_refused_creation_is_one_error_line(life):
    life.begin()
    life.say(e.ShardsListed((shard(),), 1.0, (shard(),)))

    life.resolve(life.writes()[0], Refused("AccessDeniedException", "not authorized"))

    assert "audit_refused" in life.notes()


def test_a_listing_before_any_scan_or_during_a_drain_creates_nothing():
    early, late = Life(), Life()
    early.say(e.Started())
    late.begin(row())
    late.say(e.DrainRequested("SIGTERM"))

    assert early.say(e.ShardsListed((shard("x"),), 1.0)) == ()
    assert late.say(e.ShardsListed((shard("x"),), 1.0)) == ()


# Shard ends.


def test_after_a_shard_end_the_children_are_taken_first_and_without_waiting_for_a_scan():
    life = Life(leases_max=1)
    running(life)
    life.say(e.ProcessReported("s0", reports.ShardEnded(("a", "b"))), after=1.0)
    assert life.asked(c.ScanTable)
    assert life.core.caught_up.blockers()

    parent = row("s0", owner=ME, counter=9, checkpoint=SHARD_END)
    child = row("b", parents=frozenset({"s0"}))
    life.say(e.LeasesScanned((row("x"), parent, row("y"), child, row("z"))))

    assert [take.key for take in life.writes(ch.Take)] == ["b"]


def test_shard_ends_in_quick_succession_do_not_scan_more_than_four_times_a_second(life):
    running(life)
    life.say(e.ProcessReported("s0", reports.ShardEnded(("a",))), after=1.0)
    life.say(e.LeasesScanned(()), after=0.01)
    crash_free = life.say(e.FormerOwnersProvenGone(frozenset()), after=0.01)

    assert not [x for x in crash_free if isinstance(x, c.ScanTable)]
    assert life.core.next_deadline(life.now) == pytest.approx(life.now + 0.23)
    life.say(e.Ticked(), after=0.24)
    assert life.asked(c.ScanTable)


def test_a_scan_that_began_before_the_end_does_not_make_us_forget_the_children():
    life = Life(leases_max=1)
    running(life)
    life.say(e.Ticked(), after=10.0)
    assert life.asked(c.ScanTable)
    life.say(e.ProcessReported("s0", reports.ShardEnded(("zz",))), after=1.0)

    life.say(e.LeasesScanned((row("s0", owner=ME, counter=9),)))
    life.say(e.Ticked(), after=0.3)
    parent = row("s0", owner=ME, counter=9, checkpoint=SHARD_END)
    child = row("zz", parents=frozenset({"s0"}))
    life.say(e.LeasesScanned((parent, row("x"), child, row("y"))))

    assert [take.key for take in life.writes(ch.Take)] == ["zz"]


# Draining.


def test_a_drain_tells_processes_releases_idle_rows_and_finishes_when_all_is_settled(life):
    before = [row("a", hash_range=HALVES[0]), row("b", hash_range=HALVES[1])]
    before[1] = replace(before[1], halt=Halt("poison", 1.0))
    life.begin(*before)
    for take in life.writes(ch.Take):
        life.resolve(take, Applied(replace(life.core.leases[take.key], owner=ME, counter=1)))
    life.say(e.ProcessReported("a", reports.LeaseClaimed(2, TRIM_HORIZON)))

    life.say(e.DrainRequested("SIGTERM"))
    assert life.asked(c.DrainProcess) == [c.DrainProcess("a", "SIGTERM")]
    release = life.writes()[0]
    assert release == ch.Release("b", ME, 1, TRIM_HORIZON, TRIM_HORIZON)
    assert life.core.is_draining
    life.resolve(release, Applied(row("b", counter=2)))
    assert life.notes() == ["lease_released"]
    life.say(e.ProcessReported("a", reports.LeaseReleased(TRIM_HORIZON)))
    assert life.asked(c.Finish) == []
    crash(life, "a")

    assert life.asked(c.Finish)
    assert life.core.is_finished
    assert life.say(e.LeasesScanned((row(),))) == ()


def test_a_process_that_dies_in_a_drain_leaves_its_row_to_be_released(life):
    image = running(life)
    life.say(e.DrainRequested("SIGTERM"))
    crash(life)

    life.say(e.RowRead("s0", image))

    assert life.writes() == [ch.Release("s0", ME, image.counter, TRIM_HORIZON, TRIM_HORIZON)]


def test_a_broken_row_in_our_hands_is_looked_at_each_second_until_it_is_repaired(life):
    image = running(life)
    crash(life)
    assert life.asked(c.ReadRow)

    life.say(e.RowUnreadable("s0", "checkpoint: TRIM_HORIZN"))
    assert life.asked(c.ReadRow) == [c.ReadRow("s0", life.now + 1.0)]

    restarted(life, image)
    assert life.state() == "starting"


def test_a_broken_row_in_our_hands_ends_a_drain_at_once(life):
    running(life)
    life.say(e.DrainRequested("SIGTERM"))
    crash(life)

    life.say(e.RowUnreadable("s0", "checkpoint: TRIM_HORIZN"))

    assert life.notes() == ["broken_row_left"]
    assert life.asked(c.Finish)
    assert life.core.is_finished


def test_a_broken_row_found_before_the_drain_holds_it_up_until_the_next_look_alone(life):
    running(life)
    crash(life)
    life.say(e.RowUnreadable("s0", "checkpoint: TRIM_HORIZN"))

    life.say(e.DrainRequested("SIGTERM"))
    assert life.asked(c.ReadRow) == []
    life.say(e.RowUnreadable("s0", "checkpoint: TRIM_HORIZN"), after=1.0)

    assert life.core.is_finished


def test_a_renewal_refused_by_a_broken_row_is_tried_again_each_second(life):
    taken(life, row(parents=frozenset({"p"})), parents_over=False)
    life.say(e.Ticked(), after=4.0)
    renewal = life.writes(ch.Renew)[0]

    life.resolve(renewal, Refused("BrokenRow", "checkpoint: TRIM_HORIZN"))

    assert life.asked(c.WriteRow) == [c.WriteRow(renewal, life.now + 1.0)]


def test_an_unknown_take_is_settled_before_the_end_of_a_drain(life):
    life.begin(row())
    take = life.writes()[0]
    life.resolve(take, OutcomeUnknown("timed out"))
    life.say(e.DrainRequested("SIGTERM"))

    life.say(e.RowRead("s0", row()))
    assert life.writes() == [take]  # it may still land: only a moved counter settles it
    life.resolve(take, Throttled("slow"))
    assert life.writes() == [take]
    life.resolve(take, ConditionFailed(row(owner=OTHER, counter=1)))

    assert life.asked(c.Finish)


def test_a_throttled_take_is_given_up_in_a_drain(life):
    life.begin(row())
    take = life.writes()[0]
    life.say(e.DrainRequested("SIGTERM"))

    life.resolve(take, Throttled("slow"))

    assert life.asked(c.Finish)


def test_a_release_whose_position_somebody_moved_is_issued_again_from_the_row(life):
    life.begin(row())
    life.resolve(life.writes()[0], Applied(row(owner=ME, counter=1, halt=Halt("x", 1.0))))
    life.say(e.DrainRequested("SIGTERM"))
    late = ExtendedSequenceNumber("55")

    life.resolve(life.writes()[0], ConditionFailed(row(owner=ME, counter=1, checkpoint=late)))

    assert life.writes() == [ch.Release("s0", ME, 1, late, late)]


def test_a_drain_releases_a_row_that_a_scan_under_way_shows_as_ours(life):
    mine = running(life)
    life.say(e.Ticked(), after=10.0)
    life.say(e.DrainRequested("SIGTERM"))

    life.say(e.LeasesScanned((mine, row("b", owner=ME, counter=3), row("free"))))

    assert life.asked(c.ReadRow) == [c.ReadRow("b")]
    assert life.writes(ch.Take) == []
    life.say(e.RowRead("b", row("b", owner=ME, counter=3)))
    assert life.writes(ch.Release)[0].key == "b"


# Caught up.


def test_children_that_nobody_took_yet_stand_in_the_way():
    life = Life(leases_max=1)
    running(life)
    life.say(e.ShardsListed((shard(),), 1.0))
    life.say(e.ProcessReported("s0", reports.ShardEnded(("a", "b"))), after=1.0)
    crash(life)
    parent = row("s0", owner=ME, counter=9, checkpoint=SHARD_END)
    life.say(e.LeasesScanned((parent, row("a", parents=frozenset({"s0"})), row("b"))))

    assert life.core.caught_up.blockers() == (
        "children of a shard that just ended are not taken yet: b",
    )


def test_an_empty_table_is_filled_only_from_the_listing_made_for_it(life):
    life.begin()

    life.say(e.ShardsListed((shard(),), 1.0))

    assert life.commands_but_notes() == []


def test_nothing_blocks_once_every_lease_runs_or_ended(life):
    assert life.core.caught_up.blockers()
    assert life.core.owners == {ME}
    assert dict(life.core.leases) == {}
    running(life)
    assert life.core.caught_up.blockers()  # not listed yet

    life.say(e.ShardsListed((shard(),), 1.0))

    assert life.core.caught_up.blockers() == ()
    assert life.core.owners == {ME}


def test_what_stands_in_the_way_is_named():
    life = Life(leases_max=1)
    rows = (
        row("p", checkpoint=SHARD_END, children=frozenset({"lost"}), hash_range=None),
        row("a", halt=Halt("poison", 1.0)),
        row("b", owner="java"),
    )
    life.begin(*rows, row("c", parents=frozenset({"b"})), broken=("bad",))
    life.say(e.ShardsListed((), 1.0))
    life.resolve(life.asked(c.WriteRow)[0].change) if life.writes(ch.Take) else None

    words = "\n".join(life.core.caught_up.blockers())

    assert "a is taking" in words
    assert "c is not being read" in words
    assert "lost, a child of p, has no lease" in words
    assert "bad has a row that cannot be read" in words
    assert "b is of java, not seen to renew it yet" in words


def test_two_writers_among_us_are_found_out(life):
    life.begin(row())
    life.core._audits._auditors[""].under_way["s0"] = ch.DeleteEnded("s0")

    with pytest.raises(InvariantViolation, match="two writers among us"):
        life.core.check()


def test_finished_with_something_left_is_found_out(life):
    life.begin(row())
    life.core.is_finished = True

    with pytest.raises(InvariantViolation, match="finished with"):
        life.core.check()


def test_a_child_that_waits_gives_its_place_to_work_that_nobody_else_has_room_for():
    """Somebody deleted the row of its parent, and it was made again when we had the child."""
    child = row("child", owner=ME, counter=4, parents=frozenset({"parent"}))
    parent, others = row("parent"), row("other", owner=OTHER, counter=1)
    life = Life(failover_s=10.0, leases_max=1)
    life.say(e.Started(started_at=5100.0))
    life.say(e.LeasesScanned((child, parent, others)))
    life.say(e.RowRead("child", child))
    life.resolve(life.writes(ch.Renew)[0], Applied(child := replace(child, counter=5)))
    life.say(e.ParentsRead("child", (parent,)))
    assert life.state("child") == "waiting"

    began = life.now
    while not life.writes(ch.Release):
        assert life.writes(ch.Take) == []
        assert life.now - began < 3 * 10.0 + 2 * 5.0, "three failovers and a scan"
        others = replace(others, counter=others.counter + 1)
        life.scan(life.core.held_lease("child").row, parent, others)

    assert life.now - began >= 3 * 10.0
    life.resolve(life.writes(ch.Release)[0], Applied(child := replace(child, owner=None)))
    life.scan(child, parent, replace(others, counter=others.counter + 1))
    assert [take.key for take in life.writes(ch.Take)] == ["parent"]


def test_a_child_that_waits_keeps_its_place_while_others_take_the_work():
    child = row("child", owner=ME, counter=4, parents=frozenset({"parent"}))
    life = Life(failover_s=10.0, leases_max=1)
    life.say(e.Started(started_at=5100.0))
    life.say(e.LeasesScanned((child, row("parent"))))
    life.say(e.RowRead("child", child))
    life.resolve(life.writes(ch.Renew)[0], Applied(replace(child, counter=5)))
    life.say(e.ParentsRead("child", (row("parent"),)))

    for counter in range(1, 12):
        taken = row("parent", owner=OTHER, counter=counter)
        life.scan(life.core.held_lease("child").row, taken)
        assert life.writes(ch.Release) == []

    assert life.state("child") == "waiting"
