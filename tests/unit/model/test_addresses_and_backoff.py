"""Which URLs may be an endpoint, how long a pause lasts, and which ranges and numbers compare."""

from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.stream import is_loopback, why_no_endpoint
from kclrun.model.time import backoff_s
from tests.support.tables import over_rows


@over_rows(
    ("url", "why"),
    [
        ("https://kinesis.eu-west-1.amazonaws.com", ""),
        ("http://127.0.0.1:4567", ""),
        ("http://localhost:4567", ""),
        ("http://kinesis.example", "plain http is for this machine only"),
        ("https://me@kinesis.example", "a user, a password or a query"),
        ("https://:secret@kinesis.example", "a user, a password or a query"),
        ("https://kinesis.example?a=b", "a user, a password or a query"),
        ("https://kinesis.example#a", "a user, a password or a query"),
        ("localhost", "write http://localhost"),
        ("127.0.0.1:4567", "write http://127.0.0.1:4567"),
        ("kinesis.example", "write https://kinesis.example"),
        ("me:secret@kinesis.example", "this is not a URL that starts with https://"),
        ("http://[::1]:4567", ""),
        ("http://kinesis.localhost:4567", ""),
        ("http://notlocalhost", "plain http is for this machine only"),
        ("http://10.0.0.1", "plain http is for this machine only"),
        (":4567", "this is not a URL that starts with https://"),
        ("kinesis:4567", "write https://kinesis:4567"),
        ("kinesis.example#secret", "this is not a URL that starts with https://"),
        ("kinesis.example?secret", "this is not a URL that starts with https://"),
        ("https://", "this is not a URL that starts with https://"),
        ("https://kinesis.example:99999", "this is not a URL"),
        ("orders", "this is not a URL that starts with https://"),
        ("ftp://127.0.0.1", "this is not a URL that starts with https://"),
        ("https://[::1", "this is not a URL"),
    ],
)
def test_an_endpoint_is_https_or_on_this_host_and_else_it_is_said_what_to_write(url, why):
    reported = why_no_endpoint(url)

    assert reported.startswith(why)
    assert bool(reported) == bool(why)
    assert "secret" not in reported


@over_rows(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:4567", True),
        ("https://localhost/path", True),
        ("http://10.0.0.1", False),
        ("http://[::1", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_a_url_is_of_this_host_by_its_host_and_by_nothing_else(url, is_here):
    assert is_loopback(url) == is_here


def test_pauses_double_up_to_their_bound_and_half_of_each_is_always_waited():
    assert [backoff_s(attempt, 0.0, base_s=1.0, max_s=10.0) for attempt in (1, 2, 3, 4)] == [
        *(1.0, 2.0, 4.0),
        5.0,
    ]
    assert backoff_s(1_000_000, 0.0) == 1.5
    assert backoff_s(1, 0.5, base_s=1.0, max_s=10.0) == 1.5


def test_ranges_overlap_where_they_share_a_key_and_neighbours_do_not():
    middle = HashRange(10, 20)

    assert all(middle.overlaps(HashRange(*each)) for each in ((0, 10), (20, 30), (12, 13), (0, 99)))
    assert not any(middle.overlaps(HashRange(*each)) for each in ((0, 9), (21, 30)))


def test_sequence_numbers_are_ordered_as_numbers_whatever_their_length():
    texts = ["9", "10", "11", "99", "100"]
    ordered = [ExtendedSequenceNumber(text) for text in texts]

    for at, low in enumerate(ordered):
        assert all(low < high and not high < low for high in ordered[at + 1 :])
        assert not low < low  # noqa: PLR0124 - the claim
