#!/usr/bin/env python
"""Prepares data sets: see paddle_te.data.prepare, or --help. `paddle-te prepare-data` is the same."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from paddle_te.data.prepare import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
