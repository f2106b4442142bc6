"""The embedded DynamoDB Streams: a model of rolling shards, fed by the tables of moto."""
