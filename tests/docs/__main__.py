"""`python -m tests.docs`: writes the generated regions of docs/ again. `bin/docs` runs it."""

import sys

from tests.docs import pages

if __name__ == "__main__":
    for page in pages.write_regions():
        sys.stdout.write(f"wrote {page}\n")
