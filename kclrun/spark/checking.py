"""Checks before a query starts that its stream can be read: one DescribeStreamSummary.

A throttled or broken answer is tried again for some seconds. An error that does not pass is raised
at once. The message names the stream, its place and the action that the user can take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kclrun.errors import AccessDenied, NotFound, Throttled, Unavailable
from kclrun.ports import StreamAdmin, StreamSummary
from kclrun.spark.options import Reached

# A load balancer changes hosts within seconds; a user waits at the terminal for this answer.
_WAIT_MAX_S: Final = 10.0
_PAUSE_S: Final = 0.5


def require_stream(
    admin: StreamAdmin,
    reached: Reached,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> StreamSummary:
    """The stream's own summary, after ten seconds of trying and one more try at most.

    Raises: NotFound, AccessDenied, Unavailable, Throttled, InvalidRequest.
    """
    give_up_at = clock() + _WAIT_MAX_S
    where = reached.endpoint_url or reached.region or "the region of this environment"
    while True:
        try:
            return admin.summary()
        except NotFound as error:
            raise NotFound(
                f"there is no stream {reached.name} at {where}: {error}\n"
                "Check streamName, region and endpointUrl; kclrun does not create streams",
                operation=error.operation,
                code=error.code,
            ) from None
        except AccessDenied as error:
            raise AccessDenied(
                f"the stream {reached.name} at {where} may not be read: {error}",
                operation=error.operation,
                code=error.code,
            ) from None
        except (Throttled, Unavailable) as error:
            if clock() >= give_up_at:
                raise type(error)(
                    f"the stream {reached.name} cannot be reached at {where}, tried for"
                    f" {_WAIT_MAX_S:.0f} s: {error}\nCheck endpointUrl, region and the network",
                    operation=error.operation,
                    code=error.code,
                ) from None
            wait(_PAUSE_S)
