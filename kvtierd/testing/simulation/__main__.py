"""``python -m kvtierd.testing.simulation --seeds 2000``."""

import sys

from kvtierd.testing.simulation.campaign import main

if __name__ == "__main__":
    sys.exit(main())
