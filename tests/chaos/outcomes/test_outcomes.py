"""The short form of `bin/chaos outcomes`: a database that crashes between a cursor and its rows, a
killed lease process, a split, and redrives of which one is killed. Rows and letters are compared
with the flights."""

import subprocess
from types import SimpleNamespace

import pytest

from tests.chaos.outcomes.rig import OutcomesRun, Plan
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
def test_two_outputs_have_every_row_once_and_every_letter_is_redriven_once(tmp_path, database):
    plan = Plan(
        flights=2_000,
        poisons=20,
        seed=seed_of(20266),
        rate=1_000,
        shards=2,
        reshards=((0.3, "split", 0),),
        lease_kills=(0.5,),
        database_crashes=(0.4,) if hasattr(database, "crash") else (),
        letters="s3",
    )

    report = OutcomesRun(tmp_path, plan, database, say=print).run()

    print(report)
    assert report.violations == []
    assert (report.letters, report.lease_kills) == (20, 1)
    assert report.database_crashes == len(plan.database_crashes)
    assert report.transactions_at_crashes >= report.database_crashes
