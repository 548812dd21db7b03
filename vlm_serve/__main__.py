"""`python -m vlm_serve` is the command `vlm-serve`."""

import sys

from vlm_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
