"""A share of what takes too long for every day: another one each day, all of them in a while."""

import datetime
import os

__all__ = ["share_of", "todays_share"]


def todays_share(variable, of):
    """(number, of): by the day of the year, or as the environment variable says, as K/N."""
    today = datetime.datetime.now(datetime.UTC).timetuple().tm_yday
    text = os.environ.get(variable, f"{today % of + 1}/{of}")
    print(f"share {text}; replay with {variable}={text}")
    number, _, parts = text.partition("/")
    return int(number), int(parts)


def share_of(things, number, of):
    """Every `of`-th of them, from the `number`-th (from 1) on."""
    return tuple(things)[number - 1 :: of]
