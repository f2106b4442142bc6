"""An EC2 instance of an autoscaling group, as software on it sees it: two small HTTP services.

`metadata.py` is the instance metadata service, version 2; `group.py` the group that waits at its
hooks. Neither knows anything of kclrun.
"""
