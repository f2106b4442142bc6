"""Inputs by mutation, guided by the lines they reach.

An input that reaches a line of kclrun from another line than any input before joins the corpus.
What an input may cost is looked at apart from that, without tracing.
"""

import random
import sys
import time
import tracemalloc
from pathlib import Path

import kclrun

ROOT = str(Path(kclrun.__file__).parent)
INPUT_BYTES_MAX = 4096
CORPUS_MAX = 2000
# A small input may take 50 ms and 64 MB (reliability targets for all readers of hostile bytes). The
# time is the best of three runs, of this process's own CPU: the machine may be busy.
SECONDS_MAX = 0.05
MEMORY_BYTES_MAX = 64 * 1024 * 1024
NUMBERS = (b"0", b"-1", b"255", b"65536", b"4294967296", b"18446744073709551616", b"1e999", b"NaN")


class Broken(Exception):
    """A target broke its promise: which, by which input, how."""

    def __init__(self, target, data, why):
        super().__init__(f"{target.name}: {why}")
        self.target, self.data, self.why = target, data, why


def examine(target, data):
    """Run one input without tracing, with an eye on time and memory. Raises: Broken."""
    _run(target, data)
    if target.costs_little:
        _weigh(target, data)


def _run(target, data):
    try:
        target.read(data)
    except target.errors:
        pass
    except Exception as error:
        raise Broken(target, data, f"{type(error).__name__}: {error}") from error


def _weigh(target, data):
    # The memory first: on a busy machine what takes much of it takes long, too.
    tracemalloc.start()
    try:
        _run(target, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > MEMORY_BYTES_MAX:
        raise Broken(target, data, f"{peak} bytes of memory for {len(data)} bytes")
    spent = []
    for _ in range(3):
        began = time.process_time()
        _run(target, data)
        spent.append(time.process_time() - began)
    if min(spent) > SECONDS_MAX:
        raise Broken(target, data, f"{min(spent):.3f} s for {len(data)} bytes")


class Search:
    """One target, one seed. `step` makes an input and runs it; `corpus` is what is built upon."""

    def __init__(self, target, seed):
        self.target = target
        self.inputs = 0
        self.reached = set()
        # All of it, whatever it reaches: decoders in C show no lines.
        self.corpus = list(target.corpus)
        self._chance = random.Random(f"{target.name}:{seed}")
        for data in target.corpus:
            self._try(data)

    def step(self):
        self._try(self._mutated())

    def _try(self, data):
        self.inputs += 1
        fresh = self._edges(data) - self.reached
        if fresh:
            self.reached |= fresh
            examine(self.target, data)
            if len(self.corpus) < CORPUS_MAX and data not in self.corpus:
                self.corpus.append(data)

    def _edges(self, data):
        """Which line followed which."""
        edges, last = set(), [0]

        def follow(frame, event, arg):
            if event == "line":
                here = hash((frame.f_code.co_filename, frame.f_lineno))
                edges.add((last[0], here))
                last[0] = here
            return follow

        def enter(frame, event, arg):
            return follow if frame.f_code.co_filename.startswith(ROOT) else None

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            _run(self.target, data)
        finally:
            sys.settrace(before)
        return edges

    def _mutated(self):
        data = bytearray(self._chance.choice(self.corpus))
        for _ in range(self._chance.choice((1, 1, 2, 4, 8))):
            self._chance.choice(MUTATIONS)(data, self._chance, self)
        return bytes(data[:INPUT_BYTES_MAX])

    @property
    def words(self):
        return (*self.target.words, *NUMBERS)


def _flip(data, chance, _):
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(data, chance, _):
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _insert(data, chance, _):
    place = chance.randint(0, len(data))
    data[place:place] = chance.randbytes(chance.choice((1, 1, 2, 8, 64)))


def _cut(data, chance, _):
    begin = chance.randint(0, len(data))
    del data[begin : begin + chance.choice((1, 1, 2, 8, 64))]


def _repeat(data, chance, _):
    begin = chance.randint(0, len(data))
    piece = data[begin : begin + chance.choice((1, 4, 16, 64))]
    data[begin:begin] = piece * chance.choice((1, 2, 30))


def _word(data, chance, search):
    place = chance.randint(0, len(data))
    replaced = chance.choice((0, 0, 1, 4))
    data[place : place + replaced] = chance.choice(search.words)


def _splice(data, chance, search):
    other = chance.choice(search.corpus)
    begin, end = sorted((chance.randint(0, len(other)), chance.randint(0, len(other))))
    place = chance.randint(0, len(data))
    data[place : place + chance.choice((0, end - begin))] = other[begin:end]


MUTATIONS = (_flip, _set, _insert, _cut, _repeat, _word, _splice)
