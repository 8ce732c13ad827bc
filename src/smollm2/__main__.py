"""``python -m smollm2`` and the script ``smollm2``: the command line."""

import gc
import sys


def main() -> int:
    """Run the command line; a Ctrl-C while it is still being imported is an exit code too."""
    # What a command loads is no garbage, and to look for some in it takes a tenth of its start.
    gc.set_threshold(200_000)
    try:
        from smollm2.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
