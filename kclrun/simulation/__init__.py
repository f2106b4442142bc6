"""The third shell: simulates a fleet in virtual time, drawn from one seed.

It drives the real cores of `leases/`, `lease/` and `calling/` over the stream model and the
lease rows of `local/`: only the world is simulated. It does not know the real world or the other
shells. The same seed always gives the same run.
"""
