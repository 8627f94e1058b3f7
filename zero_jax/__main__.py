"""python -m zero_jax."""

import sys

from zero_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
