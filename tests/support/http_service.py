"""A small HTTP service on loopback: one function makes its answers, in threads of the service.

An answer is (status, headers, content).
"""

import contextlib
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.patience import HUNG_S

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


class HttpService:
    """Answers each request with `answer(method, path, headers, body)`."""

    def __init__(self, answer):
        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True  # else 40 ms between head and body
            protocol_version = "HTTP/1.1"

            def handle(self):
                # The client may end between two requests, as a machine does.
                with contextlib.suppress(ConnectionResetError):
                    super().handle()

            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, headers, content = answer(self.command, self.path, self.headers, body)
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(content)
                except OSError:
                    # The client has lost patience.
                    self.close_connection = True

            do_GET = do_HEAD = do_PUT = do_POST = handle_any  # noqa: N815 - http.server's names

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def forwarded(upstream, method, path, headers, body):
    """The answer of the service at the URL `upstream`."""
    connection = http.client.HTTPConnection(urlsplit(upstream).netloc, timeout=HUNG_S)
    with contextlib.closing(connection):
        sent = {name: value for name, value in headers.items() if name != "Expect"}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        kept = {n: value for n, value in answer.getheaders() if n.lower() not in _HOP_BY_HOP}
        return answer.status, kept, answer.read()
