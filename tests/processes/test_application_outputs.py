"""Outputs that are throttled, refused, gone, locked or do not answer while an application runs: it
says so in the words of the service, keeps its leases, and each row is there once."""

import contextlib
import json
import re
import sqlite3

import pytest

from tests.processes.ledger_rig.aws import MOTO, Aws
from tests.support.clients import ONCE, client_of
from tests.support.http_service import HttpService, forwarded

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

BUCKET, QUEUE = "rows-of-outages", "rows-of-outages.fifo"
PHASE = 20
# What the gate answers, by the service and the operation's method, and what the log then says.
REFUSALS = {
    "S3 is overloaded": (("s3", 503, "SlowDown"), "PutObject: SlowDown"),
    "the role lost its right": (("s3", 403, "AccessDenied"), "PutObject: AccessDenied"),
    "the bucket was deleted": (("s3", 404, "NoSuchBucket"), "PutObject: NoSuchBucket"),
    "the queue is throttled": (("sqs", 400, "RequestThrottled"), "queue .*: RequestThrottled"),
    "the queue was deleted": (("sqs", 400, "QueueDoesNotExist"), "queue .*: QueueDoesNotExist"),
    "the queue refuses": (("sqs", 403, "AccessDenied"), "queue .*: AccessDenied"),
}


class Gate(HttpService):
    """An HTTP server before moto that refuses, or that loses the answers to PUTs."""

    def __init__(self, upstream):
        self.refusal = None
        self.loses_answers = False
        self.refused_by_condition = 0
        self._upstream = upstream
        super().__init__(self._answer)

    def _answer(self, method, path, headers, body):
        is_queue = "X-Amz-Target" in headers
        service, status, code = self.refusal or ("", 0, "")
        if service == ("sqs" if is_queue else "s3") and method in {"PUT", "POST"}:
            text = {"__type": f"com.amazonaws.sqs#{code}", "message": "made for the test"}
            xml = f"<Error><Code>{code}</Code><Message>made for the test</Message></Error>"
            return status, {}, (json.dumps(text) if is_queue else xml).encode()
        answer = forwarded(self._upstream, method, path, headers, body)
        self.refused_by_condition += answer[0] == 412
        if self.loses_answers and method == "PUT" and answer[0] == 200:
            return 500, {}, b"<Error><Code>InternalError</Code></Error>"
        return answer


@pytest.fixture
def embedded_aws():
    aws = Aws(dynamodb=MOTO)
    yield aws
    aws.close()


class Destinations:
    """A bucket, a queue and a table, and the numbers of the rows in each."""

    def __init__(self, aws, folder):
        url = aws.embedded.dynamodb_endpoint
        self._s3 = client_of("s3", url, config=ONCE)
        self._sqs = client_of("sqs", url, config=ONCE)
        self._s3.create_bucket(Bucket=BUCKET)
        self._url = self._sqs.create_queue(QueueName=QUEUE, Attributes={"FifoQueue": "true"})[
            "QueueUrl"
        ]
        self._received = []
        self.database = folder / "rows.db"

    def in_s3(self):
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        bodies = (
            self._s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            for key in keys
            if key.endswith(".jsonl")
        )
        return [
            json.loads(line)["sequence_number"] for body in bodies for line in body.splitlines()
        ]

    def in_sql(self):
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            return [n for (n,) in connection.execute("SELECT sequence_number FROM rows_of_it")]

    def in_queue(self):
        while found := self._sqs.receive_message(QueueUrl=self._url, MaxNumberOfMessages=10).get(
            "Messages"
        ):
            for each in found:
                self._received.append(json.loads(each["Body"])["sequence_number"])
                self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=each["ReceiptHandle"])
        return self._received

    def have(self, put):
        return all(len({*rows()}) >= put for rows in (self.in_s3, self.in_sql, self.in_queue))

    @contextlib.contextmanager
    def locked(self):
        """Another program has the file of the database for itself."""
        connection = sqlite3.connect(self.database, isolation_level=None)
        with contextlib.closing(connection):
            connection.execute("BEGIN EXCLUSIVE")
            yield
            connection.execute("ROLLBACK")

    def close(self):
        self._s3.close()
        self._sqs.close()


@pytest.fixture
def destinations(embedded_aws, tmp_path):
    found = Destinations(embedded_aws, tmp_path)
    yield found
    found.close()


@pytest.fixture
def gate(embedded_aws):
    with Gate(embedded_aws.embedded.dynamodb_endpoint) as gate:
        yield gate


@contextlib.contextmanager
def losing_answers(gate):
    gate.loses_answers = True
    yield
    gate.loses_answers = False


@contextlib.contextmanager
def refusing(gate, refusal):
    gate.refusal = refusal
    yield
    gate.refusal = None


@pytest.mark.slow
def test_whatever_an_output_answers_it_is_reported_and_each_row_is_there_once(
    embedded_aws, application, producer, destinations, gate
):
    troubles = [(refusing(gate, refusal), words) for refusal, words in REFUSALS.values()]
    troubles.append((destinations.locked(), "SQLITE_BUSY.*another process has the file locked"))
    troubles.append((losing_answers(gate), None))
    stream = embedded_aws.stream(shards=1)
    app = application(
        stream,
        options={"emits": True, "emits_to": ["sql", "late"]},
        output={"s3": f"s3://{BUCKET}", "roll": {"every": "500ms"}},
        outputs={
            "sql": {
                "sql": f"sqlite:///{destinations.database}",
                "table": "rows_of_it",
                "create": True,
                "schema": "sequence_number string, key string, n long",
            },
            "late": {"sqs": QUEUE, "key": ["key"]},
        },
        aws={"endpoints": {"s3": gate.url, "sqs": gate.url}},
        leases={"failover": "10s"},
    )
    total = PHASE * (len(troubles) + 1)
    source = producer(stream, total, seed=8, keys=4, rate=400, pauses=range(PHASE, total, PHASE))
    app.start()
    source.start()

    # No record comes any more: the rolls end by their age.
    app.until(lambda: source.is_paused and destinations.have(PHASE))
    for number, (trouble, words) in enumerate(troubles, 2):
        with trouble:
            reported = len(app.of("lease_process_warned"))
            refused = gate.refused_by_condition
            source.resume()
            if words is None:  # the answer was lost: our own object is there, and that is success
                app.until(lambda refused=refused: gate.refused_by_condition > refused)
            else:
                app.until(
                    lambda reported=reported, words=words: any(
                        re.search(words, line["detail"])
                        for line in app.of("lease_process_warned")[reported:]
                    )
                )
        app.until(lambda put=number * PHASE: destinations.have(put))
    app.until(lambda: source.is_done)

    assert app.stop() == 0
    (rows,) = source.put.values()
    numbers = sorted(each for each, _, _ in rows)
    assert sorted(destinations.in_s3()) == numbers, "exactly once"
    assert sorted(destinations.in_sql()) == numbers, "exactly once"
    assert sorted({*destinations.in_queue()}) == numbers, "at least once"
    assert len(app.of("lease_claimed")) == 1, "the lease was renewed, and its process lived on"
    assert not app.of("processor_raised")
