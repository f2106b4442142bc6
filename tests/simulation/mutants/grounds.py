"""Where planted bugs are hunted seed by seed: each ground makes a storm of a seed.

The product as it is passes all of them. Rule: import this after the bug is planted, for it imports
the product.
"""

from collections.abc import Callable, Mapping

import msgspec

from kclrun.simulation.network import FaultRates
from kclrun.simulation.shards import StreamFaults
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings
from tests.simulation.mutants.mutant import Ground
from tests.simulation.proving.beginnings import beginning
from tests.support.storms.dense import dense_storm, expiring_storm
from tests.support.storms.profile import Profile
from tests.support.storms.swarm import draw_profile

# Of each drawn storm a quarter of an hour, with all that would strike in an hour and a half of it:
# what a bug needs comes together in minutes or not at all, and between two strikes little happens.
_HUNTED_S = 900.0
_LAPSE = 6.0
# Every third request to the table still gets through as it should, and one in ten applies late.
_BROWN_OUT = FaultRates(throttled=0.15, unreachable=0.15, lost_reply=0.1, late=0.1)


def storm_of(ground: Ground, seed: int) -> Profile:
    """The storm that a seed is there."""
    return _GROUNDS[ground](seed)


def _drawn(seed: int) -> Profile:
    return beginning(draw_profile(seed), _HUNTED_S, lapse=_LAPSE)


def _dense(seed: int) -> Profile:
    storm: Profile = dense_storm(seed)
    return storm


def _rough(seed: int) -> Profile:
    """Dense, with the shortest failover, a table that hardly answers, and listings that lag far
    longer than two of their periods. Batches are small for the records that come, so that who
    takes a lease is behind its predecessor for a while."""
    storm: Profile = dense_storm(
        seed,
        minutes=8,
        records_per_s=20.0,
        settings=FleetSettings(
            failover_s=3.0,
            poll_s=1.0,
            checkpoint_every_s=1.0 if seed % 2 else 10.0,
            uncheckpointed_max=80,
        ),
        table_faults=_BROWN_OUT,
        stream_faults=StreamFaults(listing_lag_max_s=30.0),
        user_code=UserCode(batch_s=0.5),
    )
    kept = tuple(strike for strike in storm.strikes if strike.kind != "delete_row")
    return msgspec.structs.replace(storm, strikes=kept)


def _expiring(seed: int) -> Profile:
    storm: Profile = expiring_storm(seed)
    return storm


_GROUNDS: Mapping[Ground, Callable[[int], Profile]] = {
    "storms": _drawn,
    "dense storms": _dense,
    "rough storms": _rough,
    "expiring storms": _expiring,
}
