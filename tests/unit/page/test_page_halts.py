"""A halt on the page: it stands once, its lag grows, and a figure that is 0 is not there."""

import msgspec
import pytest

from kclrun.model.lease import Halt, OwnerId, Pause
from kclrun.model.sequence import SHARD_END
from kclrun.model.time import WallTime
from kclrun.operating.doctor.findings import Finding, Kind
from kclrun.operating.summaries import duration_text
from kclrun.page.fleet_view import fleet_body
from kclrun.page.layout import lag_text
from kclrun.page.shards_view import lineage_body, shard_body, shards_body
from kclrun.page.snapshot import Owners, rows_of
from tests.unit.page.fleet import ABOUT, NOW, NUMBER, A, behind, key, lease, shard, snapshot_of

REASON = f"process_records failed once: the account is closed, at {NUMBER}"
HALT = Halt(REASON, WallTime(NOW - 100), WallTime(NOW - 120))
LATER = WallTime(NOW + 60)


def lag_of(snapshot):
    (row,) = rows_of(snapshot)
    return row, row.lag.behind_s if row.lag is not None else None


@pytest.mark.parametrize(
    "fields",
    [
        {"halt": HALT},
        {"pause": Pause(WallTime(NOW - 100))},
        {"owner": None},
        {"owner": A, "expired": True},
    ],
)
def test_the_lag_of_a_shard_that_is_not_read_grows_between_two_measurements(fields):
    owners = Owners(frozenset(), frozenset({key(0)})) if fields.pop("expired", False) else Owners()
    given = {"lags": {key(0): behind(0, 120.0)}, "lags_at": NOW, "owners": owners}

    row, now = lag_of(snapshot_of(lease(0, **fields), **given))
    later_row, later = lag_of(snapshot_of(lease(0, **fields), **given, taken_at=LATER))

    assert (now, later) == (120.0, 180.0)
    assert later_row.lag.loss_in_s == row.lag.loss_in_s - 60.0


def test_the_lag_of_a_shard_that_is_read_is_the_measured_one():
    given = {"lags": {key(0): behind(0, 1.0)}, "lags_at": NOW, "taken_at": LATER}

    assert lag_of(snapshot_of(lease(0), **given))[1] == 1.0


@pytest.mark.parametrize("lags", [{}, {key(0): behind(0, None)}])
def test_a_halt_whose_lag_is_not_known_counts_from_the_record_that_waits(lags):
    row, seconds = lag_of(snapshot_of(lease(0, halt=HALT), lags=lags, taken_at=LATER))

    assert seconds == 180.0
    assert lag_text(row) == f"≥ {duration_text(180.0)}"


def test_a_lag_that_was_not_measured_is_unknown_and_not_over():
    (row,) = rows_of(snapshot_of(lease(0)))
    (ended,) = rows_of(snapshot_of(lease(0, checkpoint=SHARD_END)))

    assert lag_text(row) == "?"
    assert lag_text(ended) == "-"


def halted_fleet():
    found = Finding(kind=Kind.HALTED, keys=(key(0),), evidence=f"halted for 0.0 h: {REASON}")
    return snapshot_of(
        lease(0, halt=HALT),
        lease(1),
        lags={key(0): behind(0, 120.0), key(1): behind(1, 0.0)},
        lags_at=NOW,
        findings=(found,),
        findings_at=NOW,
    )


def test_a_halt_stands_once_with_one_command():
    shown = fleet_body(ABOUT, halted_fleet())

    assert shown.count("the account is closed") == 1
    assert shown.count("<code>kclrun leases") == 1
    assert "--accept halted" not in shown
    assert "Its oldest unread record has waited for 2m, and is lost in 23h 58m." in shown
    assert "Nothing but the halts above." in shown


def test_the_page_of_a_halted_shard_has_its_reason_once():
    shown = shard_body(ABOUT, halted_fleet(), key(0))

    assert shown.count("the account is closed") == 1
    assert shown.count("<code>") == 1


def test_other_findings_stay_beside_a_halt():
    other = Finding(kind=Kind.HOLE, keys=(key(1),), evidence="no owner reads it")
    fleet = halted_fleet()
    fleet = msgspec.structs.replace(fleet, findings=(*fleet.findings, other))

    shown = fleet_body(ABOUT, fleet)

    assert "no owner reads it" in shown
    assert shown.count("the account is closed") == 1


def test_the_reason_of_a_halt_is_whole_below_its_row():
    shown = shards_body(ABOUT, halted_fleet(), {})

    assert '<tr class="why"><td colspan="9"><div>process_records failed once: the acc' in shown
    assert "at 49671…789012</div>" in shown


def test_figures_that_are_zero_are_left_out():
    shown = fleet_body(ABOUT, snapshot_of(lease(0), lags={key(0): behind(0, 0.0)}))
    figures = shown.partition("</ul>")[0]

    assert "<b>0</b>" not in figures
    assert figures.count("<li") == 4  # to read, behind, to the first loss, owned
    assert "halted" not in figures


def test_one_group_is_not_shown_beside_its_owners():
    one = snapshot_of(lease(0))
    two = snapshot_of(lease(0), lease(1, OwnerId("kclrun:az2:host-2:77aa")))

    assert "Groups" not in fleet_body(ABOUT, one)
    assert "Groups" in fleet_body(ABOUT, two)


@pytest.mark.parametrize(
    ("start", "ended", "word"),
    [
        ("TRIM_HORIZON", frozenset(), "finished"),
        ("LATEST", frozenset(), "not known"),
        ("LATEST", frozenset({key(0)}), "finished"),
    ],
)
def test_a_parent_without_a_row_is_finished_only_where_something_shows_it(start, ended, word):
    parents = frozenset({key(0)})
    children = [lease(number, parents=parents, start=start) for number in (1, 2)]
    shards = {key(0): shard(0), key(1): shard(1, 0), key(2): shard(2, 0)}

    shown = lineage_body(snapshot_of(*children, shards=shards), ended)

    assert f'<span class="state">{word}</span>' in shown
    assert "not in the table" not in shown
