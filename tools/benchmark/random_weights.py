"""llm/llama/run_finetune.py from random weights that are made on the device, one at a time: --model_name_or_path holds
config.json and a tokenizer, and of weights the name of a file only. For models whose weights no disk here has room for.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from paddle_te.upstream import deferred_imports  # noqa: E402


def initialised(model_class, folder, config, dtype, in_fp8=False, verify="full", keep_transpose_cache=False):
    """In the place of `paddle_te.hosts.paddlenlp.loading.from_pretrained`, whose arguments it has: nothing is read."""
    from paddle_te.fp8 import fp8_model_init
    from paddle_te.models.decoder import recipe_of

    with fp8_model_init(in_fp8, recipe_of(config) if in_fp8 else None, keep_transpose_cache):
        return model_class.from_config(config, dtype=dtype)


def make_on_device(*modules):
    """Let the modules that tune make their models with `initialised`."""
    from paddle_te.hosts.paddlenlp import loading
    from paddle_te.hosts.paddlenlp.training import finetune

    loading.check_layout = lambda folder, layout, hf=False: layout
    for module in (finetune, *modules):
        module.from_pretrained = initialised


def main():
    deferred_imports.apply()
    from paddle_te.hosts.paddlenlp.training import finetune

    make_on_device()
    finetune.main()


if __name__ == "__main__":
    main()
