"""The AWS Glue Schema Registry: `decode: glue`."""
