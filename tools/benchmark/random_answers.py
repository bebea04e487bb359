"""llm/llama/run_kto.py from random weights, as random_preferences.py is of run_dpo.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from tools.benchmark.random_preferences import tune  # noqa: E402

if __name__ == "__main__":
    tune("kto")
