"""What people plan and read: changes of leases, resets, the lease history, the doctor's findings.

Pure: it decides and words; the verbs and the page ask the services and write.
"""
