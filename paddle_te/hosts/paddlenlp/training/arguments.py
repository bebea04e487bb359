"""Command-line arguments of pretraining: PaddleNLP's, and those that choose and tune the decoder layers."""

import difflib
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from paddlenlp.trainer import PdArgumentParser, TrainingArguments
from paddlenlp.trainer.trainer_utils import OptimizerNames, ShardingOption
from paddlenlp.transformers.configuration_utils import llmmetaclass

from paddle_te.hosts.paddlenlp.modeling import check_fp8_lm_head
from paddle_te.models.context_parallel import context_parallel
from paddle_te.options import BOUNDS, FP8_RECIPES, check_values, with_options
from paddle_te.options.paddlenlp import without_unsupported
from paddle_te.options.removed import check_removed
from paddle_te.options.scripts import LAYERS, PRETRAIN_MODEL, PRETRAINING, STATES, TRAINING, chosen
from paddle_te.options.together import PRETRAIN, check_trainer
from paddle_te.outputs import check_folder
from paddle_te.runs.parallelism import check_flags


@dataclass
@llmmetaclass  # PaddleNLP's flags for fused kernels, parallelism and recompute
@with_options(*PRETRAINING, *LAYERS, *TRAINING)
class PreTrainingArguments(TrainingArguments):
    """PaddleNLP's TrainingArguments and the switch."""

    SCRIPT = PRETRAIN  # whose flags they are

    @property
    def model_dtype(self):
        """The weights' dtype: 16 bits with fp16_opt_level O2 alone, since O1 casts what an operation takes."""
        half = "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
        return half if self.fp16_opt_level == "O2" else "float32"

    @property
    def sequence_rank(self):
        """This rank's place among those that share sequences."""
        cp = context_parallel(self)
        return cp.rank if cp else 0

    @property
    def should_save_model_state(self):
        """PaddleNLP's, but for one of the ranks that share sequences: the others have the same weights."""
        return super().should_save_model_state and self.sequence_rank == 0

    def __post_init__(self):
        """Raises ValueError for wrong values and contradictions, before PaddleNLP's initialise fleet."""
        check_values(self, BOUNDS)
        check_trainer(self, self.SCRIPT)
        self._check_layers()
        self._check_optimizer_states()
        if self.optimizer_in_backward != "off":
            self._check_optimizer_in_backward()
        self._check_saving()
        try:
            super().__post_init__()
        except AssertionError as error:
            raise ValueError(f"PaddleNLP does not take these arguments together: {error}") from error
        except ValueError as error:  # of several lines, some
            raise ValueError(" ".join(str(error).split())) from error
        if self.ddp_find_unused_parameters is None:  # there are none, and looking for them costs time
            self.ddp_find_unused_parameters = False
        self.test_iters = 10 * self.eval_iters
        self.rollbacks = []  # runs.rollback.leave_out_broken_batches knows them
        if self._clips_bf16_where_paddle_cannot():
            raise ValueError(
                f"--bf16 on {self.device} over several processes with --optim {self.optim.value} needs "
                "--amp_master_grad true (or --max_grad_norm 0): Paddle clips no bf16 gradients of parallel models on "
                "custom devices; with --optim adamw paddle_te does"
            )

    def _check_layers(self):
        if self.recompute_granularity == "full_attn" and self.transformer_engine_backend != "none":
            raise ValueError("--recompute_granularity full_attn: backends pd and te have full and core_attn")
        if self.offload_activations:
            self._check_offload()
        if self.recompute_modules:
            self._check_recompute_modules()
        if self.activation_func_fp8_input_store:
            self._check_fp8_input_store()
        if self.mlp_chunk_tokens:
            self._check_mlp_chunks()
        if self.context_parallel_degree > 1:
            self._check_ring_attention()
        if self.use_fp8 and self.transformer_engine_backend == "none":
            raise ValueError("--use_fp8 needs --transformer_engine_backend transformer_engine (or paddle, emulated)")
        check_fp8_lm_head(self)
        if self.use_fused_linear_cross_entropy and self.transformer_engine_backend == "none":
            self._check_paddlenlps_fused_loss()

    def _check_optimizer_states(self):
        """Refuses flags beside which AdamW's state is not ours to keep."""
        flags = chosen(self, STATES)
        if self.offload_optimizer:
            self._check_optimizer_offload()
            flags.append(f"--offload_optimizer {self.offload_optimizer:g}")
        if not flags:
            return
        said, sharding = " ".join(flags), f"{self.sharding} {self.sharding_parallel_config}"
        if self.optim not in (OptimizerNames.ADAMW, OptimizerNames.ADAMW.value):
            raise ValueError(f"{said} with --optim {self.optim}: it needs --optim adamw")
        if self.master_weights != "float32" and self.model_dtype != "bfloat16":
            raise ValueError(
                f"--master_weights {self.master_weights} needs bfloat16 weights: --bf16 true --fp16_opt_level O2"
            )
        for name in ("offload", "enable_stage1_tensor_fusion", "enable_fuse_optimizer_states"):
            if name in sharding:
                raise ValueError(f"{said} with {name} of --sharding or --sharding_parallel_config: leave that out")
        if self.offload_optim:
            raise ValueError(
                f"{said} with --offload_optim: that is PaddleNLP's, which moves all states to the device and back, "
                "in float32; leave one of them out"
            )
        if self.master_weights != "float32" and self.unified_checkpoint_config:
            raise ValueError(
                f"--master_weights {self.master_weights} with --unified_checkpoint_config "
                f"{self.unified_checkpoint_config}: a checkpoint must have weights and remainders; leave it out"
            )

        if self.optim_moments == "int8":
            self._check_unified_checkpoint("--optim_moments int8", "ranks keep blocks of their parts")
        if self.offload_optimizer:
            flag = f"--offload_optimizer {self.offload_optimizer:g}"
            self._check_unified_checkpoint(flag, "PaddleNLP joins them on the device, where they are not")

    def _check_unified_checkpoint(self, flag, reason):
        """Refuses unified checkpoints where PaddleNLP would join several ranks' parts of the optimizer's states."""
        if not self.unified_checkpoint:
            return
        layouts = {
            f"--tensor_parallel_degree {self.tensor_parallel_degree}": self.tensor_parallel_degree > 1,
            "split_param of --sharding_parallel_config": "split_param" in (self.sharding_parallel_config or ""),
        }
        for layout in (name for name, holds in layouts.items() if holds):
            raise ValueError(
                f"{flag} with --unified_checkpoint true and {layout}: such a checkpoint has whole weights, and "
                f"{reason}; save rank by rank with --unified_checkpoint false"
            )

    def _check_optimizer_offload(self):
        flag = f"--offload_optimizer {self.offload_optimizer:g}"
        if self.transformer_engine_backend != "transformer_engine":
            raise ValueError(
                f"{flag} needs --transformer_engine_backend transformer_engine: its native module copies the states, "
                "and on a CPU there is no device memory to save"
            )

    def _check_optimizer_in_backward(self):
        """Refuses what needs all gradients at once, or gradients that are not complete after one backward."""
        flag = f"--optimizer_in_backward {self.optimizer_in_backward}"
        if self.optimizer_in_backward == "unclipped" and self.max_grad_norm > 0:
            raise ValueError(
                f"{flag} with --max_grad_norm {self.max_grad_norm:g}: a step's norm is not known before its last "
                "gradient; give --max_grad_norm 0, or clip by the norm of the step before: last_norm"
            )
        if self.optimizer_in_backward == "last_norm" and self.max_grad_norm == 0:
            raise ValueError(f"{flag} clips gradients: it needs --max_grad_norm above 0; unclipped needs none")
        if self.optim not in (OptimizerNames.ADAMW, OptimizerNames.ADAMW.value):
            raise ValueError(f"{flag} with --optim {self.optim}: it needs --optim adamw")
        if self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"{flag} with --gradient_accumulation_steps {self.gradient_accumulation_steps}: gradients that are "
                "added up over several micro-batches must all be kept; it must be 1"
            )
        reasons = {
            "amp_master_grad": "a gradient is used at once, so there is nothing to add up in float32",
            "fp16": "a loss scale is known to be right only after the last gradient",
            "offload_optim": "Paddle brings the states back only after backward",
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise ValueError(f"{flag} with --{name}: {reason}; leave one of them out")
        if self.on_nan == "skip":
            raise ValueError(f"{flag} with --on_nan skip: a bad step has updated weights already; stop or rollback")
        self._check_whole_gradients(flag)

    def _check_whole_gradients(self, flag):
        """Refuses layouts in which backward leaves gradients of a part of the step's tokens."""
        for kind in ("pipeline", "sharding", "sep", "context"):
            name = f"{kind}_parallel_degree"
            if getattr(self, name) > 1:
                raise ValueError(
                    f"{flag} with --{name} {getattr(self, name)}: there a gradient is complete only after backward; "
                    "only --tensor_parallel_degree may be above 1"
                )
        others = self.world_size // max(self.tensor_parallel_degree, 1)
        if others > 1:
            raise ValueError(
                f"{flag} with data parallelism or sharding over {others} ranks: their gradients must be summed first; "
                "train on one GPU, or give all of them to --tensor_parallel_degree"
            )

    def _check_recompute_modules(self):
        flag = f"--recompute_modules {' '.join(self.recompute_modules)}"
        if self.transformer_engine_backend == "none":
            raise ValueError(f"{flag} needs --transformer_engine_backend transformer_engine or paddle")
        if self.recompute and self.recompute_granularity == "full":
            raise ValueError(
                f"{flag} with --recompute_granularity full: whole layers are computed again, and their parts with "
                "them; leave out --recompute_modules, or --recompute"
            )
        if {"mlp", "mlp_act"} <= {*self.recompute_modules}:
            raise ValueError(f"{flag}: mlp computes the activation again, too; leave out mlp_act")

    def _check_fp8_input_store(self):
        flag = "--activation_func_fp8_input_store true"
        if self.transformer_engine_backend == "none":
            raise ValueError(f"{flag} needs --transformer_engine_backend transformer_engine or paddle")
        for other, there in (
            ("--recompute_granularity full", self.recompute and self.recompute_granularity == "full"),
            ("--recompute_modules mlp", "mlp" in (self.recompute_modules or ())),
            (f"--mlp_chunk_tokens {self.mlp_chunk_tokens}", self.mlp_chunk_tokens),
        ):
            if there:
                raise ValueError(
                    f"{flag} with {other}, with which backward computes the activation's input again and nothing of it "
                    "is kept; leave one of them out"
                )

    def _check_mlp_chunks(self):
        flag = f"--mlp_chunk_tokens {self.mlp_chunk_tokens}"
        if self.transformer_engine_backend == "none":
            raise ValueError(f"{flag} needs --transformer_engine_backend transformer_engine or paddle")
        multiple = fp8_multiple(self) * (self.tensor_parallel_degree if self.sequence_parallel else 1)
        if self.mlp_chunk_tokens % multiple:
            raise ValueError(f"{flag}: it must be a multiple of {multiple}, of which each rank's GEMMs have a share")

    def _check_offload(self):
        flag = f"--offload_activations {self.offload_activations}"
        if self.transformer_engine_backend != "transformer_engine":
            raise ValueError(
                f"{flag} needs --transformer_engine_backend transformer_engine: its layers alone move them"
            )
        if self.recompute and self.recompute_granularity == "full":
            raise ValueError(
                f"{flag} with --recompute_granularity full: whole layers are computed again, and keep their inputs "
                "only; leave out --recompute, or compute parts again with --recompute_modules"
            )
        if self.pipeline_parallel_degree > 1:
            raise ValueError(
                f"{flag} with --pipeline_parallel_degree {self.pipeline_parallel_degree}: a stage keeps "
                "several micro-batches at a time, and there is host memory for one; leave one of them out"
            )

    def _check_ring_attention(self):
        flag = f"--context_parallel_degree {self.context_parallel_degree}"
        if self.fp8_dpa:
            raise ValueError(f"--fp8_dpa with {flag}: ring attention is in 16 bits; --sep_parallel_degree has fp8")
        if self.transformer_engine_backend != "none":
            return
        if not (
            self.device.startswith("gpu") and self.use_flash_attention and importlib.util.find_spec("paddlenlp_ops")
        ):
            raise ValueError(
                f"{flag} with --transformer_engine_backend none is PaddleNLP's own: it needs paddlepaddle-gpu, "
                "--use_flash_attention true and its package paddlenlp_ops; the other backends need nothing"
            )

    def _check_saving(self):
        for name in ("output_dir", "logging_dir", "output_signal_dir"):
            if getattr(self, name) is not None:
                check_folder(f"--{name}", Path(getattr(self, name)).expanduser())
        if self.use_async_save or "async_save" in str(self.unified_checkpoint_config):
            raise ValueError(
                "PaddleNLP's asynchronous saving: a checkpoint could not be told from an incomplete one; use "
                "--save_in_background true"
            )
        if self.unified_checkpoint and ShardingOption.FULL_SHARD.value in str(self.sharding):
            raise ValueError(
                "--unified_checkpoint true with --sharding stage3: PaddleNLP has no such checkpoints, and would save "
                "others; leave --unified_checkpoint out"
            )
        if self.save_in_background and not os.access(self.staging_dir, os.W_OK | os.X_OK):
            raise ValueError(f"--staging_dir {self.staging_dir}: it must be a folder that can be written, on each node")

    def _check_paddlenlps_fused_loss(self):
        """PaddleNLP finds out in the first step, or, in a pipeline, forgets the flag."""
        parallel = self.tensor_parallel_degree > 1 or self.pipeline_parallel_degree > 1
        if parallel or importlib.util.find_spec("paddlenlp_kernel") is None:
            raise ValueError(
                "--use_fused_linear_cross_entropy with --transformer_engine_backend none is PaddleNLP's own: it needs "
                "its package paddlenlp_kernel, and no tensor or pipeline parallelism; the other backends need nothing"
            )
        if self.label_smoothing_factor:
            raise ValueError(
                f"--label_smoothing_factor {self.label_smoothing_factor:g} with --use_fused_linear_cross_entropy and "
                "--transformer_engine_backend none: PaddleNLP's own knows no smoothing; leave one of them out"
            )
        if "accuracy" in (self.metric_for_best_model or ""):
            raise ValueError(
                f"--metric_for_best_model {self.metric_for_best_model} with --use_fused_linear_cross_entropy and "
                "--transformer_engine_backend none: PaddleNLP's own has no logits to count it by; leave one of them out"
            )

    def _clips_bf16_where_paddle_cannot(self):
        """Paddle 3.3.1's HybridParallelClipGrad has bf16 for its own GPU device and three others. `fuse_clipping` does
        without it, sharding stage 3 has a clipping of its own."""
        custom = self.device.partition(":")[0] not in ("cpu", "gpu", "xpu")
        bf16 = self.bf16 and self.fp16_opt_level == "O2" and not self.amp_master_grad
        parallel = self.use_hybrid_parallel and self.world_size > 1
        clipped_otherwise = self.optim == OptimizerNames.ADAMW or ShardingOption.FULL_SHARD in self.sharding
        return custom and bf16 and self.max_grad_norm > 0 and parallel and not clipped_otherwise


def data_seed(arguments):
    """The seed of the order of the samples."""
    return arguments.seed if arguments.data_seed is None else arguments.data_seed


def fp8_multiple(arguments):
    """What must divide the tokens of fp8 GEMMs; 1 without fp8."""
    return FP8_RECIPES[arguments.fp8_recipe] if arguments.use_fp8 else 1


def check_tokens(arguments, length, tokens, when="train", where="each rank"):
    """Raises ValueError where fp8 GEMMs do not take the tokens of a rank's micro-batch.

    length: the flag that says how long sequences are, with its value. when: "train" or "eval". where: the ranks, in
    words.
    """
    multiple = fp8_multiple(arguments)
    batch = f"per_device_{when}_batch_size"
    batch = f"--{batch} {getattr(arguments, batch)}"
    if tokens % multiple:
        raise ValueError(
            f"{length} with {batch}: GEMMs with --fp8_recipe {arguments.fp8_recipe} need a multiple of {multiple} "
            f"tokens on {where}, not {tokens}"
        )


def check_weights_folder(arguments, flag="model_name_or_path"):
    """Raises FileNotFoundError where the flag names no folder; before the tokenizer, which may be downloaded."""
    folder = getattr(arguments, flag)
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"--{flag} {folder}: there is no such folder; weights are not downloaded")


@dataclass
@with_options(*PRETRAIN_MODEL)
class ModelArguments:
    """Which model, and how PaddleNLP builds it."""

    def __post_init__(self):
        check_values(self)
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

    def read_json(self, json_file):
        """The flags that a JSON file gives. Raises ValueError for one that gives none, FileNotFoundError."""
        try:
            content = json.loads(Path(json_file).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{json_file}: is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{json_file}: must be an object of flags and their values, {{...}}")
        words = super().read_json(json_file)
        for name in content.keys() - without_unsupported(content).keys():
            start = words.index(f"--{name}")
            del words[start : start + 2]
        return words

    def parse_known_args(self, args=None, namespace=None):
        check_removed(sys.argv[1:] if args is None else args)
        flags, rest = super().parse_known_args(args, namespace)
        if rest:
            word = next((word for word in rest if word.startswith("--")), None)
            if word is None:
                self.error(f"{rest[0]}: no flag before it takes this value")
            near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, 1)
            self.error(f"{word}: there is no such flag" + (f"; did you mean {near[0]}?" if near else ""))
        for record in self.dataclass_types:
            check_values(flags, BOUNDS, record.OPTIONS)
        return flags, rest


class ArgumentParser(ScriptParser):
    """For the dataclasses of pretraining. Refuses an impossible layout, which the launcher refuses too,
    before TrainingArguments initialises fleet. Raises LayoutError, a ValueError.
    """

    def parse_known_args(self, args=None, namespace=None):
        flags, rest = super().parse_known_args(args, namespace)
        check_flags(flags, world=int(os.environ.get("PADDLE_TRAINERS_NUM", 1)))
        return flags, rest
