"""`kclrun leases --hot`: the traffic of each shard, its heaviest keys, and the advice for hot ones.

The numbers come from the endpoints of running managers (`observe.listen`), which know keys by their
hash key only. With `--show-keys` the keys themselves are looked up in the stream, with the
credentials of the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from math import inf
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.messages import echo
from kclrun.cli.reports import print_json, print_report
from kclrun.cli.tables import print_table
from kclrun.codec.kpl import effective_hash_key, open_aggregates
from kclrun.config.units import parse_listen
from kclrun.errors import LimitExceeded, RecordError, ServiceError, SettingsError, Unavailable
from kclrun.model.quotas import SHARD_READ_PAUSE_S
from kclrun.model.reading import PageCursor
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.stream import display_name, shard_id_of, stream_of
from kclrun.model.time import WallTime
from kclrun.observe.health import LeaseBody
from kclrun.ports import ShardReader, next_page
from kclrun.traffic.hot_shards import traffic_in_words

if TYPE_CHECKING:
    from kclrun.cli.services import Aws
    from kclrun.config.schema import Settings

# An endpoint answers from memory.
_PATIENCE_S: Final = 5.0
_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
# A key with 5 % of the records is missing from a page of 1,000 once in 10**22 times. The records
# are those of the last minutes: a key of an older backlog may not be among them.
_LOOKED_BACK_S: Final = 120.0
_RECORDS_A_PAGE: Final = 1000
_PAGES_MAX: Final = 5
_PAGE_PAUSE_S: Final = 2 * SHARD_READ_PAUSE_S
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound here


class _Health(msgspec.Struct, frozen=True):
    """The part of /health that is shown; a manager that starts has no leases yet."""

    application: str = ""
    owner: str = ""
    leases: tuple[LeaseBody, ...] = ()


def show_hot(aws: Aws, urls: Sequence[str], *, as_json: bool, with_keys: bool) -> int:
    """Show the traffic of the shards that these managers read, the most loaded first.

    Without `urls`, of the manager of this host by `observe.listen`. With `with_keys` the stream is
    read. Raises: SettingsError without an address, or for a manager of another application;
    Unavailable if a manager does not answer; a ServiceError leaf for the keys.
    """
    settings = aws.settings
    leases = [lease for url in urls or [_url_of(settings)] for lease in _leases(url, settings)]
    leases.sort(key=lambda lease: (-(lease.traffic.load if lease.traffic else -inf), lease.shard))
    names = _names(aws, leases) if with_keys else {}
    print_report(
        leases,
        lambda leases: _print(leases, names),
        as_json=as_json,
        in_json=lambda leases: print_json([_plain(lease, names) for lease in leases]),
    )
    return exit_codes.DRAINED


def _url_of(settings: Settings) -> str:
    if settings.observe.listen is None:
        raise SettingsError(
            "observe.listen is not set, so no manager can be asked for its traffic\n"
            "Set it and restart the managers; or, where a manager listens:"
            "  --endpoint http://127.0.0.1:PORT"
        )
    host, port = parse_listen(settings.observe.listen)
    if not port:
        raise SettingsError(
            "observe.listen: 0 takes a free port; the log line endpoint_listening names it\n"
            "Give it:  --endpoint http://127.0.0.1:PORT"
        )
    host = _WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _leases(url: str, settings: Settings) -> tuple[LeaseBody, ...]:
    """The leases of the manager at this address."""
    try:
        health = msgspec.json.decode(_body(url), type=_Health)
    except (OSError, HTTPException, msgspec.MsgspecError) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise Unavailable(f"no manager answers at {url}: {reason}") from None
    if health.application and health.application != settings.application:
        raise SettingsError(
            f"the manager at {url} is of application {health.application},"
            f" not {settings.application}"
        )
    return health.leases


def _body(url: str) -> bytes:
    host, port = _address(url)
    connection = HTTPConnection(host, port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().read(_BODY_BYTES_MAX)
    finally:
        connection.close()


def _address(url: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`. Raises: SettingsError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or url != f"http://{parts.netloc}" or "@" in parts.netloc:
        raise SettingsError("--endpoint: expected http://HOST:PORT, as endpoint_listening logs it")
    return host, port


_Names = Mapping[tuple[str, str], str]


def _names(aws: Aws, leases: Iterable[LeaseBody]) -> _Names:
    """The partition keys of the hash keys that hot shards have, as far as records are found."""
    from kclrun.cli.services import open_streams

    try:
        streams = open_streams(aws)
    except ServiceError as error:  # the shards are shown without the names of their keys
        echo(f"keys not looked up: {error}", err=True)
        return {}
    found: dict[tuple[str, str], str] = {}
    for lease in leases:
        stream = streams.get(stream_of(lease.shard))
        if lease.traffic is None or not lease.traffic.keys or stream is None:
            continue
        wanted = {key.hash_key for key in lease.traffic.keys}
        for hash_key, partition_key in _looked_up(stream.reader, lease.shard, wanted):
            found[lease.shard, hash_key] = partition_key
    return found


def _looked_up(reader: ShardReader, shard: str, wanted: set[str]) -> Iterator[tuple[str, str]]:
    """Read some records of the last minutes until each hash key was met. Half of the five reads a
    second: the application reads, too."""
    shard_id, since = shard_id_of(shard), WallTime(time.time() - _LOOKED_BACK_S)
    cursor = PageCursor(StartPoint(IteratorType.AT_TIMESTAMP, timestamp=since))
    try:
        for _ in range(_PAGES_MAX):
            page = next_page(reader, shard_id, cursor, _RECORDS_A_PAGE)
            # And the user records of aggregates, whose keys may be the heavy ones.
            for record in (*page.records, *open_aggregates(page.records)):
                try:
                    keys = record.partition_key, record.explicit_hash_key
                    hash_key = str(effective_hash_key(*keys))
                except LimitExceeded:
                    continue
                if hash_key in wanted:
                    wanted.discard(hash_key)
                    yield hash_key, record.partition_key
            if not wanted or page.next_iterator is None:
                return
            time.sleep(_PAGE_PAUSE_S)
    except (ServiceError, RecordError) as error:
        echo(f"{display_name(shard)}: keys not looked up: {error}", err=True)


def _plain(lease: LeaseBody, names: _Names) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "shard": lease.shard,
        "traffic": msgspec.to_builtins(lease.traffic),
        "hot": msgspec.to_builtins(lease.hot),
    }
    for key in (plain["traffic"] or {}).get("keys", ()):
        name = names.get((lease.shard, key["hash_key"]))
        if name is not None:
            key["partition_key"] = name
    return plain


def _print(leases: Sequence[LeaseBody], names: _Names) -> None:
    if not leases:
        echo("The managers that were asked have no lease.")
        return
    titles = ["shard", "state", "in", "of limit", "throttled", "heaviest key", "hot"]
    print_table(titles, [_cells(lease, names) for lease in leases])
    for lease in leases:
        if lease.hot is not None:
            echo(f"\n{display_name(lease.shard)}: {lease.hot.reason}")
            for line in _keys(lease, names):
                echo(f"  {line}")
            echo(f"  {lease.hot.advice}")


def _cells(lease: LeaseBody, names: _Names) -> list[str]:
    traffic = lease.traffic
    if traffic is None:
        return [display_name(lease.shard), lease.state, "not known yet", "-", "-", "-", "-"]
    heaviest = next(iter(_keys(lease, names)), "-")
    return [
        display_name(lease.shard),
        lease.state,
        traffic_in_words(traffic.in_bytes_per_s, traffic.in_records_per_s),
        f"{traffic.load:.0%}",
        f"{traffic.throttled:.0%}",
        heaviest,
        "HOT" if lease.hot is not None else "no",
    ]


def _keys(lease: LeaseBody, names: _Names) -> Iterator[str]:
    """The heavy keys, by name where it is known: a share, and the hash key."""
    traffic = lease.traffic
    for key in traffic.keys if traffic is not None else ():
        name = names.get((lease.shard, key.hash_key))
        shown = f"{name!r} ({key.hash_key})" if name is not None else key.hash_key
        yield f"{key.share:.0%} {shown}"
