"""Hold a backend against the golden vectors: `halfstep_spec.check` by the name of the package.

python -m halfstep.check adapter.py --vectors vectors.zip
"""

import importlib
import sys


def main() -> int:
    """Run the command line of `halfstep_spec.check`; return its exit status."""
    # By name: the packages know nothing of the reference, but for commands.
    return importlib.import_module("halfstep_spec.check").main()


if __name__ == "__main__":
    sys.exit(main())
