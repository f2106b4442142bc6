"""What is wrong with a lease table, how one knows, and which conditional writes mend it."""
