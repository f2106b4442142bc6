"""The first part of a storm, as a storm of its own; its strikes closer together, if asked for."""

import msgspec

from tests.support.storms.profile import Profile


def beginning(profile: Profile, storm_s: float, *, lapse: float = 1.0) -> Profile:
    """The same storm, over after so many seconds, with its strikes `lapse` times as fast."""
    moved = (
        msgspec.structs.replace(strike, at_s=round(strike.at_s / lapse, 3))
        for strike in profile.strikes
    )
    return msgspec.structs.replace(
        profile,
        storm_s=min(storm_s, profile.storm_s),
        strikes=tuple(strike for strike in moved if strike.at_s < storm_s),
    )
