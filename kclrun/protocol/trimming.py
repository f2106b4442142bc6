"""Whether a shard that the service does not show was trimmed: one rule for all [P13]. Pure.

A shard is missing from a listing, or a read of it is refused with ResourceNotFoundException, for
three reasons: its retention passed (it was trimmed); the listing, or one host of the service, lags
behind a reshard (it is too new); or the stream is being deleted or made again. Only of a trimmed
shard the rest may be given up. So a single answer never decides.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final

from kclrun.model.shard import HashRange, Shard, is_too_new_for
from kclrun.model.time import Instant

# ListShards shows within seconds that a shard was made or closed. A shard that still looks newer
# than the listings after so long does not belong to this stream: the stream was deleted and made
# again under its name.
LISTING_LAG_MAX_S: Final = 300.0
# The time between the two listings of a proof where no failover says it: pages of one listing are
# made at different instants, but not so far apart.
PROOF_APART_S: Final = 5.0


class Absence(enum.Enum):
    """What one complete listing says about a shard."""

    LISTED = "it is listed"
    TOO_NEW = "an older shard of its hash keys is listed: the listing lags"
    TRIMMED = "only shards that came after it are listed"
    UNKNOWN = "the listing says nothing about it"


def absence_of(
    shards: Collection[Shard],
    shard_id: str,
    hash_range: HashRange | None,
    parents: Collection[str],
    *,
    may_be_listed: bool = False,
) -> Absence:
    """Judge one complete listing. `hash_range` None and no `parents`: they are not known.

    Shards are trimmed oldest first. So a shard was trimmed if a child of it is listed, or if only
    younger shards with parents are listed where its hash keys were. A stream that was made again
    has shards without parents. DynamoDB Streams goes on listing a shard whose records have expired:
    with `may_be_listed` a closed shard whose child is listed counts as trimmed, too. No record can
    be added to it.
    """
    own = next((shard for shard in shards if shard.shard_id == shard_id), None)
    if own is not None:
        has_child = any(shard_id in shard.parents for shard in shards)
        is_over = may_be_listed and not own.is_open and has_child
        return Absence.TRIMMED if is_over else Absence.LISTED
    if is_too_new_for(shards, shard_id, hash_range, parents):
        return Absence.TOO_NEW
    if any(shard_id in shard.parents for shard in shards):
        return Absence.TRIMMED
    if hash_range is None:
        return Absence.UNKNOWN
    heirs = [shard for shard in shards if shard.hash_range.overlaps(hash_range)]
    are_younger = all(heir.parents for heir in heirs)
    return Absence.TRIMMED if heirs and are_younger else Absence.UNKNOWN


class ExpiryWatch:
    """The proof that a shard was trimmed, for a reader of it: its records have expired [P13].

    One instance for each reader of a shard. All ids are bare, or all are qualified. `apart_s` is
    the time between the two listings: for a lease process the failover, which is two sync periods
    of a manager that lists shards in each of its cycles [P10]. `gives_up_unknown`: a shard that for
    `LISTING_LAG_MAX_S` neither a read nor a listing finds counts as trimmed, too, unless the
    listings lag. It is for a reader that has lost the shard's hash keys. `may_be_listed`: for a
    stream of a DynamoDB table (`absence_of`).

    Kinesis forgets a closed shard once its last record is older than the retention: it leaves
    ListShards, and GetShardIterator returns ResourceNotFoundException. The same answer comes while
    a stream is deleted, after another one was made under its name, and for moments after a reshard.
    Then ending the shard would leave records out. So the reader proves the difference alone: it
    needs no message, and a message could come late or to the wrong process.

        NotFound ─► listing ─► does it show that the shard was trimmed? ─► no: look again later
                                                                        ─► yes: the first of two
        NotFound ─► listing, two sync periods later, no page in between ─► yes: proven, end it

    The possible errors, and the protection against each:

    - A listing fails, or is empty (a stream that is being deleted or made): not evidence.
    - A listing lags behind a reshard and does not show a new shard yet: it shows a parent, or an
      older shard of the same hash keys. Those are trimmed before it, so the shard is new, and never
      proven.
    - A NotFound was an error of the service: a page, or a listing with the shard, begins anew.
    - The stream was made again: its shards begin at number 0 without parents. So the listing must
      name a child of the shard, or show only younger shards with parents where its hash keys were.
      A new stream with a lineage of its own has another creation time, which the manager compares.
    - The lease moves meanwhile: the proof is gone with the process, and the next owner makes its
      own. Every write of the end has the owner's condition, as the end of any shard [P2, P12].
    - Children began, or ended, already: creating them leaves an existing row as it is.
    - Parents have not ended: a child is read, and so comes to NotFound, only after them [P11].
    - Children were trimmed, too: the shard ends without any, and the lease manager creates the
      oldest shards that are still listed of its hash keys, at their beginning
      (`leases/shard_sync.py`).
    """

    def __init__(
        self,
        shard_id: str,
        hash_range: HashRange | None,
        parents: Collection[str],
        *,
        apart_s: float = PROOF_APART_S,
        gives_up_unknown: bool = False,
        may_be_listed: bool = False,
    ) -> None:
        self._shard_id = shard_id
        self._hash_range = hash_range
        self._parents = frozenset(parents)
        self._apart_s = apart_s
        self._gives_up_unknown = gives_up_unknown
        self._may_be_listed = may_be_listed
        self._listed_instant: Instant | None = None
        self._absent_since: Instant | None = None
        self._unknown_since: Instant | None = None

    def learn(self, shard: Shard) -> None:
        """A listing, or the last page of a parent, showed the shard."""
        self._hash_range, self._parents = shard.hash_range, frozenset(shard.parents)

    def page_came(self) -> None:
        """The shard can be read: all evidence so far is void."""
        self._absent_since = self._unknown_since = None

    def is_listing_due(self, now: Instant) -> bool:
        """The service said NotFound: whether to list the shards now. At most once in `apart_s`."""
        listed = self._listed_instant
        return listed is None or now - listed >= self._apart_s

    def listing_came(self, shards: Collection[Shard], now: Instant) -> bool:
        """A complete listing follows a NotFound. Returns: whether it proves that the shard was
        trimmed."""
        self._listed_instant = now
        absence = absence_of(
            shards,
            self._shard_id,
            self._hash_range,
            self._parents,
            may_be_listed=self._may_be_listed,
        )
        if absence is not Absence.TRIMMED:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = now
        if not shards or absence in {Absence.LISTED, Absence.TOO_NEW}:
            self._unknown_since = None
        elif self._unknown_since is None:
            self._unknown_since = now
        if self._absent_since is not None and now - self._absent_since >= self._apart_s:
            return True
        unknown = self._unknown_since if self._gives_up_unknown else None
        return unknown is not None and now - unknown >= LISTING_LAG_MAX_S

    def listing_failed(self, now: Instant) -> None:
        """A listing failed and proves nothing. The next one is due after the same time."""
        self._listed_instant = now
