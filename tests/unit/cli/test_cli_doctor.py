"""`kclrun doctor` over rows in memory: findings, repairs, backups and exit codes."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.cli import doctor as verb
from kclrun.errors import AccessDenied, InvalidRequest, SettingsError
from kclrun.model.lease import KCL3_MODE_KEY, Halt, Handoff, Lease, OwnerId
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime
from kclrun.operating.doctor.findings import Finding, Kind
from kclrun.operating.doctor.repairs import change_in_words, to_repair
from kclrun.protocol.writes import (
    Amend,
    Claim,
    ConditionFailed,
    CreateChildren,
    CreateLease,
    DeleteTrimmed,
    NameChildren,
    Offer,
    OutcomeUnknown,
    Release,
    ResumeLease,
    Take,
)
from tests.support.tables import over_rows
from tests.unit.cli.memory_site import BEGUN, A, B, Site, caller, key, site_for

NATIVE = "CLIENT_VERSION_3X"
WATCHED = "Watching the counters for 1 s …"
AT = ExtendedSequenceNumber("77")


@pytest.fixture
def site(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return site_for(monkeypatch, tmp_path)


@pytest.fixture
def call(site, capsys):
    return caller(site, capsys)


def stuck_offer_and_hole(site: Site) -> None:
    site.plant(0, A)
    site.rows.write(Offer(key(0), A, 1, TRIM_HORIZON, TRIM_HORIZON, offered_to=OwnerId("gone")))


def test_a_healthy_table_ends_with_0(site, call):
    site.plant(0, A)
    site.plant(1, A)
    site.live(A)

    assert call("doctor") == (0, ["The lease table is healthy: 2 rows."], [WATCHED])
    assert call("doctor --yes") == (0, ["The lease table is healthy: 2 rows."], [WATCHED])
    assert list(Path.cwd().iterdir()) == [site.config]
    assert site.clock.slept == [1.0, 1.0]


def test_findings_are_shown_with_their_repairs_and_nothing_is_changed(site, call):
    stuck_offer_and_hole(site)
    before = site.rows.raw(key(0))

    code, said, reported = call("doctor")

    assert (code, reported) == (1, [WATCHED])
    assert [line for line in said if not line.startswith("  ")] == [
        f"ERROR  hole {key(1)}",
        f"WARNING  stuck-offer {key(0)}",
        "NOTE  no-live-owner",
        "3 findings, of which --yes can repair 2.",
        "Nothing was changed. To do it, add --yes",
    ]
    assert "no owner took it within 1 s" in "".join(said)
    assert sum(line.startswith("  repair:   ") for line in said) == 3
    # What --yes repairs needs no advice.
    advised = [line.split(":")[0].strip() for line in said if line.startswith(("  you:", "  only"))]
    assert advised == []
    assert (site.rows.raw(key(0)), site.rows.raw(key(1))) == (before, None)


def test_with_yes_the_rows_are_backed_up_repaired_and_looked_at_again(site, call):
    stuck_offer_and_hole(site)
    before = site.rows.raw(key(0))
    backup = Path("orders-20231114T221421Z.jsonl")

    code, said, reported = call("doctor --yes")

    assert (code, reported) == (0, [WATCHED, WATCHED])
    at = said.index("3 findings, of which --yes can repair 2.")
    assert said[at + 1 : at + 5] == [
        f"1 rows backed up to {backup}",
        f"hole {key(1)}: repaired",
        f"stuck-offer {key(0)}: repaired",
        "Looking again.",
    ]
    assert said[-1] == "The lease table is healthy: 2 rows."
    assert [msgspec.json.decode(line) for line in backup.read_bytes().splitlines()] == [before]
    assert backup.read_bytes().endswith(b"}\n")
    assert backup.stat().st_mode & 0o777 == 0o600
    assert (site.row(0).owner, site.row(1).checkpoint) == (None, TRIM_HORIZON)


def test_a_repair_that_fails_leaves_the_others_and_says_how_far_it_came(site, call):
    stuck_offer_and_hole(site)
    site.rows.outcomes = [ConditionFailed(), OutcomeUnknown("time-out")]

    code, said, _ = call("doctor --yes")

    assert code == 1
    assert f"hole {key(1)}: the row has changed meanwhile: left as it is (0 of 1)" in said
    assert any(line.startswith(f"stuck-offer {key(0)}: time-out (0 of ") for line in said)


def test_json_has_the_findings_the_repairs_and_what_is_left(site, call, tmp_path):
    site.plant(0)

    code, said, reported = call("doctor --json")
    looked = json.loads("\n".join(said))
    assert (code, looked["healthy"], reported) == (1, False, [WATCHED])
    assert (looked["backup"], looked["mended"], looked["left"]) == (None, [], None)
    hole, nobody = looked["findings"]
    assert (hole["kind"], hole["gravity"], hole["keys"]) == ("hole", "error", [key(1)])
    assert (hole["needs_consent"], len(hole["mend"])) == (False, 1)
    assert (nobody["kind"], nobody["mend"], nobody["needs_consent"]) == ("no-live-owner", [], False)

    rows = tmp_path / "rows.jsonl"
    code, said, reported = call("doctor --yes --json --backup", rows)
    repaired = json.loads("\n".join(said))
    assert (code, repaired["healthy"], repaired["backup"]) == (0, True, str(rows))
    assert reported == [WATCHED, f"1 rows backed up to {rows}", WATCHED]
    assert repaired["mended"] == [
        {"kind": "hole", "keys": [key(1)], "is_mended": True, "problem": ""}
    ]
    assert [each["kind"] for each in repaired["left"]] == ["no-live-owner"]


def test_what_is_a_decision_is_repaired_only_when_it_is_accepted(site, call):
    site.plant(0, checkpoint=SHARD_END)
    site.plant(1)

    code, said, _ = call("doctor --yes")

    assert code == 1
    assert f"ERROR  ended-open {key(0)}" in said
    assert "  only:     with --yes --accept ended-open" in said
    assert any(line.startswith("  you:      ") for line in said)
    counted = next(line for line in said if "of which" in line)
    assert counted == "2 findings, of which --yes can repair 0, and 1 more with your --accept KIND."
    assert not list(Path.cwd().glob("*.jsonl"))
    assert site.row(0).is_ended

    code, said, _ = call("doctor --yes --accept ended-open --backup rows.jsonl")
    assert (code, f"ended-open {key(0)}: repaired" in said) == (0, True)
    assert site.row(0).checkpoint == TRIM_HORIZON


def test_rows_of_a_live_owner_are_not_written(site, call):
    site.plant(0, B)
    site.plant(1, B, parents=frozenset({key(0)}))
    planted = site.rows.raw(key(1))

    def renew() -> None:
        site.renew(site.row(0))

    site.clock.acts.append(renew)
    code, said, _ = call("doctor --yes --json --backup rows.jsonl")

    [finding] = [
        each for each in json.loads("\n".join(said))["findings"] if each["kind"] == "parents-wrong"
    ]
    assert (code, finding["mend"]) == (1, [])
    assert f"{B} is alive" in finding["advice"]
    assert site.rows.raw(key(1)) == planted
    assert not Path("rows.jsonl").exists()


def test_a_request_that_stands_is_watched_until_it_would_be_void(site, call):
    site.plant(0, A, handoff=Handoff(B, WallTime(BEGUN)))
    site.plant(1, A)
    site.live(A, answer="drop")

    assert call("doctor")[2] == ["Watching the counters for 31 s …"]
    assert site.clock.slept == [31.0]


def test_the_reason_of_a_halt_stays_below_its_title(site, call):
    site.plant(0, A, halt=Halt("ValueError\nsecond\x1b line", WallTime(1.0)))
    site.plant(1, A)
    site.live(A)

    said = call("doctor")[1]

    at = next(number for number, line in enumerate(said) if line.endswith("ValueError"))
    assert said[at + 1] == f"{'':12}second� line"


def test_many_keys_are_counted_on_a_terminal_and_whole_in_a_pipe(monkeypatch):
    assert verb._keys([key(number) for number in range(7)]).count("shardId") == 7
    monkeypatch.setattr("kclrun.cli.tables.terminal_width", lambda: 80)
    assert verb._keys([key(number) for number in range(5)]).count("shardId") == 5
    assert "more" not in verb._keys([key(number) for number in range(5)])
    assert verb._keys([key(number) for number in range(7)]).endswith(f"{key(4)} and 2 more")


@pytest.mark.parametrize(
    ("repair", "kind", "shown", "needs_consent"),
    [
        ((), Kind.HOLE, ["you"], False),
        ((), Kind.ENDED_OPEN, ["you"], False),
        ((ResumeLease(key(1)),), Kind.HOLE, ["repair"], False),
        ((ResumeLease(key(1)),), Kind.ENDED_OPEN, ["repair", "only", "you"], True),
    ],
)
def test_a_person_is_asked_for_what_is_not_repaired_without_one(
    repair, kind, shown, needs_consent, capsys
):
    finding = Finding(kind=kind, evidence="seen", repair=repair, advice="look")

    verb._print(finding)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"ERROR  {kind.value}"
    assert [line.split(":")[0].strip() for line in lines] == ["seen", "records", *shown]
    assert verb._plain(finding)["needs_consent"] is needs_consent
    assert to_repair([finding], []) == ((finding,) if shown == ["repair"] else ())
    assert to_repair([finding], [kind.value]) == ((finding,) if repair else ())


@pytest.mark.parametrize(
    ("start", "reported"), [("", "at TRIM_HORIZON"), ("start: LATEST\n", "at LATEST")]
)
def test_a_hole_without_ancestors_is_filled_from_where_the_settings_begin(
    site, call, start, reported
):
    site.configure(site.config.read_text() + start)
    site.plant(0)
    said = call("doctor")[1]
    assert f"  repair:   create {key(1)} {reported}, if it has no row" in said


def test_a_halt_has_expired_after_the_retention(site, call):
    site.plant(0, A, halt=Halt("bad", WallTime(site.clock.now - 86_402)))
    site.plant(1, A, halt=Halt("bad", WallTime(site.clock.now - 86_398)))
    site.live(A)

    said = call("doctor")[1]
    assert f"ERROR  halt-expired {key(0)}" in said
    assert f"ERROR  halt-expired {key(1)}" not in said


def test_a_backup_is_on_the_disk_before_anything_is_repaired(tmp_path, monkeypatch):
    done: list[object] = []
    monkeypatch.setattr(verb, "sync", lambda fd: done.extend((os.fstat(fd).st_size, fd)))
    monkeypatch.setattr(verb, "sync_folder", done.append)

    verb.write_backup(tmp_path / "rows", [{"a": {"S": "b"}}])

    size, descriptor, folder = done
    assert (size, folder) == (len('{"a":{"S":"b"}}\n'), tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_backup_that_is_not_whole_does_not_stay(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(verb, "write_at", full)
        with pytest.raises(SettingsError, match="No space left on device; nothing was changed"):
            verb.write_backup(tmp_path / "rows", [{"a": {"S": "b"}}])
    assert list(tmp_path.iterdir()) == []
    verb.write_backup(tmp_path / "rows", [{"a": {"S": "b"}}])


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("--yes --accept hole", "--accept hole: expected a kind whose repair is a decision"),
        ("--accept ended-open", "--accept goes with --yes"),
        ("--backup new.jsonl", "--backup goes with --yes"),
        ("--yes --backup app.yaml", "--backup app.yaml is there already"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_is_looked_at(
    site, call, line, reported
):
    code, said, at_end = call(f"doctor {line}")
    assert (code, said, site.clock.slept) == (64, [], [])
    assert reported in " ".join(at_end)


def test_a_backup_that_cannot_be_written_ends_it_before_any_change(site, call):
    site.plant(0)
    code, _, reported = call("doctor --yes --backup no/folder.jsonl")
    assert code == 78
    assert "--backup no/folder.jsonl: No such file or directory; nothing was changed" in "".join(
        reported
    )
    assert site.rows.raw(key(1)) is None


def test_nothing_is_written_where_kcl_3_assigns_the_leases(site, call):
    site.plant(0)
    site.rows.plant(
        {
            "leaseKey": {"S": KCL3_MODE_KEY},
            "entityType": {"S": "CLIENT_VERSION_MIGRATION"},
            "cv": {"S": NATIVE},
        }
    )

    code, _, reported = call("doctor --yes --backup rows.jsonl")

    assert (code, "belongs to a KCL 3 fleet in its own mode" in " ".join(reported)) == (78, True)
    assert site.rows.raw(key(1)) is None
    assert not Path("rows.jsonl").exists()


@over_rows(
    ("change", "words"),
    [
        (CreateLease(Lease(key=key(1), checkpoint=AT)), f"create {key(1)} at 77, if it has no row"),
        (
            CreateChildren(tuple(Lease(key=key(n), checkpoint=TRIM_HORIZON) for n in (2, 3)), ()),
            f"create {key(2)}, {key(3)} at TRIM_HORIZON, if the parents' rows are as seen",
        ),
        (
            DeleteTrimmed(key(1), A, 7),
            f"delete {key(1)}, if its owner and counter (7) are as seen",
        ),
        (
            Take(key(1), A, None, 7, 1.0, "LATEST"),
            f"take {key(1)}, if its owner and counter (7) are as seen",
        ),
        (Claim(key(1), A, 7), f"remove takenFrom of {key(1)}"),
        (
            NameChildren(key(1), A, 7, frozenset({key(3), key(2)})),
            f"name the children of {key(1)}: {key(2)}, {key(3)}",
        ),
        (
            Release(key(1), A, 7, AT, AT),
            f"let {key(1)} go: no owner, no hand-off, the same checkpoint",
        ),
        (
            Release(key(1), A, 7, AT, TRIM_HORIZON),
            f"let {key(1)} go: no owner, no hand-off, its checkpoint 77",
        ),
        (
            Amend(key(1), A, 7, frozenset(), HashRange(0, 1)),
            f"parents and range of {key(1)} as the service lists them",
        ),
        (
            Amend(key(1), A, 7, frozenset(), HashRange(0, 1), WallTime(9.0)),
            f"parents and range of {key(1)} as the service lists them, and LATEST is now",
        ),
        (ResumeLease(key(1)), f"remove the halt of {key(1)}"),
    ],
)
def test_each_change_is_said_in_words(change, words):
    assert change_in_words(change) == words


# What one look takes in, besides the rows

MODE_ITEM = {"leaseKey": {"S": KCL3_MODE_KEY}, "cv": {"S": "CLIENT_VERSION_2X"}}


def look(elsewhere: object, *items: object) -> verb.Look:
    """A look at these rows, with a coordinator table that answers so."""

    def mode() -> object:
        if isinstance(elsewhere, Exception):
            raise elsewhere
        return elsewhere

    aws = SimpleNamespace(
        settings=SimpleNamespace(table="orders"),
        called_table="the lease table orders",
        table=SimpleNamespace(items=lambda: iter([items])),
        coordinator=SimpleNamespace(mode=mode),
    )
    return verb._look(aws, {}, ())[0]


def test_the_mode_of_an_early_kcl_3_fleet_is_seen_where_it_keeps_it():
    assert look(NATIVE).kcl3_mode == NATIVE
    # A mode in the lease table counts before the other.
    assert look(NATIVE, MODE_ITEM).kcl3_mode == "CLIENT_VERSION_2X"


@pytest.mark.parametrize("kind", [AccessDenied, InvalidRequest])
def test_where_that_table_may_not_be_read_the_doctor_looks_at_the_rest(kind):
    refusal = kind("no", operation="GetItem", code="")
    other = {"leaseKey": {"S": "x"}, "entityType": {"S": "STREAM"}}

    seen = look(refusal, MODE_ITEM, other, {"leaseKey": {"S": "y"}})
    assert look(refusal).kcl3_mode is None
    assert (seen.foreign, list(seen.broken)) == (2, ["y"])
