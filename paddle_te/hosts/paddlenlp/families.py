"""From a configuration to the classes of its family, by their names."""

import importlib
from typing import Any

from paddlenlp import transformers

from paddle_te.configs.families import Family, family_of
from paddle_te.configs.rope import check_paddlenlps_layers
from paddle_te.configs.spec import spec_of
from paddle_te.host import HostConfig
from paddle_te.hosts.paddlenlp import own_model
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP, no_class
from paddle_te.models.backend import check_backend_name, is_native
from paddle_te.models.context_parallel import sequence_ranks


def config_class(family: Family) -> Any:
    """Return the class for the configurations of a Family: PaddleNLP's, or ours where it has none."""
    if family.model_type not in PADDLENLP:
        return own_model.config_class(family)
    return getattr(transformers, f"{family.title}Config")


def _check_paddlenlps_layers(config: HostConfig, family: Family) -> None:
    """Raise ValueError for what PaddleNLP's own layers would leave out without a word."""
    theirs = PADDLENLP[family.model_type]
    if config.sequence_parallel and not theirs.sequence_parallel:
        raise ValueError(
            f"PaddleNLP's own {family.title} has no sequence parallelism; backends paddle and transformer_engine have"
        )
    if (ranks := sequence_ranks(config)) > 1 and not theirs.segment_parallel:
        raise ValueError(
            f"sequences that {ranks} ranks share: PaddleNLP's own {family.title} would not see whole "
            "sequences; backends paddle and transformer_engine do"
        )
    check_paddlenlps_layers(config)
    length = getattr(config, "seq_length", None) or config.max_position_embeddings
    window = spec_of(config).layer.attention.window
    if window and length > window:
        raise ValueError(
            f"sequences of {length} tokens with sliding_window={window}: PaddleNLP's own {family.title} would see all "
            "tokens; use backend paddle or transformer_engine, or sequences that are no longer than the window"
        )


def check_packed(config: HostConfig) -> None:
    """Raise ValueError where PaddleNLP's own model takes no mask that keeps packed documents apart."""
    family = family_of(config)
    if is_native(config) and not PADDLENLP[family.model_type].packed:
        raise ValueError(
            f"packed documents: PaddleNLP's own {family.title} takes no mask that keeps them apart; use backend paddle "
            "or transformer_engine, or do not pack"
        )
    of_the_host = family.model_type in PADDLENLP
    if of_the_host and family.learned_positions and getattr(config, "pipeline_parallel_degree", 1) > 1:
        raise ValueError(
            f"packed documents: PaddleNLP's pipeline of {family.title} reads the mask that keeps them apart as another "
            "one; leave --pipeline_parallel_degree at 1, or do not pack"
        )


def model_class(config: HostConfig, pipeline: bool = False) -> Any:
    """Return the class of a configuration's model for its transformer_engine_backend; PaddleNLP's own for "none".

    Raises ValueError for another backend, for a family that there is not, and for what PaddleNLP has not in this one.
    """
    backend, family = config.transformer_engine_backend, family_of(config)
    check_backend_name(backend)
    if sequence_ranks(config) > 1 and family.learned_positions:
        raise ValueError(
            f"{family.title} has learned positions, which would begin anew on each rank that shares a sequence: leave "
            "--sep_parallel_degree and --context_parallel_degree at 1"
        )
    if family.model_type not in PADDLENLP:
        if backend == "none":
            raise ValueError(no_class(family.title))
        return own_model.model_class(family, pipeline)
    if pipeline and not PADDLENLP[family.model_type].pipeline:
        raise ValueError(f"PaddleNLP has no pipeline for {family.title}: leave --pipeline_parallel_degree at 1")
    if backend == "none":
        _check_paddlenlps_layers(config, family)
        module = f"paddlenlp.transformers.{family.model_type}.{'modeling_pp' if pipeline else 'modeling'}"
    else:
        module = f"paddle_te.hosts.paddlenlp.{family.model_type}"
    return getattr(importlib.import_module(module), family.architecture + "Pipe" * pipeline)
