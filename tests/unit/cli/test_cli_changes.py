"""The verbs that the stream of a DynamoDB table does not have say so, and send nothing."""

import json

import pytest

from kclrun.cli.program import run_program

ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026-01-01T00:00:00.000"
# A request would end as an outage.
APP = f"""application: shop
stream: {ARN}
processor: a:B
aws: {{region: eu-west-1, endpoint: "http://127.0.0.1:1"}}
"""


MINE = """from kclrun import RecordProcessor
class Mine(RecordProcessor):
    def process_records(self, batch, checkpointer): ...
"""


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "app.yaml").write_text(APP)
    (tmp_path / "app.yaml").chmod(0o600)

    def asked(*arguments):
        code = run_program([*arguments, "--config", str(tmp_path / "app.yaml")])
        return code, capsys.readouterr()

    return asked


@pytest.mark.parametrize(
    "arguments",
    [
        ("put", "-"),
        ("consumers", "list"),
        ("replay", "--from", "TRIM_HORIZON", "--to", "2026-01-01T00:00:00Z"),
        ("reset", "--to", "2026-01-01T00:00:00Z"),
        ("tail", "--from", "10m"),
        ("iam", "--for", "put"),
        ("iam", "--for", "replay"),
    ],
)
def test_a_verb_for_kinesis_alone_says_so(ask, arguments):
    code, reported = ask(*arguments)

    assert code == 78
    assert "is for streams of Kinesis: " in reported.err


@pytest.mark.parametrize("verb", ["check", "run", "lag", "leases"])
@pytest.mark.usefixtures("user_code_here")
def test_a_stream_of_another_region_is_refused_in_words(ask, tmp_path, verb):
    (tmp_path / "mine.py").write_text(MINE)

    code, reported = ask(verb, "--set", "aws.region=us-east-1", "--set", "processor=mine:Mine")

    assert code == 78
    assert (
        f"stream: {ARN} is in eu-west-1, and the region of the application is us-east"
        in reported.err
    )
    assert "Set aws.region: eu-west-1, where the lease table is then, too" in reported.err


def test_the_policy_reads_the_stream_of_the_table_and_nothing_else_of_it(ask):
    _, reported = ask("iam")

    statements = {each["Sid"]: each for each in json.loads(reported.out)["Statement"]}
    reads = statements["ReadChangesOfTheTable"]
    assert reads["Resource"] == ARN
    assert reads["Action"] == [
        "dynamodb:DescribeStream",
        "dynamodb:GetRecords",
        "dynamodb:GetShardIterator",
    ]
    assert "ReadStream" not in statements
