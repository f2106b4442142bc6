"""TLS contexts: which certificates this process accepts. One context for each CA bundle.

OpenSSL takes 50 ms of CPU and 2.6 MB to load a bundle, so all clients of a process share one
context. The launcher makes it before it forks, and all lease processes share its memory. That is
safe: the launcher opens no connection, so a fork copies neither a socket nor a TLS session; Python
keeps no session of a client in a context (a TLS 1.3 ticket stays with its socket); and OpenSSL
seeds its random numbers anew after a fork.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from pathlib import Path
from typing import Final

from kclrun.errors import SettingsError

# A context with a key log has the descriptor of its file, which a fork would close.
_KEY_LOG: Final = "SSLKEYLOGFILE"
# Inode, time of the last change and size: another file under the same name is noticed.
_Identity = tuple[int, int, int]
# Setting and getting an entry are atomic. Two threads may make one context twice: harmless.
_made: Final[dict[str | None, tuple[_Identity | None, ssl.SSLContext]]] = {}


def tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    """The context for the certificates of this file, or of the host's own store.

    It is shared: do not change it. A file that was replaced is loaded again; one that is missing
    while it is replaced is not. Raises: SettingsError for a file that cannot be used.
    """
    identity = _identity(ca_bundle)
    found = _made.get(ca_bundle)
    if found is not None and identity in {None, found[0]}:
        return found[1]
    try:
        context = ssl.create_default_context(cafile=ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"the CA bundle {ca_bundle} cannot be used: {error.strerror or error}"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _made[ca_bundle] = (identity, context)
    return context


def unverified_context() -> ssl.SSLContext:
    """A context that accepts every certificate; the caller checks that the peer is on this host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def prepare(ca_bundle: str | None) -> None:
    """Make the context before a fork. A file that cannot be used is left to the process that needs
    it, and which reports it."""
    if not os.environ.get(_KEY_LOG):
        with contextlib.suppress(SettingsError):
            _begin_handshake(tls_context(ca_bundle))


def _begin_handshake(context: ssl.SSLContext) -> None:
    """The first message of a handshake, in memory: it reaches no socket and begins no session.

    OpenSSL looks for its algorithms then, which takes 3 ms and 1.5 MB in each process.
    """
    begun = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        begun.do_handshake()


def _identity(ca_bundle: str | None) -> _Identity | None:
    try:
        # A host may have no store: the path is None then, whatever its type says.
        found = Path(ca_bundle or ssl.get_default_verify_paths().cafile).stat()
    except (OSError, TypeError):
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)
