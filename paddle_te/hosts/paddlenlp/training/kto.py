"""Tune a model on answers that are wanted or not, with layers of backend none, paddle or transformer_engine.

    python run_kto.py --model_name_or_path CKPT --dataset_name_or_path DIR --output_dir OUT --do_train true …

All else is as in `dpo`.
"""

from functools import partial

from paddle_te.hosts.paddlenlp.training.ending import run_to_end
from paddle_te.hosts.paddlenlp.training.finetune import tune
from paddle_te.hosts.paddlenlp.training.preference import KTOTuning


def main() -> None:
    """Tune as the command line says. Exit as fine-tuning does."""
    run_to_end(partial(tune, KTOTuning))
