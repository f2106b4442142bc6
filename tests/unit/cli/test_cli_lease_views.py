import msgspec

from kclrun.cli.leases.views import print_lines, print_table, totals
from kclrun.model.lease import OFFERED, Halt, Lease, LeaseKey, Load, OwnerId, Pause, Scope
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.operating.summaries import LeaseSummary, lease_summary, shortened
from tests.support.tables import over_rows

KEY = LeaseKey("shardId-000000000001")
NOW = WallTime(2_000.0)
NUMBER = "49671234567890123456789012345678901234567890123456789012"


def lease(owner: str | None = "kclrun:az1:host:abc", **fields: object) -> Lease:
    defaults = {"checkpoint": ExtendedSequenceNumber(NUMBER, 3), "counter": 7}
    return Lease(key=KEY, owner=OwnerId(owner) if owner else None, **(defaults | fields))


@over_rows(
    ("row", "state"),
    [
        (lease(), "owned"),
        (lease(None), "unowned"),
        (lease(checkpoint=SHARD_END), "ended"),
        (lease(halt=Halt("bad row", WallTime(1.0))), "halted"),
        (lease(checkpoint=SHARD_END, halt=Halt("was", WallTime(1.0))), "ended"),
        (lease(pause=Pause(WallTime(1.0))), "paused"),
        (lease(pause=Pause(WallTime(1.0), until=WallTime(2_000.5))), "paused"),
        (lease(pause=Pause(WallTime(1.0), until=NOW)), "owned"),
        (lease(pause=Pause(WallTime(1.0)), halt=Halt("bad row", WallTime(1.0))), "halted"),
        (lease(pause=Pause(WallTime(1.0)), checkpoint=SHARD_END), "ended"),
        (lease(None, pause=Pause(WallTime(1.0))), "unowned"),
        (lease(OFFERED, pause=Pause(WallTime(1.0))), "offered"),
        (lease("java", pause=Pause(WallTime(1.0))), "owned"),
    ],
)
def test_a_row_is_in_one_state(row, state):
    assert lease_summary(row, NOW).state == state


def test_a_pause_is_reported_with_its_reach_and_its_end():
    paused = lease(None, pause=Pause(WallTime(0.0), WallTime(3_600.0), Scope.STREAM))

    assert lease_summary(paused, NOW).note == (
        "paused since 1970-01-01T00:00:00Z with its stream, until 1970-01-01T01:00:00Z"
    )
    assert lease_summary(paused, WallTime(3_600.0)).note == ""


def test_a_checkpoint_is_shortened_for_people_and_whole_for_programs():
    line = lease_summary(lease(), NOW)

    assert shortened(line.checkpoint) == "49671…789012/3"
    assert msgspec.to_builtins(line)["checkpoint"] == f"{NUMBER}/3"
    assert shortened(str(TRIM_HORIZON)) == "TRIM_HORIZON"


def test_totals_leave_ended_leases_out():
    lines = [
        lease_summary(lease(), NOW),
        lease_summary(lease("java"), NOW),
        lease_summary(lease(checkpoint=SHARD_END), NOW),
    ]

    assert totals(lines, "owner") == {"java": {"owned": 1}, "kclrun:az1:host:abc": {"owned": 1}}
    assert totals(lines, "group") == {"(none)": {"owned": 1}, "az1": {"owned": 1}}


def test_loads_are_shown_where_a_row_has_one(capsys):
    measured, new = (
        lease_summary(lease(load=Load(812.34, 0.0625)), NOW),
        lease_summary(lease(), NOW),
    )

    print_lines([new])
    without = capsys.readouterr().out
    print_lines([measured, new])
    titles, first, second = capsys.readouterr().out.splitlines()

    assert "KiB/s" not in without
    assert titles.split()[6:8] == ["KiB/s", "CPU"]
    assert first.split()[6:8] == ["812.3", "0.062"]
    assert second.split()[6:8] == ["-", "-"]
    assert (measured.load_kbps, new.load_cpu) == (812.34, None)


def test_a_lease_that_nobody_renews_stands_out(capsys):
    line = LeaseSummary(
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

    reported = capsys.readouterr().out
    assert "renewing" in reported
    assert " NO " in reported
    assert "\x1b" not in reported


def test_a_cell_is_one_line_as_wide_as_the_terminal_shows_it(capsys):
    print_table(["key", "n"], [["\u987e\u5ba2", "1"], ["a\nb", "2"], ["x\x1b", "3"]])
    assert capsys.readouterr().out.splitlines() == [
        "key    n",
        "\u987e\u5ba2   1",
        "a\\nb   2",
        "x\\x1b  3",
    ]
