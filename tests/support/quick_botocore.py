"""Sessions of botocore that cost little.

For each, botocore lists the folders of all services, reads the same descriptions again and inspects
the signature of each handler, and looks for the present names of a hundred events: 0.2 s of CPU,
and the tests make hundreds.
"""

import functools
import inspect

import botocore.hooks
import botocore.session


def make_quick():
    """All sessions share one loader, as the clients of one session do."""
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    botocore.hooks.accepts_kwargs = _accepts_kwargs
    botocore.hooks.EventAliaser.__init__ = _with_shared_names


_ALONE = botocore.hooks.EventAliaser.__init__
_NAMES: dict[str, str] = {}


def _with_shared_names(aliaser, event_emitter, event_aliases=None):
    _ALONE(aliaser, event_emitter, event_aliases)
    if aliaser._event_aliases == botocore.hooks.EVENT_ALIASES:
        aliaser._alias_name_cache = _NAMES


_INSPECTED = botocore.hooks.accepts_kwargs


def _accepts_kwargs(handler):
    code = getattr(handler, "__code__", None)
    return _INSPECTED(handler) if code is None else code.co_flags & inspect.CO_VARKEYWORDS
