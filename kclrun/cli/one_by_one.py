"""A verb that goes over many things, such as the streams of an application: one that fails is
named, and the others follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kclrun.cli import exit_codes, messages
from kclrun.errors import NotFound, ServiceError


class OneByOne:
    """The failures of a verb so far: `code` is its exit code, the first failure's."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self.code = exit_codes.DRAINED

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """An error of the service inside is reported, and ends this alone."""
        try:
            yield
        except ServiceError as error:
            self._failed(error)

    def missing(self, name: str, error: NotFound) -> None:
        """For `open_streams`: a stream of the application is not there any more."""
        self._failed(error.reworded(f"stream {name}: {error}"))

    def _failed(self, error: ServiceError) -> None:
        code = messages.report_error(error, self._verb)
        self.code = self.code or code
