"""Compare a backend with the golden vectors, by `halfstep_spec.check`.

python -m halfstep.check adapter.py --vectors vectors.zip
"""

import importlib
import sys


def main() -> int:
    """Run the command line of `halfstep_spec.check` and return its exit status."""
    # Imported by name, because only commands use the reference.
    return importlib.import_module("halfstep_spec.check").main()


if __name__ == "__main__":
    sys.exit(main())
