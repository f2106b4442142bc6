"""Finds errors in a lease table, with evidence and the conditional writes that repair them."""
