"""Rows `idle` and `start`: what lease processes cost while idle, how fast they begin."""

import statistics
import time
from typing import Any, Final

from bench.figures import Figure, Target, figure, paired_ratios, percentile
from bench.lease_rig import LEASE_ENTRY, LeaseProcess, LeaseRig, cpu_s_of, wait_until
from bench.servers import CannedServer
from bench.tls_front import OwnCa

_LEASES: Final = 100
# Three heartbeats of each lease (one every 3.3 s) and ten polls.
_WINDOW_S: Final = 10.0
_MB: Final = 1e6
# As many as an instance of a small fleet starts at once.
_TOGETHER: Final = 8
_TLS_MEMORY: Final = "own memory of each: over TLS, less over plain HTTP"


def idle(rounds: int) -> list[Figure]:
    """100 lease processes at the tips of their shards: CPU and memory of them all.

    Started through the real launcher with the default settings: a GetRecords each second, a
    heartbeat each 3.3 s to the lease table (moto), the status slot once a second. CPU is
    user and system time of the lease processes over 10 s, in percent of one core; servers and the
    launcher are not in it. Own memory is USS, what would come back if that one process ended, for
    each of its leases; the sum of PSS counts what they share once. First each lease has a process
    of its own, then 16 share one (`leases.per_process`), both over plain HTTP; then each has a
    process again, over TLS with a CA of the bench's own. A processor that imports nothing: user
    code comes on top. That they poll and beat is asserted, not assumed.
    """
    plain = _idle("100 leases", 1, rounds, Target(at_most=10.0), Target(at_most=7.0))
    shared = _idle("100 leases, 16 a process", 16, rounds, Target(at_most=6.0), Target(at_most=1.5))
    with OwnCa() as ca:
        over_tls = _idle("100 leases over TLS", 1, rounds, Target(at_most=10.0), None, ca)
    more = over_tls[1].median - plain[1].median
    return [
        *plain,
        *shared,
        *over_tls,
        figure("idle", _TLS_MEMORY, "MB", [more], target=Target(at_most=0.5)),
    ]


def _idle(
    what: str,
    per_process: int,
    rounds: int,
    cpu: Target,
    memory: Target | None,
    ca: OwnCa | None = None,
) -> list[Figure]:
    with CannedServer() as canned, LeaseRig(canned, ca=ca) as rig:
        names = [f"empty-{number}" for number in range(_LEASES)]
        leases: list[LeaseProcess] = []
        for at in range(0, _LEASES, per_process):
            if per_process == 1:
                leases.append(rig.start(LEASE_ENTRY, names[at]))
            else:
                leases += rig.start_shared(LEASE_ENTRY, names[at : at + per_process])
        wait_until(lambda: len(canned.first_reads()) >= _LEASES, "100 first polls")
        processes = list({each.pid: each for each in leases}.values())
        shares = [_cpu_percent(canned, leases, processes) for _ in range(rounds)]
        memories: list[Any] = [process.memory() for process in processes]
    leases_each = _LEASES / len(processes)
    own = [each.uss / _MB / leases_each for each in memories]
    return [
        figure("idle", f"{what}: CPU", "% of a core", shares, target=cpu),
        figure("idle", f"{what}: own memory (USS) of each", "MB", own, target=memory),
        figure("idle", f"{what}: PSS of all", "MB", [sum(each.pss for each in memories) / _MB]),
    ]


def _cpu_percent(
    canned: CannedServer, leases: list[LeaseProcess], processes: list[LeaseProcess]
) -> float:
    reads, counters = canned.reads(), [lease.counter() for lease in leases]
    instant, cpu_s = time.monotonic(), sum(process.cpu_s() for process in processes)
    time.sleep(_WINDOW_S)
    used_s = sum(process.cpu_s() for process in processes) - cpu_s
    window_s = time.monotonic() - instant
    polls_a_s = (canned.reads() - reads) / window_s
    now = [lease.counter() for lease in leases]
    beats = [after - before for after, before in zip(now, counters, strict=True)]
    assert polls_a_s > 0.95 * _LEASES, f"only {polls_a_s:.0f} polls a second"
    assert statistics.median(beats) >= 2, f"{statistics.median(beats)} heartbeats in {window_s} s"
    return 100 * used_s / window_s


def start(rounds: int) -> list[Figure]:
    """From asking the launcher for a lease process to that lease's first GetRecords.

    In between: the fork, the start command, the clients, the lock, the conditional claim in the
    lease table (moto), importing the processor, `initialize`, GetShardIterator. The end is the
    instant at which the canned server has the request in hand, on the clock that all processes of
    a host share. One start after the other, on an idle host; the launcher is loaded already.

    Then the CPU of a launcher and of eight lease processes until the last of them reads, over plain
    HTTP and over TLS in turn: user and system time of these nine processes from their beginning, so
    that loading the CA bundle is in it.
    """
    with CannedServer() as canned, LeaseRig(canned) as rig, OwnCa() as ca:
        rig.prepare(LEASE_ENTRY)
        took_ms = [_start_ms(canned, rig, f"empty-start-{number}") for number in range(rounds)]
        with LeaseRig(canned, ca=ca) as tls_rig:
            pairs = [
                (_start_cpu_ms(canned, rig, f"{at}h"), _start_cpu_ms(canned, tls_rig, f"{at}s"))
                for at in range(max(3, rounds // 4))
            ]
    plain_ms, over_tls_ms = zip(*pairs, strict=True)
    ratios = paired_ratios(over_tls_ms, plain_ms)
    return [
        figure("start", "asked for → first GetRecords", "ms", took_ms),
        figure("start", "… its p99", "ms", [percentile(took_ms, 99)]),
        figure("start", "8 leases over plain HTTP", "ms CPU", plain_ms),
        figure("start", "8 leases over TLS", "ms CPU", over_tls_ms),
        figure("start", "8 leases: TLS ÷ plain HTTP", "x", ratios, target=Target(at_most=1.25)),
    ]


def _start_cpu_ms(canned: CannedServer, rig: LeaseRig, name: str) -> float:
    shard_ids = [f"empty-cpu-{name}-{number}" for number in range(_TOGETHER)]
    with rig.new_launcher(LEASE_ENTRY) as launcher:
        processes = [rig.start(LEASE_ENTRY, shard_id) for shard_id in shard_ids]
        wait_until(lambda: canned.first_reads().keys() >= set(shard_ids), "eight first GetRecords")
        assert launcher.pid is not None, "it has forked"
        spent_s = cpu_s_of(launcher.pid) + sum(process.cpu_s() for process in processes)
        for process in processes:
            rig.end(process)
    return 1000 * spent_s


def _start_ms(canned: CannedServer, rig: LeaseRig, shard_id: str) -> float:
    rig.create_row(shard_id)
    process, asked = rig.start_on_row(LEASE_ENTRY, shard_id)
    wait_until(lambda: shard_id in canned.first_reads(), "the first GetRecords")
    rig.end(process)
    return 1000 * (canned.first_reads()[shard_id] - asked)
