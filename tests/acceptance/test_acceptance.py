"""`bin/aws-acceptance` over the embedded AWS: what it checks, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys

import pytest

from kclrun.local.server import start_embedded
from tests.acceptance.account import Account
from tests.acceptance.stages import ROOT, STAGES
from tests.foreground import heeding_signals
from tests.patience import HUNG_S, TEST_S
from tests.support.programs import run_to_end

pytestmark = [pytest.mark.seconds, pytest.mark.timeout(3 * TEST_S)]


@pytest.fixture(scope="module")
def endpoint():
    with start_embedded() as embedded:
        yield embedded.endpoint


@pytest.fixture
def account(endpoint):
    return Account("us-east-1", endpoint, "acc", "acc", "of-the-test")


def started(account, *words):
    command = [sys.executable, "-m", "tests.acceptance.command", "--stream", account.stream]
    with heeding_signals():
        return subprocess.Popen(
            [*command, "--table", account.table, "--endpoint", account.endpoint, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "AWS_REGION": account.region},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def ended(account, *words):
    process = started(account, *words)
    output, _ = process.communicate(timeout=2 * TEST_S)
    return process.returncode, output


def test_the_plan_shows_the_budget_and_makes_nothing(account):
    code, output = ended(account)

    assert code == 0
    assert "At most $2." in output
    assert "Nothing was made" in output
    for stage in STAGES:
        assert f"  {stage.name} " in output
    assert account.taken_names() == []


@pytest.mark.slow
def test_every_check_passes_here_and_all_that_was_made_is_gone(account):
    """The contract of the table has 672 cases, which the next test shortens, and Spark a minute."""
    code, output = ended(account, "--without", "table,spark", "--yes")

    assert code == 0, output
    for stage in STAGES:
        if stage.name not in {"table", "spark"}:
            assert f"\n{stage.name:<11}ok, " in output
    assert "Removed: stream acc, table acc-demo, table acc-" in output
    assert account.taken_names() == []


@pytest.mark.slow
def test_the_contract_of_a_table_runs_over_two_tables_of_the_account(account):
    file = "tests/contract/test_lease_table_late.py"
    ran = run_to_end(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", file],
        cwd=ROOT,
        env=account.environment() | {"PYTHONPATH": str(ROOT)},
        timeout_s=TEST_S,
    )

    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout
    assert "table acc-contract" in account.taken_names()
    account.remove()
    assert account.taken_names() == []


@pytest.mark.slow
def test_an_interrupted_run_removes_what_it_made(account):
    process = started(account, "--only", "demo,fleet", "--yes")
    read = []
    for line in process.stdout:
        read.append(line)
        if line.startswith("fleet"):
            break
    assert account.taken_names(), read
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=HUNG_S)

    assert process.returncode == 1, output
    assert "interrupted" in output
    assert "Removed: stream acc" in output
    assert account.taken_names() == []


def test_what_is_there_already_stays_and_nothing_is_begun(account):
    other = Account(**json.loads(account.environment()["KCLRUN_ACCEPTANCE"]) | {"run": "another"})
    other.create_stream("acc-kept", 1)

    code, output = ended(account, "--yes")

    assert code == 73, output
    assert "There are already: stream acc-kept" in output
    assert account.remove() == []
    assert account.taken_names() == ["stream acc-kept"]
    code, output = ended(account, "--remove", "another")
    assert (code, output.strip()) == (0, "Removed: stream acc-kept.")


@pytest.mark.slow
def test_a_check_that_fails_is_named_and_all_is_removed(account):
    kinesis = account.client("kinesis")
    process = started(account, "--only", "demo,fan-out", "--yes")
    read = []
    for line in process.stdout:
        read.append(line)
        if line.startswith("demo       ok"):
            # It expects the consumer that it registers to be the only one.
            arn = account.summary(kinesis, "acc")["StreamARN"]
            kinesis.register_stream_consumer(StreamARN=arn, ConsumerName="foreign")
            break
    output, _ = process.communicate(timeout=TEST_S)

    assert process.returncode == 1, [*read, output]
    assert "fan-out    FAILED after" in output
    assert "FAILED: fan-out" in output
    assert account.taken_names() == []
