"""``python -m pipeline``: the command line, see `pipeline.cli.command`."""

import sys

from pipeline.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
