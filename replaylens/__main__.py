"""`python -m replaylens` is `replaylens`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
