"""Interface 2: input objects, one `shutdown` for every end."""
