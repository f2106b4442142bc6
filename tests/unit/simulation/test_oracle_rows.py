"""What the oracles allow of a lease row, and the nearest thing that they refuse."""

import msgspec
import pytest

from kclrun.model.lease import OFFERED, Lease
from kclrun.model.sequence import AT_TIMESTAMP, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange
from kclrun.protocol.writes import (
    Ask,
    Checkpoint,
    Claim,
    CreateChildren,
    CreateLease,
    Decline,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    HaltLease,
    HandOver,
    LateCheckpoint,
    NameChildren,
    Offer,
    Release,
    Renew,
    ResumeLease,
    Take,
    Withdraw,
)
from kclrun.simulation.stories import RuleBroken
from tests.support.oracles.row_history import RowHistory, RowLives
from tests.support.tables import over_rows

ME, OTHER, JAVA = "kclrun:a:h:1", "kclrun:b:h:2", "java-1"
MANAGER, FIRST, SECOND, OTHERS = "a:h:1", "a:h:1/1", "a:h:1/2", "b:h:2"
LOW, AT, HIGH = (ExtendedSequenceNumber(number) for number in ("100", "200", "300"))
ROW = Lease(key="s0", checkpoint=AT, owner=ME, counter=5)
FOREIGN = object()  # a write of another program


def row(**fields):
    return msgspec.structs.replace(ROW, **fields)


def owners(kind):
    """A write as owner, of what its kind has beside owner and counter. No rule reads the rest."""
    rest = {Checkpoint: (AT, AT), Release: (AT, AT), Offer: (AT, AT), End: (AT,)}
    return kind("s0", ME, 5, *rest.get(kind, (None,) if kind in {NameChildren, HaltLease} else ()))


NEXT = row(counter=6)
BACK = row(checkpoint=LOW, counter=6)
PASSED_ON = Offer("s0", ME, 5, AT, AT)
MINE = row(owner=OFFERED, offered_to=ME)
ON_OFFER = row(owner=OFFERED, counter=6)
DECLINED = Decline("s0", ME, 5)
TAKEN = Take("s0", ME, OTHER, 5, 10.0, "TRIM_HORIZON")


@over_rows(("sender", "change", "before", "allowed", "refused"), [
        # As owner: of its own row, as it was seen, one count further.
        *[
            (FIRST, owners(kind), ROW, NEXT, after)
            for kind in (Claim, Renew, Checkpoint, NameChildren, End, Release, Offer, HaltLease)
            for after in (ROW, row(counter=7), row(counter=4))
        ],
        (MANAGER, TAKEN, row(owner=OTHER), NEXT, row(counter=7)),
        (MANAGER, DECLINED, MINE, ON_OFFER, NEXT),
        (MANAGER, DECLINED, MINE, ON_OFFER, row(owner=OFFERED)),
        # These leave owner and counter as they are.
        *[
            (OTHERS, change, ROW, row(checkpoint=HIGH), after)
            for change in (
                Ask("s0", OTHER, ME, 0.0),
                Withdraw("s0", OTHER),
                LateCheckpoint("s0", OTHER, AT, HIGH),
                ResumeLease("s0"),
            )
            for after in (NEXT, row(owner=OTHER), row(owner=OTHER, counter=6))
        ],
        # Positions never go back.
        (FIRST, owners(Checkpoint), ROW, row(checkpoint=HIGH, counter=6), BACK),
        (FIRST, owners(Renew), ROW, NEXT, BACK),
        # Another program may write what it likes, and raises the counter if it moves the row.
        (JAVA, FOREIGN, ROW, ROW, row(counter=4)),
        (JAVA, FOREIGN, ROW, NEXT, row(owner=JAVA)),
        (JAVA, FOREIGN, ROW, row(owner=JAVA, counter=6), row(owner=JAVA, counter=4)),
        (JAVA, FOREIGN, ROW, row(checkpoint=HIGH, counter=6), row(checkpoint=HIGH)),
        # Rows that come and go.
        (MANAGER, CreateLease(ROW), None, ROW, row(checkpoint=SHARD_END)),
    ])  # fmt: skip
def test_a_write_leaves_what_its_kind_may_leave(sender, change, before, allowed, refused):
    RowHistory().written(sender, change, before, allowed)
    with pytest.raises(RuleBroken, match=r"I5|I2:"):
        RowHistory().written(sender, change, before, refused)


@over_rows(("sender", "change", "allowed", "refused", "after"), [
        *[
            (FIRST, owners(kind), ROW, before, NEXT)
            for kind in (Claim, Renew, Offer)
            for before in (row(owner=OTHER), row(owner=None), row(counter=4), row(counter=6))
        ],
        (MANAGER, TAKEN, row(owner=OTHER), ROW, NEXT),
        (MANAGER, Take("s0", ME, None, 5, 10.0, ""), row(owner=None), row(owner=OTHER), NEXT),
        (MANAGER, DECLINED, MINE, row(owner=OFFERED), ON_OFFER),
        (MANAGER, DECLINED, MINE, row(offered_to=ME), ON_OFFER),
        (MANAGER, DeleteTrimmed("s0", ME, 5), ROW, NEXT, None),
        (MANAGER, DeleteTrimmed("s0", ME, 5), ROW, row(owner=OTHER), None),
    ])  # fmt: skip
def test_a_write_applies_only_to_the_row_that_its_sender_has_seen(
    sender, change, allowed, refused, after
):
    RowHistory().written(sender, change, allowed, after)
    with pytest.raises(RuleBroken, match="I5"):
        RowHistory().written(sender, change, refused, after)


def test_the_row_of_an_ended_shard_is_deleted_whatever_was_seen_of_it():
    RowHistory().written(OTHERS, DeleteEnded("s0"), ROW, None)


@over_rows(
    ("sender", "change", "is_allowed"),
    [
        (OTHERS, PASSED_ON, True),
        (OTHERS, Offer("s0", ME, 5, HIGH, AT), False),
        (OTHERS, Offer("s0", ME, 5, AT, AT, OTHER), False),
        (OTHERS, Release("s0", ME, 5, AT, AT), False),
        (OTHERS, Renew("s0", ME, 5), False),
        ("b:h:2/1", Claim("s0", ME, 5), False),
        (MANAGER, Renew("s0", ME, 5), True),
        (FIRST, Renew("s0", ME, 5), True),
    ],
)
def test_only_a_silent_owners_whole_row_is_offered_in_its_name(sender, change, is_allowed):
    if is_allowed:
        RowHistory().written(sender, change, ROW, NEXT)
        return
    with pytest.raises(RuleBroken, match=r"I5: .* wrote in the name of"):
        RowHistory().written(sender, change, ROW, NEXT)


CLAIMED = (FIRST, owners(Claim), ROW, NEXT)
HANDED_OVER = HandOver("s0", OTHER, ME, 5, AT, AT)


@over_rows(
    ("writes", "allowed", "refused"),
    [
        ([], SECOND, None),
        ([CLAIMED], FIRST, SECOND),
        ([CLAIMED, (SECOND, owners(Claim), ROW, NEXT)], SECOND, FIRST),
        ([CLAIMED, (MANAGER, owners(Renew), ROW, NEXT)], MANAGER, FIRST),
        ([CLAIMED, (MANAGER, TAKEN, row(owner=OTHER), NEXT)], MANAGER, FIRST),
        ([CLAIMED, (FIRST, owners(Renew), ROW, NEXT)], MANAGER, SECOND),
        ([CLAIMED, (OTHERS, Ask("s0", OTHER, ME, 0.0), ROW, ROW)], FIRST, SECOND),
        ([CLAIMED, (OTHERS, HANDED_OVER, ROW, NEXT)], FIRST, SECOND),
        ([CLAIMED, (OTHERS, HANDED_OVER, ROW, row(counter=4))], FIRST, SECOND),
        ([CLAIMED, (JAVA, FOREIGN, ROW, NEXT)], SECOND, None),
        ([CLAIMED, (MANAGER, DeleteEnded("s0"), ROW, None)], SECOND, None),
    ],
)
def test_after_a_claim_or_a_write_of_the_manager_no_other_lease_process_writes(
    writes, allowed, refused
):
    def history():
        made = RowHistory()
        for each in writes:
            made.written(*each)
        return made

    history().written(allowed, owners(Renew), ROW, NEXT)
    if refused is not None:
        with pytest.raises(RuleBroken, match=f"I5: {refused} wrote a Renew after"):
            history().written(refused, owners(Renew), ROW, NEXT)


# I11: two shards were merged, and the merged one split; one more shard has no family.

PARENTS = {"p": (), "q": (), "m": ("p", "q"), "x": ("m",), "y": ("m",), "z": ()}


class Family:
    """The shards' graph as `ShardStream` has it, and moves of their rows."""

    def __init__(self):
        self.now, self.expired, self.rows, self.read_out = 0.0, set(), {}, set()
        self.lives = RowLives(self, lambda: self.now, self.rows.get, self.read_out.__contains__)

    def parents_of(self, key):
        return PARENTS[key]

    def children_of(self, key):
        whole = HashRange(0, HASH_KEY_MAX)
        return [ChildShard(each, of, whole) for each, of in PARENTS.items() if key in of]

    def is_known(self, key):
        return key in PARENTS

    def is_expired(self, key):
        return key in self.expired

    def holds(self, key, _):
        return key in PARENTS and key not in self.expired

    def play(self, moves):
        answer = None
        for move in filter(None, moves.split(", ")):
            name, *words = move.split(" ")
            answer = getattr(self, name)(*words)
        return answer

    def row(self, key, at="start", **fields):
        places = {"start": TRIM_HORIZON, "time": AT_TIMESTAMP, "middle": AT, "end": SHARD_END}
        parents = frozenset(PARENTS.get(key, ()))
        return Lease(**{"key": key, "checkpoint": places[at], "parents": parents, **fields})

    def created(self, key, at="start", **fields):
        self.rows[key] = row = self.row(key, at, **fields)
        return self.lives.created(CreateLease(row), row)

    def orphaned(self, key):
        return self.created(key, parents=frozenset("z"))

    def rewritten(self, key, at="middle"):
        return self.created(key, at, owner=ME)

    def born(self, *keys):
        for key in keys:
            self.rows[key] = row = self.row(key)
            self.lives.created(CreateChildren((row,), (EndedParent("p"),)), row)

    def moved(self, key, at="middle"):
        self.rows[key] = self.row(key, at)
        self.lives.moved(self.rows[key])

    def out(self, *keys):
        self.read_out.update(keys)

    def trimmed(self, key):
        self.expired.add(key)

    def cleaned(self, key):
        self.lives.deleted(DeleteEnded(key), self.rows.pop(key))

    def forgotten(self, key):
        self.lives.deleted(DeleteTrimmed(key, None, 0), self.rows.pop(key, None) or self.row(key))

    def lost(self, key):
        """Its row is deleted from outside."""
        self.rows.pop(key, None)
        self.lives.vanished(key)


BEGUN = "created p, moved p, moved p end, created q, moved q, moved q end, out p q, born m, moved m"
ENDED = f"{BEGUN}, cleaned p, cleaned q, moved m end, out m"
SPLIT = f"{BEGUN}, moved m end, out m, born x y, moved x, moved y"


@over_rows(("story", "allowed", "refused"), [
        ("", "created z", "created k"),
        ("", "created z time", "created z middle"),
        ("", "created p", "orphaned p"),
        ("", "created m", "orphaned m"),
        ("created z", "created z", "moved z, created z"),
        ("created z, moved z time", "created z", "moved z, created z"),
        # A child comes when one of its parents was read to its end, or is gone.
        ("created p, created q", "out p, born m", "born m"),
        ("created p, created q", "out q, born m", "out x, born m"),
        ("created p, created q", "trimmed q, born m", "trimmed z, born m"),
        # A row is deleted once it has ended, its children have begun, and its parents have no row.
        (BEGUN, "cleaned p", "cleaned m"),
        ("created z, moved z end", "trimmed z, forgotten z", "cleaned z"),
        ("created z", "trimmed z, forgotten z", "forgotten z"),
        (f"{SPLIT}, cleaned p", "cleaned q, cleaned m", "cleaned m"),
        (SPLIT, "cleaned p, cleaned q, cleaned m", "cleaned m"),
        (f"{ENDED}, born x y, moved x", "moved y, cleaned m", "cleaned m"),
        # A row that was deleted comes again only after a deletion from outside, and so do its kin.
        (f"{BEGUN}, cleaned p", "lost p, created p", "created p"),
        (f"{SPLIT}, cleaned p", "lost x, created p", "lost z, created p"),
        (f"{SPLIT}, cleaned p", "lost m, created p", "lost q, created p"),
        (f"{SPLIT}, lost p, created p", "created m", "created q"),
        (f"{SPLIT}, lost p, created p", "created x", "created q"),
        (f"{SPLIT}, cleaned p, lost p, created p, moved p end", "cleaned p", "created z middle"),
        (f"{SPLIT}", "lost y, created m", "created m"),
        # Its owner writes it again where it was, once.
        (f"{BEGUN}, lost m", "rewritten m", "created m middle"),
        (f"{BEGUN}, lost m", "rewritten m", "rewritten m, rewritten m"),
        (BEGUN, "lost m, rewritten m", "rewritten m"),
    ])  # fmt: skip
def test_a_row_comes_and_goes_when_it_may(story, allowed, refused):
    good, bad = Family(), Family()
    good.play(story)
    bad.play(story)

    good.play(allowed)
    *before, last = refused.split(", ")
    bad.play(", ".join(before))
    with pytest.raises(RuleBroken, match="I11"):
        bad.play(last)


@pytest.mark.parametrize(
    ("story", "is_again"),
    [
        ("created z", False),
        (f"{BEGUN}, lost p, created p", True),
        (f"{BEGUN}, lost m, rewritten m", False),
        (f"{BEGUN}, lost m, created p", True),
    ],
)
def test_only_after_a_deletion_from_outside_a_shard_is_read_again_from_its_beginning(
    story, is_again
):
    assert Family().play(story) is is_again


def test_an_ended_shard_whose_row_came_again_has_not_ended():
    family = Family()
    family.play(f"{SPLIT}, lost p, lost x")
    assert family.lives.ended == {"p", "q", "m"}
    family.now = 60.0

    family.play("created p, created x")

    assert family.lives.ended == {"q", "m"}
    assert family.lives.came_again_s == {"p": 60.0}


@over_rows(
    ("story", "key", "is_absent", "is_vanished"),
    [
        (BEGUN, "p", False, False),
        (f"{BEGUN}, cleaned p", "p", True, False),
        (f"{BEGUN}, cleaned p", "q", False, False),
        (f"{BEGUN}, lost m", "m", True, True),
        (f"{BEGUN}, lost m, rewritten m", "m", False, False),
        (f"{BEGUN}, lost m", "p", False, False),
        (f"{BEGUN}, cleaned p, lost p, created p", "p", True, True),
        (f"{BEGUN}, cleaned p, lost m, created p", "p", False, False),
        (f"{BEGUN}, trimmed q", "q", True, False),
    ],
)
def test_a_shard_without_a_row_need_not_be_read_once_it_is_gone(story, key, is_absent, is_vanished):
    family = Family()
    family.play(story)

    assert family.lives.may_be_absent(key) is is_absent
    assert family.lives.is_vanished(key) is is_vanished
