"""How many examples a random test tries: all at the gate, fewer where somebody waits: a quarter in
`bin/test`, a tenth in its quick stage.

The profile of hypothesis says which, for tests that name a number and for seeded storms too. The
profiles are registered here: a process that a test starts imports this without conftest.py.
"""

import math

from hypothesis import HealthCheck, settings

GATE = "gate"
# The same examples each day on each machine: a gate does not search. `--hypothesis-profile search`
# looks for new ones. No deadline, and no check of how long it takes to make examples: either says
# how busy the machine is.
settings.register_profile(
    GATE,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quarter", settings.get_profile(GATE), max_examples=25)
settings.register_profile("quick", settings.get_profile(GATE), max_examples=10)
settings.register_profile("search", deadline=None, max_examples=1_000)

_AT_THE_GATE = settings.get_profile(GATE).max_examples


def examples(count):
    """Settings of hypothesis for a test that tries `count` examples at the gate."""
    return settings(max_examples=_of_profile(count), deadline=None)


def seeds(first, end):
    """The seeds from `first` up to `end`, or the first of them; a search tries no others."""
    return range(first, first + min(end - first, _of_profile(end - first)))


def is_quick():
    """Whether fewer examples are tried than at the gate."""
    return settings().max_examples < _AT_THE_GATE


def _of_profile(count):
    return math.ceil(count * settings().max_examples / _AT_THE_GATE)
