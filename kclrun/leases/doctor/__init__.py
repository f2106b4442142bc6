"""Finds errors in a lease table, with evidence and the conditional writes that mend them."""
