"""The embedded Kinesis with a retention of a second: no API call lowers it below a day."""

from kclrun.local import kinesis_process, stream
from kclrun.local.serving import serve_as_child

RETENTION_S = 1.0

if __name__ == "__main__":
    stream.RETENTION_DEFAULT_S = RETENTION_S
    serve_as_child(kinesis_process._application)
