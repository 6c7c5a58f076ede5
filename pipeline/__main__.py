"""``python -m pipeline``: the command line, see `pipeline.command`."""

import sys

from pipeline.command import main

if __name__ == "__main__":
    sys.exit(main())
