"""What `kclrun check` and a start ask of each destination: is it there, and may rows go to it?"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from kclrun import errors
from kclrun.cli.user_code import check_user_output
from kclrun.config.outputs import output_places
from kclrun.config.state import state_place
from kclrun.destinations import open_output, open_versions
from kclrun.model.output import NO_ROWS, OutputDestination, setting_of
from kclrun.model.stream import ONLY_STREAM, is_loopback_host
from kclrun.outputs.rolled_files import open_rolled_files

if TYPE_CHECKING:
    from kclrun.cli.services import Aws

# By the first part of a URL.
_PORTS: Final = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306}
_PROBE_S: Final = 1.0


def check_letters(aws: Aws) -> str:
    """The place of the letters in words, as `checked`."""
    return checked("on_error.dead_letter", aws.letters)


def output_checks(
    aws: Aws, paths: Sequence[Path] | None = None
) -> tuple[tuple[str, Callable[[], str]], ...]:
    """The store of the state, and the outputs of the fleet that are destinations of their own, each
    by its setting, with a test of it. Outputs of user code are found in the folders `paths`;
    without these they are not tested."""
    outputs: list[tuple[str, Callable[[], str]]] = []
    for place in output_places(aws.settings, ONLY_STREAM):
        if place.use is None:
            outputs.append((setting_of(place.name), partial(_check_output, aws, place)))
        elif paths is not None:
            check = partial(check_user_output, aws.settings, place, paths)
            outputs.append((setting_of(place.name), check))
    state = state_place(aws.settings)
    if state is None:
        return tuple(outputs)
    store = partial(open_versions, state, "check", aws.kinesis, aws.credentials.current)
    return (("state", partial(checked, "state", store)), *outputs)


def _check_output(aws: Aws, place: OutputDestination) -> str:
    """The destination in words, as `checked`."""
    opening: Callable[[], Checkable] = partial(
        open_output, place, NO_ROWS, aws.kinesis, aws.credentials.current
    )
    if place.grows:
        opening = partial(open_rolled_files, place, NO_ROWS)  # only its folder is looked at
    try:
        return checked(setting_of(place.name), opening)
    except errors.Unavailable as error:
        if place.sql is None or (address := refusing_address(place.sql)) is None:
            raise
        # As an endpoint of AWS on this machine: a start does not wait for it.
        words = f"{error}\nnothing listens at {address}"
        raise error.reworded(words, errors.NothingListens) from None


class Checkable(Protocol):
    """A destination or a store, as far as `kclrun check` needs it."""

    def check(self) -> str: ...

    def close(self) -> None: ...


def checked(named: str, open_it: Callable[[], Checkable]) -> str:
    """The destination in words. Raises: SettingsError if it is missing or does not fit;
    AccessDenied, Throttled, Unavailable (without an operation if it is not of AWS); each with the
    name of the setting."""
    try:
        with closing(open_it()) as opened:
            return opened.check()
    except errors.ConfigError as error:
        # Some name what is inside of the setting: `output.table: …`.
        message = str(error) if str(error).startswith(f"{named}.") else f"{named}: {error}"
        raise errors.SettingsError(message) from None
    except (errors.NotFound, errors.InvalidRequest) as error:
        raise errors.SettingsError(
            f"{named}: {error}\n"
            "Create it, or correct its name in the settings: it is looked for in aws.region"
        ) from None
    except errors.ServiceError as error:
        raise error.reworded(f"{named}: {error}") from None
    except errors.SinkError as error:
        raise errors.Unavailable(f"{named}: {error}") from None


def refusing_address(url: str) -> str | None:
    """The address on this machine that a database's URL names, if nothing listens there."""
    parts = urlsplit(url)
    host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme.partition("+")[0])
    if host is None or port is None or not is_loopback_host(host):
        return None
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return f"{host}:{port}"
    except OSError:
        return None
    return None
