"""The conditions and the effects of every write of the lease table, as data.

`aws/expressions.py` renders them as DynamoDB expressions, `local/lease_rows.py` applies them to
leases in memory. A field is one of `Lease`, or a part of one ("handoff.to"): the module does not
know the attributes of a row. Only a creation may apply where the row does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.model.lease import OFFERED, OWNER_PREFIX, Halt, Handoff, Pause
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.protocol import writes


class Value(msgspec.Struct, frozen=True):
    """A value that a write gives a field or expects there.

    `of` computes it from the write. `names` are its names in expressions, one for each attribute
    that keeps a part of the field. `may_be_absent`: it can be None or an empty set.
    """

    names: tuple[str, ...]
    of: Callable[[Any], Any]
    may_be_absent: bool = False


class OfField(msgspec.Struct, frozen=True):
    """A comparison of one field with a value, or an effect on it."""

    field: str
    value: Value


class Equals(OfField, frozen=True):
    """The field has this value; None: it has no value."""


class Differs(OfField, frozen=True):
    """The field has another value."""


class StartsWith(OfField, frozen=True):
    """The text of the field starts with this one."""


class AtLeast(OfField, frozen=True):
    """The position is this one or above it, in the extended order."""


class Below(OfField, frozen=True):
    """The position is below this one, in the extended order."""


class AnyOf(msgspec.Struct, frozen=True):
    """One of the conditions holds."""

    parts: tuple[Condition, ...]


class AllOf(msgspec.Struct, frozen=True):
    """Every one of the conditions holds."""

    parts: tuple[Condition, ...]


Condition = Equals | Differs | StartsWith | AtLeast | Below | AnyOf | AllOf


class Set(OfField, frozen=True):
    """The field gets this value; None or an empty set removes what it has."""


class SetOnce(OfField, frozen=True):
    """The field gets this value unless it has one."""


class Add(OfField, frozen=True):
    """The number in the field grows by this value."""


class When(msgspec.Struct, frozen=True):
    """These effects happen only with writes that pass `test`; `words` say which ones."""

    words: str
    test: Callable[[Any], bool]
    effects: tuple[Effect, ...]


Effect = Set | SetOnce | Add


class Write(msgspec.Struct, frozen=True):
    """One kind of write: its conditions, which must all hold, and its effects.

    `mistake` finds errors that no condition can prevent: it returns the error in words, or None.
    """

    name: str
    conditions: tuple[Condition, ...]
    effects: tuple[Effect | When, ...] = ()
    mistake: Callable[[Any], str | None] | None = None

    def effects_of(self, change: Any) -> tuple[Effect, ...]:
        """The effects of one such write."""
        effects: list[Effect] = []
        for effect in self.effects:
            if not isinstance(effect, When):
                effects.append(effect)
            elif effect.test(change):
                effects += effect.effects
        return tuple(effects)

    def refuse_mistake(self, change: Any) -> None:
        """Raises: InvariantViolation for a write that must never be sent."""
        if self.mistake is not None and (words := self.mistake(change)) is not None:
            raise InvariantViolation(f"{change.key}: {words}")


def reader(path: str) -> Callable[[Any], Any]:
    """Reads a field, or a part of one: None if the field has no value."""
    field, _, part = path.partition(".")
    read = attrgetter(field)
    if not part:
        return read
    read_part = attrgetter(part)

    def read_both(of: Any) -> Any:
        whole = read(of)
        return None if whole is None else read_part(whole)

    return read_both


# Values


def _value(names: str, of: str | Callable[[Any], Any], *, may_be_absent: bool = False) -> Value:
    """A value by the field of the write that has it, or computed from the write."""
    return Value(tuple(names.split()), reader(of) if isinstance(of, str) else of, may_be_absent)


def _always(names: str, value: Any) -> Value:
    return Value(tuple(names.split()), lambda _: value)


def _ms(at: float) -> float:
    """Seconds as a row keeps them: whole milliseconds."""
    return round(at * 1000) / 1000


def _ms_or_none(at: float | None) -> float | None:
    """The same; 0 stands for an unknown time."""
    return _ms(at) if at else None


def _as_kept(ask: Handoff | None) -> Handoff | None:
    return None if ask is None else Handoff(ask.to, WallTime(_ms(ask.asked_at)))


def _halt(change: writes.HaltLease | writes.ResetLease | writes.HaltForReset) -> Halt:
    """If it is not known since when records wait, they wait since the halt."""
    halt = change.halt
    since = halt.waiting_since or halt.halted_at
    return Halt(halt.reason, WallTime(_ms(halt.halted_at)), WallTime(_ms(since)))


def _to_ms(pause: Pause | None) -> Pause | None:
    if pause is None:
        return None
    return Pause(WallTime(_ms(pause.paused_at)), WallTime(_ms(pause.until)), pause.scope)


def _stored(change: Any) -> StoredCursors | None:
    """The cursors of the outputs with the checkpoint of the same write [K2]."""
    if change.cursors is None:
        return None
    return StoredCursors(getattr(change, "position", SHARD_END), change.cursors)


NOTHING: Final = Value((), lambda _: None)
_ME: Final = _value(":me", "owner")
_SEEN: Final = _value(":seen", "seen_counter")
_SEEN_OWNER: Final = _value(":seenOwner", "seen_owner", may_be_absent=True)
_LAST: Final = _value(":last :lastSub", "last")
_POSITION: Final = _value(":position :sub", "position")
_AT_SHARD_END: Final = _always(":position :sub", SHARD_END)
_SHARD_END: Final = _always(":shardEnd", SHARD_END.sequence_number)
_OFFERED: Final = _always(":offered", OFFERED)
_ZERO: Final = _always(":zero", 0)
_ONE: Final = _always(":one", 1)
_ASK: Final = _value(":me :askedAt", lambda c: Handoff(c.owner, WallTime(_ms(c.asked_at))))
_SEEN_ASK: Final = _value(":seenTo :seenAt", lambda c: _as_kept(c.seen), may_be_absent=True)
_PINNED_AT: Final = _value(":pinnedAt", lambda c: _ms(c.latest_pinned_at))
_GENERATION: Final = _value(":generation", "generation")
_PAUSE: Final = _value(
    ":pausedAt :pausedUntil :pauseScope", lambda c: _to_ms(c.pause), may_be_absent=True
)
_SEEN_PAUSE: Final = _value(
    ":seenPausedAt :seenPausedUntil :seenPauseScope", lambda c: _to_ms(c.seen), may_be_absent=True
)
_PARENTS_PAUSE: Final = Value(_SEEN_PAUSE.names, lambda c: _to_ms(c.pause), may_be_absent=True)
_CREATED_AT: Final = _value(":createdAt", lambda c: _ms_or_none(c.stream_created_at))

# Conditions. An owner's write names the owner and the counter last seen [P2]; a write that carries
# a position names the position last seen, too.

_HELD: Final = (Equals("owner", _ME), Equals("counter", _SEEN))
_HELD_AT: Final = (*_HELD, Equals("checkpoint", _LAST))
_AS_SEEN: Final = (Equals("counter", _SEEN), Equals("owner", _SEEN_OWNER))
_ENDED: Final = Equals("checkpoint.sequence_number", _SHARD_END)
_NOT_ENDED: Final = Differs("checkpoint.sequence_number", _SHARD_END)
# The late checkpoint [P19] must not disturb the protocol of a Java owner.
_HAS_NO_OR_OTHER_KCLRUN_OWNER: Final = AnyOf(
    (
        Equals("owner", NOTHING),
        AllOf(
            (
                StartsWith("owner", _always(":prefix", OWNER_PREFIX)),
                Differs("owner", _value(":former", "former")),
            )
        ),
    )
)

# Effects. An owner's update adds one to the counter [P1]. Every write of a position removes a
# pending checkpoint, and the note of deaths at the position before.


def _without(*fields: str) -> tuple[Set, ...]:
    return tuple(Set(field, NOTHING) for field in fields)


def _moved(position: Value) -> tuple[Set, ...]:
    return (
        Set("checkpoint", position),
        Set("owner_switches", _ZERO),
        *_without("pending", "died_on"),
    )


def _if_pinned(effect: Effect) -> When:
    words = "the instant of LATEST is given"
    return When(words, lambda c: c.latest_pinned_at is not None, (effect,))


def _moves(change: writes.Release | writes.Offer | writes.HandOver) -> bool:
    return change.position != change.last


_COUNTED: Final = Set("counter", _value(":next", lambda c: c.seen_counter + 1))
_MOVED: Final = _moved(_POSITION)
_MOVED_IF_IT_MOVES: Final = When("the position moves", _moves, _MOVED)
_WITHOUT_HANDOFF: Final = _without("handoff", "offered_to", "offered_by")
_LOAD_IF_GIVEN: Final = When(
    "the load is given",
    lambda c: c.load is not None,
    (Set("load", _value(":loadKBps :loadCpu", "load")),),
)
_OUTPUTS_IF_GIVEN: Final = (
    When(
        "the cursors of the outputs are given",
        lambda c: c.cursors is not None,
        (Set("outputs", _value(":outputsAt :outputCursors", _stored)),),
    ),
    When(
        "a version of the keyed state is given",
        lambda c: bool(c.state_version),
        (Set("state_version", _value(":stateVersion", "state_version")),),
    ),
    When(
        "the version of the keyed state is removed",
        lambda c: c.state_version is not None and not c.state_version,
        (Set("state_version", NOTHING),),
    ),
)
_SWITCHED: Final = (Add("owner_switches", _ONE),)
_HALTED: Final = Set("halt", _value(":reason :haltedAt :waitingSince", _halt))

# Mistakes


def _mistake_of_take(change: writes.Take) -> str | None:
    """A lease that a kclrun owner renews is never taken by force [P16]."""
    seen = change.seen_owner
    if change.forced and (seen is None or seen.startswith(OWNER_PREFIX)):
        return f"only a Java owner is taken from by force, not {seen}"
    return None


def _mistake_of_offer(change: writes.Offer) -> str | None:
    if change.died_on is not None and (_moves(change) or change.offered_to is not None):
        return "an offer after deaths has no position or receiver"
    return None


def _mistake_of_late(change: writes.LateCheckpoint) -> str | None:
    """At SHARD_END the children would start [P19]."""
    position: ExtendedSequenceNumber = change.position
    return f"a late checkpoint is never {position}" if position.is_sentinel else None


def _mistake_of_reset(change: writes.ResetLease) -> str | None:
    """At SHARD_END the children would be missing; a tick is of timers, which fire again."""
    position: ExtendedSequenceNumber = change.position
    is_place = (position != SHARD_END or bool(change.children)) and not position.tick
    return None if is_place else f"a reset is never to {position}"


def _mistake_of_names(change: writes.NameChildren) -> str | None:
    return None if change.children else "children are named only if there are any"


WRITES: Final[Mapping[type[Any], Write]] = {
    writes.Take: Write(
        "take",
        _AS_SEEN,
        (
            _COUNTED,
            Set("owner", _ME),
            Set("failover_s", _value(":failoverMs", lambda c: _ms(c.failover_s))),
            Set("start", _value(":start", "start")),
            Set("stream_created_at", _CREATED_AT),
            Set("endpoint", _value(":endpoint", "endpoint", may_be_absent=True)),
            *_without("checkpoint_owner"),
            *_WITHOUT_HANDOFF,
            When("another had it", lambda c: c.seen_owner not in {None, c.owner}, _SWITCHED),
            When("by force", lambda c: c.forced, (Set("taken_from", _SEEN_OWNER),)),
            _if_pinned(SetOnce("latest_pinned_at", _PINNED_AT)),
        ),
        _mistake_of_take,
    ),
    writes.Ask: Write(
        "ask",
        (Equals("owner", _value(":asked", "asked")), _NOT_ENDED, Equals("handoff", _SEEN_ASK)),
        (Set("handoff", _ASK),),
    ),
    writes.Withdraw: Write("withdraw an ask", (Equals("handoff.to", _ME),), _without("handoff")),
    writes.Decline: Write(
        "decline an offer",
        (Equals("owner", _OFFERED), Equals("offered_to", _ME), Equals("counter", _SEEN)),
        (_COUNTED, Set("offered_by", _ME), *_without("offered_to")),
    ),
    writes.Claim: Write(
        "claim",
        _HELD,
        (_COUNTED, When("after the wait", lambda c: c.has_waited, _without("taken_from"))),
    ),
    writes.Renew: Write(
        "renew",
        _HELD,
        (
            _COUNTED,
            When(
                "the throughput is given",
                lambda c: c.throughput_kbps is not None,
                (Set("throughput_kbps", _value(":throughput", "throughput_kbps")),),
            ),
            When("it drops the ask", lambda c: c.drops_ask, _without("handoff")),
            _LOAD_IF_GIVEN,
        ),
    ),
    writes.Checkpoint: Write(
        "checkpoint", _HELD_AT, (_COUNTED, *_MOVED, _LOAD_IF_GIVEN, *_OUTPUTS_IF_GIVEN)
    ),
    writes.NameChildren: Write(
        "name children",
        _HELD,
        (_COUNTED, Set("children", _value(":children", "children"))),
        _mistake_of_names,
    ),
    writes.End: Write(
        "end",
        _HELD_AT,
        (_COUNTED, *_moved(_AT_SHARD_END), *_WITHOUT_HANDOFF, *_OUTPUTS_IF_GIVEN),
    ),
    writes.Release: Write(
        "release",
        _HELD_AT,
        (
            _COUNTED,
            *_without("owner"),
            *_WITHOUT_HANDOFF,
            _MOVED_IF_IT_MOVES,
            *_OUTPUTS_IF_GIVEN,
        ),
    ),
    writes.Offer: Write(
        "offer",
        _HELD_AT,
        (
            _COUNTED,
            Set("owner", _OFFERED),
            Set("offered_by", _ME),
            Set("offered_to", _value(":to", "offered_to", may_be_absent=True)),
            *_without("handoff"),
            _MOVED_IF_IT_MOVES,
            *_OUTPUTS_IF_GIVEN,
            When(
                "after deaths",
                lambda c: c.died_on is not None,
                (Set("died_on", _value(":diedOn", "died_on")),),
            ),
        ),
        _mistake_of_offer,
    ),
    writes.HandOver: Write(
        "hand over",
        (
            Equals("owner", _value(":nextOwner", "next_owner")),
            Equals("checkpoint_owner", _ME),
            Equals("counter", _SEEN),
            Equals("checkpoint", _LAST),
        ),
        (
            _COUNTED,
            *_without("checkpoint_owner"),
            *_WITHOUT_HANDOFF,
            _MOVED_IF_IT_MOVES,
            When("the position stays", lambda c: not _moves(c), _SWITCHED),
            *_OUTPUTS_IF_GIVEN,
        ),
    ),
    writes.LateCheckpoint: Write(
        "late checkpoint",
        (
            _NOT_ENDED,
            _HAS_NO_OR_OTHER_KCLRUN_OWNER,
            Equals("letters_to", _value(":seenLettersTo", "letters_to", may_be_absent=True)),
            Equals("generation", _GENERATION),
            AtLeast("checkpoint", _LAST),
            Below("checkpoint", _POSITION),
        ),
        (*_MOVED, *_OUTPUTS_IF_GIVEN),
        _mistake_of_late,
    ),
    writes.Amend: Write(
        "amend",
        _HELD,
        (
            _COUNTED,
            Set("hash_range", _value(":first :final", "hash_range")),
            Set("parents", _value(":parents", "parents", may_be_absent=True)),
        ),
    ),
    writes.HaltLease: Write(
        "halt",
        _HELD,
        (_COUNTED, _HALTED),
    ),
    writes.ResumeLease: Write(
        "resume",
        (),
        (
            *_without("halt", "died_on"),
            When("the outputs begin anew", lambda c: c.forgets_outputs, _without("outputs")),
        ),
    ),
    writes.ChangePause: Write(
        "pause or resume", (Equals("pause", _SEEN_PAUSE),), (Set("pause", _PAUSE),)
    ),
    writes.NoteLetters: Write(
        "note letters",
        (
            Equals("owner", _ME),
            Equals("letters_to", _value(":seenLettersTo", "seen", may_be_absent=True)),
        ),
        (Set("letters_to", _value(":lettersTo", "upto")),),
    ),
    writes.DeleteEnded: Write("delete an ended lease", (_ENDED,)),
    writes.DeleteTrimmed: Write("delete a trimmed shard's lease", _AS_SEEN),
    writes.ResetLease: Write(
        "reset",
        (*_AS_SEEN, Equals("checkpoint", _LAST)),
        (
            _COUNTED,
            *_without("owner", "checkpoint_owner"),
            *_WITHOUT_HANDOFF,
            *_MOVED,
            *_without("outputs", "letters_to", "state_version"),
            Set("children", _value(":children", "children", may_be_absent=True)),
            Set("generation", _GENERATION),
            Set(
                "latest_pinned_at",
                _value(":pinnedAt", lambda c: _ms_or_none(c.latest_pinned_at), may_be_absent=True),
            ),
            _HALTED,
        ),
        _mistake_of_reset,
    ),
    writes.HaltForReset: Write(
        "halt for a reset",
        _AS_SEEN,
        (_COUNTED, *_without("owner", "checkpoint_owner"), *_WITHOUT_HANDOFF, _HALTED),
    ),
    writes.DeleteReset: Write("delete a row that a reset replaces", _AS_SEEN),
    writes.FinishReset: Write(
        "finish a reset",
        (Equals("generation", _GENERATION), Equals("halt.reason", _value(":reason", "reason"))),
        _without("halt"),
    ),
    writes.HeldParent: Write(
        "the ending parent is held",
        (
            Equals("owner", _ME),
            Equals("counter", _value(":seen", "counter")),
            Equals("pause", _PARENTS_PAUSE),
        ),
    ),
    writes.EndedParent: Write("the parent has ended", (_ENDED,)),
    writes.ExistingParent: Write("the other parent has a row", ()),
}
