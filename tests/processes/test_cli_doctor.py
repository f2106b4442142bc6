"""`kclrun doctor` against real services and a real fleet.

All that it prints and writes is tested with rows in memory: tests/unit/cli/test_cli_doctor.py.
"""

import itertools
import json
import time

import msgspec
import pytest

from kclrun.cli.startup import open_world
from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol.writes import Applied, CreateLease, Offer, Take
from tests.patience import HUNG_S
from tests.processes.cli_rig import Program, Site, called
from tests.support.build import key

pytestmark = pytest.mark.slow
NUMBERS = itertools.count()
DEAD, LIVE = "kclrun:az1:host1:nonce", "kclrun:az2:host2:nonce"


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


def test_a_stuck_offer_and_a_hole_are_shown_then_repaired_after_a_backup(site, tmp_path):
    plant(site, 0, DEAD)
    offered = Offer(key(0), DEAD, 1, TRIM_HORIZON, TRIM_HORIZON, offered_to="kclrun:az3:h:gone")
    assert isinstance(site.aws.table.write(offered), Applied)
    before = item(site, 0)

    code, out, reported = doctor(site)

    assert code == 1, reported
    assert "Nothing was changed" in out
    assert f"ERROR  hole {key(1)}" in out
    assert f"WARNING  stuck-offer {key(0)}" in out
    assert (item(site, 0), item(site, 1)) == (before, None)

    backup = tmp_path / "rows.jsonl"
    code, out, reported = doctor(site, "--yes", "--backup", backup)

    assert code == 0, out + reported
    assert [msgspec.json.decode(line) for line in backup.read_text().splitlines()] == [before]
    assert backup.stat().st_mode & 0o777 == 0o600
    assert f"hole {key(1)}: repaired" in out
    assert f"stuck-offer {key(0)}: repaired" in out
    freed = site.aws.table.read(key(0))
    assert (freed.owner, freed.offered_to, freed.counter) == (None, None, 4)
    assert site.aws.table.read(key(1)).checkpoint == TRIM_HORIZON


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

    for _, out, reported in (before, after):
        findings = json.loads(out)["findings"]
        assert [each for each in findings if each["gravity"] == "error"] == [], reported
        assert "no-live-owner" not in {each["kind"] for each in findings}


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

    code, out, reported = doctor(site, "--yes", "--backup", tmp_path / "rows.jsonl")

    assert (code, "belongs to a KCL 3 fleet in its own mode" in reported) == (78, True), (
        out + reported
    )
    assert item(site, 1) is None
    assert not (tmp_path / "rows.jsonl").exists()
