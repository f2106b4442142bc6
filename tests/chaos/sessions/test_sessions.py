"""The short form of `bin/chaos sessions`: a lease process and a manager are killed around a split
and a merge, and Spark in between. Rows and state are compared with the flights."""

import pytest

from tests.chaos.sessions.rig import Plan, SessionsRun
from tests.seeds import seed_of


@pytest.mark.slow
@pytest.mark.alone
def test_sessions_over_kills_and_reshards_are_those_of_the_flights(tmp_path):
    plan = Plan(
        flights=3_000,
        copies=2,
        seed=seed_of(20267),
        rate=600,
        shards=2,
        reshards=((0.25, "split", 0), (0.7, "merge", 0)),
        lease_kills=(0.2, 0.5),
        manager_kills=(0.4,),
        spark=(0.6, 0.8),
    )

    report = SessionsRun(tmp_path, plan, say=print).run()

    print(report)
    assert report.violations == []
    assert (report.records, report.lease_kills, report.manager_kills) == (6_000, 2, 1)
    assert (report.spark_records, report.spark_kills) == (1_200, 1)
    assert report.rows > 0
