"""Services as destinations of rows, through botocore's clients. A process imports the module of a
destination only when it opens it."""
