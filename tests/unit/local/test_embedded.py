"""The running embedded AWS, by stock boto3 and by hand: real processes, real sockets."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from kclrun.local.server import start_embedded
from tests.patience import HUNG_S
from tests.unit.local.conftest import KEY, SECRET
from tests.unit.local.serving import ask, code_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def embedded():
    with start_embedded() as running:
        yield running


@pytest.fixture(scope="module")
def guarded():
    with start_embedded(credentials=(KEY, SECRET), limits=True) as running:
        yield running


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def eventually(condition, within_s=HUNG_S):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_one_endpoint_serves_the_other_services_too(embedded, client):
    s3 = client("s3", embedded.endpoint)
    s3.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    body = os.urandom(3_000_000)
    s3.put_object(Bucket="bucket", Key="a b/é%2Fc", Body=body)
    assert s3.get_object(Bucket="bucket", Key="a b/é%2Fc")["Body"].read() == body
    assert s3.head_object(Bucket="bucket", Key="a b/é%2Fc")["ContentLength"] == len(body)

    sqs = client("sqs", embedded.endpoint)
    url = sqs.create_queue(QueueName="queue")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="hello")
    assert sqs.receive_message(QueueUrl=url)["Messages"][0]["Body"] == "hello"

    metrics = client("cloudwatch", embedded.endpoint)
    metrics.put_metric_data(Namespace="n", MetricData=[{"MetricName": "m", "Value": 1.0}])
    assert metrics.list_metrics(Namespace="n")["Metrics"][0]["MetricName"] == "m"


def test_conditional_writes_of_many_clients_are_atomic(embedded, client):
    table = {"TableName": "race"}
    dynamodb = client("dynamodb", embedded.endpoint)
    dynamodb.create_table(
        **table,
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
    )
    endpoints = [embedded.endpoint, embedded.dynamodb_endpoint] * 2
    clients = [client("dynamodb", endpoint) for endpoint in endpoints]
    won = []

    def run(own):
        for index in range(25):
            try:
                own.put_item(
                    **table,
                    Item={"k": {"S": str(index)}},
                    ConditionExpression="attribute_not_exists(k)",
                )
            except own.exceptions.ConditionalCheckFailedException:
                continue
            won.append(index)

    threads = [threading.Thread(target=run, args=(own,)) for own in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(25))


@pytest.mark.parametrize("service", ["kinesis", "dynamodb", "sqs", "s3", "cloudwatch"])
def test_the_right_secret_is_let_in_and_a_wrong_one_is_not(guarded, client, service):
    calls = {
        "kinesis": "list_streams",
        "dynamodb": "list_tables",
        "sqs": "list_queues",
        "s3": "list_buckets",
        "cloudwatch": "list_metrics",
    }
    json_codes = ("InvalidSignatureException", "UnrecognizedClientException")
    xml_codes = ("SignatureDoesNotMatch", "InvalidAccessKeyId")
    mismatch, unknown = xml_codes if service == "s3" else json_codes

    def call(**given):
        return getattr(client(service, guarded.endpoint, **given), calls[service])

    call()()
    assert code_of(call(secret="wrong"))[0] == mismatch
    assert code_of(call(key="AKIDOTHER"))[0] == unknown


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://evil.example"}])
def test_no_request_wipes_the_tables_unless_the_user_allows_it(embedded, client, headers):
    dynamodb = client("dynamodb", embedded.endpoint)
    with contextlib.suppress(dynamodb.exceptions.ResourceInUseException):
        dynamodb.create_table(
            TableName="kept",
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
        )
    for endpoint in (embedded.endpoint, embedded.dynamodb_endpoint):
        assert ask(endpoint, "POST", "/moto-api/reset", headers=headers)[0] == 403
    assert "kept" in dynamodb.list_tables()["TableNames"]


def test_both_end_when_their_parent_is_killed():
    code = (
        "from kclrun.local.server import start_embedded; import time\n"
        "print(*start_embedded().pids, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2

    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    eventually(lambda: all(gone(pid) for pid in pids))
