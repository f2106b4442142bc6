"""From where a stream is to clients that reach it, once a process: on the driver and on executors.

Each process resolves endpoint and credentials for itself, by the AWS chain of its own host: no
secret travels. Rule: making a connection sends nothing; the first call is the first to ask.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kclrun.aws.connecting import is_loopback
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.transport import CONNECTIONS_MAX
from kclrun.aws.wire import WireClient
from kclrun.errors import SettingsError
from kclrun.model.address import why_no_endpoint
from kclrun.model.wire import WireEndpoint
from kclrun.spark.settings import LeasesAt, Reached

__all__ = ["Connected", "Kept", "connected"]

# Python workers are shared by the tasks of all queries of an executor: a stream each, and few of
# them. A connection that falls out stays good for whoever holds it.
_KEPT_MAX: Final = 16


class Connected:
    """One stream, reached: a reader and an administrator over one client. Threads may share it.

    At most `connections_max` requests are under way at once; one more waits for its turn.
    """

    def __init__(self, reached: Reached, connections_max: int = CONNECTIONS_MAX) -> None:
        settings = EndpointSettings(region=_region(reached), endpoint_url=_endpoint_url(reached))
        session = open_session(settings)
        self._session = session
        self.endpoint: WireEndpoint = resolve_endpoint(session, "kinesis", settings)
        self._credentials = CredentialSource(
            session,
            endpoint_url=self.endpoint.url,
            role_arn=reached.role_arn,
            role_external_id=reached.role_external_id,
            role_session_name=reached.role_session_name,
            # An emulator on this host answers for STS too; another URL is of Kinesis alone.
            sts_endpoint_url=self.endpoint.url if is_loopback(self.endpoint.url) else None,
        )
        self.client = WireClient(
            self.endpoint,
            self._credentials.current,
            service="kinesis",
            connections_max=connections_max,
        )
        self.reader = PollingReader(self.client, reached.stream)
        self.admin = WireStreamAdmin(self.client, reached.stream)

    def lease_table(self, leases: LeasesAt) -> DynamoLeaseTable:
        """The table, in the stream's region and by the same credentials; sends nothing.

        Without an endpoint of its own it is AWS's, or the stream's if that is an emulator here.
        """
        url = leases.endpoint_url
        if url is None and is_loopback(self.endpoint.url):
            url = self.endpoint.url
        settings = EndpointSettings(region=self.endpoint.region, endpoint_url=url)
        endpoint = resolve_endpoint(self._session, "dynamodb", settings)
        client = WireClient(endpoint, self._credentials.current, service="dynamodb")
        return DynamoLeaseTable(client, leases.table)

    def __repr__(self) -> str:
        return f"Connected({self.endpoint.url})"


def connected(reached: Reached, connections_max: int = CONNECTIONS_MAX) -> Connected:
    """This process's connection to a stream, made at the first call and kept; sends nothing.

    One for each `connections_max` asked for. A forked process makes its own. Raises:
    SettingsError where no region is known, or region, ARN and endpoint URL do not go together.
    """
    return _KEPT.get(reached, connections_max)


class Kept:
    """The connections of this process, `count_max` of them; the longest unused leaves first."""

    def __init__(self, make: Callable[[Reached, int], Connected], count_max: int) -> None:
        self._make = make
        self._count_max = count_max
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def get(self, reached: Reached, connections_max: int = CONNECTIONS_MAX) -> Connected:
        wanted = (reached, connections_max)
        with self._lock:
            found = self._by_wanted.get(wanted)
            if found is None:
                found = self._by_wanted[wanted] = self._make(reached, connections_max)
            self._by_wanted.move_to_end(wanted)
            if len(self._by_wanted) > self._count_max:
                self._by_wanted.popitem(last=False)
            return found

    def _forget(self) -> None:
        # In a forked child also the lock: a thread that is not there any more may hold it.
        self._lock = threading.Lock()
        self._by_wanted: OrderedDict[tuple[Reached, int], Connected] = OrderedDict()


_KEPT: Final = Kept(Connected, _KEPT_MAX)


def _region(reached: Reached) -> str | None:
    """The region given, or that of the ARN; None leaves it to the AWS chain."""
    if not reached.stream.startswith("arn:"):
        return reached.region
    parts = reached.stream.split(":")
    named = parts[3] if len(parts) == 6 and parts[5].startswith("stream/") else ""
    if not named:
        raise SettingsError(
            f"{reached.stream!r} is no stream's ARN: expected"
            " arn:aws:kinesis:<region>:<account>:stream/<name>"
        )
    if reached.region not in {None, named}:
        raise SettingsError(
            f"region is {reached.region}, but the stream's ARN says {named}: leave region out"
        )
    return named


def _endpoint_url(reached: Reached) -> str | None:
    if reached.endpoint_url is not None and (wrong := why_no_endpoint(reached.endpoint_url)):
        raise SettingsError(f"endpointUrl: expected an https URL: {wrong}")
    return reached.endpoint_url
