"""Tune a model on pairs of a better and a worse answer, with layers of backend none, paddle or transformer_engine.

    python run_dpo.py --model_name_or_path CKPT --dataset_name_or_path DIR --output_dir OUT --do_train true \
        [--lora true] [--loss_type sigmoid] [--precompute_ref_log_probs true] …
    python run_dpo.py arguments.json [--flag value …]

DIR holds train.json and dev.json (`data.preferences` has their forms); PaddleNLP's --train_dataset_path and
--dev_dataset_path name files. All else is as in fine-tuning.
"""

from functools import partial

from paddle_te.hosts.paddlenlp.training.ending import run_to_end
from paddle_te.hosts.paddlenlp.training.finetune import tune
from paddle_te.hosts.paddlenlp.training.preference import PreferenceTuning


def main() -> None:
    """Tune as the command line says. Exit as fine-tuning does."""
    run_to_end(partial(tune, PreferenceTuning))
