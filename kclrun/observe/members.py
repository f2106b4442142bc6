"""The live detail of one lease: a manager serves it at `/lease`, the page of the fleet shows it.

Rule: the address of a manager comes from a row of the lease table, which other programs may have
written. So a request goes only to an address of a private network, has one path, and follows no
redirect. An answer counts only if it names the application and the owner of the row. All limits are
in `docs/how-to/see-the-fleet.md`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec

from kclrun.model.time import WallTime
from kclrun.observe.health import TrafficBody, traffic_body
from kclrun.observe.logs import Value, clean_text
from kclrun.observe.sample import LeaseSample, ManagerSample
from kclrun.traffic.hot_shards import HotShard

PATH: Final = "/lease"
# Of one shard; and the shards of one manager, which holds 64 leases by default. An error has at
# most 9 KB: 4 MB in all, when every lease fails in five ways.
_ERRORS_MAX: Final = 5
_SHARDS_MAX: Final = 100
_TEXT_CHARACTERS_MAX: Final = 1_000
_STACK_CHARACTERS_MAX: Final = 8_000
# The events of errors, all of whose texts the log has as well: no payload, no key.
_ERRORS: Final = frozenset(
    {
        "processor_raised",
        "processor_failed",
        "record_dead_lettered",
        "record_skipped",
        "process_died",
        "process_stalled",
        "lease_halted",
        "lease_process_warned",
    }
)


# An answer may come from another program: a number beyond a Java long cannot be divided by 1,000.
Milliseconds = Annotated[int, msgspec.Meta(le=2**63 - 1)]


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """One error of a lease, by the clock of its manager. `stack` is a traceback, or empty."""

    at: WallTime
    event: str
    error: str = ""
    raised_at: str = ""
    position: str = ""
    attempts: int = 0
    stack: str = ""


class LeaseDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/lease`. Rates are those of the last seconds, totals those since the manager
    started, with the names and meanings of `LeaseSample`; `traffic` is that of /health."""

    application: str
    owner: str
    shard: str
    state: str
    note: str = ""
    records_per_s: float = 0.0
    records_total: int = 0
    bytes_total: int = 0
    retries_total: int = 0
    dead_letters_total: int = 0
    skipped_total: int = 0
    lag_ms: Milliseconds | None = None
    output_lag_ms: Milliseconds | None = None
    still_s: float | None = None
    destination_away_s: float | None = None
    restarts: int = 0
    traffic: TrafficBody | None = None
    hot: HotShard | None = None
    errors: tuple[ErrorBody, ...] = ()


class LastErrors:
    """The last errors of each lease of a manager. The loop's thread calls `note`, the threads of
    the endpoint call `of`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_shard: OrderedDict[str, deque[ErrorBody]] = OrderedDict()

    def note(self, event: str, shard: str, fields: Mapping[str, Value]) -> None:
        """Keep the event if it is an error. A repetition replaces the one before, and keeps its
        stack: the log has that only the first time."""
        if not shard or event not in _ERRORS:
            return
        error = _error_of(event, fields)
        with self._lock:
            kept = self._of_shard.setdefault(shard, deque(maxlen=_ERRORS_MAX))
            self._of_shard.move_to_end(shard)
            if kept and _is_again(kept[-1], error):
                before = kept.pop()
                error = msgspec.structs.replace(
                    error,
                    stack=error.stack or before.stack,
                    raised_at=error.raised_at or before.raised_at,
                )
            kept.append(error)
            if len(self._of_shard) > _SHARDS_MAX:
                self._of_shard.popitem(last=False)

    def of(self, shard: str) -> tuple[ErrorBody, ...]:
        """The errors of a shard, the last one first."""
        with self._lock:
            return tuple(reversed(self._of_shard.get(shard, ())))


def _error_of(event: str, fields: Mapping[str, Value]) -> ErrorBody:
    def text(name: str, most: int = _TEXT_CHARACTERS_MAX) -> str:
        value = fields.get(name)
        return clean_text(str(value), most, keeps_lines=True) if value is not None else ""

    attempts = fields.get("attempts")
    return ErrorBody(
        at=WallTime(round(time.time(), 3)),
        event=event,
        error=text("error") or text("reason") or text("detail"),
        raised_at=text("raised_at"),
        position=text("position"),
        attempts=attempts if isinstance(attempts, int) else 0,
        stack=text("traceback", _STACK_CHARACTERS_MAX),
    )


def _is_again(before: ErrorBody, error: ErrorBody) -> bool:
    return (before.event, before.error) == (error.event, error.error)


def detail_of(
    sample: ManagerSample | None, shard: str, errors: tuple[ErrorBody, ...]
) -> LeaseDetail | None:
    """The detail of one lease; None if the manager does not have it."""
    lease = (
        next((lease for lease in sample.leases if lease.shard == shard), None) if sample else None
    )
    if sample is None or lease is None:
        return None
    return LeaseDetail(
        application=sample.application,
        owner=sample.owner,
        shard=shard,
        note=clean_text(lease.note, _TEXT_CHARACTERS_MAX),
        traffic=traffic_body(lease.heat) if lease.heat is not None else None,
        errors=errors,
        **_values(lease),
    )


def _values(lease: LeaseSample) -> dict[str, Any]:
    """The values that have one name in both."""
    names = set(LeaseDetail.__struct_fields__) & set(LeaseSample.__struct_fields__)
    return {name: getattr(lease, name) for name in names - {"shard", "note"}}


# The client: how the page asks.

# A manager answers from memory; the rest is for a network between zones and a busy machine.
_PATIENCE_S: Final = 1.5
# Five stacks and 128 heavy keys are 60 KB.
_ANSWER_BYTES_MAX: Final = 256 * 1024
_PLACE: Final = re.compile(r"(\d{1,3}(?:\.\d{1,3}){3}|\[[0-9a-f:]{2,39}\]):(\d{4,5})\Z")
_PORT_MAX: Final = 65_535
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Loopback, the networks of RFC 1918, and the unique local addresses of IPv6. Not link-local ones,
# at which machines and containers get their credentials.
_PRIVATE: Final[tuple[Network, ...]] = tuple(
    map(
        ipaddress.ip_network,
        ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7"),
    )
)
# The services of a machine of AWS itself, at IPv4, at IPv6, and at IPv4 within IPv6: never, also if
# a setting says so.
_NEVER: Final[tuple[Network, ...]] = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",
            "0.0.0.0/8",
            "224.0.0.0/4",
            "fd00:ec2::/32",
            "fe80::/10",
            "ff00::/8",
            "::/128",
            "::ffff:0:0/96",
            "64:ff9b::/96",
        ),
    )
)


def place_of(text: str | None, networks: Sequence[Network] = ()) -> tuple[str, int] | None:
    """Host and port of `ADDRESS:PORT` from a row, if a request may go there: to a port above 1023,
    in a private network or in one of `networks`; else None."""
    found = _PLACE.match(text or "")
    if found is None or not 1024 <= int(found[2]) <= _PORT_MAX:
        return None
    try:
        address = ipaddress.ip_address(found[1].strip("[]"))
    except ValueError:
        return None
    if any(address in network for network in _NEVER):
        return None
    allowed = any(address in network for network in (*_PRIVATE, *networks))
    return (str(address), int(found[2])) if allowed else None


def ask_for_detail(
    place: tuple[str, int], shard: str, *, application: str, owner: str
) -> LeaseDetail | None:
    """The detail of the lease from the manager at this place; None if no manager answers in time,
    or another program or owner answers. No other part of an answer is ever shown."""
    try:
        answer = _get(place, f"{PATH}?shard={quote(shard, safe='')}")
        detail = msgspec.json.decode(answer, type=LeaseDetail)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    is_it = (detail.application, detail.owner, detail.shard) == (application, owner, shard)
    return detail if is_it else None


def _get(place: tuple[str, int], target: str) -> bytes:
    """The body of an answer of status 200. Raises: OSError, ValueError."""
    deadline = time.monotonic() + _PATIENCE_S
    host, port = place
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = f"GET {target} HTTP/1.0\r\nHost: {authority}\r\nAccept: application/json\r\n\r\n"
    received = bytearray()
    with socket.create_connection(place, timeout=_PATIENCE_S) as connection:
        connection.sendall(request.encode("ascii"))
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
            piece = connection.recv(65_536)
            if not piece:
                break
            received += piece
            if len(received) > _ANSWER_BYTES_MAX:
                raise ValueError("the answer is too long")
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    if not re.match(rb"HTTP/1\.[01] 200 ", head):
        raise ValueError("not a success")
    return body
