"""The stream of a lease: its key, lease keys made with it, and addresses of services."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final, NewType
from urllib.parse import urlsplit

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.time import WallTime

# An emulator on this host has no region, but signatures, ARNs and boto3 need one. Never used for
# an address that is not this host's own.
LOOPBACK_REGION: Final = "us-east-1"
# In every partition; with the names that ask for endpoints of FIPS.
_REGION: Final = re.compile(r"(fips-)?[a-z]{2,4}(-[a-z]+)+-\d{1,2}(-fips)?")


def why_no_endpoint(url: str) -> str:
    """Why a URL is not a valid endpoint; empty if it is. Credentials in a URL are not repeated."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "this is not a URL"
    if "://" not in url and _is_address(url):
        return f"write {'http' if is_loopback(f'//{url}') else 'https'}://{url}"
    if parts.scheme not in {"http", "https"} or not host:
        return "this is not a URL that starts with https:// (or, on this machine, http://)"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "a user, a password or a query has no place in it"
    if parts.scheme == "http" and not is_loopback_host(host):
        return "plain http is for this machine only (localhost, 127.0.0.1)"
    return ""


def is_aws_region(name: str) -> bool:
    """Whether a name has the form of AWS's regions: `eu-west-1`. It may be none."""
    return _REGION.fullmatch(name) is not None


def is_loopback(url: str | None) -> bool:
    """Whether a URL points to this host; None is AWS itself. Makes no look-up."""
    return url is not None and is_loopback_host(_host_of(url))


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(text: str) -> bool:
    """Whether a text is host, port and path of a URL, without parts that may be a secret."""
    host = _host_of(f"//{text}")
    looks_so = is_loopback_host(host) or "." in host or ":" in text
    return bool(host) and looks_so and not {"@", "?", "#"} & set(text)


def is_loopback_host(host: str) -> bool:
    """Whether a host is this one, by its address or the name localhost. Makes no look-up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


# The stream of a lease: the KCL's key of a stream, and lease keys made with it.
#
# An application with one stream has bare shard ids for lease keys. An application with several has
# `<account>:<stream>:<creation, epoch seconds>:<shard id>`, the KCL's multi-stream form. A stream
# that was deleted and made again is another stream. In memory every shard id of such an application
# is qualified like its lease key, also parents and children, so that shards of two streams are
# never confused. The table holds bare ids there, as the KCL writes them (`aws/rows.py`).
StreamKey = NewType("StreamKey", str)

# The stream of an application with one stream: its lease keys are bare shard ids.
ONLY_STREAM: Final = StreamKey("")

# The stream part as in the KCL's `StreamIdentifier`, then the shard.
_QUALIFIED: Final = re.compile(r"(?P<stream>[0-9]+:(?P<name>[^:]+):[0-9]+):(?P<shard>[^:]+)")
_SHARD_ID: Final = "shardId-"
_SHARD_DIGITS: Final = 12
_ARN: Final = re.compile(r"arn:[^:]+:kinesis:[^:]*:(?P<account>[0-9]+):stream/(?P<name>[^:/]+)")

_CHANGES: Final = re.compile(
    r"arn:[^:]+:dynamodb:[^:]*:[0-9]+:table/(?P<table>[^:/]+)/stream/(?P<label>.+)"
)


def is_change_stream(stream: str) -> bool:
    """Whether a stream, by the name or ARN of the settings, is that of a DynamoDB table."""
    return _CHANGES.fullmatch(stream) is not None


def region_of(stream: str) -> str | None:
    """The region that a stream's ARN names; None for a name."""
    parts = stream.split(":")
    return parts[3] or None if len(parts) > 5 and parts[0] == "arn" else None


def arn_difference(own: str, other: str, there: str = "is read") -> str:
    """How the ARN of a stream differs from one that is nearly the same, in words; empty for one
    that only has its form in common. `there` is what is so of `own`."""
    ours, theirs = _Named.parse(own), _Named.parse(other)
    if ours is None or theirs is None or ours.name.casefold() != theirs.name.casefold():
        return ""
    name = ours.name
    if name != theirs.name:
        return f"{theirs.name} is written otherwise than {name}, which {there}"
    if (ours.began is None) != (theirs.began is None):
        kinds = ("the stream of Kinesis", "the stream of the table")
        its, own_one = (kinds[one.began is not None] for one in (theirs, ours))
        return f"{its} {name}; {own_one} {name} {there}"
    for what in ("partition", "region", "account"):
        its_place, own_place = getattr(theirs, what) or "(none)", getattr(ours, what)
        if its_place != own_place:
            return f"{name} of {what} {its_place}; the one of {what} {own_place} {there}"
    if ours.began is not None and theirs.began is not None and ours.began != theirs.began:
        age = "an earlier" if theirs.began < ours.began else "a later"
        return (
            f"{age} stream of the table {name}, of {theirs.began}; the one of {ours.began} {there}"
        )
    return ""


class _Named(msgspec.Struct, frozen=True):
    """The parts of a stream's ARN. `began` is the label of a table's stream, and None for Kinesis;
    a label is a time, and its order that of time."""

    partition: str
    region: str
    account: str
    name: str
    began: str | None

    @classmethod
    def parse(cls, arn: str) -> _Named | None:
        parts = arn.split(":", 5)
        if len(parts) != 6:
            return None
        _, partition, _, region, account, resource = parts
        if not resource.startswith("table/"):
            return cls(partition, region, account, resource.removeprefix("stream/"), None)
        name, _, label = resource.removeprefix("table/").partition("/stream/")
        return cls(partition, region, account, name, label)


def table_of(arn: str) -> str:
    """The table of a DynamoDB stream."""
    parts = _CHANGES.fullmatch(arn)
    assert parts is not None, "asked for a change stream only"
    return parts["table"]


def stream_key(arn: str, created_at: WallTime) -> StreamKey:
    """The key of a stream among several, from its summary; whole seconds, as the KCL has them.

    Raises: SettingsError for an ARN that no Kinesis stream has.
    """
    parts = _ARN.fullmatch(arn)
    if parts is None:
        raise SettingsError(f"{arn!r} is not the ARN of a stream: leases cannot be named by it")
    return StreamKey(f"{parts['account']}:{parts['name']}:{int(created_at)}")


def stream_of(key: str) -> StreamKey:
    """The stream part of a lease key; ONLY_STREAM for any bare key."""
    if ":" not in key:  # the usual case, called for each row of a scan
        return ONLY_STREAM
    parts = _QUALIFIED.fullmatch(key)
    return ONLY_STREAM if parts is None else StreamKey(parts["stream"])


def shard_id_of(key: str) -> str:
    """The bare shard id of a lease key; a bare one is its own."""
    parts = _QUALIFIED.fullmatch(key)
    return key if parts is None else parts["shard"]


def stream_name_of(stream: StreamKey) -> str:
    """The stream's name, for people; empty for ONLY_STREAM."""
    return stream.split(":")[1] if stream else ""


def display_name(key: str) -> str:
    """A lease key in short for people: `orders:shardId-…` among several streams, else the shard."""
    parts = _QUALIFIED.fullmatch(key)
    return key if parts is None else f"{parts['name']}:{parts['shard']}"


def spelled_out(shard: str) -> str:
    """A shard with its id in full: `2` is `shardId-000000000002`, the third shard of its stream;
    `orders:2` is `orders:shardId-000000000002`. Any other text stays."""
    stream, colon, number = shard.rpartition(":")
    if not (number.isascii() and number.isdecimal() and len(number) <= _SHARD_DIGITS):
        return shard
    return f"{stream}{colon}{_SHARD_ID}{int(number):0{_SHARD_DIGITS}d}"


def short_name(key: str) -> str:
    """The inverse, for a lease key or a shard id: `2`, or `orders:2` among several streams.

    The zeros of an id are the same on every line. A text that is not a shard id stays as it is.
    """
    stream, colon, shard_id = display_name(key).rpartition(":")
    number = shard_id.removeprefix(_SHARD_ID)
    is_id = shard_id.startswith(_SHARD_ID) and number.isascii() and number.isdecimal()
    return f"{stream}{colon}{(number.lstrip('0') or '0') if is_id else shard_id}"


def qualified(stream: StreamKey, shard_id: str) -> str:
    """The lease key of a shard of this stream."""
    return f"{stream}:{shard_id}" if stream else shard_id


def qualified_shards(stream: StreamKey, shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """A listing with the ids of shards and parents qualified."""
    if not stream:
        return tuple(shards)
    return tuple(
        msgspec.structs.replace(
            shard,
            shard_id=qualified(stream, shard.shard_id),
            parent_shard_id=_qualified_or_none(stream, shard.parent_shard_id),
            adjacent_parent_shard_id=_qualified_or_none(stream, shard.adjacent_parent_shard_id),
        )
        for shard in shards
    )


def qualified_child(stream: StreamKey, child: ChildShard) -> ChildShard:
    """A child as GetRecords names it, with its id and its parents' qualified."""
    parents = tuple(qualified(stream, parent) for parent in child.parents)
    return ChildShard(qualified(stream, child.shard_id), parents, child.hash_range)


def _qualified_or_none(stream: StreamKey, shard_id: str | None) -> str | None:
    return None if shard_id is None else qualified(stream, shard_id)
