"""A Llama or a Qwen3 on random tokens, for torchtitan's own trainer, which imports this module
(--experimental.custom_import) and finds the model under the name random_tokens.

The environment variable TITAN_FAMILY is a key of ARGUMENTS, and TITAN_MODEL has the arguments of its class, as JSON.
"""

import importlib
import json
import os
from dataclasses import replace

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.protocols.train_spec import register_train_spec

# {family: (torchtitan's module of its model, the class there for its sizes)}
ARGUMENTS = {"llama": ("llama3", "TransformerModelArgs"), "qwen3": ("qwen3", "Qwen3ModelArgs")}
NAME, CLASS = ARGUMENTS[os.environ["TITAN_FAMILY"]]
MODEL = importlib.import_module(f"torchtitan.models.{NAME}")
SIZES = getattr(MODEL, CLASS)(**json.loads(os.environ["TITAN_MODEL"]))


class RandomTokens(IterableDataset):
    """Sequences without end: ({"input": int64 [sequence]}, the next tokens), each rank's from a seed of its own."""

    def __init__(self, sequence, seed):
        self.sequence, self.seed = sequence, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            tokens = torch.randint(0, SIZES.vocab_size, (self.sequence + 1,), generator=generator)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def build_dataloader(dp_world_size, dp_rank, tokenizer, job_config):
    wanted = job_config.training
    tokens = RandomTokens(wanted.seq_len, dp_rank)
    return ParallelAwareDataloader(
        tokens, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=wanted.local_batch_size
    )


register_train_spec(
    "random_tokens",
    replace(
        MODEL.get_train_spec(),
        model_args={"random": SIZES},
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,
    ),
)
