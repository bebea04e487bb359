"""A run as one frozen record: all that its flags say, whoever says it, and what follows from that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from paddle_te.configs.spec import ModelSpec
from paddle_te.host import HOSTS, PADDLEFORMERS, PADDLENLP
from paddle_te.options.layers import AGAIN, FP8_RECIPES, FuseWgrad, Layers
from paddle_te.options.option import options_of
from paddle_te.options.pretraining import PretrainData, PretrainModel, Schedule
from paddle_te.options.training import OPTIMIZER, Kernels, Memory, Optimizer, Parallelism, Precision, Run
from paddle_te.options.tuning import (
    NO_REFERENCE,
    FinetuneData,
    FinetuneModel,
    PairPreference,
    PreferenceData,
    SinglePreference,
)
from paddle_te.records import Record, record

PRETRAIN, FINETUNE, DPO, KTO = "pretrain", "finetune", "dpo", "kto"
PREFERENCES = (DPO, KTO)


@record
class Job(
    Record,
    Layers, Parallelism, Precision, Memory, Kernels, Optimizer, Run, Schedule, PretrainModel, PretrainData,
    FinetuneModel, FinetuneData, PreferenceData, PairPreference, SinglePreference,
):  # fmt: skip
    """A run: the flags of its sections by name, and what no flag says.

    script: PRETRAIN, FINETUNE, DPO or KTO. host: the library of the model and its Trainer. world: processes, one a
    device. model: what config.json says; None where nobody has read it, and then no rule asks. elsewhere: the run is
    for another machine, so that what is installed here says nothing. A flag that has no default has one here that says
    nothing, and a degree that is not given is 1. positions_elsewhere, loads_flex: of a recipe of PaddleFormers, whether
    its configuration scales the angles or has their base elsewhere, and whether checkpoints are in its default format.
    """

    script: str = PRETRAIN
    host: str = PADDLENLP
    world: int = 1
    model: ModelSpec | None = None
    elsewhere: bool = False
    positions_elsewhere: bool = False
    loads_flex: bool = True
    model_name_or_path: str = ""
    output_dir: str = ""
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    sep_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1

    def __post_init__(self) -> None:
        """Preference tuning packs its rows, and fills them all."""
        if self.prefers:
            self.__dict__.update(zero_padding=True, pad_to_max_length=True)

    @classmethod
    def of(cls, flags: object, **known: Any) -> Job:
        """Return the record of what `flags` says, {flag: value} or an object with such attributes.

        What it leaves out has the flag's default. A host's enumerations become their words. known: further fields.
        """
        says = flags if isinstance(flags, Mapping) else _Attributes(flags)
        said = {name: _plain(name, says[name]) for name in FLAGS if name in says and name not in known}
        return cls(**said, **known)

    def but(self, **changes: object) -> Job:
        """The same run with other fields. Faster than `dataclasses.replace`, which the planner's search feels."""
        if unknown := changes.keys() - self.__dataclass_fields__.keys():
            raise TypeError(f"a Job has no {', '.join(sorted(unknown))}")
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **changes)
        return made

    # -- how ranks share the work -----------------------------------------------------------------

    @property
    def tp(self) -> int:
        """Degree of tensor parallelism."""
        return self.tensor_parallel_degree

    @property
    def pp(self) -> int:
        """Degree of pipeline parallelism."""
        return self.pipeline_parallel_degree

    @property
    def vp(self) -> int:
        """Virtual stages of a rank."""
        return self.virtual_pp_degree

    @property
    def sep(self) -> int:
        """Ranks that share sequences by an exchange of heads."""
        return self.sep_parallel_degree

    @property
    def cp(self) -> int:
        """Ranks that share sequences by ring attention."""
        return self.context_parallel_degree

    @property
    def ep(self) -> int:
        """Sharding ranks that divide a mixture's experts."""
        return self.expert_parallel_degree

    @property
    def sharing(self) -> int:
        """Ranks that have parts of the same sequences, by SEP or CP."""
        return self.sep * self.cp

    @property
    def shared_by(self) -> str:
        """The flag by which ranks share sequences, SEP's unless only CP is asked for."""
        return "context_parallel_degree" if self.cp > 1 and self.sep == 1 else "sep_parallel_degree"

    @property
    def devices(self) -> int:
        """One for each process."""
        return self.world

    @property
    def ranks_of_a_sequence(self) -> int:
        """Ranks between which data is not divided."""
        return self.tp * self.pp * self.sharing

    @property
    def sharding_ranks(self) -> int:
        """Ranks that share states: all that the other degrees leave where --sharding says no number."""
        if self.sharding_parallel_degree > 0:
            return self.sharding_parallel_degree
        return max(self.world // self.ranks_of_a_sequence, 1) if self.sharding else 1

    @property
    def stage(self) -> int:
        """Sharding's stage: 1 divides optimizer states, 2 also gradients, 3 also weights."""
        found = re.search("stage([123])", self.sharding)
        return int(found[1]) if found else 1

    @property
    def data(self) -> int:
        """Ranks with other sequences."""
        return self.world // self.ranks_of_a_sequence

    @property
    def replicas(self) -> int:
        """Data-parallel ranks, each with all that sharding's ranks have together."""
        return self.data // self.sharding_ranks

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps the gradients of its own weights only."""
        return self.sharding_ranks > 1 and self.stage > 1

    @property
    def shards_weights(self) -> bool:
        """Whether a rank keeps slices of the weights only."""
        return self.sharding_ranks > 1 and self.stage == 3

    @property
    def overlaps(self) -> bool:
        """Whether sharding's communication runs at the same time as computation."""
        return "overlap" in self.sharding_parallel_config

    # -- how much a step is of ----------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Sequences of a micro-batch."""
        return self.per_device_train_batch_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on a rank."""
        return self.gradient_accumulation_steps

    @property
    def tokens(self) -> int:
        """Tokens of a rank's micro-batch; other ranks may have the rest of its sequences."""
        return self.batch * self.sequence // self.sharing

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step on all ranks."""
        return self.batch * self.sequence * self.micro_batches * self.data

    @property
    def mlp_in_chunks(self) -> bool:
        """Whether the GEMMs of a layer's MLP have more tokens than a chunk."""
        return 0 < self.chunk < self.tokens

    @property
    def length_flag(self) -> str:
        """The flag that says how many tokens a sequence has."""
        return "max_seq_length" if self.script == PRETRAIN else "max_seq_len" if self.prefers else "max_length"

    @property
    def sequence(self) -> int:
        """Tokens of a sequence at most."""
        return getattr(self, self.length_flag)

    @property
    def one_length(self) -> bool:
        """Whether all sequences have the full length; in fine-tuning only packed or padded ones have."""
        return self.script == PRETRAIN or self.pad_to_max_length or self.zero_padding

    # -- what is learned ----------------------------------------------------------------------------

    @property
    def tunes(self) -> bool:
        """Whether the run tunes a trained model, on answers or on preferences."""
        return self.script != PRETRAIN

    @property
    def prefers(self) -> bool:
        """Whether the run tunes on preferences."""
        return self.script in PREFERENCES

    @property
    def has_reference(self) -> bool:
        """Whether answers are compared with a reference's."""
        return self.prefers and not (self.reference_free or (self.script == DPO and self.loss_type in NO_REFERENCE))

    @property
    def second_model(self) -> bool:
        """Whether the reference is a second model: not the model without its adapter, nor numbers computed before."""
        return self.has_reference and not (self.lora or self.precompute_ref_log_probs)

    # -- what computes ----------------------------------------------------------------------------

    @property
    def te(self) -> bool:
        """Whether the decoder layers are Transformer Engine's."""
        return self.transformer_engine_backend == "transformer_engine"

    @property
    def ours(self) -> bool:
        """Whether the decoder layers are te's or pd's, not the host's own."""
        return self.transformer_engine_backend != "none"

    @property
    def place(self) -> str:
        """Kind of device: cpu, gpu, nvgpu."""
        return self.device.partition(":")[0]

    @property
    def model_dtype(self) -> str:
        """The weights' dtype: 16 bits with fp16_opt_level O2 only, since O1 casts what an operation takes."""
        half = "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
        return half if self.fp16_opt_level == "O2" else "float32"

    @property
    def precision(self) -> str:
        """The launcher's word: fp8, bf16 or fp32."""
        return "fp8" if self.use_fp8 else "bf16" if self.bf16 else "fp32"

    @property
    def optimizer(self) -> dict[str, str]:
        """The flags of the optimizer on which memory depends: {name: value}."""
        return {name: getattr(self, name) for name in OPTIMIZER}

    @property
    def offloads(self) -> bool:
        """Whether anything lies in host memory."""
        return self.layers_on_host > 0 or self.share_on_host > 0

    @property
    def layers_on_host(self) -> int:
        """Decoder layers whose activations lie in host memory meanwhile."""
        return self.offload_activations

    @property
    def share_on_host(self) -> float:
        """The share of the optimizer's states that lies in host memory, 0 to 1."""
        return self.offload_optimizer

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The parts of a layer that backward computes again, where it does not so with whole layers."""
        return self._parts_again + ("core_attn",) * (self.recomputed == "core_attn")

    @property
    def _parts_again(self) -> tuple[str, ...]:
        return getattr(self, AGAIN) or ()

    @property
    def stores_input_in_fp8(self) -> bool:
        """Whether the input of the MLP's activation is kept in fp8."""
        return self.activation_func_fp8_input_store

    @property
    def chunk(self) -> int:
        """Tokens that the MLP takes at a time; 0: all."""
        return self.mlp_chunk_tokens

    @property
    def input_again(self) -> str:
        """The flag with which backward computes the input of the MLP's activation again; "" where it is kept."""
        if self.recomputed == "full":
            return "recompute_granularity"
        if "mlp" in self._parts_again:
            return AGAIN
        return "mlp_chunk_tokens" if self.mlp_chunk_tokens else ""

    @property
    def fp8_multiple(self) -> int:
        """The number that must divide the dimensions of GEMMs; 1 without fp8."""
        return FP8_RECIPES[self.fp8_recipe] if self.use_fp8 else 1

    @property
    def fuses_wgrad(self) -> FuseWgrad:
        """Where te's GEMMs add up weight gradients.

        In main gradients, if there are any; else several micro-batches of one process in the gradients themselves.
        Several processes may wait for each gradient of Paddle's, to send it.
        """
        if self.amp_master_grad:
            return self.te
        return "grad" if self.te and self.world == 1 and self.micro_batches > 1 else False

    @property
    def keeps_main_gradients(self) -> bool:
        """Whether the launcher asks for float32 main gradients.

        It does for 16-bit weights over several devices of nvgpu or in PaddleFormers.

        PaddleFormers needs them to shard the optimizer and to clip gradients. On nvgpu Paddle clips no bf16 gradients
        of parallel models, unless the optimizer is ours. An update in backward uses each gradient at once and keeps
        none.
        """
        needed = self.place == "nvgpu" or self.host == PADDLEFORMERS
        half = needed and self.model_dtype != "float32"
        return half and self.world > 1 and self.optimizer_in_backward == "off"

    @property
    def library(self) -> str:
        """The host's name."""
        return HOSTS[self.host]

    @property
    def family(self) -> str:
        """The title of the model's family."""
        return self.model.family.title if self.model else ""

    @property
    def layers(self) -> int:
        """Decoder layers of the model; 0 where nobody has read its config.json."""
        return len(self.model.layers) if self.model else 0

    @property
    def positions(self) -> int:
        """Tokens of the model's longest sequence; 0 where nobody has read its config.json."""
        return self.model.positions if self.model else 0

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated while training."""
        return self.do_eval or self.evaluation_strategy != "no"


SECTIONS = Job.__bases__[1:]  # behind Record
FLAGS = tuple(dict.fromkeys(option.name for option in options_of(*SECTIONS)))
_DEGREES = (
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "sep_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)


class _Attributes(Mapping[str, object]):
    """An object's attributes as a mapping."""

    def __init__(self, of: object) -> None:
        self._of = of

    def __getitem__(self, name: str) -> object:
        return getattr(self._of, name)

    def __contains__(self, name: object) -> bool:
        return hasattr(self._of, str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._of))

    def __len__(self) -> int:
        return len(vars(self._of))


def _plain(name: str, value: Any) -> Any:
    """Return a host's enumeration as its word, a list as a tuple, PaddleNLP's list of ShardingOptions as one text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        words = tuple(str(getattr(each, "value", each)) for each in value)
        return " ".join(words) if name == "sharding" else words
    if name in _DEGREES:
        return max(int(str(value)), 1)
    return value
