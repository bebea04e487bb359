"""llm/llama/run_dpo.py from random weights, as random_weights.py is of run_finetune.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from paddle_te.upstream import deferred_imports  # noqa: E402


def main() -> None:
    """Tune as the command line says."""
    deferred_imports.apply()
    from paddle_te.hosts.paddlenlp.training import dpo, preference
    from tools.benchmark.random_weights import make_on_device

    make_on_device(preference)
    dpo.main()


if __name__ == "__main__":
    main()
