"""An endpoint before a real one that refuses what it is told to, in the service's own words."""

import json
import re

from tests.support.http_service import HttpService, forwarded

_ACCOUNT = "123456789012"
_ITERATOR = re.compile(rb'"(?:Next)?ShardIterator":\s*"([^"]+)"')


class DenyingEndpoint(HttpService):
    """Forwards JSON calls to `upstream`; operations in `refused` get that error instead.

    `refused` maps an operation's name to an error code, and may be changed at any time. `calls`
    are the names of all operations asked for, in order; `iterators` all shard iterators given out.
    """

    def __init__(self, upstream):
        self.refused = {}
        self.calls = []
        self.iterators = set()
        self._upstream = upstream
        super().__init__(self._answer)

    def deny(self, *operations):
        """Refuse these as IAM does."""
        self.refused |= dict.fromkeys(operations, "AccessDeniedException")

    def throttle(self, *operations):
        """Refuse these as an overloaded service does."""
        self.refused |= dict.fromkeys(operations, "ProvisionedThroughputExceededException")

    def _answer(self, method, path, headers, body):
        service, _, operation = headers.get("X-Amz-Target", "").rpartition(".")
        self.calls.append(operation)
        code = self.refused.get(operation)
        if code is not None:
            return _refusal(service, operation, code, body)
        answer = forwarded(self._upstream, method, path, headers, body)
        self.iterators |= {found.decode() for found in _ITERATOR.findall(answer[2])}
        return answer


def _refusal(service, operation, code, body):
    """IAM's message, as it reads: who, what, on which resource; and any other's."""
    asked = json.loads(body)
    if service.startswith("DynamoDB"):
        action = f"dynamodb:{operation}"
        resource = f"arn:aws:dynamodb:us-east-1:{_ACCOUNT}:table/{asked.get('TableName')}"
    else:
        action = f"kinesis:{operation}"
        resource = f"arn:aws:kinesis:us-east-1:{_ACCOUNT}:stream/{asked.get('StreamName')}"
    # Services quote what they were asked, iterators and all.
    message = f"it was not possible: {body.decode(errors='replace')}"
    if code == "AccessDeniedException":
        message = (
            f"User: arn:aws:sts::{_ACCOUNT}:assumed-role/kclrun/i-0abc is not authorized to"
            f" perform: {action} on resource: {resource} because no identity-based policy allows"
            f" the {action} action"
        )
    content = json.dumps({"__type": f"com.amazon.coral.service#{code}", "message": message})
    return 400, {"Content-Type": "application/x-amz-json-1.0"}, content.encode()
