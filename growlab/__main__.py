"""The command line: `python -m growlab`."""

import sys

from growlab.lab.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
