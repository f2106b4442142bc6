"""Shell 2: the lease process. Three threads around one lease, a thin shell for `lease/`
and `calling/`.

May know: the cores, ports, `aws`, `ipc`, `outputs`, `observe`. May not know: the manager. No
decision about the lease is made here.
"""
