"""kclrun as a user runs it (`python -m kclrun --config …`) over an embedded AWS, for a row."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.servers import CREDENTIALS, REGION
from kclrun.local.server import Embedded

_PATIENCE_S: Final = 60.0


@contextlib.contextmanager
def program(
    folder: Path,
    embedded: Embedded,
    stream: str,
    processor: str,
    options: dict[str, Any],
    **settings: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """A processor of `processors.py` runs; it is told to drain at the end. If something took too
    long, the log is shown. `settings` come beside those of every row."""
    config = folder / "app.yaml"
    config.write_text(json.dumps(_settings(embedded, stream, processor, options) | settings))
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kclrun", "--config", str(config)],
            env=os.environ | credentials(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    except TimeoutError:
        sys.stderr.write(log.read_text()[-4000:])
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def repeated(action: Callable[[], object], every_s: float) -> Iterator[None]:
    """`action` again and again in a thread, with this pause between two calls."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            action()

    thread = threading.Thread(target=repeat, name="repeated", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _settings(
    embedded: Embedded, stream: str, processor: str, options: dict[str, Any]
) -> dict[str, Any]:
    return {
        "application": "bench",
        "stream": stream,
        "processor": f"bench.processors:{processor}",
        "path": str(Path(__file__).parents[1]),
        "options": options,
        "start": "TRIM_HORIZON",
        "aws": {
            "region": REGION,
            "endpoint": embedded.endpoint,
            "endpoints": {
                "kinesis": embedded.kinesis_endpoint,
                "dynamodb": embedded.dynamodb_endpoint,
            },
        },
        "checkpoint": {"every": "1s"},
        "log": {"format": "json"},
    }


def credentials() -> dict[str, str]:
    """The environment of a program that signs its requests."""
    return {
        "AWS_ACCESS_KEY_ID": CREDENTIALS.access_key,
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS.secret_key,
    }
