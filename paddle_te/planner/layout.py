"""How the ranks of a job share a step."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_te.job import FINETUNE, PRETRAIN, Job
from paddle_te.options.scripts import LORA_TARGETS, OPTIMIZER, chosen


@dataclass(frozen=True)
class Lora:
    """An adapter that is trained over frozen weights: --lora_rank, --lora_targets.

    fp8_base: the decoder layers' frozen weights exist in fp8 only, --quantize_base fp8.
    """

    rank: int
    targets: str = LORA_TARGETS[0]
    fp8_base: bool = False

    def on(self, part: str) -> bool:
        """Whether the GEMMs of "attention" or the "mlp" have low-rank products beside them."""
        return self.targets in (LORA_TARGETS[0], part)

    def flags(self) -> list[str]:
        """Those of fine-tuning and of the planner, beside --lora."""
        targets = [f"--lora_targets {self.targets}"] * (self.targets != LORA_TARGETS[0])
        return [f"--lora_rank {self.rank}", *targets, *["--quantize_base fp8"] * self.fp8_base]


@dataclass(frozen=True)
class Layout:
    """The launcher's arguments of a job, as far as memory and time depend on them.

    gpus: all of them. tp, pp, vp, sep, cp, sharding: degrees; what they leave of `gpus` is data parallel. batch:
    sequences of a micro-batch; micro_batches: of a step on a rank. stage: of sharding. overlap: OVERLAP=1.
    loss_in_chunks, fp8_head, fp8_attention: --use_fused_linear_cross_entropy, --fp8_lm_head, --fp8_dpa. main_grads:
    gradients are added up in float32, --amp_master_grad. release_grads, optim_moments, master_weights,
    optimizer_in_backward, recompute_modules, mlp_chunk_tokens, offload_activations and offload_optimizer: the flags.
    fp8_input_store: --activation_func_fp8_input_store. lora: None where all weights are trained. recompute: the
    launcher's.
    """

    gpus: int
    sequence: int
    tp: int = 1
    pp: int = 1
    vp: int = 1
    sep: int = 1
    cp: int = 1
    sharding: int = 1
    stage: int = 1
    batch: int = 1
    micro_batches: int = 1
    precision: str = "fp8"
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    fp8_input_store: bool = False
    mlp_chunk_tokens: int = 0
    offload_activations: int = 0
    offload_optimizer: float = 0.0
    overlap: bool = False
    loss_in_chunks: bool = False
    fp8_head: bool = False
    fp8_attention: bool = False
    main_grads: bool = False
    release_grads: bool = False
    optim_moments: str = "float32"
    master_weights: str = "float32"
    optimizer_in_backward: str = "off"
    lora: Lora | None = None

    @property
    def fp8_base(self) -> bool:
        """Whether the frozen weights exist in fp8 only."""
        return self.lora is not None and self.lora.fp8_base

    @property
    def optimizer(self) -> dict[str, str]:
        """What the flags of the optimizer are, by their names."""
        return {name: getattr(self, name) for name in OPTIMIZER}

    @property
    def data(self) -> int:
        """Ranks with other sequences."""
        return self.gpus // (self.tp * self.pp * self.sharing)

    @property
    def sharing(self) -> int:
        """Ranks that have parts of the same sequences, by SEP or CP."""
        return self.sep * self.cp

    @property
    def replicas(self) -> int:
        """Data-parallel ranks, each with all that sharding's ranks have together."""
        return self.data // self.sharding

    @property
    def main_grads_by_themselves(self) -> bool:
        """Whether the launcher keeps main gradients on nvgpu."""
        return self.job.keeps_main_gradients

    @property
    def job(self) -> Job:
        """The run that the launcher starts on nvgpu for this layout."""
        return Job(
            script=FINETUNE if self.lora else PRETRAIN,
            do_train=True,
            device="nvgpu",
            world=self.gpus,
            transformer_engine_backend="transformer_engine",
            bf16=True,
            fp16_opt_level="O2",
            use_fp8=self.precision == "fp8",
            tensor_parallel_degree=self.tp,
            sequence_parallel=self.tp > 1,
            pad_to_max_length=self.tp > 1,
            pipeline_parallel_degree=self.pp,
            virtual_pp_degree=self.vp,
            sep_parallel_degree=self.sep,
            context_parallel_degree=self.cp,
            sharding=f"stage{self.stage}" if self.sharding > 1 else "",
            sharding_parallel_degree=self.sharding,
            per_device_train_batch_size=self.batch,
            gradient_accumulation_steps=self.micro_batches,
            max_seq_length=self.sequence,
            max_length=self.sequence,
            recompute=self.recompute != "none",
            recompute_granularity="full" if self.recompute == "none" else self.recompute,
            recompute_modules=self.recompute_modules,
            activation_func_fp8_input_store=self.fp8_input_store,
            mlp_chunk_tokens=self.mlp_chunk_tokens,
            offload_activations=self.offload_activations,
            offload_optimizer=self.offload_optimizer,
            use_fused_linear_cross_entropy=self.loss_in_chunks,
            fp8_lm_head=self.fp8_head,
            fp8_dpa=self.fp8_attention,
            amp_master_grad=self.main_grads,
            optim_moments=self.optim_moments,
            master_weights=self.master_weights,
            optimizer_in_backward=self.optimizer_in_backward,
            max_grad_norm=0.0 if self.optimizer_in_backward == "unclipped" else 1.0,
            lora=self.lora is not None,
        )

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps the gradients of its own weights only."""
        return self.sharding > 1 and self.stage > 1

    @property
    def shards_weights(self) -> bool:
        """Whether a rank keeps slices of the weights only."""
        return self.sharding > 1 and self.stage == 3

    @property
    def tokens(self) -> int:
        """Of a rank's micro-batch, of whose sequences other ranks may have the rest."""
        return self.batch * self.sequence // self.sharing

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.batch * self.sequence * self.micro_batches * self.data

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The parts of a layer that backward computes again, where it does not so with whole layers."""
        return self.recompute_modules + ("core_attn",) * (self.recompute == "core_attn")

    @property
    def mlp_in_chunks(self) -> bool:
        """Whether the GEMMs of a layer's MLP have more tokens than a chunk."""
        return 0 < self.mlp_chunk_tokens < self.tokens

    @property
    def offloads(self) -> bool:
        """Whether anything lies in host memory."""
        return self.offload_activations > 0 or self.offload_optimizer > 0

    @property
    def recompute_text(self) -> str:
        """What backward computes again, in words for a table."""
        return " + ".join(self.recomputed_modules) or self.recompute

    @property
    def memory_text(self) -> str:
        """The same, and how many tokens the MLP takes at a time where these are not all."""
        stored = ", SwiGLU's input in fp8" * self.fp8_input_store
        return self.recompute_text + stored + f", MLP in chunks of {self.mlp_chunk_tokens}" * self.mlp_in_chunks

    def launcher_arguments(self) -> dict[str, object]:
        """The launcher's arguments and variables that make this layout, but for EXTRA_ARGS."""
        arguments = {
            "batch_size_per_device": self.batch,
            "FSDP": self.sharding,
            "TP": self.tp,
            "PP": self.pp,
            "VP": self.vp,
            "GA": self.micro_batches,
            "SP": self.tp > 1,
            "max_seqlen": self.sequence,
            "sharding_stage": f"stage{self.stage}",
            "backend": "te",
            "precision": self.precision,
            "recompute": self.recompute,
        }
        if self.lora:  # fine-tuning has no pipelines
            del arguments["PP"], arguments["VP"]
            arguments["method"] = "lora"
        arguments |= {name: degree for name, degree in (("SEP", self.sep), ("CP", self.cp)) if degree > 1}
        return arguments | ({"OVERLAP": True} if self.overlap else {})

    def extra_arguments(self) -> str:
        """What stands in EXTRA_ARGS."""
        extra = self.lora.flags() if self.lora else []
        extra += [f"--recompute_modules {' '.join(self.recompute_modules)}"] * bool(self.recompute_modules)
        extra += ["--activation_func_fp8_input_store true"] * self.fp8_input_store
        extra += [f"--mlp_chunk_tokens {self.mlp_chunk_tokens}"] * bool(self.mlp_chunk_tokens)
        extra += [f"--offload_activations {self.offload_activations}"] * bool(self.offload_activations)
        extra += [f"--offload_optimizer {self.offload_optimizer:g}"] * bool(self.offload_optimizer)
        if self.main_grads != self.main_grads_by_themselves and not self.overlap:
            extra.append(f"--amp_master_grad {str(self.main_grads).lower()}")
        extra += ["--release_grads true"] * self.release_grads
        extra += ["--fp8_lm_head true"] * self.fp8_head + ["--fp8_dpa true"] * self.fp8_attention
        extra += ["--use_fused_linear_cross_entropy true"] * self.loss_in_chunks
        extra += chosen(self, OPTIMIZER)
        extra += ["--max_grad_norm 0"] * (self.optimizer_in_backward == "unclipped")
        return " ".join(extra)

    def __str__(self) -> str:
        degrees = {"TP": self.tp, "PP": self.pp, "VP": self.vp, "SEP": self.sep, "CP": self.cp}
        degrees |= {f"stage{self.stage} over ": self.sharding}
        degrees["DP"] = self.replicas
        words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1] or ["one GPU"]
        return " × ".join(words)
