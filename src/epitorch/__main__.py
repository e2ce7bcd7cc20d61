"""`python -m epitorch`."""

import sys

from epitorch.cli import main

if __name__ == "__main__":
    sys.exit(main())
