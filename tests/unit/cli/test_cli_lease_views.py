from typing import cast

import msgspec
import pytest

from kclrun.cli import lease_views
from kclrun.cli.lag_measure import Lag
from kclrun.cli.lease_views import (
    LeaseLine,
    as_plain,
    lease_lines,
    line_of,
    print_lines,
    shortened,
    totals,
)
from kclrun.cli.world import Aws
from kclrun.model.lease import Halt, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime

KEY = LeaseKey("shardId-000000000001")
NUMBER = "49671234567890123456789012345678901234567890123456789012"


def lease(owner: str | None = "kclrun:az1:host:abc", **fields: object) -> Lease:
    defaults = {"checkpoint": ExtendedSequenceNumber(NUMBER, 3), "counter": 7}
    return Lease(key=KEY, owner=OwnerId(owner) if owner else None, **(defaults | fields))


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (lease(), "owned"),
        (lease(None), "unowned"),
        (lease(checkpoint=SHARD_END), "ended"),
        (lease(halt=Halt("bad row", WallTime(1.0))), "halted"),
        (lease(checkpoint=SHARD_END, halt=Halt("was", WallTime(1.0))), "ended"),
    ],
)
def test_a_row_is_in_one_state(row: Lease, state: str) -> None:
    assert line_of(row).state == state


def test_our_owners_have_a_group_and_others_none() -> None:
    assert line_of(lease()).group == "az1"
    assert line_of(lease("java-worker-17")).group == ""


def test_lag_is_asked_of_leases_that_have_not_ended_and_only_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def lag_of(of: Lease) -> Lag:
        asked.append(of.key)
        return Lag(5.0)

    ended = msgspec.structs.replace(lease(checkpoint=SHARD_END), key=LeaseKey("shardId-0"))
    monkeypatch.setattr(lease_views, "scan_leases", lambda _: (lease(), ended))
    monkeypatch.setattr(lease_views, "_lags", lambda _: lag_of)

    def lags(*, wanted: bool) -> list[int | None]:
        lines = lease_lines(cast("Aws", None), with_lag=wanted, with_age=False)
        return [line.lag_ms for line in lines]

    assert lags(wanted=False) == [None, None]
    assert asked == []
    assert lags(wanted=True) == [None, 5000]
    assert asked == [KEY]


def test_a_checkpoint_is_shortened_for_people_and_whole_for_programs() -> None:
    line = line_of(lease())

    assert shortened(line.checkpoint) == "49671…789012/3"
    assert as_plain(line)["checkpoint"] == f"{NUMBER}/3"
    assert shortened(str(TRIM_HORIZON)) == "TRIM_HORIZON"


def test_totals_leave_ended_leases_out() -> None:
    lines = [line_of(lease()), line_of(lease("java")), line_of(lease(checkpoint=SHARD_END))]

    assert totals(lines, "owner") == {"java": {"owned": 1}, "kclrun:az1:host:abc": {"owned": 1}}
    assert totals(lines, "group") == {"(none)": {"owned": 1}, "az1": {"owned": 1}}


def test_what_was_not_asked_has_no_column(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines([line_of(lease(owner_switches=5))])
    header, row = capsys.readouterr().out.splitlines()

    assert header.split() == [
        "shard",
        "state",
        "owner",
        "checkpoint",
        "counter",
        "switches",
        "note",
    ]
    assert "hopping" in row


def test_a_lease_that_nobody_renews_stands_out(capsys: pytest.CaptureFixture[str]) -> None:
    line = LeaseLine(
        shard="s",
        state="owned",
        owner="o",
        group="",
        checkpoint="LATEST",
        counter=1,
        owner_switches=0,
        is_hopping=False,
        is_renewed=False,
        halt_reason="x\x1b[1m",
    )
    print_lines([line])

    told = capsys.readouterr().out
    assert "renewing" in told
    assert " NO " in told
    assert "\x1b" not in told
