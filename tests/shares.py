"""A share of what takes too long for every run: the same one each time, all of them when asked."""

import os


def asked_share(variable, of):
    """(number, of): the first share, or as the environment variable says, as K/N."""
    text = os.environ.get(variable, f"1/{of}")
    print(f"share {text}; another with {variable}=K/{of}, all with {variable}=1/1")
    number, _, parts = text.partition("/")
    return int(number), int(parts)


def share_of(things, number, of):
    """Every `of`-th of them, from the `number`-th (from 1) on."""
    return tuple(things)[number - 1 :: of]


def beyond_each_value(cases):
    """The numbers of the cases, each a mapping of names to values, that may be left out: without
    them each value of each name still has a case."""
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    left = set(range(len(cases)))
    unseen = set().union(*values)
    while unseen:
        best = max(sorted(left), key=lambda number: len(values[number] & unseen))
        left.remove(best)
        unseen -= values[best]
    return sorted(left)
