"""The judge of the interop scenarios sees each fault it is there for."""

import json

import pytest

from tests.interop.rig.ledger import Ledger, judge

PUT = {
    "i:1": ("parent", (1, 0)),
    "i:2": ("parent", (1, 1)),
    "i:3": ("parent", (2, 0)),
    "i:4": ("child", (3, 0)),
}
PARENTS = {"child": ["parent"]}
ALL = ["i:1", "i:2", "i:3", "i:4"]


def judged(tmp_path, deliveries, put=PUT):
    """`deliveries`: who and what, one batch each."""
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    with path.open("a") as file:
        for who, record in deliveries:
            shard, (sequence, sub) = put.get(record, ("parent", (9, 9)))
            entry = {"what": "batch", "who": who, "shard": shard}
            file.write(f"\n{json.dumps({**entry, 'records': [[str(sequence), sub, record]]})}\n")
        file.write('\n{"what":"bat')
    return judge(PUT, PARENTS, ledger.read())


def by_java(records):
    return [("java", record) for record in records]


def test_all_in_order_is_faultless_and_repetitions_are_counted_by_pair(tmp_path):
    again = [("java", "i:1"), ("kclrun", "i:1"), *by_java(ALL[1:]), ("kclrun", "i:4")]

    verdict = judged(tmp_path, again)

    assert verdict.faults == []
    assert verdict.duplicates_by == {("java", "kclrun"): 2}


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        (ALL[:-1], "given to no worker: i:4"),
        ([*ALL, "i:5"], "never put: i:5"),
        (["i:2", "i:1", "i:3", "i:4"], "i:1 of parent came after a later one"),
        (["i:1", "i:2", "i:4", "i:3"], "i:4 of child came before all of its parents"),
    ],
    ids=["lost", "invented", "out-of-order", "child-first"],
)
def test_each_fault_is_reported(tmp_path, records, fault):
    assert any(fault in each for each in judged(tmp_path, by_java(records)).faults)


def test_a_record_at_another_place_than_it_was_put_to_is_reported(tmp_path):
    moved = {**PUT, "i:2": ("parent", (1, 2))}

    assert any("put elsewhere" in each for each in judged(tmp_path, by_java(ALL), moved).faults)
