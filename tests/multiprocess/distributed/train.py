"""One rank of a training job; started by tests/multiprocess/distributed through paddle.distributed.launch.

    train.py JOB.json

The job: {"layout": flags of run_pretrain, "variants": [{"name", "init": {backend: weights folder, "model": folder with
their configuration, if it is not the layout's}, **flags}], "output": folder}. All variants run one after another in
these processes, to start Python and Paddle once. For each, rank 0 writes OUTPUT/NAME.json (losses by step) and NAME.npz
(final weights, merged over all ranks), and every rank NAME.rankN.json (sizes of what it holds). With "resume" a variant
goes on from a checkpoint, and with "save_what_is_loaded" it saves that again before its first step. It runs without the
repairs of "unrepaired". With EMULATED_TE=1 te computes with tests/emulated_te.py, with EMULATED_TE=hopper as there.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils import hybrid_parallel_util
from paddlenlp.trainer import IntervalStrategy, PdArgumentParser, Trainer, TrainerCallback, set_seed
from paddlenlp.trainer.unified_checkpoint import utils as unified_utils

from paddle_te import upstream
from paddle_te.configs.spec import spec_of
from paddle_te.distributed.expert_parallel import all_experts
from paddle_te.hosts.paddlenlp.training import pretrain
from paddle_te.hosts.paddlenlp.training.arguments import ModelArguments, PreTrainingArguments
from paddle_te.hosts.paddlenlp.training.datasets import DataArguments, MockDataset
from paddle_te.hosts.paddlenlp.training.packing import make_collator
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer
from paddle_te.layers import cross_entropy
from paddle_te.ops.te import packing
from paddle_te.optimizer import offloaded_states
from paddle_te.optimizer.holding import layers_of
from paddle_te.options.fp8 import Fallback
from paddle_te.training.experts import ExpertsCallback
from paddle_te.training.fp8_statistics import FP8StatisticsCallback
from tests import emulated_te
from tests.multiprocess.distributed.buckets import several_buckets
from tests.multiprocess.distributed.jobs import STEPS

REPOSITORY = Path(__file__).parents[3]
COMMON = dict(
    model_name_or_path=REPOSITORY / "tests/model",
    tokenizer_name_or_path="none",
    mock_data="true",
    max_seq_length=32,
    max_steps=STEPS,
    logging_steps=1,
    learning_rate=1e-3,
    adam_epsilon=1e-4,  # so that rounding in tiny gradients does not become a whole step
    warmup_steps=1,
    do_train="true",
    disable_tqdm="true",
    report_to="none",
    save_strategy="no",
    dataloader_drop_last="true",
    seed=11,
)


def lower_limits():
    """Lower the sizes above which Paddle and PaddleNLP treat weights differently, so that these models cross them."""
    share_small_weights()
    several_buckets()
    small_reductions()
    large_tensors()
    packing.JOINED = 0  # each of te's operations allocates and releases its memory in pieces


def share_small_weights():
    """Stage 2 collects gradients in a buffer of 2**23 elements, and reduces those one by one that do not fit. Stage 3
    slices weights of more than 2**20 elements. Here few gradients fit, and only weights above proj's are sliced."""
    from paddle.distributed import sharding

    original = sharding.group_sharded_parallel
    sharding.group_sharded_parallel = lambda *args, **kwargs: original(
        *args, **kwargs, buffer_max_size=2**12, segment_size=2**12
    )


def small_reductions():
    """Data parallel ranks reduce gradients in buckets of 25 MB during backward, or of 128 MB behind it."""
    original = paddle.DataParallel.__init__
    paddle.DataParallel.__init__ = functools.partialmethod(original, comm_buffer_size=0.02, last_comm_buffer_size=0.01)
    hybrid_parallel_util.fused_allreduce_gradients_with_group.__defaults__ = 2**14, None


def large_tensors():
    """For a unified checkpoint tensor parallel ranks gather tensors of 5 GB or more in pieces. The host joins them."""
    original = unified_utils.dtype_byte_size
    unified_utils.dtype_byte_size = lambda dtype: 2**24 * original(dtype)


def several_pieces():
    """Offload takes weights of 2**18 elements or more, in pieces of up to 2**23."""
    offloaded_states.LEAST, offloaded_states.PIECE, offloaded_states.OFFLOADED_AT_ONCE = 128, 1024, 4 * 1024


@contextlib.contextmanager
def counted_divisions():
    """Yields a list that gets the number of elements of each gradient, or slice of one, that a number multiplies."""
    original, counts = paddle.Tensor.scale_, []

    def scale_(tensor, scale=1.0, *args, **kwargs):
        if isinstance(scale, float) and scale != 1:  # clipping's is a tensor
            counts.append(tensor.size)
        return original(tensor, scale, *args, **kwargs)

    paddle.Tensor.scale_ = scale_
    try:
        yield counts
    finally:
        paddle.Tensor.scale_ = original


def parse(flags):
    words = [str(word) for key, value in (COMMON | flags).items() for word in (f"--{key}", value)]
    return PdArgumentParser((ModelArguments, DataArguments, PreTrainingArguments)).parse_args_into_dataclasses(words)


class SameBatch(MockDataset):
    """The same 12 sequences in every step, so that there is something to learn.

    end_of_document: None, or the token that ends documents: the sequences then have several, but for the first one.
    uneven: each sequence instead begins with more such tokens than the one before, and ends with fewer others.
    """

    def __init__(self, *args, end_of_document, uneven):
        super().__init__(*args)
        self.end_of_document, self.uneven = end_of_document, uneven

    def __getitem__(self, index):
        index %= 12
        sample = super().__getitem__(index)
        if self.end_of_document is not None and index:
            ends = slice(2 * index) if self.uneven else slice(index % 5, None, 8 + index)
            sample["text"][ends] = self.end_of_document
        return sample


class Losses(TrainerCallback):
    def __init__(self):
        self.losses, self.at_begin = {}, None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.at_begin:
            self.at_begin(model)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.losses[state.global_step] = logs["loss"]


def merged_weights(trainer, args):
    """{name: whole float32 array} on rank 0."""
    if "stage3" in str(args.sharding):
        trainer.model_wrapped.get_all_parameters(convert2cpu=False)
    mine = {name: value.astype("float32") for name, value in trainer.model.state_dict().items()}
    mine = {name: (all_experts(value) if ".experts." in name else value).numpy() for name, value in mine.items()}
    everyone = [(args.tensor_parallel_rank, mine)]
    if args.world_size > 1:
        everyone = []
        dist.all_gather_object(everyone, (max(args.tensor_parallel_rank, 0), mine))
    merge = trainer.model._get_tensor_parallel_mappings(trainer.model.config, is_split=False)
    whole, names = {}, {name for _, weights in everyone for name in weights}
    # GPT's is always the embedding, and in PaddleNLP's pipeline has its name
    for name in names - ({"lm_head.weight"} if trainer.model.config.model_type == "gpt" else set()):
        shares = {rank: weights[name] for rank, weights in everyone if name in weights}
        degree = max(args.tensor_parallel_degree, 1)
        action = next((action for end, action in merge.items() if f".{name}".endswith(f".{end}")), None)
        split = degree > 1 and action is not None
        whole[name] = np.asarray(action([shares[r] for r in range(degree)])) if split else shares[min(shares)]
    return whole


def clips_in_adamw(optimizer):
    return getattr(layers_of(optimizer)[-1]._grad_clip, "factor", None) is not None


def sizes(trainer):
    """Elements of parameters and of Adam's first moments on this rank, and whether AdamW has clipped."""
    parameters = sum(int(np.prod(p.shape)) for p in trainer.model.parameters())
    sliced = [p for p in trainer.model.parameters() if getattr(p, "fw_storage", None) is not None]
    moments = [v for k, v in trainer.optimizer.state_dict().items() if "moment1" in k and hasattr(v, "shape")]
    return dict(
        parameters=parameters,
        sliced_parameters=len(sliced),
        slices=sum(int(np.prod(p.fw_storage.shape)) for p in sliced),
        moments=sum(int(np.prod(v.shape)) for v in moments),
        **dict(zip(("state_bytes", "host_bytes"), state_bytes(trainer.optimizer), strict=True)),
        clips_in_adamw=clips_in_adamw(trainer.optimizer),
    )


def state_bytes(optimizer):
    """Of the moments and the master weights that this rank keeps, and those of them that are in the host's memory."""
    state = optimizer.state_dict()
    tensors = [tensor for name, tensor in state.items() if "moment" in name]
    tensors += state.get("master_weights", {}).values()
    sizes = [(tensor.size * tensor.element_size(), tensor.place.is_cpu_place()) for tensor in tensors]
    return sum(size for size, _ in sizes), sum(size for size, on_host in sizes if on_host)


NOT_FLAGS = ("name", "init", "resume", "save_what_is_loaded", "unrepaired", "uneven")


def run(base, variant, output):
    flags = {key: value for key, value in variant.items() if key not in NOT_FLAGS}
    model_args, data_args, training_args = base[0], base[1], copy.copy(base[2])
    data_args = dataclasses.replace(data_args, **{key: flags.pop(key) for key in [*flags] if hasattr(data_args, key)})
    for key, value in flags.items():
        setattr(training_args, key, IntervalStrategy(value) if key == "save_strategy" else value)
    training_args.output_dir = str(output / variant["name"])
    model_args = dataclasses.replace(
        model_args,
        te_init_weight_path=variant["init"][training_args.transformer_engine_backend],
        model_name_or_path=variant["init"].get("model", model_args.model_name_or_path),
    )
    paddle.set_default_dtype("float32")
    set_seed(training_args.seed)
    with paddle.utils.unique_name.guard():
        config = pretrain.make_config(model_args, data_args, training_args, None)
        model = pretrain.make_model(config, model_args, training_args)
        losses, end = Losses(), config.eos_token_id
        documents = dict(end_of_document=end if data_args.eod_mask_loss else None, uneven=variant.get("uneven"))
        size = 12 * training_args.max_steps, data_args.max_seq_length, config.vocab_size, 3
        trainer = PretrainingTrainer(
            model=model,
            args=training_args,
            data_collator=make_collator(data_args, training_args, end),
            train_dataset=SameBatch(*size, **documents),
            optimizers=(None, pretrain.make_scheduler(training_args)),
            callbacks=[losses],
            labels_vary=data_args.eod_mask_loss,
        )
        if spec_of(config).experts:
            trainer.add_callback(ExpertsCallback())
        if every := training_args.fp8_statistics:
            fallback = Fallback.of(training_args.fp8_fallback)
            trainer.add_callback(FP8StatisticsCallback(every, fallback, trainer.in_16_bits))
        if variant.get("save_what_is_loaded"):
            losses.at_begin = trainer._save_checkpoint
        with pretrain.mask_scope(data_args), counted_divisions() as divided:
            trainer.train(resume_from_checkpoint=variant.get("resume"))
    mine = sizes(trainer) | dict(divided=divided)
    (output / f"{variant['name']}.rank{dist.get_rank()}.json").write_text(json.dumps(mine))
    weights = merged_weights(trainer, training_args)
    if dist.get_rank() == 0:
        np.savez(output / f"{variant['name']}.npz", **weights)
        (output / f"{variant['name']}.json").write_text(json.dumps(losses.losses))


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    output = Path(job["output"])
    upstream.apply()
    base = parse(job["layout"] | dict(output_dir=output))
    paddle.set_device(base[2].device)
    if os.environ.get("EMULATED_TE"):
        emulated_te.install()
        # attention in fp8 takes heads of 16 there, and experts run on Hopper only
        emulated_te.Stream.capability = (9, 0) if os.environ["EMULATED_TE"] == "hopper" else (10, 0)
    lower_limits()
    several_pieces()
    Trainer.print_config = lambda *args: None  # 250 lines for each variant
    cross_entropy.CHUNK_TOKENS = 24  # of a micro-batch's 64
    for variant in job["variants"]:
        print(f"variant {variant['name']}", flush=True)
        unrepaired = variant.get("unrepaired", ())
        if unrepaired:
            upstream.undo(*unrepaired)
        run(base, variant, output)
        if unrepaired:
            upstream.apply(*unrepaired)


main()
