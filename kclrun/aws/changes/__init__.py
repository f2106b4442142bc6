"""The stream of a DynamoDB table as a source."""
