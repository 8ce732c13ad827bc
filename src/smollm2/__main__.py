"""``python -m smollm2`` is the command line."""

import sys

from smollm2.cli import main

sys.exit(main())
