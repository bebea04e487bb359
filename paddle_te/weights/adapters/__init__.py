"""LoRA adapters: read as PEFT, PaddleNLP and PaddleFormers write them, merged into weights, written for PEFT."""

from paddle_te.weights.adapters.files import Adapter, open_adapter
from paddle_te.weights.adapters.fitting import check_fits, with_adapter

__all__ = ["Adapter", "check_fits", "open_adapter", "with_adapter"]
