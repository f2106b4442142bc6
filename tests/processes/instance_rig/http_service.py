"""A small HTTP service on loopback, its answers made by one function, in threads of its own."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HttpService:
    """`answer(method, path, headers, body)` gives (status, headers, body bytes)."""

    def __init__(self, answer):
        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True  # else 40 ms between head and body
            protocol_version = "HTTP/1.1"

            def handle(self):
                # Whoever asked may end between two requests, as a machine does.
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
                    self.wfile.write(content)
                except OSError:
                    # Whoever asked has lost patience.
                    self.close_connection = True

            do_GET = handle_any  # noqa: N815 - http.server's names
            do_PUT = handle_any  # noqa: N815 - http.server's names
            do_POST = handle_any  # noqa: N815 - http.server's names

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
