"""The short form of `bin/chaos refusals`: a database is away for a third of the run, rows are
refused by it and by an index of DynamoDB, and a lease process is killed in each part."""

import subprocess
from types import SimpleNamespace

import pytest

from tests.chaos.refusals.rig import Plan, RefusalsRun
from tests.seeds import seed_of
from tests.support.databases import running_postgres


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """PostgreSQL, or SQLite where it cannot be had."""
    if subprocess.run(["bin/debian", "postgresql"], capture_output=True).returncode:
        yield SimpleNamespace(url=f"sqlite:///{tmp_path_factory.mktemp('rows') / 'rows.db'}")
        return
    with running_postgres() as server:
        yield server


@pytest.mark.slow
@pytest.mark.alone
def test_each_record_is_once_in_its_output_or_a_letter_though_the_database_was_away(
    tmp_path, database
):
    plan = Plan(
        flights=6_000,
        seed=seed_of(20268),
        rate=150,
        shards=2,
        reshards=((0.8, "split", 0),),
        lease_kills=(0.1, 0.4, 0.7),
        manager_kills=(0.85,),
        away=(0.2, 0.53),
        index_at=0.6,
        poison_share=0.005,
        poison_items_share=0.1,
    )

    report = RefusalsRun(tmp_path, plan, database, say=print).run()

    print(report)
    assert report.violations == []
    assert (report.duplicates, report.lost, report.leases_lost_while_away) == (0, 0, 0)
    assert report.calls_while_away > 0
    assert report.commits_refused > 0
    assert set(report.letters) == {"n", "driver"}
