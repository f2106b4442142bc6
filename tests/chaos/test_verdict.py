"""The judges of chaos can find each fault: otherwise their silence proves nothing."""

import json
import random

import pytest

from tests.chaos.excuses import died_before_it_logged, excuses, lives_of
from tests.chaos.faults import KINDS
from tests.chaos.nemesis import WEIGHTS, Nemesis, Signal
from tests.chaos.samples import Sample, Sampler
from tests.chaos.table_history import judge_history
from tests.chaos.trims import Told, Trims, expired_records, unnamed_shards, untrue_expiries
from tests.chaos.verdict import bugs_in, duplicates_by_excuse, judge_lineage, judge_overlaps
from tests.chaos.weather import foretell
from tests.processes.ledger_rig.deliveries import Batch

FAILOVER_S = 5.0


class Written:
    """A ledger of one shard, "s", from (what, at, pid, token) or (what, at, pid, token, shard)."""

    def __init__(self, *entries):
        self.marks, self.batches = [], []
        for what, at, pid, token, *shard in entries:
            where = {"shard": shard[0] if shard else "s", "token": token, "pid": pid, "at": at}
            if what == "batch":
                self.batches.append(Batch(at, pid, "a", where["shard"], token, ()))
            else:
                self.marks.append({"what": what, "manager": "a", **where})


TWO_LIVES = (("began", 10.0, 1, 7), ("batch", 11.0, 1, 7), ("began", 20.0, 2, 9))


def signalled(name, at, pid, until=None):
    return Signal(at, name, "lease", "a", pid, at if until is None else until)


def hit(kind, at, *keys, door="a/dynamodb"):
    return {"at": at, "door": door, "operation": "UpdateItem", "kind": kind, "keys": list(keys)}


EXCUSES = {
    "killed": ([signalled("KILL", 15.0, 1)], [], {"SIGKILL"}),
    "frozen": ([signalled("STOP", 15.0, 1)], [], {"SIGSTOP"}),
    "a write cut off": ([], [hit("cut_after", 12.0, "s")], {"table fault"}),
    "a doubled write": ([], [hit("repeat", 12.0, "s")], {"table fault"}),
    "a failover earlier": ([], [hit("stall", 7.0, "s")], {"table fault"}),
    "nothing": ([], [], None),
    "a polite signal": ([signalled("TERM", 15.0, 1)], [], None),
    "another process": ([signalled("KILL", 15.0, 3)], [], None),
    "later, another process of that pid": ([signalled("KILL", 25.0, 1)], [], None),
    "another lease": ([], [hit("cut_after", 12.0, "t")], None),
    "another machine": ([], [hit("cut_after", 12.0, "s", door="b/dynamodb")], None),
    "a request of no lease": ([], [hit("cut_after", 12.0)], None),
    "long before": ([], [hit("cut_after", 4.0, "s")], None),
    "a write that comes once more": ([], [hit("echo", 12.0, "s")], None),
    "a slow answer": ([], [hit("slice", 12.0, "s")], None),
}


@pytest.mark.parametrize("what", EXCUSES)
def test_what_is_unclean_excuses_the_process_it_happened_to_and_nothing_else_does(what):
    signals, hits, words = EXCUSES[what]
    found = excuses(lives_of(Written(*TWO_LIVES)), signals, hits, FAILOVER_S)

    assert found == ({} if words is None else {1: words})


def test_a_lease_process_that_ended_by_a_bug_is_found():
    lines = [
        {"event": "process_died", "shard": "s", "reason": "exit code 70 (bug)"},
        {"event": "process_died", "shard": "t", "reason": "killed by SIGKILL"},
        {"event": "lease_claimed", "shard": "u"},
    ]

    assert bugs_in(lines) == ["s: process_died: exit code 70 (bug)"]


def test_duplicates_are_reported_by_their_excuse():
    assert duplicates_by_excuse({1: 5, 2: 3}, {1: {"SIGKILL", "SIGSTOP"}}) == {
        "SIGKILL and SIGSTOP": 5,
        "nothing": 3,
    }


def test_a_batch_beside_the_successor_is_found_unless_its_process_was_frozen():
    ledger = Written(*TWO_LIVES, ("batch", 21.0, 1, 7), ("batch", 21.0, 2, 9))
    lives = lives_of(ledger)

    assert judge_overlaps(ledger, lives, [signalled("STOP", 15.0, 1, until=20.9)]) == (1, [])
    for signals in ([], [signalled("STOP", 12.0, 1, until=13.0)]):
        count, faults = judge_overlaps(ledger, lives, signals)
        assert count == 1
        assert "[I4]" in faults[0]


def test_a_frozen_process_has_one_batch_under_way_and_no_second_one():
    ledger = Written(*TWO_LIVES, ("batch", 21.0, 1, 7), ("batch", 22.0, 1, 7))

    _, faults = judge_overlaps(ledger, lives_of(ledger), [signalled("STOP", 15.0, 1, until=20.9)])

    assert "began 2 batches" in faults[0]


PARENTS = {"s": [], "child": ["s"]}


PARENT, CHILD = ("batch", 1.0, 1, 1), ("batch", 3.0, 2, 1, "child")
LINEAGES = {
    "in order": ((PARENT, ("ended", 2.0, 1, 1), CHILD), (), None),
    "never ended": ((PARENT, CHILD), (), "[I3]"),
    "ended later": ((PARENT, CHILD, ("ended", 4.0, 1, 1)), (), "[I3]"),
    "read again": ((("ended", 2.0, 1, 1), CHILD, ("batch", 4.0, 1, 1)), (), "[I3]"),
    "trimmed, and nobody held it": ((PARENT, CHILD), {"s"}, None),
    "trimmed, and read again": ((PARENT, CHILD, ("batch", 4.0, 3, 2)), {"s"}, "after its child"),
}


@pytest.mark.parametrize("what", LINEAGES)
def test_a_child_before_its_parents_end_is_found(what):
    entries, trimmed, fault = LINEAGES[what]
    faults = judge_lineage(Written(*entries), PARENTS, [], trimmed)

    assert faults == [] if fault is None else any(fault in each for each in faults)


PUT = {"s": [("10", "k", 0), ("20", "k", 1), ("30", "k", 2)], "child": [("40", "k", 3)]}


@pytest.mark.parametrize(
    ("delivered", "trimmed", "reported", "excused"),
    [
        ({"10", "40"}, {"s"}, [Told("s", "10")], {"20", "30"}),
        ({"40"}, {"s"}, [Told("s", "TRIM_HORIZON")], {"10", "20", "30"}),
        ({"10", "40"}, {"s"}, [Told("s", "20")], {"30"}),  # a checkpoint passed it
        ({"10", "40"}, {"s"}, [Told("s", "TRIM_HORIZON"), Told("s", "20")], {"30"}),  # told twice
        ({"10", "40"}, {"s"}, [], set()),
        ({"10", "40"}, {"s"}, [Told("child", "40")], set()),  # told of another shard
        ({"10", "40"}, set(), [Told("s", "10")], set()),  # nobody trimmed it
    ],
)
def test_what_nobody_read_of_a_trimmed_shard_is_excused_above_the_checkpoint_that_was_reported(
    delivered, trimmed, reported, excused
):
    assert expired_records(PUT, delivered, trimmed, reported, PARENTS) == excused


def test_a_trimmed_shard_without_a_lease_is_excused_by_the_event_of_what_it_came_of():
    parents = {"1": [], "2": ["1"], "3": ["1"], "4": ["2"], "5": ["4"]}
    trimmed = {"1", "2", "4"}

    assert unnamed_shards(trimmed, [Told("1", "10", children=True)], parents) == {"2", "4"}
    assert unnamed_shards(trimmed, [Told("1", "10")], parents) == set()
    named = [Told("1", "10", children=True), Told("2", "10")]
    assert unnamed_shards(trimmed, named, parents) == set()


def test_an_expiry_of_a_shard_that_nobody_trimmed_is_found():
    assert untrue_expiries({"s"}, [Told("s", "10")]) == []
    assert "[P13]" in untrue_expiries({"s"}, [Told("t", "10")])[0]


def test_one_shard_is_trimmed_for_each_time_that_it_was_asked_for():
    trimmed = []
    trims = Trims(trimmed.append, {}, random.Random(1))

    trims.closed(["a"])
    assert trims.arm()
    assert not trims.arm()
    trims.closed(["b", "c"])
    trims.closed(["d"])

    assert len(trimmed) == 1
    assert set(trimmed) == set(trims.at) <= {"b", "c"}


def test_a_shard_is_trimmed_with_its_ancestors_which_kinesis_forgets_first():
    trimmed = []
    parents = {"a": [], "b": [], "c": ["a", "b"], "d": ["c"], "e": ["c"]}
    trims = Trims(trimmed.append, parents, random.Random(1))
    trims.arm()

    trims.closed(["d"])

    assert trimmed == ["d"]
    assert set(trims.at) == trims.shards == {"a", "b", "c", "d"}


def test_what_was_trimmed_can_be_gone_through_while_more_is_trimmed():
    trims = Trims(lambda shard: None, {}, random.Random(1))
    for shard in ("a", "b"):
        trims.arm()
        trims.closed([shard])

    for shard in trims.shards:
        trims.arm()
        trims.closed([f"later than {shard}"])

    assert len(trims.shards) == 4


class Ended:
    """A manager that has ended."""

    def __init__(self, code):
        self.pid, self.returncode = 7, code

    def poll(self):
        return self.returncode


class Machine:
    def __init__(self, code):
        self.process = Ended(code)
        self.starts = 0

    def start(self):
        self.starts += 1
        self.process.returncode = None

    def last_words_of(self, pid):
        return f"a traceback of {pid}"


def test_a_manager_that_ended_by_itself_is_reported_with_its_last_words():
    machines = {"a": Machine(70), "b": Machine(None)}
    nemesis = Nemesis(machines, 1, FAILOVER_S, trims=None)

    assert nemesis.is_at_rest()

    (surprise,) = nemesis.surprises
    assert surprise == (
        "a: the manager 7 ended by itself, with exit code 70. It wrote:\na traceback of 7"
    )
    assert machines["a"].starts == 1


@pytest.mark.parametrize(("code", "surprises"), [(0, 0), (75, 0), (-9, 0), (70, 1), (1, 1)])
def test_how_a_manager_ended_that_was_asked_to_is_judged_by_its_exit_code(code, surprises):
    machines = {"a": Machine(code), "b": Machine(None)}
    clock = iter(range(0, 1000, 10))
    nemesis = Nemesis(machines, 1, FAILOVER_S, trims=None, now=lambda: float(next(clock)))
    nemesis._is_down("a")

    assert nemesis.is_at_rest()

    assert len(nemesis.surprises) == surprises
    assert machines["a"].starts == 1


def test_every_blow_is_one_that_the_nemesis_can_strike():
    assert all(callable(getattr(Nemesis, f"_{blow}")) for blow in WEIGHTS)


A, A_LATER, B = "kclrun::host-a:1", "kclrun::host-a:2", "kclrun::host-b:1"


def row(owner, counter, checkpoint="100", sub="0", **more):
    found = {"leaseCounter": str(counter), "checkpoint": checkpoint, **more}
    found["checkpointSubSequenceNumber"] = sub
    return found | ({"leaseOwner": owner} if owner else {})


@pytest.mark.parametrize(
    ("signals", "is_excused"),
    [
        ([], False),
        ([signalled("KILL", 10.9, 7)], True),
        ([signalled("KILL", 11.1, 7)], False),
        ([signalled("KILL", 9.9, 7)], False),
        ([signalled("KILL", 10.9, 8)], False),
        ([signalled("TERM", 10.1, 7)], False),
        ([signalled("STOP", 5.0, 7, 30.0), signalled("KILL", 20.0, 7)], True),
        ([signalled("STOP", 10.5, 7, 30.0), signalled("KILL", 20.0, 7)], True),
        ([signalled("STOP", 5.0, 7, 18.0), signalled("KILL", 20.0, 7)], False),
        ([signalled("STOP", 12.0, 7, 30.0), signalled("KILL", 20.0, 7)], False),
        ([signalled("STOP", 5.0, 8, 30.0), signalled("KILL", 20.0, 7)], False),
    ],
)
def test_a_report_is_excused_only_if_its_manager_died_before_it_ran_a_second(signals, is_excused):
    assert died_before_it_logged(10.0, 7, signals) is is_excused


def history(tmp_path, *writes, trimmed=()):
    """Each write: (at, who, the row it left)."""
    path = tmp_path / "requests"
    lines = [
        {
            "at": at,
            "what": "dynamodb",
            "table": "t",
            "update": "SET",
            "me": me,
            "status": 200,
            "rows": [["s", left]],
        }
        for at, me, left in writes
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return judge_history(path, "t", FAILOVER_S, trimmed)


def test_the_end_of_a_shard_is_noted_once_with_its_writer(tmp_path):
    end = row(A, 2, "SHARD_END")

    assert history(tmp_path, (0, A, row(A, 1)), (1, A, end), (2, B, end)).ended == {"s": (1, A)}


def test_the_row_of_a_trimmed_shard_may_go_before_its_end(tmp_path):
    writes = [(0, A, row(A, 1)), (1, A, None)]

    assert history(tmp_path, *writes, trimmed={"s"}).faults == []
    assert "[I11]" in history(tmp_path, *writes, trimmed={"t"}).faults[0]


HISTORIES = {
    "a checkpoint": ([(0, A, row(A, 1)), (1, A, row(A, 2, "200"))], None),
    "an offer and its take": (
        [(0, A, row(A, 1)), (1, A, row("kclrun:offered", 2)), (1.1, B, row(B, 3))],
        None,
    ),
    "an offer that its addressee passes on": (
        [(0, A, row("kclrun:offered", 2, offeredTo=B)), (1, B, row("kclrun:offered", 3))],
        None,
    ),
    "an offer that another passes on": (
        [(0, A, row("kclrun:offered", 2, offeredTo=A)), (1, B, row("kclrun:offered", 3))],
        "[I5]",
    ),
    "a stale addressee's write": (
        [(0, A, row(A, 2, offeredTo=B)), (1, B, row(A, 3, offeredTo=B))],
        "[I5]",
    ),
    "a former self": ([(0, A, row(A, 1)), (1, A_LATER, row(A_LATER, 2))], None),
    "an expiry": ([(0, A, row(A, 1)), (5.1, B, row(B, 2))], None),
    "a late checkpoint": ([(0, A, row(B, 1)), (1, A, row(B, 1, "150"))], None),
    "an end": ([(0, A, row(A, 1, "200")), (1, A, row(A, 2, "SHARD_END")), (2, A, None)], None),
    "a start": ([(0, A, row(A, 1, "TRIM_HORIZON")), (1, A, row(A, 2, "0"))], None),
    "back": ([(0, A, row(A, 1, "200")), (1, A, row(A, 2, "100"))], "[I2]"),
    "sub": ([(0, A, row(A, 1, sub="3")), (1, A, row(A, 2, sub="2"))], "[I2]"),
    "reopened": ([(0, A, row(A, 1, "SHARD_END")), (1, A, row(A, 2))], "[I2]"),
    "a counter set anew": ([(0, A, row(A, 7)), (6, B, row(B, 1))], "[P1]"),
    "an uncounted take": ([(0, A, row(A, 1)), (6, B, row(B, 1))], "[P1]"),
    "a stale write": ([(0, A, row(A, 1)), (6, B, row(A, 2))], "[I5]"),
    "too early a take": ([(0, A, row(A, 1)), (4.8, B, row(B, 2))], "[I4]"),
    "a row deleted in use": ([(0, A, row(A, 1)), (1, A, None)], "[I11]"),
}


@pytest.mark.parametrize("what", HISTORIES)
def test_each_fault_of_the_table_is_found_and_what_the_protocol_allows_is_none(tmp_path, what):
    writes, rule = HISTORIES[what]
    faults = history(tmp_path, *writes).faults

    assert faults == [] if rule is None else any(rule in fault for fault in faults), faults


def test_growth_is_measured_over_the_last_life_without_its_beginning(tmp_path):
    sampler = Sampler(tmp_path / "samples")
    sampler.samples["c"] = [Sample(minute * 60.0, 1, 999, 99) for minute in range(5)] + [
        Sample(600 + minute * 60.0, 2, 5000 if minute < 3 else 100 + minute, 20)
        for minute in range(9)
    ]

    growth = sampler.growth("c")

    assert (growth.minutes, growth.rss_kb, growth.descriptors) == (5.0, 108, 20)
    assert growth.rss_kb_an_hour == pytest.approx(60.0)
    assert growth.descriptors_an_hour == 0.0


def test_a_storm_is_the_same_again_by_its_seed_and_has_its_deep_partitions():
    again = [foretell(5, ("a", "b", "c"), 100.0, FAILOVER_S) for _ in range(2)]

    assert again[0] == again[1] != foretell(6, ("a", "b", "c"), 100.0, FAILOVER_S)
    deep = {fault.doors for fault in again[0] if fault.start_s in (30.0, 60.0)}
    assert deep == {("c/dynamodb",), ("c/kinesis",)}
    assert {
        fault.kind for seed in range(20) for fault in foretell(seed, ("a",), 100.0, 5.0)
    } == set(KINDS)
