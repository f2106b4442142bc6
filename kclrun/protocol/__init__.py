"""The lease row: the writes of P1 to P19 as values, their outcomes, and the fence; the status and
the reports of a lease process. Pure.
"""
