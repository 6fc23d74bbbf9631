"""`python -m posenc_export`: the `posenc` command."""

import sys

from posenc_export.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
