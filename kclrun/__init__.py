"""kclrun: Python over Amazon Kinesis Data Streams, on a fleet of plain machines or on Spark."""
