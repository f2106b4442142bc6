"""`kclrun completion`: verbs and options complete in a shell."""
