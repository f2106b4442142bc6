"""The DynamoDB expression of every write to the lease table, with its meaning in English.

It is data, built from `clauses.py`, so that the reference and tests can print it. `binding.py`
chooses the expression for a change and fills in its values; `lease_table.py` sends it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kclrun.aws import clauses
from kclrun.aws.clauses import (
    AT_LAST,
    AT_LAST_WHOLE,
    ENDED,
    EXISTS,
    MINE,
    SEEN_COUNTER,
    SEEN_OWNER,
    UNOWNED,
    Clause,
)
from kclrun.model.lease import LeaseKey


class Expression(msgspec.Struct, frozen=True):
    """The update of one write (None: it deletes, creates or only checks) and its condition.

    Rules [P1, P2]: each write of an owner names the owner and the counter last seen and adds one
    to the counter. A write that carries a position also names the position last seen. Only a
    creation may apply where the row does not exist. "From sub 0": if the position last seen is
    outside an aggregate, a row without a sub-sequence number counts as sub 0.
    """

    name: str
    update: Clause | None
    conditions: tuple[Clause, ...]

    @property
    def condition(self) -> str:
        return " AND ".join(clause.code for clause in self.conditions)

    @property
    def english(self) -> str:
        given = ", ".join(clause.english for clause in self.conditions)
        return f"{self.name}: {self.update.english if self.update else ''} if {given}"


Values = dict[str, dict[str, Any]]


class BoundWrite(msgspec.Struct, frozen=True):
    """An expression with its values, for one row."""

    expression: Expression
    key: LeaseKey
    values: Values


_HELD: Final = (EXISTS, MINE, SEEN_COUNTER)
_HELD_AT: Final = (*_HELD, AT_LAST)
_HELD_AT_WHOLE: Final = (*_HELD, AT_LAST_WHOLE)
_ASKED: Final = (EXISTS, clauses.ASKED_OWNER, clauses.NOT_ENDED)
_HANDED: Final = (EXISTS, clauses.NEXT_OWNER, clauses.MY_CHECKPOINTS, SEEN_COUNTER)
_LATE: Final = (EXISTS, clauses.NOT_ENDED, clauses.OURS_NOW)

CREATE: Final = Expression("create", None, (clauses.ABSENT,))
TAKE_UNOWNED: Final = Expression(
    "take an unowned lease", clauses.TAKE_OVER, (EXISTS, SEEN_COUNTER, UNOWNED)
)
TAKE_EXPIRED: Final = Expression(
    "take somebody else's lease", clauses.TAKE_FROM_OTHER, (EXISTS, SEEN_COUNTER, SEEN_OWNER)
)
TAKE_BY_FORCE: Final = Expression(
    "take by force", clauses.TAKE_BY_FORCE, (EXISTS, SEEN_COUNTER, SEEN_OWNER)
)
TAKE_OWN: Final = Expression(
    "take a lease that is mine", clauses.TAKE_OVER, (EXISTS, SEEN_COUNTER, SEEN_OWNER)
)
TAKE_UNOWNED_AND_PIN: Final = Expression(
    "take and pin an unowned lease", clauses.TAKE_OVER_AND_PIN, TAKE_UNOWNED.conditions
)
TAKE_EXPIRED_AND_PIN: Final = Expression(
    "take and pin somebody else's lease", clauses.TAKE_FROM_OTHER_AND_PIN, TAKE_EXPIRED.conditions
)
TAKE_BY_FORCE_AND_PIN: Final = Expression(
    "take by force and pin", clauses.TAKE_BY_FORCE_AND_PIN, TAKE_BY_FORCE.conditions
)
TAKE_OWN_AND_PIN: Final = Expression(
    "take and pin a lease that is mine", clauses.TAKE_OVER_AND_PIN, TAKE_OWN.conditions
)
ASK: Final = Expression("ask", clauses.ASK, (*_ASKED, clauses.NOT_ASKED))
ASK_AGAIN: Final = Expression("ask instead of another", clauses.ASK, (*_ASKED, clauses.ASK_SEEN))
ASK_AGAIN_UNDATED: Final = Expression(
    "ask instead of an ask from time 0", clauses.ASK, (*_ASKED, clauses.ASK_SEEN_UNDATED)
)
WITHDRAW: Final = Expression("withdraw an ask", clauses.WITHDRAW, (EXISTS, clauses.ASKED_BY_ME))
DECLINE: Final = Expression(
    "decline an offer",
    clauses.DECLINE,
    (EXISTS, clauses.OFFERED_TO_ME, SEEN_COUNTER),
)
CLAIM: Final = Expression("claim", clauses.BUMP, _HELD)
CLAIM_WAITED: Final = Expression("claim after the wait", clauses.BUMP_WAITED, _HELD)
RENEW: Final = Expression("renew", clauses.BUMP, _HELD)
RENEW_MEASURED: Final = Expression("renew with throughput", clauses.BUMP_MEASURED, _HELD)
RENEW_UNASKED: Final = Expression("renew and drop the ask", clauses.BUMP_UNASKED, _HELD)
RENEW_MEASURED_UNASKED: Final = Expression(
    "renew with throughput and drop the ask", clauses.BUMP_MEASURED_UNASKED, _HELD
)
CHECKPOINT: Final = Expression("checkpoint", clauses.MOVE, _HELD_AT)
CHECKPOINT_WHOLE: Final = Expression("checkpoint from sub 0", clauses.MOVE, _HELD_AT_WHOLE)
NAME_CHILDREN: Final = Expression("name children", clauses.NAME, _HELD)
END: Final = Expression("end", clauses.FINISH, _HELD_AT)
END_WHOLE: Final = Expression("end from sub 0", clauses.FINISH, _HELD_AT_WHOLE)
RELEASE: Final = Expression("release", clauses.LET_GO, _HELD_AT)
RELEASE_WHOLE: Final = Expression("release from sub 0", clauses.LET_GO, _HELD_AT_WHOLE)
RELEASE_MOVED: Final = Expression("checkpoint and release", clauses.MOVE_AND_LET_GO, _HELD_AT)
RELEASE_MOVED_WHOLE: Final = Expression(
    "checkpoint and release from sub 0", clauses.MOVE_AND_LET_GO, _HELD_AT_WHOLE
)
OFFER: Final = Expression("offer", clauses.OFFER, _HELD_AT)
OFFER_WHOLE: Final = Expression("offer from sub 0", clauses.OFFER, _HELD_AT_WHOLE)
OFFER_MOVED: Final = Expression("checkpoint and offer", clauses.MOVE_AND_OFFER, _HELD_AT)
OFFER_MOVED_WHOLE: Final = Expression(
    "checkpoint and offer from sub 0", clauses.MOVE_AND_OFFER, _HELD_AT_WHOLE
)
OFFER_AFTER_DEATHS: Final = Expression("offer after deaths", clauses.OFFER_AFTER_DEATHS, _HELD_AT)
OFFER_AFTER_DEATHS_WHOLE: Final = Expression(
    "offer after deaths from sub 0", clauses.OFFER_AFTER_DEATHS, _HELD_AT_WHOLE
)
OFFER_TO: Final = Expression("offer to the asker", clauses.OFFER_TO, _HELD_AT)
OFFER_TO_WHOLE: Final = Expression(
    "offer to the asker from sub 0", clauses.OFFER_TO, _HELD_AT_WHOLE
)
OFFER_TO_MOVED: Final = Expression(
    "checkpoint and offer to the asker", clauses.MOVE_AND_OFFER_TO, _HELD_AT
)
OFFER_TO_MOVED_WHOLE: Final = Expression(
    "checkpoint and offer to the asker from sub 0", clauses.MOVE_AND_OFFER_TO, _HELD_AT_WHOLE
)
HAND_OVER: Final = Expression("hand over", clauses.HAND_OVER, (*_HANDED, AT_LAST))
HAND_OVER_WHOLE: Final = Expression(
    "hand over from sub 0", clauses.HAND_OVER, (*_HANDED, AT_LAST_WHOLE)
)
HAND_OVER_MOVED: Final = Expression(
    "checkpoint and hand over", clauses.MOVE_AND_HAND_OVER, (*_HANDED, AT_LAST)
)
HAND_OVER_MOVED_WHOLE: Final = Expression(
    "checkpoint and hand over from sub 0", clauses.MOVE_AND_HAND_OVER, (*_HANDED, AT_LAST_WHOLE)
)
LATE: Final = Expression(
    "late checkpoint", clauses.MOVE_LATE, (*_LATE, clauses.FROM_LAST, clauses.BEFORE_NEW)
)
LATE_FROM_WHOLE: Final = Expression(
    "late checkpoint from sub 0",
    clauses.MOVE_LATE,
    (*_LATE, clauses.FROM_LAST_WHOLE, clauses.BEFORE_NEW),
)
LATE_TO_WHOLE: Final = Expression(
    "late checkpoint to sub 0",
    clauses.MOVE_LATE,
    (*_LATE, clauses.FROM_LAST, clauses.BEFORE_NEW_WHOLE),
)
LATE_WHOLE: Final = Expression(
    "late checkpoint from sub 0 to sub 0",
    clauses.MOVE_LATE,
    (*_LATE, clauses.FROM_LAST_WHOLE, clauses.BEFORE_NEW_WHOLE),
)
AMEND: Final = Expression("amend", clauses.AMEND, _HELD)
AMEND_ROOT: Final = Expression("amend a shard without parents", clauses.AMEND_ROOT, _HELD)
AMEND_AND_PIN: Final = Expression("amend and pin", clauses.AMEND_AND_PIN, _HELD)
AMEND_ROOT_AND_PIN: Final = Expression(
    "amend and pin a shard without parents", clauses.AMEND_ROOT_AND_PIN, _HELD
)
HALT_LEASE: Final = Expression("halt", clauses.HALT, _HELD)
RESUME_LEASE: Final = Expression("resume", clauses.RESUME, (EXISTS,))
DELETE_ENDED: Final = Expression("delete an ended lease", None, (EXISTS, ENDED))
DELETE_TRIMMED: Final = Expression(
    "delete a trimmed shard's lease", None, (EXISTS, SEEN_COUNTER, SEEN_OWNER)
)
DELETE_TRIMMED_UNOWNED: Final = Expression(
    "delete a trimmed shard's unowned lease", None, (EXISTS, SEEN_COUNTER, UNOWNED)
)
PARENT_HELD: Final = Expression("the ending parent is held", None, _HELD)
PARENT_ENDED: Final = Expression("the parent has ended", None, (EXISTS, ENDED))
PARENT_EXISTS: Final = Expression("the other parent has a row", None, (EXISTS,))

CATALOGUE: Final = (
    CREATE,
    TAKE_UNOWNED,
    TAKE_EXPIRED,
    TAKE_BY_FORCE,
    TAKE_OWN,
    TAKE_UNOWNED_AND_PIN,
    TAKE_EXPIRED_AND_PIN,
    TAKE_BY_FORCE_AND_PIN,
    TAKE_OWN_AND_PIN,
    ASK,
    ASK_AGAIN,
    ASK_AGAIN_UNDATED,
    WITHDRAW,
    DECLINE,
    CLAIM,
    CLAIM_WAITED,
    RENEW,
    RENEW_MEASURED,
    RENEW_UNASKED,
    RENEW_MEASURED_UNASKED,
    CHECKPOINT,
    CHECKPOINT_WHOLE,
    NAME_CHILDREN,
    END,
    END_WHOLE,
    RELEASE,
    RELEASE_WHOLE,
    RELEASE_MOVED,
    RELEASE_MOVED_WHOLE,
    OFFER,
    OFFER_WHOLE,
    OFFER_MOVED,
    OFFER_MOVED_WHOLE,
    OFFER_AFTER_DEATHS,
    OFFER_AFTER_DEATHS_WHOLE,
    OFFER_TO,
    OFFER_TO_WHOLE,
    OFFER_TO_MOVED,
    OFFER_TO_MOVED_WHOLE,
    HAND_OVER,
    HAND_OVER_WHOLE,
    HAND_OVER_MOVED,
    HAND_OVER_MOVED_WHOLE,
    LATE,
    LATE_FROM_WHOLE,
    LATE_TO_WHOLE,
    LATE_WHOLE,
    AMEND,
    AMEND_ROOT,
    AMEND_AND_PIN,
    AMEND_ROOT_AND_PIN,
    HALT_LEASE,
    RESUME_LEASE,
    DELETE_ENDED,
    DELETE_TRIMMED,
    DELETE_TRIMMED_UNOWNED,
    PARENT_HELD,
    PARENT_ENDED,
    PARENT_EXISTS,
)
