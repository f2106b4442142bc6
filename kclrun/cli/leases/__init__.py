"""Shows the leases of an application, and moves, releases and resumes them."""
