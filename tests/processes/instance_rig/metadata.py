"""The instance metadata service as EC2 documents its version 2: a session by PUT, items by GET.

moto's has no sessions, and none of the items that tell of an end. Here a request without a valid
session is 401, an item that is not there 404, a forwarded PUT 403, as in the EC2 User Guide.
"""

import json
import secrets
import threading
from datetime import UTC, datetime, timedelta

from tests.support.http_service import HttpService

INSTANCE_ID = "i-0123456789abcdef0"
_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN = "X-aws-ec2-metadata-token"
_META_DATA = "/latest/meta-data/"


class FakeMetadata:
    """One instance's. `items` may be changed at any time; `sessions` counts those begun.

    While `hangs` is set nothing is answered; `status`, if set, is the answer to everything.
    """

    def __init__(self, zone="us-east-1b"):
        self.items = {
            "instance-id": INSTANCE_ID,
            "placement/availability-zone": zone,
            "placement/region": zone[:-1],
        }
        self.sessions = 0
        self.asked = []
        self.status = None
        self._tokens = set()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._service = HttpService(self._answer)
        self.url = self._service.url

    # What befalls the instance.

    def notice_interruption(self, action="terminate", in_s=120.0):
        at = datetime.now(UTC) + timedelta(seconds=in_s)
        text = {"action": action, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.items["spot/instance-action"] = json.dumps(text)

    def recommend_rebalance(self):
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.items["events/recommendations/rebalance"] = json.dumps({"noticeTime": at})

    def target(self, state):
        self.items["autoscaling/target-lifecycle-state"] = state

    def name_group(self, group):
        self.items["tags/instance/aws:autoscaling:groupName"] = group

    # What befalls the service.

    def expire_sessions(self):
        self._tokens.clear()

    def hang(self):
        self._goes_on.clear()

    def go_on(self):
        self._goes_on.set()

    def close(self):
        self._goes_on.set()
        self._service.close()

    def _answer(self, method, path, headers, body):
        self._goes_on.wait()
        self.asked.append((method, path))
        if self.status is not None:
            return self.status, {}, b""
        if path == "/latest/api/token":
            return self._begin_session(method, headers)
        if method != "GET":
            return 405, {}, b""
        if headers.get(_TOKEN) not in self._tokens:
            return 401, {}, b""
        item = self.items.get(path.removeprefix(_META_DATA))
        return (404, {}, b"") if item is None else (200, {}, item.encode())

    def _begin_session(self, method, headers):
        if method != "PUT":
            return 405, {}, b""
        if "X-Forwarded-For" in headers:
            return 403, {}, b""
        ttl = headers.get(_TTL, "")
        if not ttl.isdecimal() or not 1 <= int(ttl) <= 21_600:
            return 400, {}, b""
        self.sessions += 1
        token = secrets.token_urlsafe(40)
        self._tokens.add(token)
        return 200, {_TTL: ttl}, token.encode()
