"""A door before the S3 of the embedded AWS that loses answers and refuses requests."""

import http.client
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_DENIED = b"<Error><Code>AccessDenied</Code><Message>not you</Message></Error>"


class Door(ThreadingHTTPServer):
    """Requests arrive; of every other name that is put the first answer is lost with `loses`, and
    those with a method in `denies` are refused."""

    daemon_threads = True

    def __init__(self, behind):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = urlsplit(behind).netloc
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.loses, self.denies = False, frozenset()
        self.put, self.lost, self.taken = [], [], []


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def pass_on(self):
        door, of = self.server, self.headers
        body = self.rfile.read(int(of.get("Content-Length", 0)))
        if self.command in door.denies:
            self._say(403, {}, _DENIED)
            return
        behind = http.client.HTTPConnection(door.behind)
        behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in of.items():
            if name.lower() not in {"expect", "connection"}:
                behind.putheader(name, value)
        behind.endheaders(body)
        answer = behind.getresponse()
        content = answer.read()
        behind.close()
        if self.command == "PUT" and answer.status == 412:
            door.taken.append(self.path)
        elif self.command == "PUT" and self.path.endswith(".state"):
            door.put.append(self.path)
            if door.loses and len(door.put) % 2:
                door.lost.append(self.path)
                self.close_connection = True
                return
        self._say(answer.status, answer.headers, content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = pass_on  # noqa: N815 - http.server's names

    def _say(self, status, headers, content):
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in {"content-length", "transfer-encoding", "connection", "date"}:
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_): ...
