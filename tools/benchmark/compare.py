"""Compares experiments: see paddle_te.runs.compare, or --help. `paddle-te compare` is the same command."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from paddle_te.runs.compare import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
