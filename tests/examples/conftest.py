"""The demo's scripts import one another by name, as they do when `python examples/demo.py` runs them."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))
