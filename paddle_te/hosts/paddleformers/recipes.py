"""PaddleFormers' own recipes with our decoder layers: what `paddleformers-cli train run.yaml` does in each process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import paddle.distributed as dist
from paddleformers.cli.hparams import read_args
from paddleformers.cli.train.sft import workflow
from paddleformers.cli.train.tuner import run_tuner
from paddleformers.nn.criterion import sft_loss
from paddleformers.trainer import trainer
from paddleformers.trainer.integrations import get_available_reporting_integrations
from paddleformers.transformers import AutoConfig
from paddleformers.transformers.llama import modeling

from paddle_te import upstream
from paddle_te.hosts.paddleformers import corpora, launched
from paddle_te.hosts.paddleformers.configuration import has_positions_elsewhere
from paddle_te.hosts.paddleformers.criterion import mean_of_counted
from paddle_te.hosts.paddleformers.lora import TELoRAModel
from paddle_te.hosts.paddleformers.modeling import LlamaForCausalLM, LlamaForCausalLMPipe, check_family
from paddle_te.hosts.paddleformers.replaced import replaced
from paddle_te.hosts.paddleformers.trainer import OurTrainer, TETrainer
from paddle_te.hosts.paddleformers.weights import read_config
from paddle_te.job import check
from paddle_te.job.paddleformers import FLEX, ITS_OWN, RECIPE, job_of_recipe
from paddle_te.models.backend import is_native
from paddle_te.options import LAYER_OPTIONS, LayerOptions, check_values
from paddle_te.training.trackers import check_logins

# Options of our layers that a recipe may hold and that do not reach its configurations without us
OPTIONS = {name: option for name, option in LAYER_OPTIONS.items() if name not in ITS_OWN}

# Of Paddle: without them its sharding and FlashMask refuse nvgpu, sharding and virtual pipeline stages are slow or hang
# there, pipelines clip a model with tied embeddings too much, rank 0 may abort in its end, and C++ code speaks up
REPAIRS = (
    "sharding_alignment",
    "flash_attention_flags",
    "averages",
    "stage2_storage",
    "stage3_storage",
    "stage3_prefetch",
    "stage3_gradients",
    "pipeline_transfers",
    "shared_weights",
    "threaded_store",
    "promotion_notices",
)
# What a recipe may say with our layers: the values, and what to do about another one
_ONLY = {
    "stage": (("PT", "SFT"), "use backend none for this stage"),
    "save_checkpoint_format": ((FLEX,), "leave it out, as others have no Hugging Face names"),
    "load_checkpoint_format": ((FLEX,), "leave it out, as others have no Hugging Face names"),
}


def check_recipe(recipe: Mapping[str, Any], world: int = 1) -> None:
    """Raise ValueError for values that our options in a recipe may not have, and lines that do not go together.

    It also refuses a model of another family. world: processes.
    """
    layers = LayerOptions(**_ours(recipe))
    check_values(layers, options=OPTIONS)
    read_config(recipe["model_name_or_path"])
    elsewhere = has_positions_elsewhere(AutoConfig.from_pretrained(recipe["model_name_or_path"]))
    check(job_of_recipe(recipe, world, positions_elsewhere=elsewhere), RECIPE)
    if not is_native(layers):
        for name, (values, remedy) in _ONLY.items():
            if recipe.get(name) not in (None, *values):
                raise ValueError(
                    f"{name}: {recipe[name]!r}: backends paddle and transformer_engine have only "
                    f"{' and '.join(filter(None, values))} in PaddleFormers; {remedy}"
                )
        check_family(AutoConfig.from_pretrained(recipe["model_name_or_path"]))


def check_training(recipe: Mapping[str, Any]) -> None:
    """Raise ValueError as `check_recipe` with as many processes as were started, for a damaged corpus or no login."""
    check_recipe(recipe, dist.get_world_size())
    reports = job_of_recipe(recipe).report_to or ()
    check_logins(reports, get_available_reporting_integrations(), recipe.get("wandb_api_key"))
    corpora.check_corpora(recipe)


def train(recipe: Mapping[str, Any]) -> None:
    """Run a recipe, a dict of PaddleFormers' arguments, of OPTIONS and of `launched.OPTIONS`.

    Raises what `check_training` raises, and what `check_config` raises where our layers cannot do what the recipe
    asks for.
    """
    check_training(recipe)
    upstream.apply(*REPAIRS)
    fuse = job_of_recipe(recipe, dist.get_world_size()).fuses_wgrad
    said = {name: recipe[name] for name in launched.OPTIONS if name in recipe}
    whole = replaced(workflow, create_pretrained_dataset=corpora.checked())
    loss = replaced(sft_loss, sft_postprocess_loss=mean_of_counted)
    ours = our_llama(**_ours(recipe), fuse_wgrad_accumulation=fuse)
    with ours, whole, loss, launched.launched(**said), _evaluating_lora():
        run_tuner(without_ours(recipe))


@contextmanager
def _evaluating_lora() -> Iterator[None]:
    """Let PaddleFormers 1.2.0 evaluate with LoRA while it lasts.

    It asks for a class of paddlefleet's, which has no name in its Trainer's module where paddlefleet is not
    installed.
    """
    if missing := not hasattr(trainer, "GPTModel"):
        trainer.GPTModel = type("GPTModel", (), {})
    try:
        yield
    finally:
        if missing:
            del trainer.GPTModel


def without_ours(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe as PaddleFormers knows it."""
    return {name: value for name, value in recipe.items() if name not in {*OPTIONS, *launched.OPTIONS}}


def _ours(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name in OPTIONS}


@contextmanager
def our_llama(**options: Any) -> Iterator[None]:
    """Let PaddleFormers' Auto classes build a Llama with our decoder layers and these options while it lasts.

    The options are LayerOptions', as they would stand in its config.json, and what fuse_wgrad_accumulation says of
    the Trainer. Recipes train it with LoRA and a Trainer for them; with transformer_engine_backend "none" only the
    Trainer is ours.
    """
    layers = LayerOptions(**options)
    if is_native(layers):
        with replaced(workflow, SFTTrainer=OurTrainer):
            yield
        return
    every = {name: getattr(layers, name) for name in OPTIONS}  # else those of an earlier run's config.json stay
    theirs = dict(options=every, fuse_wgrad_accumulation=layers.fuse_wgrad_accumulation, keeps_fp8_state=True)
    models = {ours.__name__: type(ours.__name__, (ours,), theirs) for ours in (LlamaForCausalLM, LlamaForCausalLMPipe)}
    with replaced(modeling, **models), replaced(workflow, LoRAModel=TELoRAModel, SFTTrainer=TETrainer):
        yield


def read_recipe() -> dict[str, Any]:
    """Return the recipe that the command line names, with what follows it there in the form name=value.

    Raises ValueError where it names no YAML or JSON file.
    """
    arguments = read_args()
    if not isinstance(arguments, dict):
        raise ValueError("give a recipe, a YAML or JSON file, as paddleformers-cli takes one")
    if arguments.get("sharding", "") is None:  # of sharding="" a shell leaves sharding=
        arguments["sharding"] = ""
    return arguments
