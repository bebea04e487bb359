"""Times a whole training step of a Llama, Qwen2.5, Qwen3 or a mixture of experts and accounts for it part by part. Its
peers are the same model of Hugging Face's layers and of Transformer Engine's PyTorch layers.

    python tools/benchmark/step.py [--peers hf_bf16 paddle_te_fp8 ...] [--sizes 8b-s8192 ...] [--layers 16] [--fit]

Peers follow each other in one process, each alone on the GPU, whose memory two would not share. Writes
benchmarks/step/<date>_<gpu>x<n>_<what>.json and a table of the same name. A peer that is not there or fails keeps its
row, with the reason.
"""

import argparse
import statistics
import sys
import traceback
from bisect import bisect_left
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

import numpy as np  # noqa: E402

from paddle_te.configs.families import FAMILIES  # noqa: E402
from paddle_te.configs.spec import experts_width  # noqa: E402
from paddle_te.job import Job  # noqa: E402
from tools.benchmark import floors, report, timing  # noqa: E402
from tools.benchmark.expert_peers import te_torch_mixture_layer  # noqa: E402
from tools.benchmark.experts import choose_libraries  # noqa: E402
from tools.benchmark.layer import free_memory, run_sizes, sizes_in_words  # noqa: E402
from tools.benchmark.peers import recipe_of, start_on_paddles, te_torch_angles, te_torch_layer  # noqa: E402
from tools.benchmark.problem import EPSILON, QWEN3, Dims  # noqa: E402
from tools.benchmark.problem import SIZES as LAYER_SIZES  # noqa: E402

# What config.json of a GPT has besides a Llama's sizes, and what of them it has not.
GPT_CONFIG = dict(
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, tie_word_embeddings=True, ignore_index=-100
)
NOT_GPTS = ("num_key_value_heads", "rms_norm_eps", "rope_theta")


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, each of Dims.ffn columns, of which a token gets topk.

    words: more of what config.json says of them.
    """

    experts: int
    topk: int
    words: tuple = ()

    def config(self, family, ffn):
        """What a family's config.json says."""
        number = "num_local_experts" if family == "mixtral" else "num_experts"
        width = {experts_width(FAMILIES[family]): ffn}
        return {number: self.experts, "num_experts_per_tok": self.topk, **width, **dict(self.words)}


@dataclass(frozen=True)
class Size:
    """A model of so many `layers` of the same Dims, its vocabulary, and how many times Dims' batch a step takes.

    family: a name of `configs.families.FAMILIES`, whose layers Dims' are. tied: whether the head has the embedding's
    weight. mixture: of each layer, whose Dims.ffn is then an expert's.
    """

    dims: Dims
    vocabulary: int
    layers: int = 16
    micro_batches: int = 1
    family: str = "llama"
    tied: bool = False
    mixture: Mixture | None = None

    @property
    def title(self):
        """What PaddleNLP's and transformers' names of the family's classes begin with."""
        return FAMILIES[self.family].title

    @property
    def config(self):
        """What of the family's configuration is the same for all peers."""
        config = self.dims.config | {
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "initializer_range": 0.02,
            "use_cache": False,
            **({"tie_word_embeddings": True} if self.tied else {}),
            **(self.mixture.config(self.family, self.dims.ffn) if self.mixture else {}),
        }
        if self.family != "gpt":
            return config
        return {name: value for name, value in config.items() if name not in NOT_GPTS} | GPT_CONFIG

    @property
    def tokens(self):
        """The tokens of a step."""
        return self.dims.batch * self.dims.sequence * self.micro_batches

    @property
    def flops(self):
        """The FLOP of a step, as Dims.flops counts them; lm_head has 6 per token and weight, the embedding none."""
        layers = self.micro_batches * self.layers * self.dims.flops
        return layers + 6 * self.tokens * (self.dims.hidden * self.vocabulary + self.layers * self._of_more_experts)

    @property
    def _of_more_experts(self):
        """Elements of the weights that a token is multiplied with in a layer beside Dims': all experts but one."""
        if self.mixture is None:
            return 0
        more = 3 * self.dims.ffn * (self.mixture.topk - 1) + self.mixture.experts
        return self.dims.hidden * more

    def floor_ms(self, bandwidth):
        """{"bf16", "fp8": the least milliseconds of a step} with experts, see `floors`; {} without."""
        dims, mixture = self.dims, self.mixture
        if mixture is None:
            return {}
        layer = floors.LayerSizes(
            dims.hidden, dims.ffn, dims.heads, dims.kv_heads, dims.head_dim, mixture.experts, mixture.topk
        )
        weights = self.layers * layer.weights + (1 if self.tied else 2) * dims.hidden * self.vocabulary
        once = floors.head_seconds(self.tokens, dims.hidden, self.vocabulary) + floors.update_seconds(
            weights, bandwidth
        )
        return {
            precision: 1e3 * (once + self.micro_batches * self.layers * of_one)
            for precision in floors.GEMMS
            for of_one in [floors.layer_seconds(layer, dims.batch, dims.sequence, precision, bandwidth)]
        }


LLAMA_8B = LAYER_SIZES["8b-s8192"]
LLAMA_1B = Dims(1, 1024, 2048, 8192, 32, 8, 500000.0)  # Llama-3.2-1B, micro-batches so short that Python's time counts
SIZES = {
    "1b-s1024": Size(LLAMA_1B, 128256),
    "8b-s8192": Size(LLAMA_8B, 128256),
    "8b-s4096": Size(replace(LLAMA_8B, sequence=4096), 128256),
    "7b-s4096": Size(LAYER_SIZES["7b-b1"], 32000),
    "qwen2.5-7b-s4096": Size(LAYER_SIZES["qwen2.5-7b"], 152064, family="qwen2"),
    "qwen3-8b-s4096": Size(LAYER_SIZES["qwen3-8b"], 151936, family="qwen3"),
    "qwen3-8b-s8192": Size(replace(LAYER_SIZES["qwen3-8b"], sequence=8192), 151936, family="qwen3"),
}
# Batches of 2 leave room for 8 layers of Mixtral in an H200.
MIXTURES = {
    "mixtral-s4096": Size(
        Dims(2, 4096, 4096, 14336, 32, 8, 1000000.0), 32000, 8, family="mixtral", mixture=Mixture(8, 2)
    ),
    "olmoe-s4096": Size(
        Dims(2, 4096, 2048, 1024, 16, 16, variant=QWEN3), 50304, 16, family="olmoe", mixture=Mixture(64, 8)
    ),
    "qwen3-30b-s4096": Size(
        Dims(2, 4096, 2048, 768, 32, 4, 1000000.0, variant=QWEN3, kv_channels=128),
        151936,
        16,
        family="qwen3_moe",
        mixture=Mixture(128, 8, (("norm_topk_prob", True),)),
    ),
}
DENSE = tuple(SIZES)
SIZES |= MIXTURES
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-4, 0.1, 1.0
BATCHES, STEPS = 64, 16  # micro-batches, and steps, at least, until the first one comes again
# In the order in which a step comes through them.
PARTS = (
    "embedding forward",
    "layers forward",
    "head and loss forward",
    "head and loss backward",
    "layers backward",
    "embedding backward",
    "clipping",
    "optimizer",
)
DEFINITIONS = [
    "Step: forward and backward of each micro-batch, clipping to a global norm, AdamW, by events on the peer's own "
    "stream; median of a round's steps, then the median and range of the rounds' medians. Each micro-batch has random "
    "tokens of its own: a model that knows its batch by heart has gradients of zeros, for which a GPU at its power "
    "limit clocks higher. Trainer, data loading and logging are not in it. Gradients are bf16; te keeps its fp8 "
    "weights from one micro-batch to the next, and its GEMMs add gradients to those of the micro-batches before. "
    "Paddle: bf16 weights, float32 master weights and moments, as "
    "PaddleNLP's Trainer has them under O2; on nvgpu AdamW clips as it reads the gradients, so clipping is their norm. "
    "Hugging Face: bf16 weights and moments, PyTorch's fused AdamW, no master weights, so that its optimizer moves "
    "less than half the bytes; float32_weights: weights, gradients and moments in float32, bf16 by autocast. TE's "
    "PyTorch layers: bf16 weights, TE's FusedAdam with float32 master weights and moments, TE's cross entropy; in fp8 "
    "they keep their weights from one micro-batch to the next, too.",
    "Parts: by events between them on that stream, in steps of their own, so the GPU's waiting for the host counts "
    "for the part in which it waits. Head: final norm, lm_head, loss. TFLOP/s: 6 per token and weight multiplied, and "
    "attention's products, halved by the causal mask. Host: until the call of a step returns, the device idle before.",
    "Peak GB: greatest count of the framework's own allocator in a step, above its count before the model was built.",
    "Loss: of the first step and the last one; on random tokens both are near the logarithm of the vocabulary.",
    "Mixtures of experts: forced balance, each expert gets as many tokens. Their TE layers are its MultiheadAttention "
    "and the peer of benchmarks/experts; where OLMoE norms all heads of q together, theirs norm each. FLOP: of the "
    "experts that a token gets. Of floor: the share of a step that its GEMMs, attention and the passes over memory "
    "which nothing saves would take at the best rates seen (tools/benchmark/floors.py).",
]


class TrainingStep:
    """A model with its optimizer and batches. Subclasses set what follows, and give the methods that raise.

    stream: a cudaStream_t as an int, None on a CPU. memory: the allocator's count before the model was built.
    tokens: micro-batches × batch × (sequence + 1), int64, for subclasses to move to their device.
    """

    precision, stream, memory = "bf16", None, None

    def __init__(self, size):
        self.size, self.mark = size, lambda part: None
        batches = max(BATCHES, STEPS * size.micro_batches)
        shape = [batches, size.dims.batch, size.dims.sequence + 1]
        self.tokens = np.random.default_rng(0).integers(0, size.vocabulary, shape)
        self.order = cycle(range(batches))

    def watch(self, after_forward, embedding, last_layer):
        """Marks where the two modules' outputs are there, and later their gradients.

        after_forward: the framework's name for a module's method that takes such a hook.
        """

        def hook(forward, backward):
            def after(module, inputs, output):
                output = output[0] if isinstance(output, tuple) else output
                self.mark(forward)
                output.register_hook(lambda _: self.mark(backward))

            return after

        getattr(embedding, after_forward)(hook(PARTS[0], PARTS[4]))
        getattr(last_layer, after_forward)(hook(PARTS[1], PARTS[3]))

    def step(self):
        """One training step."""
        for index in range(self.size.micro_batches):
            loss = self.loss(is_first_microbatch=index == 0)
            self.mark(PARTS[2])
            (loss / self.size.micro_batches if self.size.micro_batches > 1 else loss).backward()
            self.mark(PARTS[5])
        self.update()
        self.mark(PARTS[7])
        self.last_loss = loss.detach()  # its graph holds the hooks, they this object: no collector sees that circle

    def next_tokens(self):
        """Return a micro-batch's tokens, batch × (sequence + 1)."""
        return self.tokens[next(self.order)]

    def loss(self, is_first_microbatch):
        """Return the loss of the next micro-batch."""
        raise NotImplementedError

    def update(self):
        """Clips, marks, updates the weights, drops the gradients."""
        raise NotImplementedError

    def peak_memory(self):
        """Bytes of one more step, at most; None on a CPU."""
        raise NotImplementedError


class TorchStep(TrainingStep):
    """A model of PyTorch's modules. Subclasses set `model` and `optimizer`, and give `loss`."""

    def __init__(self, size, device):
        super().__init__(size)
        import torch

        self.torch, self.device = torch, device
        if device != "cpu":
            self.stream, self.memory = torch.cuda.current_stream().cuda_stream, torch.cuda.memory_allocated()
        self.tokens = torch.tensor(self.tokens, device=device)

    def update(self):
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM, foreach=True)
        self.mark(PARTS[6])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_memory(self):
        if self.device == "cpu":
            return None
        self.torch.cuda.reset_peak_memory_stats()
        self.step()
        return self.torch.cuda.max_memory_allocated() - self.memory


class HuggingFaceStep(TorchStep):
    """transformers' model with SDPA, PyTorch's fused AdamW.

    float32_weights: weights, gradients and moments in float32, computing in bf16 by autocast; False: all of it in bf16.
    """

    def __init__(self, size, device="cuda", float32_weights=False):
        super().__init__(size, device)
        import transformers

        torch = self.torch
        config = getattr(transformers, f"{size.title}Config")(**size.config, attn_implementation="sdpa")
        kept = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if float32_weights else torch.bfloat16)
        self.autocast = partial(torch.autocast, torch.device(device).type, torch.bfloat16, enabled=float32_weights)
        try:
            with torch.device(device):
                self.model = getattr(transformers, f"{size.title}ForCausalLM")(config).train()
        finally:
            torch.set_default_dtype(kept)
        self.watch("register_forward_hook", self.model.model.embed_tokens, self.model.model.layers[-1])
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    def loss(self, is_first_microbatch):
        tokens = self.next_tokens()[:, :-1]
        with self.autocast():
            return self.model(tokens, labels=tokens).loss  # shifts them itself


class TransformerEngineStep(TorchStep):
    """A model of TE's own PyTorch layers, with TE's FusedAdam: bf16 weights, float32 master weights and moments.

    use_fp8: with the scaling of fp8_recipe, "delayed" or "current". fp8_lm_head, fp8_dpa: the head, attention in fp8 as
    well. compact: moments in bfloat16, and only the remainders of master weights.
    """

    def __init__(
        self,
        size,
        device="cuda",
        use_fp8=False,
        fp8_recipe="delayed",
        fp8_lm_head=False,
        fp8_dpa=False,
        compact=False,
    ):
        super().__init__(size, device)
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()  # else each step goes on updating the scales of earlier peers
        torch, dims = self.torch, size.dims
        where = dict(dtype=torch.bfloat16, device=device)
        self.cross_entropy, self.head_in_fp8 = parallel_cross_entropy, fp8_lm_head
        self.precision = f"fp8_{fp8_recipe}" if use_fp8 else "bf16"
        scaling = recipe_of(recipe, self.precision, fp8_dpa=fp8_dpa)
        self.autocast = partial(te.autocast, enabled=use_fp8, recipe=scaling)
        self.embedding = torch.nn.Embedding(size.vocabulary, dims.hidden, **where)
        make = partial(te_torch_mixture_layer, size.mixture) if size.mixture else te_torch_layer
        layers = [make(dims, torch.bfloat16, device, layer_number=1 + i) for i in range(size.layers)]
        self.layers = torch.nn.ModuleList(layers)
        self.norm = te.RMSNorm(dims.hidden, eps=EPSILON, **where)
        if fp8_lm_head:
            self.head = te.Linear(dims.hidden, size.vocabulary, bias=False, params_dtype=torch.bfloat16, device=device)
        else:
            self.head = torch.nn.Linear(dims.hidden, size.vocabulary, bias=False, **where)
        for module in (self.embedding, self.head):
            torch.nn.init.normal_(module.weight, std=size.config["initializer_range"])
        self.model = torch.nn.ModuleList([self.embedding, self.layers, self.norm, self.head])
        self.angles = te_torch_angles(dims, device)
        self.watch("register_forward_hook", self.embedding, self.layers[-1])
        self.optimizer = self._make_optimizer(compact)

    def _make_optimizer(self, compact):
        from transformer_engine.pytorch.optimizers import FusedAdam

        moments = self.torch.bfloat16 if compact else self.torch.float32
        return FusedAdam(
            self.model.parameters(),
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_w_mode=True,
            master_weights=True,
            exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments,
            store_param_remainders=compact,
        )

    def loss(self, is_first_microbatch):
        tokens = self.next_tokens()
        first = is_first_microbatch if self.size.micro_batches > 1 else None
        with self.autocast():
            x = self.embedding(tokens[:, :-1])
            for layer in self.layers:
                x = layer(x, rotary_pos_emb=self.angles, is_first_microbatch=first)
            x = self.norm(x)
            logits = self.head(x, is_first_microbatch=first) if self.head_in_fp8 else self.head(x)
        return self.cross_entropy(logits, tokens[:, 1:].contiguous()).mean()


def as_trained(backend, micro_batches):
    """Return what the training script tells the layers of a run in one process."""
    run = Job(transformer_engine_backend=backend, gradient_accumulation_steps=micro_batches)
    return {"fuse_wgrad_accumulation": run.fuses_wgrad}


class PaddleStep(TrainingStep):
    """PaddleNLP's model with this project's decoder layers, Paddle's AdamW with master weights.

    backend: the switch's value; "none" is PaddleNLP's own model. use_fp8: with the scaling of fp8_recipe. flags: more
    of the config's. compact: AdamW's state in 6 bytes a parameter.
    """

    def __init__(
        self,
        size,
        backend="transformer_engine",
        use_fp8=False,
        fp8_recipe="delayed",
        device="cuda",
        dtype="bfloat16",
        compact=False,
        **flags,
    ):
        super().__init__(size)
        import paddle

        from paddle_te import device as paddle_device
        from paddle_te import fp8
        from paddle_te.hosts.paddlenlp.families import config_class

        self.paddle, self.paddle_device, self.fp8 = paddle, paddle_device, fp8
        self.precision = f"fp8_{fp8_recipe}" if use_fp8 else "bf16"
        _, self.stream, self.memory = start_on_paddles(device)
        config = config_class(FAMILIES[size.family])(
            **size.config,
            seq_length=size.dims.sequence,
            transformer_engine_backend=backend,
            use_fp8=use_fp8,
            fp8_recipe=fp8_recipe,
            **(dict(moe_router_force_load_balancing=True) if size.mixture else {}),
            **(as_trained(backend, size.micro_batches) | flags),
        )
        self.model = self._make_model(config, dtype)
        self.model.train()
        inner = getattr(self.model, size.family)
        self.watch("register_forward_post_hook", inner.embed_tokens, inner.layers[-1])
        self.schedule = paddle.optimizer.lr.LambdaDecay(LEARNING_RATE, lambda step: 1.0)  # its count seeds roundings
        self.optimizer = self._make_optimizer(dtype != "float32", compact)
        self._mark_clipping()
        self.tokens = paddle.to_tensor(self.tokens)

    def _make_model(self, config, dtype):
        from paddle_te.hosts.paddlenlp.families import model_class

        kept = self.paddle.get_default_dtype()
        self.paddle.set_default_dtype(dtype)
        try:
            return model_class(config)(config)
        finally:
            self.paddle.set_default_dtype(kept)

    def _make_optimizer(self, master_weights, compact):
        from paddle_te.optimizer import fuse_clipping
        from paddle_te.optimizer.compact_states import keep_compact

        optimizer = self.paddle.optimizer.AdamW(
            self.schedule,
            parameters=self.model.parameters(),
            weight_decay=WEIGHT_DECAY,
            grad_clip=self.paddle.nn.ClipGradByGlobalNorm(CLIP_NORM),
            multi_precision=master_weights,
        )
        fuse_clipping(optimizer)
        if compact:
            keep_compact(optimizer, "bfloat16", "bf16_remainder")
        return optimizer

    def _mark_clipping(self):
        step, clip = self, self.optimizer._grad_clip

        class Marking(type(clip)):
            def __call__(self, params_grads):
                clipped = super().__call__(params_grads)
                step.mark(PARTS[6])
                return clipped

        clip.__class__ = Marking

    def loss(self, is_first_microbatch):
        tokens = self.next_tokens()
        with self.fp8.microbatch(is_first_microbatch if self.size.micro_batches > 1 else None):
            return self.model(tokens[:, :-1], labels=tokens[:, 1:])[0]

    def update(self):
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.clear_grad(set_to_zero=False)

    def peak_memory(self):
        if self.stream is None:
            return None
        self.paddle_device.reset_peak_memory()
        self.step()
        return self.paddle_device.peak_memory() - self.memory


# What both models of Transformer Engine's kernels are compared in: (their arguments, in words).
VARIANTS = {
    "bf16": ({}, "bf16"),
    "fp8": (dict(use_fp8=True), "fp8"),
    "fp8_current": (dict(use_fp8=True, fp8_recipe="current"), "fp8 with current scaling"),
    "fp8_dpa": (dict(use_fp8=True, fp8_dpa=True), "fp8, attention in fp8 as well"),
    "fp8_head": (dict(use_fp8=True, fp8_lm_head=True), "fp8, the head in fp8 as well"),
    "fp8_dpa_head": (
        dict(use_fp8=True, fp8_dpa=True, fp8_lm_head=True),
        "fp8, attention and the head in fp8 as well",
    ),
}
# AdamW's state in 6 bytes a parameter: moments in bfloat16, remainders of master weights.
VARIANTS |= {
    f"{name}_compact": (options | dict(compact=True), f"{words}, AdamW's state in 6 bytes a parameter")
    for name, (options, words) in list(VARIANTS.items())[:3]
}
CHUNKS = dict(use_fp8=True, use_fused_linear_cross_entropy=True)
# name: (what runs, in words). The first is the one that speed-ups are against.
PEERS = {
    "hf_bf16": (HuggingFaceStep, "transformers, SDPA, PyTorch's fused AdamW"),
    **{
        f"paddle_te_{name}": (partial(PaddleStep, **options), f"te, {words}")
        for name, (options, words) in VARIANTS.items()
    },
    "paddle_te_fp8_fused_loss": (partial(PaddleStep, **CHUNKS), "te, fp8, head and loss in chunks of tokens"),
    "paddle_te_fp8_fused_loss_compact": (
        partial(PaddleStep, **CHUNKS, compact=True),
        "te, fp8, head and loss in chunks of tokens, AdamW's state in 6 bytes a parameter",
    ),
    "hf_bf16_float32_weights": (
        partial(HuggingFaceStep, float32_weights=True),
        "transformers with float32 weights under autocast: as exact an update as Paddle's master weights give",
    ),
    **{
        f"te_torch_{name}": (
            partial(TransformerEngineStep, **options),
            f"TE's PyTorch layers, FusedAdam with master weights, {words}",
        )
        for name, (options, words) in VARIANTS.items()
    },
    "paddle_pd_bf16": (partial(PaddleStep, backend="paddle"), "pd, bf16"),
    "paddlenlp_bf16": (partial(PaddleStep, backend="none"), "PaddleNLP's own layers, bf16"),
}
USUAL = ("hf_bf16", "paddle_te_bf16", "paddle_te_fp8", "paddle_te_fp8_fused_loss")
SPEEDUP_OVER = {"× HF": "hf_bf16", "× te bf16": "paddle_te_bf16"}


def twin(name):
    """The same model of TE's PyTorch layers; None if not ours."""
    return name.replace("paddle_te", "te_torch") if name.startswith("paddle_te") else None


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=USUAL, metavar="NAME", help=", ".join(PEERS))
    dense = [name for name, size in SIZES.items() if not size.mixture]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=dense, metavar="NAME", help=", ".join(SIZES))
    parser.add_argument("--layers", type=int, help="decoder layers of the model; default: 16, and 8 of Mixtral")
    parser.add_argument("--batch", type=int, help="sequences of a micro-batch; default: each size's own")
    parser.add_argument(
        "--fit",
        action="store_true",
        help="as many layers as all peers have room for, those of --layers at most, each size by itself",
    )
    parser.add_argument("--micro_batches", type=int, default=1, help="of a step; default %(default)s")
    timing.add_options(parser, "step", rounds=2, iterations=10, warmup=3, quick=(1, 3, 1))
    arguments = timing.parse_options(parser, argv, ["micro_batches", "warmup"])
    for name in "layers", "batch":
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    return arguments


def asked_for(size, arguments):
    """The Size with what the command line says of it."""
    dims = replace(size.dims, batch=arguments.batch or size.dims.batch)
    return replace(size, dims=dims, layers=arguments.layers or size.layers, micro_batches=arguments.micro_batches)


def time_parts(clock, peer, iterations):
    """{part: [milliseconds of each step]}: from one mark to the next on the peer's stream, of all micro-batches."""
    steps = []
    for _ in range(iterations):
        marks = [(None, clock.record(peer.stream))]
        peer.mark = lambda part, marks=marks: marks.append((part, clock.record(peer.stream)))
        peer.step()
        steps.append(marks)
    peer.mark = lambda part: None
    clock.synchronize()
    times = {part: [0.0] * iterations for part in PARTS}
    for index, marks in enumerate(steps):
        for (_, start), (part, stop) in zip(marks, marks[1:], strict=False):
            times[part][index] += clock.elapsed_ms(start, stop)
    return times


def run_peer(make, size, arguments, clock):
    """One round's measurements of a peer, which is gone afterwards."""
    peer = make(size, device=arguments.device)
    peer.step()
    first = float(peer.last_loss)
    step_ms = timing.time_steps(clock, peer, arguments.iterations, arguments.warmup)
    found = {
        "step_ms": step_ms,
        "host_us": timing.time_enqueue(clock, peer, min(arguments.iterations, 5), 0),
        "parts_ms": time_parts(clock, peer, arguments.iterations),
        "peak_bytes": peer.peak_memory(),
        "loss": [first, float(peer.last_loss)],
        "precision": peer.precision,
    }
    return found


def summarize(rounds):
    """A peer's row from its rounds."""
    parts = {part: [found["parts_ms"][part] for found in rounds] for part in PARTS}
    return {
        "status": "ok",
        "precision": rounds[-1]["precision"],
        "step_ms": timing.summarize([found["step_ms"] for found in rounds]),
        "host_us": timing.summarize([found["host_us"] for found in rounds]),
        "parts_ms": {part: timing.summarize(times) for part, times in parts.items()},
        "peak_bytes": rounds[-1]["peak_bytes"],
        "loss": rounds[-1]["loss"],
    }


def fitting(arguments, clock, size):
    """The Size with as many layers as all peers have room for, at most its own.

    A peer that fails in another way than for memory counts as one that fits: its row says why. Raises MemoryError if a
    peer has no room for one.
    """
    for name in arguments.peers:
        size = replace(size, layers=most_layers(name, size, arguments, clock))
    return size


def most_layers(name, size, arguments, clock):
    """Return how many layers a peer has room for, at most the size's. Raise MemoryError where not one fits."""

    def too_many(layers):
        return out_of_memory(name, replace(size, layers=layers), arguments, clock)

    if not too_many(size.layers):
        return size.layers
    if fewer := bisect_left(range(1, size.layers), True, key=too_many):
        return fewer
    raise MemoryError(f"{name} has no room for one layer")


def out_of_memory(name, size, arguments, clock):
    """Whether a peer has no room for two steps, and those that are timed, at this size."""
    try:
        peer = PEERS[name][0](size, device=arguments.device)
        timing.time_steps(clock, peer, 1, 1)
        peer.peak_memory()
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    peer = None
    free_memory()
    found = report.OUT_OF_MEMORY.search(said)
    outcome = f"have no room: {report.one_line(said)}" if found else "tried"
    print(f"{name:30} {size.layers} layers {outcome}", flush=True)
    return bool(found)


def run_size(arguments, clock, size):
    """{"dims", "vocabulary", "layers", "flops", "tokens", "peers": {name: row}} of one size."""
    rounds, rows = defaultdict(list), {}
    for _ in range(arguments.rounds):
        for name in arguments.peers:
            if name in rows:
                continue  # has failed
            try:
                rounds[name].append(run_peer(PEERS[name][0], size, arguments, clock))
                print(f"{name:30} {statistics.median(rounds[name][-1]['step_ms']):10.3f} ms", flush=True)
            except Exception as error:
                traceback.print_exception(error)
                status = "missing" if isinstance(error, ModuleNotFoundError) else "failed"
                rows[name] = {"status": status, "reason": f"{type(error).__name__}: {error}"}
            free_memory()
    rows |= {name: summarize(found) for name, found in rounds.items() if name not in rows}
    return {
        "dims": asdict(size.dims),
        "mixture": size.mixture and asdict(size.mixture),
        "vocabulary": size.vocabulary,
        "layers": size.layers,
        "micro_batches": size.micro_batches,
        "flops": size.flops,
        "tokens": size.tokens,
        "peers": {name: rows[name] for name in arguments.peers},
    }


def markdown(result):
    """The readable tables of a result."""
    lines = report.heading("A training step", result)
    for name, size in result["sizes"].items():
        what = f"{size['layers']} layers, vocabulary {size['vocabulary']}, {report.describe(size['dims'])}"
        what += f", {report.describe(size['mixture'])}" if size.get("mixture") else ""
        what += f", {size['micro_batches']} micro-batches a step" * (size["micro_batches"] > 1)
        lines += [f"## {name}: {what}", ""]
        if size["layers"] < (asked := size.get("layers_asked_for", size["layers"])):
            lines += [f"**{asked} layers have no room in this GPU, {size['layers']} have.**", ""]
        lines += [*_step_table(size), *_parts_table(size)]
    return "\n".join(lines)


def _of_floor(size, peer):
    """The floor's milliseconds by the peer's, as a cell; "" where there is no floor."""
    floor = (size.get("floor_ms") or {}).get(peer["precision"].split("_")[0])
    return f"{floor / peer['step_ms']['median']:.2f}" if floor else ""


def _step_table(size):
    peers = size["peers"]

    def row(name, peer):
        step = peer["step_ms"]
        names = [*SPEEDUP_OVER.values(), twin(name)]
        others = [peers.get(other, {}).get("step_ms") for other in names]
        return [
            f"{step['median']:.2f}",
            f"{step['min']:.2f} to {step['max']:.2f}",
            f"{size['tokens'] / step['median'] * 1e3:.0f}",
            f"{size['flops'] / step['median'] / 1e9:.0f}",
            _of_floor(size, peer),
            *(f"{other['median'] / step['median']:.2f}" if other else "" for other in others),
            f"{peer['host_us']['median'] / 1e3:.2f}",
            "" if peer["peak_bytes"] is None else f"{peer['peak_bytes'] / 1e9:.2f}",
            " → ".join(f"{loss:.3f}" for loss in peer["loss"]),
        ]

    header = [
        "",
        "ms",
        "over rounds",
        "tokens/s",
        "TFLOP/s",
        "of floor",
        *SPEEDUP_OVER,
        "× TE's PyTorch",
        "host ms",
        "peak GB",
        "loss",
    ]
    return report.rows(header, peers, row)


def _parts_table(size):
    peers = {name: peer for name, peer in size["peers"].items() if peer["status"] == "ok"}
    if not peers:
        return []

    def cells(parts):
        for peer in peers.values():
            times = {part: peer["parts_ms"][part]["median"] for part in PARTS}
            part = sum(times[name] for name in parts)
            yield f"{part:.2f} ({part / sum(times.values()):.0%})"

    groups = {part: [part] for part in PARTS} | {
        "**layers**": ["layers forward", "layers backward"],
        "**all parts**": PARTS,
    }
    lines = ["| ms (share) | " + " | ".join(peers) + " |", "|---" * (len(peers) + 1) + "|"]
    return lines + [f"| {name} | " + " | ".join(cells(parts)) + " |" for name, parts in groups.items()] + [""]


def main(argv=None):
    arguments = parse_arguments(argv)
    mixed = any(SIZES[name].mixture for name in arguments.sizes)
    libraries = choose_libraries(arguments.device) if mixed else {}  # grouped GEMMs need a newer cuBLAS
    clock = timing.make_clock(arguments)
    result = report.header("step", argv, DEFINITIONS) | {
        "native_libraries": libraries,
        "settings": {name: getattr(arguments, name) for name in ("micro_batches", "rounds", "iterations", "warmup")},
    }

    def run(name):
        size = asked_for(SIZES[name], arguments)
        found = run_size(arguments, clock, fitting(arguments, clock, size) if arguments.fit else size)
        bandwidth = floors.bandwidth_of(result["hardware"]["name"])
        fitted = replace(size, layers=found["layers"])
        return found | {"layers_asked_for": size.layers, "floor_ms": bandwidth and fitted.floor_ms(bandwidth)}

    what = sizes_in_words(arguments.sizes, SIZES)
    if arguments.micro_batches > 1:
        what += f"-{arguments.micro_batches}-micro-batches"
    return run_sizes(result, arguments, run, report.destination(result, arguments, what), markdown)


if __name__ == "__main__":
    sys.exit(main())
