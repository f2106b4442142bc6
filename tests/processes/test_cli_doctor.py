"""`kclrun doctor` as a program, against a table with planted rows on an embedded AWS."""

import itertools
import json
import threading
import time

import msgspec
import pytest

from kclrun.cli.world import open_world
from kclrun.local.server import start_embedded
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.protocol.writes import Applied, CreateLease, Offer, Renew, Take
from tests.patience import HUNG_S
from tests.processes.cli_rig import Program, Site, called

pytestmark = pytest.mark.slow
NUMBERS = itertools.count()
DEAD, LIVE = "kclrun:az1:host1:nonce", "kclrun:az2:host2:nonce"


def key(number):
    return LeaseKey(f"shardId-{number:012d}")


@pytest.fixture(scope="module")
def endpoint():
    with start_embedded() as embedded:
        yield embedded.endpoint


@pytest.fixture
def site(endpoint, tmp_path):
    made = Site(tmp_path, endpoint, f"doctor-{next(NUMBERS)}", 2)
    open_world(made.aws.settings)
    return made


def plant(site, number, owner=None, checkpoint=TRIM_HORIZON, **fields):
    table = site.aws.table
    hash_range = next(
        shard.hash_range for shard in site.aws.stream.list_shards() if shard.shard_id == key(number)
    )
    lease = Lease(key=key(number), checkpoint=checkpoint, hash_range=hash_range, **fields)
    assert isinstance(table.write(CreateLease(lease)), Applied)
    if owner is not None:
        assert isinstance(
            table.write(Take(lease.key, owner, None, 0, 1.0, "TRIM_HORIZON")), Applied
        )


def item(site, number):
    found = [
        each
        for page in site.aws.table.items()
        for each in page
        if each["leaseKey"]["S"] == key(number)
    ]
    return found[0] if found else None


def doctor(site, *arguments):
    return called("doctor", "--config", site.config, *arguments)


def test_a_healthy_table_ends_with_0(site):
    plant(site, 0)
    plant(site, 1)

    code, out, told = doctor(site)

    assert code == 0, told
    assert out.splitlines()[-1] == "The lease table is healthy: 2 rows."


def test_a_stuck_offer_and_a_hole_are_shown_then_mended_after_a_backup(site, tmp_path):
    plant(site, 0, DEAD)
    offered = Offer(key(0), DEAD, 1, TRIM_HORIZON, TRIM_HORIZON, offered_to="kclrun:az3:h:gone")
    assert isinstance(site.aws.table.write(offered), Applied)
    before = item(site, 0)

    code, out, told = doctor(site)

    assert code == 1, told
    assert "Nothing was changed" in out
    assert f"ERROR  hole {key(1)}" in out
    assert f"WARNING  stuck-offer {key(0)}" in out
    assert (item(site, 0), item(site, 1)) == (before, None)

    backup = tmp_path / "rows.jsonl"
    code, out, told = doctor(site, "--yes", "--backup", backup)

    assert code == 0, out + told
    assert [msgspec.json.decode(line) for line in backup.read_text().splitlines()] == [before]
    assert backup.stat().st_mode & 0o777 == 0o600
    assert f"hole {key(1)}: mended" in out
    assert f"stuck-offer {key(0)}: mended" in out
    freed = site.aws.table.read(key(0))
    assert (freed.owner, freed.offered_to, freed.counter) == (None, None, 4)
    assert site.aws.table.read(key(1)).checkpoint == TRIM_HORIZON


def test_rows_of_a_live_owner_stay_byte_for_byte(site, tmp_path):
    plant(site, 0, LIVE)
    plant(site, 1, LIVE, parents=frozenset({key(0)}))
    is_over = threading.Event()

    def renew():
        while not is_over.wait(0.2):
            row = site.aws.table.read(key(0))
            site.aws.table.write(Renew(key(0), LIVE, row.counter))

    living = threading.Thread(target=renew)
    living.start()
    try:
        planted = item(site, 1)
        code, out, _ = doctor(site, "--yes", "--backup", tmp_path / "rows.jsonl", "--json")
    finally:
        is_over.set()
        living.join()

    assert code == 1
    [finding] = [each for each in json.loads(out)["findings"] if each["kind"] == "parents-wrong"]
    assert finding["mend"] == []
    assert f"{LIVE} is alive" in finding["advice"]
    assert item(site, 1) == planted
    assert not (tmp_path / "rows.jsonl").exists()


def test_json_has_the_findings_the_mends_and_what_is_left(site, tmp_path):
    plant(site, 0)

    code, out, told = doctor(site, "--yes", "--json", "--backup", tmp_path / "rows.jsonl")

    told_all = json.loads(out)
    assert (code, told_all["healthy"]) == (0, True), told
    assert [each["kind"] for each in told_all["findings"]] == ["hole", "nobody-alive"]
    assert told_all["mended"] == [
        {"kind": "hole", "keys": [key(1)], "is_mended": True, "problem": ""}
    ]
    assert [each["kind"] for each in told_all["left"]] == ["nobody-alive"]


def test_what_is_a_decision_is_mended_only_when_it_is_accepted(site, tmp_path):
    plant(site, 0, checkpoint=SHARD_END)
    plant(site, 1)
    before = item(site, 0)

    code, out, told = doctor(site, "--yes", "--backup", tmp_path / "first.jsonl")

    assert code == 1, told
    assert f"ERROR  ended-open {key(0)}" in out
    assert "  only:     with --yes --accept ended-open" in out
    assert "and 1 more with your --accept KIND" in out
    assert item(site, 0) == before

    accepting = ("--yes", "--accept", "ended-open", "--backup", tmp_path / "second.jsonl")
    code, out, told = doctor(site, *accepting)

    assert code == 0, out + told
    assert f"ended-open {key(0)}: mended" in out
    assert site.aws.table.read(key(0)).checkpoint == TRIM_HORIZON


def test_only_kinds_that_are_a_decision_can_be_accepted(site):
    code, _, told = doctor(site, "--yes", "--accept", "hole")
    assert (code, "--accept hole: expected a kind" in told) == (64, True)

    code, _, told = doctor(site, "--accept", "ended-open")
    assert (code, "--accept goes with --yes" in told) == (64, True)


def test_a_running_fleet_shows_no_error_before_and_after_a_split(site):
    running = Program("run", "--config", site.config)
    try:
        await_rows(site, lambda rows: len(rows) == 2 and all(row.owner for row in rows.values()))
        before = doctor(site, "--json")
        site.split(site.open_shards()[0])
        await_rows(site, lambda rows: key(2) in rows and key(3) in rows)
        after = doctor(site, "--json")
    finally:
        running.end()
        running.close()

    for _, out, told in (before, after):
        findings = json.loads(out)["findings"]
        assert [each for each in findings if each["gravity"] == "error"] == [], told
        assert "nobody-alive" not in {each["kind"] for each in findings}


def await_rows(site, are_right):
    over = time.monotonic() + HUNG_S
    while time.monotonic() < over:
        rows = {row.key: row for page in site.aws.table.scan() for row in page.leases}
        if are_right(rows):
            return
        time.sleep(0.1)
    raise AssertionError(f"not in time: {rows}")


def test_nothing_is_written_where_kcl_3_assigns_the_leases(site, tmp_path):
    plant(site, 0)
    entity = {"entityType": {"S": "CLIENT_VERSION_MIGRATION"}, "cv": {"S": "CLIENT_VERSION_3X"}}
    site.aws.control.dynamodb_writes().put_item(
        TableName=site.aws.settings.table, Item={"leaseKey": {"S": "Migration3.0"}} | entity
    )

    code, out, told = doctor(site, "--yes", "--backup", tmp_path / "rows.jsonl")

    assert (code, "belongs to a KCL 3 fleet in its own mode" in told) == (78, True), out + told
    assert item(site, 1) is None
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_backup_that_is_there_is_refused_before_anything_is_looked_at(site):
    code, _, told = doctor(site, "--yes", "--backup", site.config)
    assert (code, "is there already" in told) == (64, True)

    code, _, told = doctor(site, "--backup", "new.jsonl")
    assert (code, "--backup goes with --yes" in told) == (64, True)
