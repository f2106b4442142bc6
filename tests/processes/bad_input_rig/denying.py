"""An endpoint before a real one that refuses what it is told to, in the service's own words."""

import http.client
import http.server
import json
import re
import threading
from urllib.parse import urlsplit

_ACCOUNT = "123456789012"
_ITERATOR = re.compile(rb'"(?:Next)?ShardIterator":\s*"([^"]+)"')
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


class DenyingEndpoint:
    """Forwards JSON calls to `upstream`; operations in `refused` get that error instead.

    `refused` maps an operation's name to an error code, and may be changed at any time. `calls`
    are the names of all operations asked for, in order; `iterators` all shard iterators given out.
    """

    def __init__(self, upstream):
        self.refused = {}
        self.calls = []
        self.iterators = set()
        self._upstream = urlsplit(upstream)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                outer._answer(self)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def deny(self, *operations):
        """Refuse these as IAM does."""
        self.refused |= dict.fromkeys(operations, "AccessDeniedException")

    def throttle(self, *operations):
        """Refuse these as an overloaded service does."""
        self.refused |= dict.fromkeys(operations, "ProvisionedThroughputExceededException")

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        service, _, operation = request.headers.get("X-Amz-Target", "").rpartition(".")
        self.calls.append(operation)
        code = self.refused.get(operation)
        if code is None:
            status, headers, content = self._forwarded(request, body)
        else:
            status, headers, content = _refusal(service, operation, code, body)
        request.send_response(status)
        for name, value in headers:
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _forwarded(self, request, body):
        upstream = http.client.HTTPConnection(self._upstream.hostname, self._upstream.port)
        try:
            upstream.request("POST", "/", body, dict(request.headers))
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        self.iterators |= {found.decode() for found in _ITERATOR.findall(content)}
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP]
        return answer.status, kept, content


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
    return 400, [("Content-Type", "application/x-amz-json-1.0")], content.encode()
