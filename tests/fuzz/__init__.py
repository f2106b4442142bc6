"""Fuzzing what reads bytes of others: a value or a named error, within limits, never anything else.

`targets.py` says what is fuzzed and what each may answer, `searching.py` makes inputs and follows
those that reach new lines, `program.py` runs it for as long as one likes:

    python -m tests.fuzz.program --seconds 600
    python -m tests.fuzz.program lease-row --replay FILE

An input that broke something is kept in `found/<target>/`, beside some that were made to, and is
replayed by `test_fuzz.py`.
"""
