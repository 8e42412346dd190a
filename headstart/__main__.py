"""`python -m headstart` is the command line."""

import sys

from headstart.cli import main

if __name__ == "__main__":
    sys.exit(main())
