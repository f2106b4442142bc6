"""Calls of user code, on either engine and in a test: one driver, and what an exception says.

It must not know where it runs: the hosts have the clock, the rows, the letters and the reports.
"""
