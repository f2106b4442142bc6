"""What people plan and read: changes of leases, resets, replays, stories, the doctor's findings.

Pure: it decides and words; the verbs and the page ask the services and write.
"""
