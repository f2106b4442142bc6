"""A rig for fleets: several managers of one application, each as on a machine of its own.

The embedded AWS it starts notes what is asked of it and when (`noting.py`, `watched_*.py`);
`notes.py` reads that back; `fleet.py` starts and ends managers and says who owns what;
`gaps.py` measures from one owner's last word to the next one's first read. Deliveries are judged
as in `ledger_rig`. Rule: times are the servers' own, on the clock that all processes share.
"""
