"""A TCP gate before a service: open it forwards, shut it refuses, and cuts what was open.

While it trickles, answers come so slowly that no read times out and none is ever whole.
"""

import contextlib
import socket
import threading
import time
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 16
# Below any read time-out.
_TRICKLE_S = 0.5


class Gate:
    """`url` is where clients connect. Open at first; `shut` and `open` may alternate."""

    def __init__(self, url):
        parts = urlsplit(url)
        self._service = (parts.hostname, parts.port)
        self._port = 0
        self._listener = None
        self._acceptor = None
        self._lock = threading.Lock()
        self._live = set()
        self._trickling = threading.Event()
        self._hanging_up = threading.Event()
        self.open()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def open(self):
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=64)
        self._port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,))
        self._acceptor.start()

    def shut(self):
        """New connections are refused from now on; those under way are cut."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.cut()

    def cut(self):
        """Cut what is under way: nobody learns whether a request was served."""
        with self._lock:
            live = list(self._live)
        for end in live:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def outage(self):
        self.shut()
        try:
            yield
        finally:
            self.open()

    @contextlib.contextmanager
    def hang_up(self):
        """New connections are accepted and closed, without an answer."""
        self._hanging_up.set()
        try:
            yield
        finally:
            self._hanging_up.clear()

    @contextlib.contextmanager
    def trickle(self):
        """A byte of each answer, now and then."""
        self._trickling.set()
        try:
            yield
        finally:
            self._trickling.clear()

    def _accept(self, listener):
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                if self._hanging_up.is_set():
                    client.close()
                    continue
                service = socket.create_connection(self._service)
                with self._lock:
                    self._live |= {client, service}
                for source, target in ((client, service), (service, client)):
                    threading.Thread(
                        target=self._forward,
                        args=(source, target),
                        kwargs={"is_answer": source is service},
                        daemon=True,
                    ).start()

    def _forward(self, source, target, *, is_answer):
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                while is_answer and data and self._trickling.is_set():
                    target.sendall(data[:1])
                    data = data[1:]
                    time.sleep(_TRICKLE_S)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            is_last = source not in self._live
            self._live -= {source, target}
        if is_last:
            source.close()
            target.close()
