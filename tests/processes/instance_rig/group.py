"""An autoscaling group that waits at its lifecycle hooks: the two calls that answer them.

moto (5.2) keeps lifecycle hooks and never waits at one: it has neither
RecordLifecycleActionHeartbeat nor CompleteLifecycleAction. So these two stand here, over HTTP in
the query protocol, as the API reference of EC2 Auto Scaling describes them; which members a request
must have is read from botocore's model of the service. One group, one instance.

    Pending:Wait ──launch hook──► InService ──end()──► Terminating:Wait
                                                              │ termination hook
                                                              ▼
                                                          Terminated
"""

import collections
import threading
import time
import uuid
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

import botocore.session

from tests.processes.instance_rig.metadata import INSTANCE_ID
from tests.support.http_service import HttpService

GROUP = "orders"
LAUNCH_HOOK = "orders-ready"
TERMINATION_HOOK = "orders-drained"
_NAMESPACE = "http://autoscaling.amazonaws.com/doc/2011-01-01/"
_WAITS_AT = {"Pending:Wait": LAUNCH_HOOK, "Terminating:Wait": TERMINATION_HOOK}
_THEN = {"Pending:Wait": "InService", "Terminating:Wait": "Terminated"}


class FakeGroup:
    """`history` has each state and each request that was granted, with its monotonic instant.

    `failures` are given instead of answers, first to last: (HTTP status, error code), or None for
    an answer that is lost after the request was carried out.
    """

    def __init__(self, metadata, timeout_s=60.0):
        self.failures = collections.deque()
        self.history = []
        self.asked = []
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._model = botocore.session.Session().get_service_model("autoscaling")
        self._service = HttpService(self._answer)
        self.url = self._service.url
        self._enter("Pending:Wait", target="InService")

    def end(self):
        """Scale in, refresh, rebalance: the group ends the instance, and waits at its hook."""
        with self._lock:
            self._enter("Terminating:Wait", target="Terminated")

    @property
    def state(self):
        with self._lock:
            return self._timed()

    def instant_of(self, what):
        """When something of the history was first; None before."""
        return next((at for name, at in tuple(self.history) if name == what), None)

    def close(self):
        self._service.close()

    def _enter(self, state, target=None):
        self._state = state
        self._waits_until = time.monotonic() + self._timeout_s
        self.history.append((state, time.monotonic()))
        if target is not None:
            self._metadata.target(target)

    def _timed(self):
        """The state by now: at a hook that timed out nothing waits any more."""
        if self._state in _THEN and time.monotonic() >= self._waits_until:
            self._enter("abandoned")
        return self._state

    def _answer(self, method, path, headers, body):
        with self._lock:
            request = dict(parse_qsl(body.decode()))
            name = request.get("Action", "")
            self.asked.append(name)
            failure = self.failures.popleft() if self.failures else ()
            if failure:
                return _refused(failure[0], failure[1], "Rate exceeded")
            problem = self._problem(name, request, headers)
            if problem is not None:
                return _refused(400, *problem)
            self.history.append((f"{name} {request['LifecycleHookName']}", time.monotonic()))
            if name == "CompleteLifecycleAction":
                self._enter(_THEN[self._state])
            else:
                self._waits_until = time.monotonic() + self._timeout_s
            if failure is None:
                return 500, {}, b""
            return 200, {"Content-Type": "text/xml"}, _granted(name)

    def _problem(self, name, request, headers):
        if name not in {"CompleteLifecycleAction", "RecordLifecycleActionHeartbeat"}:
            return "InvalidAction", f"Could not find operation {name}"
        if "AWS4-HMAC-SHA256" not in headers.get("Authorization", ""):
            return "MissingAuthenticationToken", "Missing Authentication Token"
        required = self._model.operation_model(name).input_shape.required_members
        if missing := [member for member in required if not request.get(member)]:
            return "ValidationError", f"{len(missing)} validation errors detected: {missing}"
        if request["AutoScalingGroupName"] != GROUP:
            return "ValidationError", f"AutoScalingGroup name not found: {GROUP}"
        if request["LifecycleHookName"] not in {LAUNCH_HOOK, TERMINATION_HOOK}:
            return "ValidationError", f"Lifecycle hook not found: {request['LifecycleHookName']}"
        is_waited_for = _WAITS_AT.get(self._timed()) == request["LifecycleHookName"]
        if request.get("InstanceId") != INSTANCE_ID or not is_waited_for:
            given = request.get("InstanceId")
            return "ValidationError", f"No active Lifecycle Action found with instance ID {given}"
        if request.get("LifecycleActionResult", "CONTINUE") != "CONTINUE":
            return "ValidationError", "this rig's instances are never abandoned"
        return None


def _granted(name):
    return (
        f'<{name}Response xmlns="{_NAMESPACE}"><{name}Result/><ResponseMetadata>'
        f"<RequestId>{uuid.uuid4()}</RequestId></ResponseMetadata></{name}Response>"
    ).encode()


def _refused(status, code, message):
    body = (
        f'<ErrorResponse xmlns="{_NAMESPACE}"><Error><Type>Sender</Type><Code>{code}</Code>'
        f"<Message>{escape(message)}</Message></Error><RequestId>{uuid.uuid4()}</RequestId>"
        "</ErrorResponse>"
    ).encode()
    return status, {"Content-Type": "text/xml"}, body
