"""A rig that proves a whole application: a verifiable producer, a ledger of deliveries, a verdict.

`aws.py` is the embedded AWS as a test sees it, `producing.py` puts records it can account for,
`processor/` writes down what it is given, `application.py` runs `python -m kclrun` and ends it,
`deliveries.py` reads the ledger and judges it, `measure.py` prints times. Rule: the verdict knows
nothing of kclrun's code; it compares what was put with what user code was given.
"""
