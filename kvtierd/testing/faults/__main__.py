"""``python -m kvtierd.testing.faults --kills 300``."""

import sys

from kvtierd.testing.faults.campaign import main

if __name__ == "__main__":
    sys.exit(main())
