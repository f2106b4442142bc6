"""How requests reach the WSGI application behind: one at a time, or side by side."""

import asyncio
import threading

import pytest

from kclrun.local.moto_server import MotoServer
from kclrun.local.signatures import Credentials

TOGETHER_MAX_S = 5.0


class Application:
    """A WSGI application that notices how many requests are in it at once.

    A request stays until `expected` are in, or until the time is up.
    """

    def __init__(self, expected, stay_max_s):
        self.most = 0
        self._inside = 0
        self._lock = threading.Lock()
        self._full = threading.Event()
        self._expected, self._stay_max_s = expected, stay_max_s

    def __call__(self, environ, start_response):
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
            if self._inside >= self._expected:
                self._full.set()
        self._full.wait(self._stay_max_s)
        with self._lock:
            self._inside -= 1
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"hello ", environ["wsgi.input"].read()]


async def request(face, headers, body=b"body"):
    scope = {
        "type": "http",
        "method": "POST",
        "raw_path": b"/",
        "query_string": b"",
        "headers": headers,
        "server": ("127.0.0.1", 1),
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    await face(scope, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


def all_at_once(application, headers):
    async def run():
        face = MotoServer(application, None)
        return await asyncio.gather(*(request(face, headers) for _ in range(4)))

    answers = asyncio.run(run())
    assert answers == [(200, b"hello body")] * 4
    return application.most


def test_requests_to_dynamodb_are_answered_one_at_a_time():
    headers = [(b"x-amz-target", b"DynamoDB_20120810.UpdateItem")]

    assert all_at_once(Application(expected=2, stay_max_s=0.05), headers) == 1


def test_other_requests_are_answered_side_by_side():
    headers = [(b"x-amz-target", b"AmazonSQS.ReceiveMessage")]

    assert all_at_once(Application(expected=4, stay_max_s=TOGETHER_MAX_S), headers) == 4


@pytest.mark.parametrize(
    ("content_type", "status", "code"),
    [
        (b"application/x-www-form-urlencoded", 403, b"<Code>MissingAuthenticationToken</Code>"),
        (b"application/octet-stream", 403, b"<Code>AccessDenied</Code>"),
    ],
)
def test_an_unsigned_request_never_reaches_the_application(content_type, status, code):
    application = Application(expected=1, stay_max_s=0)
    face = MotoServer(application, Credentials("key", "secret"))

    answer = asyncio.run(request(face, [(b"content-type", content_type)]))

    assert answer[0] == status
    assert code in answer[1]
    assert application.most == 0
