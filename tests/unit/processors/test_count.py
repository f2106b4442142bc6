"""ByKey: partial counts."""

import pytest

from kclrun.testing import Faults, replay, run_processor
from processors.count import ByKey, Count, merge

RECORDS = [(f"k{n % 7}", b"x" * n) for n in range(60)]
EXPECTED = {f"k{k}": Count(len(range(k, 60, 7)), sum(range(k, 60, 7))) for k in range(7)}


@pytest.mark.parametrize("crash_after", [0, 1, 29, 60])
def test_a_crash_and_a_replay_change_no_count(crash_after):
    run = replay(
        ByKey,
        RECORDS,
        settings={"fetch": {"batch_max": 8}, "checkpoint": {"every": "batch"}},
        faults=Faults(crash_after=crash_after),
    )

    assert merge(run.rows) == EXPECTED


def test_a_batch_with_many_keys_emits_before_it_grows():
    run = run_processor(ByKey, RECORDS, settings={"options": {"keys_max": 3}})

    assert merge(run.rows) == EXPECTED
    assert len(run.rows) > 7


def test_a_field_of_json_data_can_be_the_key():
    data = [b'{"c": "UA"}', b'{"c": 7}', b'{"c": null}', b"{}", b"[1]", b"\xff", b"[" * 100_000]
    data.append(b'{"c": "\\ud800"}')
    run = run_processor(ByKey, data, settings={"options": {"field": "c"}})

    counts = {key: count.records for key, count in merge(run.rows).items()}
    assert counts == {"UA": 1, "7": 1, None: 5, r"\ud800": 1}


def test_no_keys_at_all_is_refused():
    with pytest.raises(ValueError, match="keys_max"):
        run_processor(ByKey, [], settings={"options": {"keys_max": 0}})
