"""Answers the lifecycle hooks of an autoscaling group over botocore's own client.

The calls go to the group's region, which need not be the stream's, with the machine's own role.
Each is sent once. Implements `ports.LifecycleActions`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kclrun.aws.control import BOTO_FAILURES, NO_CREDENTIALS, Client, ControlPlane, from_botocore
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.operations import (
    COMPLETE_LIFECYCLE_ACTION,
    RECORD_LIFECYCLE_ACTION_HEARTBEAT,
    Operation,
)
from kclrun.errors import AccessDenied, NotFound, Unavailable
from kclrun.model.instance import LifecycleAction
from kclrun.model.wire import WireCredentials

# The service's one code for a missing group, a missing hook and a missing pending action.
_NOTHING_WAITS: Final = "ValidationError"


class BotoLifecycleActions:
    """Answers hooks. The client is made at the first call; `settings.region` is not used."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._credentials: CredentialSource | None = None
        # One call at a time: botocore's sessions are not thread-safe.
        self._lock = threading.Lock()

    def heartbeat(self, action: LifecycleAction) -> None:
        """RecordLifecycleActionHeartbeat. Raises: as `ports.LifecycleActions` says."""
        self._call(
            RECORD_LIFECYCLE_ACTION_HEARTBEAT,
            action,
            lambda client, names: client.record_lifecycle_action_heartbeat(**names),
        )

    def complete(self, action: LifecycleAction) -> None:
        """CompleteLifecycleAction with CONTINUE. Raises: as `ports.LifecycleActions` says."""
        self._call(
            COMPLETE_LIFECYCLE_ACTION,
            action,
            lambda client, names: client.complete_lifecycle_action(
                LifecycleActionResult="CONTINUE", **names
            ),
        )

    def _call(
        self,
        operation: Operation,
        action: LifecycleAction,
        call: Callable[[Client, dict[str, str]], Any],
    ) -> None:
        names = {
            "AutoScalingGroupName": action.group,
            "LifecycleHookName": action.hook,
            "InstanceId": action.instance_id,
        }
        with self._lock:
            client = self._client(action.region)
            try:
                call(client, names)
            except BOTO_FAILURES as error:
                failure = from_botocore(operation, error)
                if failure.code == _NOTHING_WAITS:
                    raise NotFound(
                        str(failure), operation=failure.operation, code=failure.code
                    ) from None
                raise failure from None
            finally:
                client.close()

    def _client(self, region: str) -> Client:
        """A client with the present keys: minutes or months pass between two calls."""
        settings = msgspec.structs.replace(self._settings, region=region)
        session = open_session(settings)
        if self._credentials is None:
            self._credentials = CredentialSource(session, endpoint_url=settings.endpoint_url)
        return ControlPlane(session, settings, self._keys(self._credentials)).autoscaling()

    def _keys(self, source: CredentialSource) -> WireCredentials:
        try:
            return source.current()
        except AccessDenied as error:
            if error.code != NO_CREDENTIALS:
                raise
            # The role's keys come from the instance metadata service. It answered before, so this
            # failure is temporary.
            raise Unavailable(str(error), operation=error.operation, code=error.code) from None
