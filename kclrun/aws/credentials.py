"""Credentials from botocore's provider chain, as plain values.

The parent resolves and renews them and sends them to its lease processes before they expire
(`signing.HeldCredentials` there). Credentials never come from our own configuration, are never
anonymous, and never appear in a message, a repr or a log.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from botocore.credentials import Credentials, RefreshableCredentials
from botocore.exceptions import BotoCoreError

from kclrun.aws.control import BOTO_FAILURES, NO_CREDENTIALS
from kclrun.aws.provider_words import nothing_found, provider_error
from kclrun.aws.sessions import OwnSession
from kclrun.errors import AccessDenied, KclrunError, SettingsError
from kclrun.model.stream import is_loopback
from kclrun.model.time import Instant
from kclrun.model.wire import WireCredentials

# For an emulator on this host, where no keys are configured. Emulators check no signature, so
# kclrun runs without any set-up. Never used for an address that is not this host's own.
LOOPBACK_CREDENTIALS: Final = WireCredentials("kclrun-loopback", "kclrun-loopback")
# The session name is shown in the account's CloudTrail: it says which program assumed the role.
_ROLE_SESSION: Final = "kclrun"
# A file is read in a millisecond, and a role is assumed once for each of these.
_REREAD_PAUSE_S: Final = 10.0
# A provider reads a file (a token), runs a program (`credential_process`) or asks a service, and
# parses the answer without checks. A RuntimeError: what it got has expired already.
_FAILURES: Final = (*BOTO_FAILURES, AttributeError, TypeError, OSError, RuntimeError)


class CredentialSource:
    """The provider chain, or a role assumed from it. `current` is called for every request.

    `role_arn` is assumed through STS (`sts_endpoint_url` for an emulator), with an external ID
    where its trust policy asks for one. Threads may share one source.
    """

    def __init__(
        self,
        session: OwnSession,
        *,
        endpoint_url: str | None = None,
        role_arn: str | None = None,
        role_external_id: str | None = None,
        role_session_name: str | None = None,
        sts_endpoint_url: str | None = None,
    ) -> None:
        self._session = session
        self._on_this_host = is_loopback(endpoint_url)
        self._role_arn = role_arn
        self._role_session = {"RoleSessionName": role_session_name or _ROLE_SESSION}
        if role_external_id is not None:
            self._role_session["ExternalId"] = role_external_id
        self._sts_endpoint_url = sts_endpoint_url
        self._lock = threading.Lock()
        self._rereading = threading.Lock()
        self._reread_instant: Instant | None = None
        self._replaced: Callable[[], None] = lambda: None
        self._credentials: Credentials | None = None
        self._uses_loopback = False

    def current(self) -> WireCredentials:
        """Credentials that are valid for some minutes at least; renewed here before they expire.

        botocore tries to renew them from 15 minutes before they expire, and a failure is an error
        from 10 minutes before. Raises: AccessDenied without a whole pair of keys; Unavailable or
        AccessDenied where the provider fails to renew them; SettingsError where they are empty or
        cannot be sent.
        """
        try:
            with self._lock:
                found = self._found()
            if found is None:
                return LOOPBACK_CREDENTIALS
            # Outside the lock: while one thread renews early, botocore serves the others at once.
            frozen = found.get_frozen_credentials()
        except _FAILURES as error:
            raise provider_error(error, *self._profile(), os.environ) from None
        if not frozen.access_key or not frozen.secret_key:
            raise SettingsError("the AWS credentials found are empty")
        found_keys = WireCredentials(frozen.access_key, frozen.secret_key, frozen.token)
        if not _fits_into_headers(found_keys):
            raise SettingsError(
                "the AWS credentials found contain a line break or another character that no key"
                " has\nCorrect AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or"
                " the profile"
            )
        return found_keys

    def notify(self, replaced: Callable[[], None]) -> None:
        """`replaced` is called, on any thread, after a refusal led to other keys."""
        self._replaced = replaced

    def reread(self, refused: WireCredentials) -> bool:
        """Whether there are other keys than those that a service refused.

        A person or a program may have replaced them where they come from: the files, the program or
        the service are read again, at most once in `_REREAD_PAUSE_S`. May do I/O; the thread that
        renews a lease never comes here. Raises: nothing.
        """
        with self._rereading:
            if self._held() not in {refused, None}:
                return True  # another thread has read them
            now = Instant(time.monotonic())
            if self._reread_instant is not None and now < self._reread_instant + _REREAD_PAUSE_S:
                return False
            self._reread_instant = now
            former = self._session, self._credentials, self._uses_loopback
            with self._lock:
                self._session, self._credentials = self._session.reopened(), None
                self._uses_loopback = False
            found = self._held()
            if found is None:
                # What is read now is less than what there was: a file that is being written.
                with self._lock:
                    self._session, self._credentials, self._uses_loopback = former
        if found in {refused, None}:
            return False
        self._replaced()
        return True

    def _held(self) -> WireCredentials | None:
        try:
            return self.current()
        except KclrunError:
            return None

    def _found(self) -> Credentials | None:
        if self._credentials is None and not self._uses_loopback:
            base = self._session.get_credentials()
            if base is None and self._on_this_host:
                # The chain asks EC2's metadata service, with 2 ms of CPU: not for every request.
                self._uses_loopback = True
                return None
            if base is None:
                raise AccessDenied(
                    nothing_found(*self._profile(), os.environ),
                    operation="credentials",
                    code=NO_CREDENTIALS,
                )
            self._credentials = base if self._role_arn is None else self._assumed(self._role_arn)
        return self._credentials

    def _profile(self) -> tuple[Mapping[str, Any], str | None]:
        """The settings of the profile in use, and its name."""
        with contextlib.suppress(BotoCoreError):
            return self._session.get_scoped_config(), self._session.profile
        return {}, None

    def _assumed(self, role_arn: str) -> Credentials:
        client: Any = self._session.create_client("sts", endpoint_url=self._sts_endpoint_url)

        def refresh() -> dict[str, Any]:
            keys = client.assume_role(RoleArn=role_arn, **self._role_session)["Credentials"]
            return {
                "access_key": keys["AccessKeyId"],
                "secret_key": keys["SecretAccessKey"],
                "token": keys["SessionToken"],
                "expiry_time": keys["Expiration"].isoformat(),
            }

        made: Callable[..., Credentials] = RefreshableCredentials.create_from_metadata
        return made(metadata=refresh(), refresh_using=refresh, method="sts-assume-role")

    def __repr__(self) -> str:
        return "CredentialSource(…)"


def _fits_into_headers(keys: WireCredentials) -> bool:
    """Whether no key has a line break. A line feed at the end of an environment variable is a
    common mistake."""
    parts = (keys.access_key, keys.secret_key, keys.token or "")
    return all(part.isascii() and part.isprintable() for part in parts)
