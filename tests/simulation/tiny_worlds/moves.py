"""What can happen next in a state, and what it makes of it.

Moves come in the order of a fair and healthy world: what was asked is answered, what is due rings,
batches end and begin, and only then time passes; so always taking the first one is the schedule
that liveness is judged by. Faults come last, while the world has some left.
"""

from copy import copy

from kclrun.calling.delivery import StartBatch
from kclrun.lease import events as worker_on
from kclrun.leases import events
from kclrun.model.lease import ANYBODY
from kclrun.model.time import WallTime
from kclrun.protocol.writes import (
    Applied,
    Ask,
    Claim,
    CreateChildren,
    HeldParent,
    LateCheckpoint,
    OutcomeUnknown,
)
from tests.simulation.tiny_worlds.motions import Motion
from tests.simulation.tiny_worlds.rules import key_of
from tests.simulation.tiny_worlds.shells import Shells
from tests.simulation.tiny_worlds.states import State
from tests.simulation.tiny_worlds.worlds import OWNERS

# A client waits so many ticks for a reply, a scan may be so many old: a failover.
PATIENCE_TICKS = 2
_UNKNOWN = OutcomeUnknown("timed out")
FAULTS = {
    "lose request", "lose reply", "late", "slow", "stale", "kill process", "kill host",
    "kill manager", "ask", "restart",
}  # fmt: skip


def moves(shells: Shells, state: State) -> list[tuple]:
    """All that can happen next, the fair schedule's choice first."""
    regular, faults = [], []
    allowed = shells.world.faults if state.faults_left > 0 else frozenset()
    is_time_free = True
    for index, host in enumerate(state.hosts):
        now = shells.instant(index, state.ticks)
        for place, request in enumerate(host.requests):
            is_time_free &= _offer_request(regular, faults, allowed, index, place, request)
        for key, process in host.processes.items():
            if process.request is not None:
                request = process.request
                is_time_free &= _offer_request(regular, faults, allowed, index, key, request)
        for reap in host.reaps:
            regular.append(("reap", index, reap[0]))
            is_time_free = False
        if host.has_manager and not host.is_finished:
            if host.alarm <= now:
                regular.append(("ring", index, None))
                is_time_free = False
                if "stale" in allowed and not any(each.kind == "scan" for each in host.requests):
                    faults.append(("stale", index, None))
            if "kill manager" in allowed:
                faults.append(("kill manager", index, None))
        if "kill host" in allowed and (host.processes or host.has_manager):
            faults.append(("kill host", index, None))
        is_time_free &= _offer_process_moves(regular, faults, allowed, index, host, now, shells)
        faults.extend(("arrive", index, place) for place in range(len(host.orphans)))
        if state.drains_left and host.has_manager and not host.is_draining:
            faults.append(("drain", index, None))
    if "ask" in allowed:
        for key, row in state.rows.items():
            if row.owner in OWNERS and not row.is_ended and row.handoff is None:
                faults.append(("ask", 0, key))
    if is_time_free and any(_is_alive(host) for host in state.hosts):
        regular.append(("tick", 0, None))
    return regular + faults


def _offer_request(regular, faults, allowed, index, place, request) -> bool:
    """What may become of one request; whether time may pass before."""
    if request.answer is not None:
        regular.append(("answer", index, place))
        return request.waits < PATIENCE_TICKS
    regular.append(("serve", index, place))
    if request.kind == "write":
        faults.extend(
            (fault, index, place)
            for fault in ("lose request", "lose reply", "late", "slow")
            if fault in allowed
        )
    return False


def _offer_process_moves(regular, faults, allowed, index, host, now, shells) -> bool:
    is_time_free = True
    for key, process in host.processes.items():
        is_quiet = process.request is None
        if is_quiet and process.alarm <= now:
            regular.append(("ring", index, key))
            is_time_free = False
        if process.busy:
            regular.append(("end", index, key))
            is_time_free &= process.busy_ticks < 1
        elif _may_begin(process, now, shells.world.records):
            regular.append(("begin", index, key))
        faults.extend(
            (fault, index, key) for fault in ("kill process", "restart") if fault in allowed
        )
    return is_time_free


def _may_begin(process, now, records) -> bool:
    waiting = records - process.delivered
    if not process.is_initialized or not waiting or not process.delivery.may_start(now):
        return False
    return isinstance(copy(process.delivery).next_start(waiting, now), StartBatch)


def _is_alive(host) -> bool:
    return bool(host.processes) or (host.has_manager and not host.is_finished)


def step(shells: Shells, state: State, move: tuple) -> State:
    """Make it happen. Raises: Broken, InvariantViolation, AssertionError where a rule is broken."""
    verb, index, what = move
    motion = Motion(shells, state, is_scan_stale=verb == "stale")
    if verb in FAULTS:
        motion.faults_left -= 1
    _HAPPENINGS[verb](motion, index, what)
    _drop_dead_orphans(motion)
    return motion.state()


def _tick(motion: Motion, *_) -> None:
    motion.ticks += 1
    for index in range(len(motion.hosts)):
        host = motion.host(index)
        now = motion.instant(index)
        host.requests = tuple(
            each if each.answer is None else each._replace(waits=each.waits + 1)
            for each in host.requests
        )
        due = [change for at, change in host.timed if at <= now]
        host.timed = tuple(each for each in host.timed if each[0] > now)
        for change in due:
            motion.send(index, change)
        for key in tuple(host.processes):
            _tick_process(motion, index, key, now)


def _tick_process(motion: Motion, index: int, key: str, now: float) -> None:
    process = motion.process(index, key)
    if process.busy:
        process.busy_ticks += 1
    if process.request is not None:
        process.request = process.request._replace(waits=process.request.waits + 1)
    due = [command for at, command in process.timed if at <= now]
    if due and process.request is None:
        process.timed = tuple(each for each in process.timed if each[0] > now)
        for command in due:
            motion.request(index, process, command)
        motion.turn(index, process)


def _request_of(motion: Motion, index: int, place):
    """The request and whose it is: a manager's by number, a lease process's by key."""
    host = motion.hosts[index]
    if isinstance(place, int):
        return host.requests[place], None
    return host.processes[place].request, place


def _serve(motion: Motion, index: int, place) -> None:
    request, key = _request_of(motion, index, place)
    _tell(motion, index, request, key, _carry_out(motion, index, request, key))


def _carry_out(motion: Motion, index: int, request, key):
    """Do what is asked; the event that says so."""
    match request.kind:
        case "write":
            sender = f"{'ab'[index]}{'/' + key if key else ''}"
            outcome = motion.write(sender, request.what)
            if key is None:
                return events.WriteResolved(request.what, outcome)
            return worker_on.WriteResolved(request.what, outcome, request.sent)
        case "row" if key is None:
            return events.RowRead(request.what, motion.read(request.what))
        case "row":
            return worker_on.OwnRowRead(motion.read(key))
        case "parents":
            child, parents = request.what
            return events.ParentsRead(child, tuple(motion.read(parent) for parent in parents))
        case "rows":
            return worker_on.RowsRead(tuple((each, motion.read(each)) for each in request.what))


def _tell(motion: Motion, index: int, request, key, event) -> None:
    if key is None:
        motion.answered(index, request, event)
        return
    is_claimed = isinstance(request.what, Claim) and isinstance(event.outcome, Applied)
    if is_claimed:
        motion.process(index, key).has_claimed = True
    motion.heard(index, key, event)


def _lose_request(motion: Motion, index: int, place) -> None:
    request, key = _request_of(motion, index, place)
    _tell(motion, index, request, key, _unknown(request, key))


def _lose_reply(motion: Motion, index: int, place) -> None:
    request, key = _request_of(motion, index, place)
    _carry_out(motion, index, request, key)
    _tell(motion, index, request, key, _unknown(request, key))


def _late(motion: Motion, index: int, place) -> None:
    request, key = _request_of(motion, index, place)
    host = motion.host(index)
    number = host.processes[key].number if key is not None else 0
    host.orphans = (*host.orphans, (request.what, number))
    _tell(motion, index, request, key, _unknown(request, key))


def _unknown(request, key):
    if key is None:
        return events.WriteResolved(request.what, _UNKNOWN)
    return worker_on.WriteResolved(request.what, _UNKNOWN, request.sent)


def _slow(motion: Motion, index: int, place) -> None:
    """Carried out now; its sender hears of it later."""
    request, key = _request_of(motion, index, place)
    event = _carry_out(motion, index, request, key)
    pending = request._replace(answer=event)
    host = motion.host(index)
    if key is None:
        host.requests = tuple(pending if each is request else each for each in host.requests)
    else:
        motion.process(index, key).request = pending


def _answer(motion: Motion, index: int, place) -> None:
    request, key = _request_of(motion, index, place)
    _tell(motion, index, request, key, request.answer)


def _ring(motion: Motion, index: int, key) -> None:
    if key is None:
        motion.feed(index, events.Ticked())
    else:
        motion.post(index, key, worker_on.Ticked())


def _reap(motion: Motion, index: int, key: str) -> None:
    host = motion.host(index)
    _, number, reason = next(each for each in host.reaps if each[0] == key)
    host.reaps = tuple(each for each in host.reaps if each[0] != key)
    motion.feed(index, events.ProcessExited(key, number, reason))


def _kill_process(motion: Motion, index: int, key: str) -> None:
    process = motion.process(index, key)
    motion.unclean(key)
    motion.ends(index, process, "SIGKILL")


def _kill_host(motion: Motion, index: int, _) -> None:
    host = motion.host(index)
    for key in tuple(host.processes):
        _kill_process(motion, index, key)
    _end_manager(host)
    host.reaps = ()


def _kill_manager(motion: Motion, index: int, _) -> None:
    host = motion.host(index)
    _end_manager(host)
    for key in tuple(host.processes):
        motion.unclean(key)
        motion.post(index, key, worker_on.ManagerGone())


def _end_manager(host) -> None:
    under_way = [(each.what, 0) for each in host.requests if each.kind == "write"]
    host.orphans = (*host.orphans, *under_way)
    host.requests = host.timed = host.waiting = host.reaps = ()
    host.has_manager = False
    host.mind = None


def _arrive(motion: Motion, index: int, place: int) -> None:
    host = motion.host(index)
    change, _ = host.orphans[place]
    host.orphans = host.orphans[:place] + host.orphans[place + 1 :]
    motion.write(f"{'ab'[index]}, late", change)


def _drain(motion: Motion, index: int, _) -> None:
    motion.drains_left -= 1
    motion.feed(index, events.DrainRequested("SIGTERM"))


def _restart(motion: Motion, index: int, key: str) -> None:
    """The lease is too busy for the process that it shares."""
    motion.post(index, key, worker_on.RestartRequested())


def _ask(motion: Motion, _, key: str) -> None:
    """An operator: `kclrun leases release`."""
    row = motion.rows[key]
    asked_at = WallTime(motion.ticks + 0.5)
    motion.write("an operator", Ask(key, ANYBODY, row.owner, asked_at, row.handoff))


def _drop_dead_orphans(motion: Motion) -> None:
    """What expects a counter that has passed can never apply."""
    for index, host in enumerate(motion.hosts):
        if host.orphans:
            alive = tuple(each for each in host.orphans if not _is_dead(each[0], motion.rows))
            if len(alive) != len(host.orphans):
                motion.host(index).orphans = alive


def _is_dead(change, rows) -> bool:
    row = rows.get(key_of(change))
    if isinstance(change, CreateChildren):
        held = [each for each in change.parents if isinstance(each, HeldParent)]
        return any(each.key in rows and rows[each.key].counter > each.counter for each in held)
    if row is None:
        return False
    if isinstance(change, LateCheckpoint):
        return row.checkpoint >= change.position
    counter = getattr(change, "seen_counter", None)
    return counter is not None and row.counter > counter


_HAPPENINGS = {
    "tick": _tick,
    "serve": _serve,
    "answer": _answer,
    "ring": _ring,
    "stale": _ring,
    "reap": _reap,
    "begin": lambda motion, index, key: motion.begins_batch(index, key),
    "end": lambda motion, index, key: motion.ends_batch(index, key),
    "lose request": _lose_request,
    "lose reply": _lose_reply,
    "late": _late,
    "slow": _slow,
    "kill process": _kill_process,
    "kill host": _kill_host,
    "kill manager": _kill_manager,
    "arrive": _arrive,
    "drain": _drain,
    "ask": _ask,
    "restart": _restart,
}
