"""Models from checkpoint folders."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle import Tensor
from paddlenlp.generation import GenerationConfig

from paddle_te.configs import MODEL_VALUES, check_computed
from paddle_te.configs.families import family_of, is_tied
from paddle_te.configs.others import CHANGING, NOT_FOR_PADDLENLP
from paddle_te.configs.reading import remarks
from paddle_te.configs.schema import keys_of
from paddle_te.data.questions import IGNORED
from paddle_te.data.tokenizer import load_tokenizer  # noqa: F401 (one import for a model and its tokenizer)
from paddle_te.data.tokenizer_folder import GENERATION, end_tokens
from paddle_te.distributed import gather_objects
from paddle_te.distributed.expert_parallel import experts_share, own_experts
from paddle_te.fp8 import fp8_model_init
from paddle_te.host import HostConfig, HostModel
from paddle_te.hosts.paddlenlp.families import config_class, model_class
from paddle_te.hosts.paddlenlp.modeling import TELMHead
from paddle_te.hosts.paddlenlp.room import check_room
from paddle_te.layers import stored_weights
from paddle_te.models import pipeline
from paddle_te.models.backend import check_backend, check_backend_name, is_native
from paddle_te.models.decoder import recipe_of
from paddle_te.runs.transfers import Transfer
from paddle_te.weights import CheckpointError, check_layout, native_layout, read_tensors, te_layout
from paddle_te.weights import config as weights_config
from paddle_te.weights.adapters import open_adapter, with_adapter
from paddle_te.weights.config import native_words
from paddle_te.weights.folder import Checkpoint
from paddle_te.weights.layout import Layout
from paddle_te.weights.verification import FULL, Verification

logger = logging.getLogger(__name__)


@contextmanager
def _no_views() -> Iterator[None]:
    """Let slices be copies while it lasts.

    Tensor.set_value copies a view from the host to a custom device without its strides (Paddle 3.3.1), and
    PaddleNLP splits weights over tensor parallel ranks by slicing.
    """
    flag = "FLAGS_use_stride_kernel"
    kept = paddle.get_flags(flag)
    paddle.set_flags({flag: False})
    try:
        yield
    finally:
        paddle.set_flags(kept)


def verification(level: str = FULL) -> Verification:
    """Return the Verification, at a level of --verify_checkpoint, of files that all processes read together."""
    ranks = dist.get_world_size()
    return Verification(level, dist.get_rank(), ranks, lambda mine: gather_objects(mine, ranks), logger.warning)


def from_pretrained(
    model_class: Any,
    folder: str | Path,
    config: HostConfig,
    dtype: str,
    in_fp8: bool = False,
    verify: str = FULL,
    adapter: str | Path | None = None,
    keep_transpose_cache: bool = False,
) -> HostModel:
    """Return model_class(config) with the weights in `folder`, in the backend's layout or in Hugging Face's.

    All processes call it. The model's `loaded` is the Transfer.
    adapter: the folder of a LoRA adapter, which is added to the weights as they are read.
    in_fp8: the weights of the decoder layers' GEMMs exist in fp8 only, quantized as they are read for the recipe of the
    configuration. keep_transpose_cache: `fp8_model_init`'s. verify: how much of the folder's manifest, if it has one,
    is compared, beside the reading. Raises CheckpointError where PaddleNLP would only warn, and for files that differ
    from their manifest. Raises ValueError for a model that this machine cannot hold.
    """
    start = time.perf_counter()
    check_room(config, dtype, in_fp8)
    if adapter:
        verification(verify).check(adapter)
    with verification(verify).beside(folder) as comparison:
        checkpoint = check_layout(folder, "native" if is_native(config) else "te", hf=True)
        storing = fp8_model_init(True, recipe_of(config), keep_transpose_cache) if in_fp8 else None
        model = _with_weights(model_class, checkpoint, config, dtype, storing, adapter)
    verified = comparison.result
    size = sum(path.stat().st_size for path in checkpoint.files)
    note = f"{verified.words} ({verified.seconds:.1f} s)" if verified.compared else verified.words
    model.loaded = Transfer("load", Path(folder), size, time.perf_counter() - start, note, verified.compared)
    if dist.get_rank() == 0:
        logger.info(model.loaded.line())
    return model


def _with_weights(
    model_class: Any,
    checkpoint: Checkpoint,
    config: HostConfig,
    dtype: str,
    storing: fp8_model_init | None,
    adapter: str | Path | None,
) -> HostModel:
    """Return model_class(config) with an opened Checkpoint's weights, read by PaddleNLP where it reads them right.

    storing: the context in which a model is made whose GEMMs' weights exist in fp8 only; None for others.
    """
    folder = checkpoint.folder
    of_a_rank = any(folder.glob("model_state.[tpe]p*"))
    # PaddleNLP's GPT gives each of several ranks the whole head, which has room for a part
    whole_head = family_of(config).learned_positions and config.tensor_parallel_degree > 1
    rank_by_rank = of_a_rank or whole_head or experts_share()[0] > 1
    # of a tied head, which files may leave out, PaddleNLP warns that it is newly initialized
    if storing or checkpoint.layout.kind == "hf" or rank_by_rank or adapter or is_tied(config):
        if adapter:
            checkpoint = with_adapter(checkpoint, open_adapter(adapter, family_of(config)))
        with storing or nullcontext():
            model = model_class.from_config(config, dtype=dtype)
        load_weights(model, checkpoint)
    else:
        with _no_views():
            model = model_class.from_pretrained(str(folder), config=config, dtype=dtype)
    keep_generation(model, folder)
    return model


def keep_generation(model: HostModel, folder: Path) -> None:
    """Give a model what the folder's generation_config.json says, which the model then saves."""
    end_tokens(folder)  # raises for a file that cannot be read
    if (folder / GENERATION).is_file() and getattr(model, "generation_config", None) is not None:
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
        model.generation_config._from_model_config = False  # else PaddleNLP makes one of config.json, and warns
        if model.generation_config.decode_strategy != "sampling":  # PaddleNLP saves none that has these, without use
            model.generation_config.temperature = model.generation_config.top_p = 1.0


def load_weights(model: HostModel, checkpoint: Checkpoint) -> None:
    """Give a model the weights of an opened Checkpoint in any layout and degrees: each rank reads its own share.

    The weights are translated on their way, tensor by tensor, and quantized where the model has them in fp8 only; the
    host holds at most twice the largest tensor at a time. Raises CheckpointError where one is missing or has
    another shape, or where the checkpoint has more layers than the model.
    """
    config, theirs = model.config, checkpoint.dims.num_hidden_layers
    if theirs != config.num_hidden_layers:
        raise CheckpointError(f"{checkpoint.folder}: has {theirs} layers, the model {config.num_hidden_layers}")
    weights = model.state_dict()  # this pipeline stage's; the parameters themselves
    # by the parameters: a stage of a pipeline calls them otherwise than the whole model
    stored = {id(layer._parameters[weight]): (layer, weight) for layer, weight in stored_weights(model).values()}
    for name, array in read_share(checkpoint, config, weights.keys()):
        if list(array.shape) != list(weights[name].shape):
            raise CheckpointError(
                f"{checkpoint.folder}: {name} has shape {list(array.shape)}, in this model {list(weights[name].shape)}"
            )
        tensor = on_device(array)
        if id(weights[name]) in stored:
            layer, weight = stored[id(weights[name])]
            layer.store_weight(weight, tensor)
        else:
            weights[name].set_value(tensor.astype(weights[name].dtype))
        del array, tensor  # before the next one is read


def on_device(array: NDArray[Any]) -> Tensor:
    """Return the tensor of one of `read_share`'s arrays on the present device, whose uint16 are bfloat16's bits."""
    return paddle.to_tensor(np.ascontiguousarray(array))


def read_share(
    checkpoint: Checkpoint, config: HostConfig, names: Iterable[str], numbers: bool = False
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (name, numpy array) of the weights `names`, as this rank of tensor and expert parallelism has them.

    checkpoint: a Checkpoint; or one kind of its weights' state, numbers as in `read_tensors`. Raises CheckpointError
    where one is missing.
    """
    # tied embeddings are saved under one name, but the last pipeline stage has its own copy
    layout = layout_of(config)
    copies = {layout.model_name("embed"): layout.model_name("lm_head")} if is_tied(config) else {}
    degree, rank = max(config.tensor_parallel_degree, 1), max(config.tensor_parallel_rank, 0)
    missing = set(names)
    for name, array in read_tensors(checkpoint, layout, missing | set(copies), degree, rank, numbers):
        if not numbers and layout.place(name).slot.stacked:
            array = own_experts(array)
        for here in {name, copies.get(name, name)} & set(names):
            yield here, array
            missing.discard(here)
        del array  # before the next one is read
    if missing:
        raise CheckpointError(f"{checkpoint.folder}: has nothing for {', '.join(sorted(missing))} of this model")


def layout_of(config: HostConfig) -> Layout:
    """Return the Layout of a model's weights, from its configuration."""
    tied, family = is_tied(config), family_of(config)
    if not is_native(config):
        return te_layout(tied, family)
    return native_layout(config.fuse_attention_qkv, config.fuse_attention_ffn, tied, family)


def read_config(folder: str | Path, backend: str | None = None) -> HostConfig:
    """Return the configuration, PaddleNLP's object, of a folder's config.json, PaddleNLP's or Hugging Face's.

    Raises CheckpointError, also for what PaddleNLP's model, or the layers of a `backend`, would take in silence and
    compute otherwise.
    """
    said = weights_config.read_config(folder)
    if said is None:
        raise CheckpointError(f"{folder}: has no config.json")
    words = native_words(said)
    check_computed(said, backend)
    for remark in remarks(said) if dist.get_rank() == 0 else ():
        _tell(remark)
    left_out = NOT_FOR_PADDLENLP.union(said.unknown, CHANGING.keys() - keys_of(type(said.record)).keys())
    kept = {name: value for name, value in words.items() if name not in left_out}
    config = config_class(said.family).from_dict(kept)
    if "ignore_index" not in kept:
        config.ignore_index = IGNORED  # PaddleNLP's GPT would leave out the loss of word 0
    return config


@cache
def _tell(remark: str) -> None:
    logger.warning(remark)


def check_same_model(config: HostConfig, folder: str | Path) -> None:
    """Refuse weights of another model.

    Its shapes may be others or the same, as those of Llama 3.1 and Llama 3, whose angles differ.

    Raises CheckpointError that names all values which differ. A folder without config.json tells nothing.
    """
    if not (Path(folder) / "config.json").is_file():
        return
    there, here = ({name: getattr(each, name, None) for name in MODEL_VALUES} for each in (read_config(folder), config))
    differ = [name for name in MODEL_VALUES if there[name] != here[name]]
    if differ:
        found, wanted = (", ".join(f"{name}={values[name]}" for name in differ) for values in (there, here))
        raise CheckpointError(
            f"{folder}: its weights belong to a model with {found}, this run's has {wanted}: give the folder as "
            "model_name_or_path too, or change its config.json to go on with other values"
        )


def check_token_ids(rows: Iterable[Any], config: HostConfig) -> None:
    """Raise ValueError where a row of token ids has one that the model's embedding does not have."""
    largest = max((max(row) for row in rows if len(row)), default=0)
    if largest >= config.vocab_size:
        raise ValueError(
            f"the text has token id {largest}, but the model's vocab_size is {config.vocab_size}: the tokenizer is "
            "another model's (--tokenizer_name_or_path)"
        )


def load_config(folder: str | Path, backend: str = "none", **settings: Any) -> HostConfig:
    """Return PaddleNLP's configuration of the checkpoint in `folder` for a run with `backend`; settings override it.

    Its weights are not looked at. Raises FileNotFoundError, and ValueError for an unknown backend or a config.json that
    says what it may not.
    """
    check_backend_name(backend)
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of a checkpoint")
    config = read_config(folder, backend)
    # a checkpoint of another run brings that run's flags along
    own = dict(transformer_engine_backend=backend, use_fp8=False, fp8_lm_head=False, sequence_parallel=False)
    own |= dict(tensor_parallel_degree=1, pipeline_parallel_degree=1, virtual_pp_degree=1)
    own |= dict(use_fused_linear_cross_entropy=False, fuse_wgrad_accumulation=False)
    for name, value in {**own, **settings}.items():
        setattr(config, name, value)
    return config


def load_model(
    folder: str | Path,
    backend: str = "none",
    dtype: str = "float32",
    verify: str = FULL,
    adapter: str | Path | None = None,
    **settings: Any,
) -> HostModel:
    """Return the model with the weights in `folder`, in evaluation mode; of a pipeline (settings) this process's stage.

    verify, adapter: as `from_pretrained`'s. Raises what `check_backend`, `load_config` and `from_pretrained` raise.
    """
    check_backend(backend, dtype, settings.get("use_fp8", False))
    config = load_config(folder, backend, **settings)
    model = from_pretrained(
        model_class(config, config.pipeline_parallel_degree > 1), folder, config, dtype, verify=verify, adapter=adapter
    )
    model.eval()
    return model


def stage_layer_names(model: HostModel) -> dict[str, str]:
    """Return `models.pipeline.stage_layer_names`, and the head's name.

    PaddleNLP's GPT names the head on a stage after the embedding, whose weight it shares.
    """
    names = pipeline.stage_layer_names(model)
    heads = [name for name, layer in model.named_sublayers() if isinstance(layer, TELMHead)]
    return names | {name: "lm_head" for name in heads if name in names}
