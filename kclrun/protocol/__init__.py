"""The lease row: the writes of P1 to P19 as values, their outcomes, the fence, and the status of a
lease process; and the order in which a shell drives a core. Pure.
"""
