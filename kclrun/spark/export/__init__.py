"""Moves a stopped query back to the fleet: its checkpoint becomes positions of leases.

A record that the query has not committed never lies below a position that is written. The package
does not know PySpark, or how rows are written.
"""
