"""llm/llama/run_dpo.py from random weights, as random_weights.py is of run_finetune.py."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from paddle_te.upstream import deferred_imports  # noqa: E402


def tune(method: str) -> None:
    """Tune by `method`, dpo or kto, as the command line says."""
    deferred_imports.apply()
    from paddle_te.hosts.paddlenlp.training import preference
    from tools.benchmark.random_weights import make_on_device

    make_on_device(preference)
    import_module(f"paddle_te.hosts.paddlenlp.training.{method}").main()


if __name__ == "__main__":
    tune("dpo")
