"""Bugs in the lease manager's decisions: expiry, takes, parents, balance, clean-up."""

from tests.simulation.mutants.mutant import Mutant

BALANCE = "tests/properties/test_leases_balance.py"
LOAD = "tests/properties/test_leases_load.py"
LOAD_UNITS = "tests/unit/leases/test_lease_load.py"
SICK_HOST = "tests/unit/leases/test_lease_sick_host.py"

OF_MANAGERS = (
    Mutant(
        name="expiry-by-first-sight",
        file="kclrun/leases/table_view.py",
        old="            same = list(compress(keys, map(eq, counters, self._counters)))\n",
        new="            same = keys\n",
        breaks="a lease expires a failover after it was first seen, however often it is renewed",
        source="P9",
        found_at=0,
    ),
    Mutant(
        name="expiry-too-soon",
        file="kclrun/leases/table_view.py",
        old=(
            "if now - at >= shortest_s}\n"
            "        candidates = [lease for lease in leases if lease.key in still] if still"
            " else []\n"
            "        return frozenset(lease.key for lease in candidates if"
            " self.has_expired(lease, now))"
        ),
        new=(
            "if now - at >= shortest_s / 2}\n"
            "        candidates = [lease for lease in leases if lease.key in still] if still"
            " else []\n"
            "        return frozenset(lease.key for lease in candidates)"
        ),
        breaks="a lease is taken while its owner is still permitted",
        source="P9",
        found_at=0,
    ),
    Mutant(
        name="take-not-read-back",
        file="kclrun/leases/held_leases.py",
        old="                return [held_lease.requests.read_back(held_lease.key)]",
        new=(
            "                if isinstance(change, writes.Take):\n"
            "                    return self._judge(held_lease, None, now)\n"
            "                return [held_lease.requests.read_back(held_lease.key)]"
        ),
        breaks="a take that applied without an answer is given up: the row says us, nobody reads",
        source="a2",
        # In a fleet the next scan shows the stray, which is adopted: a second net.
        layer="tests/unit/leases/test_lease_manager.py",
    ),
    Mutant(
        name="strays-left-alone",
        file="kclrun/leases/manager.py",
        old="            if lease.owner == me and self._balancer.is_free(lease.key):",
        new="            if lease.is_ended and self._balancer.is_free(lease.key):",
        breaks="rows that say us and are in nobody's hands are never picked up",
        source="a2, a9: any error leaves the row owned",
        # In a fleet every take is read back before it is given up: strays are seldom.
        layer="tests/unit/leases/test_lease_asks_and_offers.py",
    ),
    Mutant(
        name="parents-not-asked",
        file="kclrun/leases/table_view.py",
        old="    return all(parent is None or parent.is_ended for parent in parents)",
        new="    return any(parent is None or parent.is_ended for parent in parents)",
        breaks="a child is started when one of its parents has ended",
        source="D.7: one merge parent forgotten",
        # In a fleet the scan has said before that all parents have ended: a second net.
        layer="tests/unit/leases/test_lease_manager.py",
    ),
    Mutant(
        name="scan-believed-about-parents",
        file="kclrun/leases/held_leases.py",
        old="            are_over = held_lease.parents.are_over or not row.parents",
        new="            are_over = True",
        breaks="a child is started on the word of a scan, without consistent reads",
        source="trace C2",
        # Rows of a simulated scan are never stale, as an eventually consistent one's may be.
        layer="tests/unit/leases/test_lease_manager.py",
    ),
    Mutant(
        name="drained-manager-keeps-idle-rows",
        file="kclrun/leases/held_leases.py",
        old="        if self.is_draining or is_asked_for:",
        new="        if is_asked_for:",
        breaks="a draining manager keeps rows that have no process, and never finishes",
        source="trace N8",
        # In a fleet a drain has an end by time, and what it left behind expires: time is lost.
        layer="tests/unit/leases/test_lease_giving_away.py",
    ),
    Mutant(
        name="ask-counted-twice",
        file="kclrun/leases/assignment.py",
        old=(
            "            self._promised.add(lease.key)\n            return\n       "
            " self.counts[to] += 1"
        ),
        new=(
            "            self._promised.add(lease.key)\n            return\n"
            "        self.counts[owner] += 1\n        self.counts[to] += 1"
        ),
        breaks="a lease on its way counts for its owner and for the asker: no fixed point",
        source="Assignment",
        layer=BALANCE,
    ),
    Mutant(
        name="own-lease-not-counted",
        file="kclrun/leases/assignment.py",
        old="        allowed = min(\n            self._policy.moves",
        new="        self._mine -= 1\n        allowed = min(\n            self._policy.moves",
        breaks="a manager holds itself for poorer than it is: leases wander between even owners",
        source="D.7: own lease counted as rich",
        layer=BALANCE,
    ),
    Mutant(
        name="load-moves-again-at-once",
        file="kclrun/leases/load.py",
        old="        return owner not in self.moving and owner not in self.unsteady",
        new="        return True",
        breaks="leases are exchanged while others are on their way: two fill one light owner",
        source="balance by load: hysteresis",
        layer=LOAD,
    ),
    Mutant(
        name="load-without-a-watch",
        file="kclrun/leases/load.py",
        old="        pays = min(watched.excess, watched.gain, *margins) > 0",
        new="        pays = True",
        breaks="one scan with lucky figures moves leases: noise keeps them moving for ever",
        source="balance by load: a fixed point",
        layer=LOAD_UNITS,
    ),
    Mutant(
        name="load-before-counts",
        file="kclrun/leases/load.py",
        old="        is_even = other != self._me and abs(count - mine) <= 1",
        new="        is_even = other != self._me",
        breaks="a lease goes to an owner that holds far more already, or far fewer",
        source="Assignment: counts first",
        layer="tests/scenarios/test_scenarios.py",
    ),
    Mutant(
        name="load-given-for-nothing",
        file="kclrun/leases/balancing.py",
        old="                if wanted is not None and not self._held.is_draining:",
        new="                if wanted is None and not self._held.is_draining:",
        breaks="the light lease is never asked for: the counts move another one, at random",
        source="balance by load: swap a heavy for a light lease",
        layer=LOAD_UNITS,
    ),
    Mutant(
        name="load-of-a-start",
        file="kclrun/lease/policy.py",
        old="        if age_s < LOAD_MEAN_S:\n            return None\n",
        new="",
        breaks="a process that reads a backlog at its start counts as a heavy lease",
        source="balance by load: stale figures after a move",
        layer="tests/unit/lease/test_lease_life_pieces.py",
    ),
    Mutant(
        name="clean-up-before-children-begin",
        file="kclrun/leases/cleanup.py",
        old=(
            "        row is not None and row.checkpoint.sequence_number not in _AT_START"
            " for row in rows"
        ),
        new="        row is not None for row in rows",
        breaks="an ended row goes while its children have not begun",
        source="P13, I11",
        layer="dense storms",
        found_at=3,
    ),
    Mutant(
        name="clean-up-before-parents",
        file="kclrun/leases/cleanup.py",
        old="        and not any(view.has_row(parent) for parent in row.parents)",
        new="        and row.is_ended",
        breaks="an ended row goes before those of its own parents",
        source="P13",
        layer="dense storms",
        found_at=1,
    ),
    Mutant(
        name="deletion-on-one-listing",
        file="kclrun/leases/cleanup.py",
        old="            if listing.seen_instant - since < max(two_periods_s, lag_s):",
        new="            if listing.seen_instant - since < 0.0:",
        breaks="one listing that lacks a shard deletes its row, and its checkpoint with it",
        source="a10",
        found_at=1,
    ),
    Mutant(
        name="listing-lag-forgotten",
        file="kclrun/leases/cleanup.py",
        old="            lag_s = LISTING_LAG_MAX_S if is_new else 0.0",
        new="            lag_s = 0.0",
        breaks="a shard that the listing does not show yet is taken for trimmed",
        source="K5",
        # Rows that a kclrun owner renews are left to it, so storms of its fleets meet this seldom.
        layer="tests/unit/leases/test_trimmed_or_new.py",
    ),
    Mutant(
        name="latest-not-pinned",
        file="kclrun/leases/shard_sync.py",
        old="    pinned_at = listed_at if sentinel == LATEST else None",
        new="    pinned_at = None",
        breaks="what arrives between the creation of a lease and its first read is skipped",
        source="P14",
        layer="tests/scenarios/test_scenarios.py",
    ),
    Mutant(
        name="latest-of-others-not-pinned",
        file="kclrun/leases/balancing.py",
        old="            latest_pinned_at=pinned_at,\n",
        new="",
        breaks="each start of a lease that a Java worker made at LATEST skips what came before it",
        source="P14; trial: 20 of 20 records lost by a halt and a resume",
        layer="tests/unit/leases/test_lease_traces.py",
    ),
    Mutant(
        name="pin-moved-by-each-take",
        file="kclrun/protocol/conditions.py",
        old='SetOnce("latest_pinned_at", _PINNED_AT)',
        new='Set("latest_pinned_at", _PINNED_AT)',
        breaks="a take that saw no instant overwrites one that was noted since",
        source="P14",
        layer="tests/contract/test_lease_table.py",
    ),
    Mutant(
        name="drain-waits-for-broken-rows",
        file="kclrun/leases/held_leases.py",
        old="        if not self.is_draining:\n            return [ReadRow(event.key,",
        new="        if True:\n            return [ReadRow(event.key,",
        breaks="a row that a person mistyped costs every stop its whole grace and exit code 75",
        source="P8; trial: 68.5 s and exit 75",
        layer="tests/unit/leases/test_lease_manager.py",
    ),
    Mutant(
        name="ended-owners-forgotten",
        file="kclrun/leases/table_view.py",
        old="        self.owners = frozenset(owners | with_ended)\n",
        new="        self.owners = frozenset(owners)\n",
        breaks="after every shard split, the first manager to look takes all the children",
        source="seen beside KCL 2.7.2 and 3.5.1: 11 of 12 children taken, 149 s until fair",
        layer="tests/scenarios/test_scenarios.py",
    ),
    Mutant(
        name="long-ended-owners-counted",
        file="kclrun/leases/table_view.py",
        old="            may_live = has_moved or not owner.startswith(OWNER_PREFIX)\n",
        new="            may_live = True\n",
        breaks="a restarted fleet leaves a failover's share of its work to owners long gone",
        source="P9: what is new to us was renewed just now",
        layer="tests/scenarios/test_scenarios.py",
    ),
    Mutant(
        name="failed-starts-never-offered",
        file="kclrun/leases/restarts.py",
        old="        is_failing = self.failed_starts >= FAILED_STARTS_MAX",
        new="        is_failing = False",
        breaks="a host that can start no process keeps its share of the leases, and reads none",
        source="P17: what fails because of the host leaves the host",
        layer=SICK_HOST,
    ),
    Mutant(
        name="halted-after-one-hosts-deaths",
        file="kclrun/leases/restarts.py",
        old="            if failed_slot not in {None, slot} or self.deaths >= DEATHS_ALONE_MAX:",
        new="            if self.has_tripped:",
        breaks="five deaths on a host short of memory halt a lease for the whole fleet",
        source="halted for deaths only after another host tried",
        layer=SICK_HOST,
    ),
    Mutant(
        name="deaths-counted-anew-on-each-host",
        file="kclrun/leases/restarts.py",
        old="            if failed_slot not in {None, slot} or self.deaths >= DEATHS_ALONE_MAX:",
        new="            if self.deaths >= DEATHS_ALONE_MAX:",
        breaks="a lease that kills whatever runs it wanders through the fleet",
        source="L7",
        layer=SICK_HOST,
    ),
    Mutant(
        name="note-of-deaths-outlives-progress",
        file="kclrun/model/lease.py",
        old="if died is not None and died.position == at else None",
        new="if died is not None else None",
        breaks="deaths of long ago halt a lease that moved on since, by a Java worker too",
        source="L7",
        layer=SICK_HOST,
    ),
    Mutant(
        name="places-not-capped",
        file="kclrun/leases/capacity.py",
        old="        self.count = self.proven = min(self.count, running)",
        new="        self.proven = min(self.count, running)",
        breaks="a sick host takes back at once what it gave away: nobody reads the lease",
        source="P17: what fails because of the host leaves the host",
        layer=SICK_HOST,
    ),
    Mutant(
        name="places-never-come-back",
        file="kclrun/leases/capacity.py",
        old="        self.count += self._step\n",
        new="",
        breaks="a host that was short of memory for a minute holds less than its share for ever",
        source="L4",
        layer=SICK_HOST,
    ),
    Mutant(
        name="overdue-leases-left-to-nobody",
        file="kclrun/leases/assignment.py",
        old="            elif self._room_for_overdue > 0 and self._is_overdue(lease):",
        new="            elif self._room > 0 and self._is_overdue(lease):",
        breaks="where all hosts failed for a moment, nobody reads what they gave away",
        source="L1",
        layer=SICK_HOST,
    ),
    Mutant(
        name="expired-starts-tried-for-ever",
        file="kclrun/leases/held_lease.py",
        old="        if now >= self.confirmed_instant + failover_s:\n",
        new="        if False:\n",
        breaks="a host so slow that start commands expire keeps its leases and reads none of them",
        source="P17: what fails because of the host leaves the host",
        layer=SICK_HOST,
    ),
    Mutant(
        name="expired-starts-cost-no-place",
        file="kclrun/leases/capacity.py",
        old="        if self._expired_starts >= FAILED_STARTS_MAX:\n",
        new="        if False:\n",
        breaks="others take what expired with its start, and the slow host asks for more, for ever",
        source="the simulator; P17: what fails because of the host leaves the host",
        layer="tests/unit/simulation/test_sick_hosts.py",
    ),
    Mutant(
        name="waiting-child-keeps-its-place",
        file="kclrun/leases/balancing.py",
        old="        if unread and self._held.is_full:\n",
        new="        if False:\n",
        breaks="with leases.max filled everywhere, a parent whose row was made again is never read",
        source="the simulator; a lease whose parents have not ended is not work",
        layer="tests/unit/leases/test_lease_manager.py",
    ),
    Mutant(
        name="creation-time-not-published",
        file="kclrun/leases/balancing.py",
        old="stream_created_at=self._policy.created.get(stream_of(lease.key)),",
        new="stream_created_at=None,",
        breaks="a fleet that starts after its stream was made again reads it by the old rows",
        source="P13",
        layer="tests/unit/simulation/test_recreated_stream.py",
    ),
    Mutant(
        name="recreated-stream-not-refused",
        file="kclrun/leases/manager.py",
        old="        if why is None or self._is_refused or self.is_draining:\n",
        new="        if True:\n",
        breaks="leases of a stream that was made again are renewed and not read, for ever",
        source="found by trying the product out; P13",
        layer="tests/unit/simulation/test_recreated_stream.py",
    ),
    Mutant(
        name="empty-listing-believed",
        file="kclrun/leases/auditing.py",
        old="        if before is not None and before.shards and not event.shards:\n",
        new="        if False:\n",
        breaks="a stream that was made again is not noticed by who listed it before it had a shard",
        source="the storms that make a stream again; P13",
        layer="tests/unit/leases/test_recreated_stream.py",
    ),
    Mutant(
        name="rows-made-by-a-listing-of-another-stream",
        file="kclrun/leases/auditing.py",
        old="        if is_doubted:\n            return commands\n",
        new="",
        breaks="rows are made for shards of the new stream, with the old creation time",
        source="the simulator",
        layer="tests/unit/simulation/test_recreated_stream.py",
    ),
    Mutant(
        name="drain-leaves-its-asks",
        file="kclrun/leases/balancing.py",
        old=(
            "            if not self.is_writing(key):\n                commands +="
            " self._withdraw(key)"
        ),
        new="            if self._is_draining:\n                continue",
        breaks="an owner offers a lease to a manager that is gone: nobody reads it for seconds",
        source="P17: four managers that drain at once",
        # In a fleet time is lost, no promise broken: the others take it in the end.
        layer="tests/unit/leases/test_lease_asks_and_offers.py",
    ),
    Mutant(
        name="drain-keeps-what-is-offered-to-it",
        file="kclrun/leases/balancing.py",
        old="        if row is not None and row.owner == OFFERED and row.offered_to == self._me:",
        new="        if row is not None and row.owner == OFFERED and row.offered_to != self._me:",
        breaks="what was just offered to a manager that drains waits for it for seconds",
        source="P17: four managers that drain at once",
        layer="tests/unit/leases/test_lease_asks_and_offers.py",
    ),
    Mutant(
        name="left-offers-tell-nothing",
        file="kclrun/leases/balancing.py",
        old="        return is_news and not is_seldom(",
        new="        return is_news and is_seldom(",
        breaks="a target of owners that are gone stands until the next scan in its turn",
        source="P17: four managers that drain at once",
        layer="tests/unit/simulation/test_drains_at_once.py",
    ),
    Mutant(
        name="who-left-is-an-owner-for-what-ended",
        file="kclrun/leases/assignment.py",
        old="set(left & view.owners_of_ended)",
        new="set()",
        breaks="the shards that ended at a drained manager keep it an owner for a failover",
        source="P17: shards that split while managers drain",
        layer="tests/unit/simulation/test_drains_at_once.py",
    ),
    Mutant(
        name="starved-at-records-never-counts",
        file="kclrun/leases/restarts.py",
        old="        if at_records:\n",
        new="        if False:\n",
        breaks="a record that needs more memory than any host has wanders, and is never halted",
        source="L7",
        layer="tests/scenarios/test_scenarios.py",
    ),
    Mutant(
        name="starved-at-records-halts-at-once",
        file="kclrun/leases/held_lease.py",
        old="            case reports.ProcessorFailed(is_host_fault=True):\n",
        new="            case reports.ProcessorFailed(is_host_fault=None):\n",
        breaks="a host without memory, descriptors or disk halts its share of the leases for all",
        source="L7: the troubles of one host stay there",
        layer="tests/unit/leases/test_lease_sick_host.py",
    ),
    Mutant(
        name="paused-lease-started",
        file="kclrun/leases/held_leases.py",
        old="            return Transition.TO_BE_PAUSED",
        new="            pass",
        breaks="a manager starts a process for a paused lease",
        source="a pause, attacked",
        layer="tests/scenarios/test_held_lease_table.py",
    ),
)
