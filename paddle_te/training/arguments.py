"""Command-line arguments of pretraining: PaddleNLP's, and those that choose and tune the decoder layers."""

import difflib
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from paddlenlp.trainer import PdArgumentParser, TrainingArguments
from paddlenlp.trainer.trainer_utils import OptimizerNames, ShardingOption
from paddlenlp.transformers.configuration_utils import llmmetaclass

from paddle_te.models.llama.modeling import check_fp8_lm_head
from paddle_te.runs.background import STAGING_DIR
from paddle_te.runs.layout import check_flags
from paddle_te.runs.manifest import LEVELS


def _option(default, help, **kwargs):
    return field(default=default, metadata={"help": help, **kwargs})


# those of PreTrainingArguments that decide on the decoder layers
LAYER_FLAGS = (
    "transformer_engine_backend use_fp8 fp8_recipe fp8_format fp8_amax_history_len fp8_amax_compute_algo "
    "fp8_dpa fp8_dpa_bwd fp8_lm_head fuse_wgrad_accumulation"
).split()


@dataclass
@llmmetaclass  # PaddleNLP's flags for fused kernels, parallelism and recompute
class PreTrainingArguments(TrainingArguments):
    """PaddleNLP's TrainingArguments and the switch."""

    min_learning_rate: float = _option(1e-5, "Learning rate at the end of the decay.")
    decay_steps: int = _option(None, "Steps of the decay; afterwards min_learning_rate. Default: max_steps.")
    eval_iters: int = _option(10, "Batches of one evaluation.")
    transformer_engine_backend: str = _option(
        "none",
        "What a decoder layer is made of: none (PaddleNLP's own), paddle (Paddle operations) or transformer_engine.",
    )
    use_fp8: bool = _option(False, "Run the decoder layers' GEMMs in fp8 (backend paddle emulates its rounding).")
    fp8_recipe: str = _option("delayed", "delayed or current scaling.")
    fp8_format: str = _option("HYBRID", "HYBRID (e4m3 forward, e5m2 gradients) or E4M3.")
    fp8_amax_history_len: int = _option(1024, "Steps of amax history (delayed scaling).")
    fp8_amax_compute_algo: str = _option("max", "max of the history, or most_recent (delayed scaling).")
    fp8_dpa: bool = _option(False, "Attention in fp8 as well (delayed scaling; heads of 128, no packed documents).")
    fp8_dpa_bwd: bool = _option(True, "With fp8_dpa: attention's backward too; false: in the activations' precision.")
    fp8_lm_head: bool = _option(False, "The language model's head in fp8 as well (16 divides each rank's vocabulary).")
    fuse_wgrad_accumulation: bool = _option(
        False, "Add weight gradients to float32 main gradients inside the GEMMs (needs --amp_master_grad)."
    )

    recompute_use_reentrant: bool = _option(
        True, "Recompute as a PyLayer (True), which frees all that te's layers keep, or through saved-tensor hooks."
    )
    save_in_background: bool = _option(
        False, "Write checkpoints to memory and copy them to output_dir while training goes on."
    )
    staging_dir: str = _option(STAGING_DIR, "With save_in_background: where each node keeps its part meanwhile.")
    on_nan: str = _option(
        "stop",
        "When loss, gradients or a tensor to be saved are not finite: stop, skip (leave the step out) or rollback "
        "(to the last good checkpoint, and past the batches since).",
    )
    on_nan_limit: int = _option(10, "Skip: so many steps in a row; rollback: so many times to one checkpoint.")
    spike_factor: Optional[float] = _option(
        None, "Treat a loss above so many times the median of the last 100 as on_nan says. Default: no loss."
    )
    verify_checkpoint: str = _option(
        "full",
        "What a checkpoint must agree with its manifest in before it is resumed: full (sizes and checksums of all "
        "files), size, or none.",
    )

    @property
    def model_dtype(self):
        """The weights' dtype: 16 bits with fp16_opt_level O2 alone, since O1 casts what an operation takes."""
        half = "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
        return half if self.fp16_opt_level == "O2" else "float32"

    def configure_layers(self, config):
        """Puts what decides on the decoder layers into a model's configuration."""
        for name in LAYER_FLAGS:
            setattr(config, name, getattr(self, name))

    def __post_init__(self):
        """Raises ValueError for flags that contradict each other, before PaddleNLP's initialise fleet."""
        self._check_layers()
        self._check_saving()
        self._check_health()
        super().__post_init__()
        self.test_iters = 10 * self.eval_iters
        self.rollbacks = []  # runs.rollback.leave_out_broken_batches knows them
        if self._clips_bf16_where_paddle_cannot():
            raise ValueError(
                f"--bf16 on {self.device} over several processes with --optim {self.optim.value} needs "
                "--amp_master_grad true (or --max_grad_norm 0): Paddle clips no bf16 gradients of parallel models on "
                "custom devices; with --optim adamw paddle_te does"
            )

    def _check_layers(self):
        _one_of(self, "transformer_engine_backend", ("none", "paddle", "transformer_engine"))
        _one_of(self, "recompute_granularity", ("full", "core_attn", "full_attn"))
        if self.recompute_granularity == "full_attn" and self.transformer_engine_backend != "none":
            raise ValueError("--recompute_granularity full_attn: backends pd and te have full and core_attn")
        for name in ("sep_parallel_degree", "context_parallel_degree"):
            if self.transformer_engine_backend != "none" and (degree := getattr(self, name)) > 1:
                raise ValueError(f"--{name} {degree}: attention of backends pd and te sees whole sequences only")
        _one_of(self, "fp8_recipe", ("delayed", "current"))
        _one_of(self, "fp8_format", ("HYBRID", "E4M3"))
        _one_of(self, "fp8_amax_compute_algo", ("max", "most_recent"))
        if self.use_fp8 and self.transformer_engine_backend == "none":
            raise ValueError("--use_fp8 needs --transformer_engine_backend transformer_engine (or paddle, emulated)")
        check_fp8_dpa(self)
        if not self.fp8_dpa_bwd and not self.fp8_dpa:
            raise ValueError("--fp8_dpa_bwd false says how --fp8_dpa true goes backward; alone it means nothing")
        check_fp8_lm_head(self)
        if self.fuse_wgrad_accumulation and self.transformer_engine_backend != "transformer_engine":
            raise ValueError("--fuse_wgrad_accumulation needs --transformer_engine_backend transformer_engine")
        if self.fuse_wgrad_accumulation and not self.amp_master_grad:
            raise ValueError(
                "--fuse_wgrad_accumulation needs --amp_master_grad true: another optimizer does not look at the main "
                "gradients, and the layers would stay as they are"
            )
        if self.use_fused_linear_cross_entropy and self.transformer_engine_backend == "none":
            self._check_paddlenlps_fused_loss()

    def _check_saving(self):
        _one_of(self, "verify_checkpoint", LEVELS)
        if self.use_async_save or "async_save" in str(self.unified_checkpoint_config):
            raise ValueError(
                "PaddleNLP's asynchronous saving: a checkpoint could not be told from an incomplete one; use "
                "--save_in_background true"
            )
        if self.staging_dir != STAGING_DIR and not self.save_in_background:
            raise ValueError("--staging_dir says where --save_in_background true writes first; alone it means nothing")
        if self.save_in_background and not os.access(self.staging_dir, os.W_OK | os.X_OK):
            raise ValueError(f"--staging_dir {self.staging_dir}: it must be a folder that can be written, on each node")

    def _check_health(self):
        _one_of(self, "on_nan", ("stop", "skip", "rollback"))
        if self.on_nan_limit < 1:
            raise ValueError(f"--on_nan_limit {self.on_nan_limit}: it must be at least 1")
        if self.spike_factor is not None and not 1 < self.spike_factor < float("inf"):
            raise ValueError(f"--spike_factor {self.spike_factor}: it must be a number above 1, such as 1.5")

    def _check_paddlenlps_fused_loss(self):
        """PaddleNLP finds out in the first step, or, in a pipeline, forgets the flag."""
        parallel = self.tensor_parallel_degree > 1 or self.pipeline_parallel_degree > 1
        if parallel or importlib.util.find_spec("paddlenlp_kernel") is None:
            raise ValueError(
                "--use_fused_linear_cross_entropy with --transformer_engine_backend none is PaddleNLP's own: it needs "
                "its package paddlenlp_kernel, and no tensor or pipeline parallelism; the other backends need nothing"
            )

    def _clips_bf16_where_paddle_cannot(self):
        """Paddle 3.3.1's HybridParallelClipGrad has bf16 for its own GPU device and three others. `fuse_clipping` does
        without it, sharding stage 3 has a clipping of its own."""
        custom = self.device.partition(":")[0] not in ("cpu", "gpu", "xpu")
        bf16 = self.bf16 and self.fp16_opt_level == "O2" and not self.amp_master_grad
        parallel = self.use_hybrid_parallel and self.world_size > 1
        clipped_otherwise = self.optim == OptimizerNames.ADAMW or ShardingOption.FULL_SHARD in self.sharding
        return custom and bf16 and self.max_grad_norm > 0 and parallel and not clipped_otherwise


def check_fp8_dpa(arguments):
    """Raises ValueError for attention in fp8 where the rest is not, or has another recipe."""
    if arguments.fp8_dpa and not (arguments.use_fp8 and arguments.fp8_recipe == "delayed"):
        raise ValueError("--fp8_dpa needs --use_fp8 and --fp8_recipe delayed: Hopper has it with no other recipe")


def check_weights_folder(arguments, flag="model_name_or_path"):
    """Raises FileNotFoundError where the flag names no folder; before the tokenizer, which may be downloaded."""
    folder = getattr(arguments, flag)
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"--{flag} {folder}: there is no such folder; weights are not downloaded")


def _one_of(arguments, name, choices):
    value = getattr(arguments, name)
    if value not in choices:
        raise ValueError(f"--{name} {value}: it may be {', '.join(choices)}")


@dataclass
class ModelArguments:
    """Which model, and how PaddleNLP builds it."""

    model_name_or_path: str = _option(
        "tiny-llama-demo", "A built-in configuration's name or a folder with config.json."
    )
    tokenizer_name_or_path: Optional[str] = _option(
        None, "Tokenizer folder or name; none with --mock_data. Default: model_name_or_path."
    )
    continue_training: bool = _option(False, "Start from the weights in model_name_or_path instead of from scratch.")
    te_init_weight_path: Optional[str] = _option(
        None, "Folder with initial weights, in this backend's layout (te_llama_ckpt_converter.py) or Hugging Face's."
    )
    fuse_attention_qkv: bool = _option(False, "Native layers: one weight for q, k and v.")
    fuse_attention_ffn: bool = _option(False, "Native layers: one weight for gate and up.")
    hidden_dropout_prob: float = _option(0.0, "Llama has no dropout: accepted for old scripts, ignored.")
    attention_probs_dropout_prob: float = _option(0.0, "Llama has no dropout: accepted for old scripts, ignored.")

    def __post_init__(self):
        self.tokenizer_name_or_path = self.tokenizer_name_or_path or self.model_name_or_path


class ScriptParser(PdArgumentParser):
    """PaddleNLP's, with one line for what is missing, malformed or no flag. Raises ValueError."""

    def parse(self):
        """The dataclasses, from the command line, of which the first word may be a JSON file."""
        if len(sys.argv) >= 2 and sys.argv[1].endswith(".json"):
            return self.parse_json_file_and_cmd_lines()
        return self.parse_args_into_dataclasses()

    def error(self, message):
        raise ValueError(f"{message} (--help lists the flags)")

    def parse_known_args(self, args=None, namespace=None):
        flags, rest = super().parse_known_args(args, namespace)
        if rest:
            word = next((word for word in rest if word.startswith("--")), rest[0])
            near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, 1)
            self.error(f"{word}: there is no such flag" + (f"; did you mean {near[0]}?" if near else ""))
        return flags, rest


class ArgumentParser(ScriptParser):
    """For the dataclasses of pretraining. Refuses an impossible layout, which the launcher refuses too,
    before TrainingArguments initialises fleet. Raises LayoutError, a ValueError.
    """

    def parse_known_args(self, args=None, namespace=None):
        flags, rest = super().parse_known_args(args, namespace)
        check_flags(flags, world=int(os.environ.get("PADDLE_TRAINERS_NUM", 1)))
        return flags, rest
