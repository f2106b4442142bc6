"""PutMetricData over a real socket: to moto, and to a server that answers as the test says."""

import gzip
import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kclrun.aws import cloudwatch
from kclrun.aws.cloudwatch import CloudWatchOutlet
from kclrun.aws.endpoints import EndpointSettings
from kclrun.errors import AccessDenied, OutcomeUnknown, Throttled
from kclrun.model.record import Measurement, Statistics
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials
from tests.patience import HUNG_S
from tests.support.clients import client_of

KEYS = WireCredentials("AKIAEXAMPLEEXAMPLE", "secret")
NOW = datetime.now(UTC).replace(second=0, microsecond=0)
_numbers = itertools.count()


@pytest.fixture
def make_outlet():
    made: list[CloudWatchOutlet] = []

    def make(
        url: str,
        *,
        namespace: str = "kclrun",
        credentials: Callable[[], WireCredentials] = lambda: KEYS,
    ) -> CloudWatchOutlet:
        settings = EndpointSettings(region="eu-west-1", endpoint_url=url, read_timeout_s=HUNG_S)
        made.append(CloudWatchOutlet(settings, namespace, credentials))
        return made[-1]

    yield make
    for outlet in made:
        outlet.close()


def measurement(
    name: str = "records", *dimensions: tuple[str, str], **values: float
) -> Measurement:
    numbers = {"count": 2, "total": 9.0, "minimum": 4.0, "maximum": 5.0} | values
    return Measurement(
        name=name,
        unit="Count",
        dimensions=dimensions or (("Application", "orders"),),
        measured_at=WallTime(NOW.timestamp()),
        statistics=Statistics(**numbers),
    )


def read_back(url: str, namespace: str, name: str) -> dict[str, Any]:
    client = client_of("cloudwatch", url, "eu-west-1")
    try:
        [point] = client.get_metric_statistics(
            Namespace=namespace,
            MetricName=name,
            Dimensions=[{"Name": "Application", "Value": "orders"}],
            StartTime=NOW - timedelta(minutes=5),
            EndTime=NOW + timedelta(minutes=5),
            Period=600,
            Statistics=["SampleCount", "Sum", "Average", "Minimum", "Maximum"],
        )["Datapoints"]
        return dict(point)
    finally:
        client.close()


def test_a_set_of_values_arrives_with_all_its_statistics(moto_url, make_outlet):
    namespace = f"test-{next(_numbers)}"

    make_outlet(moto_url, namespace=namespace).put([measurement(), measurement("bytes", total=8.0)])

    found = read_back(moto_url, namespace, "records")
    assert (found["SampleCount"], found["Sum"]) == (2, 9)
    assert read_back(moto_url, namespace, "bytes")["Sum"] == 8


def test_the_sets_of_several_managers_add_up(moto_url, make_outlet):
    namespace = f"test-{next(_numbers)}"
    for total in (3.0, 4.0):
        make_outlet(moto_url, namespace=namespace).put([measurement(total=total)])

    found = read_back(moto_url, namespace, "records")
    assert (found["SampleCount"], found["Sum"]) == (4, 7)


def test_a_large_request_is_compressed_and_a_small_one_is_not(server, make_outlet):
    outlet = make_outlet(server.url)
    server.default.body = b""

    outlet.put([measurement()])
    outlet.put([measurement() for _ in range(500)])

    small, large = server.requests
    assert "content-encoding" not in small.headers
    assert large.headers["content-encoding"] == "gzip"
    assert len(large.body) < 20_000 < len(gzip.decompress(large.body))


def test_a_batch_has_a_thousand_metrics_and_a_megabyte_at_the_most(server, make_outlet):
    outlet = make_outlet(server.url)
    server.default.body = b""
    long = [(f"Dimension{number}", "=" * 200) for number in range(28)]
    wordy = [measurement("records", *long) for _ in range(200)]

    assert [len(batch) for batch in outlet.batches([measurement()] * 2500)] == [1000, 1000, 500]
    batches = list(outlet.batches(wordy))
    outlet.put(batches[0])

    assert [one for batch in batches for one in batch] == wordy
    assert len(batches) > 1
    body = server.requests[0].body
    assert len(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body) < 1_000_000
    assert list(outlet.batches([])) == []


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "Throttling", Throttled),
        (403, "AccessDenied", AccessDenied),
        (500, "InternalFailure", OutcomeUnknown),
    ],
)
def test_a_refusal_is_one_of_our_errors_and_the_request_was_sent_once(
    server, make_outlet, status, code, error
):
    server.refuse(status, code, "no")

    with pytest.raises(error, match="PutMetricData"):
        make_outlet(server.url).put([measurement()])

    assert len(server.requests) == 1


def test_a_connection_that_breaks_leaves_the_outcome_unknown(server, make_outlet):
    server.hang_up()

    with pytest.raises(OutcomeUnknown):
        make_outlet(server.url).put([measurement()])

    assert len(server.requests) == 1


def test_new_keys_are_used_as_soon_as_there_are_some(server, make_outlet):
    server.default.body = b""
    keys = [WireCredentials("AKIAOLDOLDOLDOLD", "a"), WireCredentials("AKIANEWNEWNEWNEW", "b", "t")]
    held = iter([keys[0], keys[0], keys[1]])
    outlet = make_outlet(server.url, credentials=lambda: next(held))

    for _ in range(3):
        outlet.put([measurement()])

    signed_by = [
        request.headers["authorization"].split("Credential=")[1].split("/")[0]
        for request in server.requests
    ]
    assert signed_by == ["AKIAOLDOLDOLDOLD", "AKIAOLDOLDOLDOLD", "AKIANEWNEWNEWNEW"]
    # The connection of the old keys was kept for them, and closed with them.
    assert [request.connection for request in server.requests] == [1, 1, 2]
    former, present = server._threads
    former.join(HUNG_S)
    assert (former.is_alive(), present.is_alive()) == (False, True)
    outlet.close()
    present.join(HUNG_S)
    assert not present.is_alive()


@pytest.mark.parametrize(("spare", "sizes"), [(0, [3, 3, 1]), (-1, [2, 2, 2, 1])])
def test_a_batch_is_filled_to_its_last_byte(make_outlet, monkeypatch, spare, sizes):
    size = cloudwatch._size_max(measurement())
    monkeypatch.setattr(cloudwatch, "_REQUEST_BYTES_MAX", 3 * size + spare)

    found = make_outlet("http://127.0.0.1:1").batches([measurement()] * 7)

    assert [len(batch) for batch in found] == sizes
