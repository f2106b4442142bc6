"""Bugs in a lease's life: checkpoints, the fence, unknown outcomes, giving away, shard ends."""

from __future__ import annotations

from tests.simulation.mutants.mutant import Mutant

OF_LEASE_PROCESSES = (
    Mutant(
        name="checkpoint-before-process",
        file="kclrun/consuming/state_machine.py",
        old="wanted = ledger.processed if wanted is None else max(wanted, ledger.processed)",
        new="wanted = ledger.delivered if wanted is None else max(wanted, ledger.delivered)",
        breaks="a checkpoint covers records that user code has not returned from",
        source="I2b",
        found_at=0,
    ),
    Mutant(
        name="offer-before-the-last-batch",
        file="kclrun/consuming/states.py",
        old="Step.EXHAUSTED: State.CREATING,\n        Step.WITHDRAWN: State.STOPPING,",
        new="Step.EXHAUSTED: State.CREATING,\n        Step.WITHDRAWN: State.RELEASING,",
        breaks="a drained lease is offered while its last batch is under way",
        source="P17: finish the batch; then one write",
        found_at=0,
    ),
    Mutant(
        name="offer-without-its-checkpoint",
        file="kclrun/consuming/shard_end.py",
        old="position = max(self._requests.final_position(ledger), row.checkpoint)",
        new="position = row.checkpoint",
        breaks="what was processed since the last checkpoint comes again after a planned move",
        source='I8; KCL 3 "doesn\'t completely eliminate" it',
        found_at=0,
    ),
    Mutant(
        name="final-position-is-delivered",
        file="kclrun/consuming/checkpoints.py",
        old="return max(ledger.processed, self.highest or ledger.processed)",
        new="return max(ledger.delivered, self.highest or ledger.processed)",
        breaks="a drain checkpoints a batch that user code raised on",
        source="I2b, I9",
        found_at=21,
    ),
    Mutant(
        name="late-checkpoint-of-delivered",
        file="kclrun/consuming/checkpoints.py",
        old="if not self._is_manual:\n            return ledger.processed\n        refused",
        new="if not self._is_manual:\n            return ledger.delivered\n        refused",
        breaks="a late checkpoint covers a batch that was never processed",
        source="P19: for what was fully processed",
        layer="dense storms",
        found_at=0,
    ),
    Mutant(
        name="batch-after-the-stop",
        file="kclrun/consuming/delivery.py",
        old="        self.permit = None\n        self._call = None\n",
        new="        self._call = None\n",
        breaks="a batch starts after the lease was offered",
        source="P17: after sending it, no batch starts",
        layer="tests/unit/consuming/test_consuming_delivery.py",
    ),
    Mutant(
        name="batch-at-its-fence",
        file="kclrun/consuming/delivery.py",
        old="self._is_halted or now >= permit.fence else permit",
        new="self._is_halted else permit",
        breaks="user code is given a batch that another owner may have",
        source="P7: after it start no batch",
        found_at=0,
    ),
    Mutant(
        name="given-again-after-the-stop",
        file="kclrun/consuming/delivery.py",
        old="        if self._is_stop_asked:\n            return Repetition.NEVER\n",
        new="",
        breaks="a batch that raised is given again and again, and its lease cannot be drained",
        source="P17: finish the batch; then one write",
        layer="tests/unit/consuming/test_consuming_delivery.py",
    ),
    Mutant(
        name="rows-of-a-failed-attempt-stay",
        file="kclrun/consuming/delivery.py",
        old="        rows.take_back_batch(durable())\n",
        new="        rows.end_batch(covers)\n",
        breaks="the rows of a batch that is given again come twice",
        source="I9; contract of emit",
        layer="tests/unit/consuming/test_consuming_delivery.py",
    ),
    Mutant(
        name="fence-from-the-latest-send",
        file="kclrun/consuming/lease_writer.py",
        old="                return self._judge(row, answered=True)",
        new=(
            "                if self.in_flight.unresolved:\n"
            "                    self.in_flight.unresolved = [sent]\n"
            "                return self._judge(row, answered=True)"
        ),
        breaks="permission counts from the send that failed, and an earlier one had applied",
        source="trace H3: earliest unresolved renewal replaced by the latest",
        layer="worlds:network:late",
    ),
    Mutant(
        name="fence-without-margins",
        file="kclrun/protocol/fence.py",
        old="return Instant(sent + failover_s * (1 - RATE_DRIFT_MAX) - SCHEDULING_MARGIN_S)",
        new="return Instant(sent + failover_s)",
        breaks="a slow clock permits batches when a fast one may take already",
        source="B.1; fence margin 0",
        layer="dense storms",
        found_at=69,
    ),
    Mutant(
        name="fence-of-two-failovers",
        file="kclrun/protocol/fence.py",
        old="return Instant(sent + failover_s * (1 - RATE_DRIFT_MAX) - SCHEDULING_MARGIN_S)",
        new="return Instant(sent + 2 * failover_s)",
        breaks="a lease that expired is still processed",
        source="a9: the worker's own idea of its lease outlives the table's",
        found_at=0,
    ),
    Mutant(
        name="unmoved-counter-taken-as-applied",
        file="kclrun/consuming/lease_writer.py",
        old="            return self._unmoved(change, row, answered=answered)",
        new=(
            "            is_first = isinstance(change, Claim)\n"
            "            return self._again('') if is_first else self._settle(change)"
        ),
        breaks="an outcome that is still unknown is taken for a success",
        source="P6: first unknown outcome taken as applied",
        found_at=10,
    ),
    Mutant(
        name="unknown-outcome-taken-as-not-applied",
        file="kclrun/consuming/lease_writer.py",
        old="                self.in_flight.unresolved.append(sent)\n",
        new="                return self._lost('no answer')\n",
        breaks="a write without an answer is taken for one that failed, and the lease for lost",
        source="P6; a2: no read-back",
        # A lease that is given up too early is a loss of time, and no rule is broken.
        layer="tests/unit/consuming/test_consuming_checkpoints.py",
    ),
    Mutant(
        name="any-write-of-mine-taken-for-this-one",
        file="kclrun/protocol/in_flight.py",
        old="return Fate.APPLIED if was_applied(change, row) else Fate.MISSING",
        new="return Fate.APPLIED",
        breaks="an earlier checkpoint that applied is taken for the end of the shard",
        source="trace H5",
        # In a fleet all that is unresolved at one time is the same write [P5]: a second net.
        layer="tests/unit/consuming/test_consuming_claims_and_renewals.py",
    ),
    Mutant(
        name="rebased-to-a-lower-position",
        file="kclrun/protocol/in_flight.py",
        old=(
            "        case Checkpoint(position=position) | Release(position=position)"
            " | Offer(position=position):\n"
            "            return msgspec.structs.replace(\n"
            "                change,\n"
            "                seen_counter=row.counter,\n"
            "                last=row.checkpoint,\n"
            "                position=max(position, row.checkpoint),"
        ),
        new=(
            "        case Checkpoint(position=position) | Release(position=position)"
            " | Offer(position=position):\n"
            "            return msgspec.structs.replace(\n"
            "                change,\n"
            "                seen_counter=row.counter,\n"
            "                last=row.checkpoint,\n"
            "                position=position,"
        ),
        breaks="the position of a late checkpoint is adopted, and a lower one written over it",
        source="trace N1",
        layer="rough storms",
        found_at=4,
    ),
    Mutant(
        name="renewal-as-slow-as-expiry",
        file="kclrun/protocol/fence.py",
        old="    return max(failover_s / RENEWALS_PER_FAILOVER - RENEW_EPSILON_S, RENEW_EPSILON_S)",
        new="    return failover_s",
        breaks="every lease is lost as often as it should be renewed",
        source="a9: the renewal period equals the expiry threshold",
        found_at=0,
    ),
    Mutant(
        name="child-knows-one-parent",
        file="kclrun/consuming/shard_end.py",
        old="        parents=frozenset(child.parents),",
        new="        parents=frozenset(child.parents[:1]),",
        breaks="the child of a merge is read when the first of its parents has ended",
        source="D.7: one merge parent forgotten",
        found_at=3,
    ),
    Mutant(
        name="children-without-all-parents-rows",
        file="kclrun/consuming/shard_end.py",
        old="        if waiting:",
        new="        if waiting and not rows:",
        breaks="a child is created, and read, before its other parent has a lease",
        source="trace C1",
        layer="dense storms",
        found_at=3,
    ),
    Mutant(
        name="end-without-children",
        file="kclrun/consuming/states.py",
        old="        Step.EXHAUSTED: State.CREATING,",
        new="        Step.EXHAUSTED: State.ENDING,",
        breaks="a shard ends before the leases of its children exist",
        source="P12: the order of a shard's end",
        # In a fleet the audit creates the children a scan and a listing later.
        layer="tests/unit/consuming/test_consuming_shard_end.py",
    ),
    Mutant(
        name="claim-believed-from-a-read",
        file="kclrun/consuming/lease_writer.py",
        old="            self.counter = row.counter\n            self.in_flight",
        new=(
            "            if self.in_flight.unresolved:\n"
            "                self._confirm(row, min(self.in_flight.unresolved))\n"
            "                return self._settle(change)\n"
            "            self.counter = row.counter\n            self.in_flight"
        ),
        breaks="a claim counts as made though what moved the row may be another's renewal",
        source="P4, trace H1c",
        layer="worlds:network:lose reply",
    ),
    Mutant(
        name="shorter-failover-from-the-last-send",
        file="kclrun/protocol/fence.py",
        old="        return max(fence, min(as_sent, self._shortened_until))\n",
        new="        return fence\n",
        breaks="one row with a short failover, or a deploy to one, loses every lease of the fleet",
        source="P7; trial: both processes lost their fence 0.1 s ago at once",
        layer="tests/unit/consuming/test_consuming_claims_and_renewals.py",
    ),
    Mutant(
        name="shorter-failover-without-end",
        file="kclrun/protocol/fence.py",
        old="        return max(fence, min(as_sent, self._shortened_until))\n",
        new="        return as_sent\n",
        breaks="cut off from the table, an owner reads on by the long failover it knows is void",
        source="P7",
        layer="tests/unit/consuming/test_consuming_claims_and_renewals.py",
    ),
    Mutant(
        name="shorter-failover-not-renewed-under",
        file="kclrun/protocol/fence.py",
        old="            return self._shortened_instant\n        return Instant(sent",
        new="            pass\n        return Instant(sent",
        breaks="the shortened fence passes before the next renewal is due by the old send",
        source="P7, P9",
        layer="tests/unit/consuming/test_consuming_claims_and_renewals.py",
    ),
    Mutant(
        name="shard-not-found-is-only-an-outage",
        file="kclrun/consuming/shard_end.py",
        old="        return listed is None or now - listed >= self._apart_s\n",
        new="        return False\n",
        breaks="a shard that was trimmed while it was held is held for ever, its children unread",
        source="found by trying the product out; P13",
        layer="expiring storms",
        found_at=6,
    ),
    Mutant(
        name="any-listing-without-the-shard-proves-it-trimmed",
        file="kclrun/consuming/shard_end.py",
        old="        return bool(heirs) and all(shard.parents for shard in heirs)\n",
        new="        return True\n",
        breaks="a new shard that a listing does not show yet is ended with its records unread",
        source="P13: a listing may lag",
        layer="tests/unit/consuming/test_expired_shard.py",
    ),
    Mutant(
        name="expiry-proven-by-one-listing",
        file="kclrun/consuming/shard_end.py",
        old=" and now - self._absent_since >= self._apart_s\n",
        new="\n",
        breaks="a single listing that is wrong ends a shard with its records unread",
        source="P13: two listings, two sync periods apart",
        layer="tests/unit/consuming/test_expired_shard.py",
    ),
    Mutant(
        name="expired-shard-ended-without-a-word",
        file="kclrun/consuming/state_machine.py",
        old="return (records_expired(self.own.confirmed),)\n",
        new="return ()\n",
        breaks="records are lost to the retention and nothing says so",
        source="P13",
        layer="expiring storms",
        found_at=14,
    ),
    Mutant(
        name="full-output-held-for-ever",
        file="kclrun/consuming/state_machine.py",
        old="        return self._output.give_up_instant if is_wanted else None\n",
        new="        return None\n",
        breaks="a host whose output disk is full renews its share of the leases and reads none",
        source="DESIGN 1: every shard that should advance and does not is restarted",
        layer="tests/unit/consuming/test_consuming_host_faults.py",
    ),
    Mutant(
        name="full-output-given-up-though-alone",
        file="kclrun/consuming/state_machine.py",
        old="self.state is State.PROCESSING and self._graceful.others_in_sight\n",
        new="self.state is State.PROCESSING\n",
        breaks="the only host of a fleet ends and starts its processes while its disk is full",
        source="L7: the troubles of one host stay there",
        layer="tests/unit/consuming/test_consuming_host_faults.py",
    ),
    Mutant(
        name="no-heirs-of-a-trimmed-family",
        file="kclrun/leases/shard_sync.py",
        old="            for heir in listing.heirs_of(row):\n",
        new="            for heir in ():\n",
        breaks="with start LATEST, what came after two trimmed generations is not read",
        source="the shard sync of the Java KCL",
        layer="tests/unit/leases/test_trimmed_or_new.py",
    ),
    Mutant(
        name="trimmed-row-deleted-under-its-process",
        file="kclrun/leases/shard_sync.py",
        old="        if row.is_ended or is_of_java:\n",
        new="        if True:\n",
        breaks="its process writes the row again, and says nothing of the records that were lost",
        source="P13: a shard that is trimmed while it is held ends in words",
        layer="expiring storms",
        found_at=1,
    ),
)
