"""Our models in the registry of EleutherAI's harness, as `paddle_te`. They are there once this module is imported.

import paddle_te.hosts.paddlenlp.evaluation.registered
lm_eval.simple_evaluate("paddle_te", model_args="pretrained=CKPT,transformer_engine_backend=paddle", tasks=["boolq"])
"""

from collections.abc import Mapping
from typing import Any, Self

import paddle
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import simple_parse_args_string

from paddle_te import device
from paddle_te.hosts.paddlenlp.evaluation.harness_model import HarnessModel
from paddle_te.hosts.paddlenlp.evaluation.model import (
    EvaluatedModel,
    make_model,
    make_scorer,
    make_template,
    read_length,
)
from paddle_te.hosts.paddlenlp.loading import load_config, load_tokenizer

# The harness's words for an EvaluatedModel's. What it has besides, max_batch_size, is for looking for a batch size.
_NAMES = {"pretrained": "model_name_or_path", "tokenizer": "tokenizer_name_or_path"}


@register_model("paddle_te")
class PaddleTE(HarnessModel, LM):
    """A model of ours as the harness makes it, from --model_args: pretrained, tokenizer and run_eval.py's own flags."""

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the model of {name: value}. additional_config: the harness's --batch_size and --device.

        Raises ValueError for a name that is none, and what `make_model` raises.
        """
        given = {**arg_dict, **{name: value for name, value in (additional_config or {}).items() if value is not None}}
        given.pop("max_batch_size", None)
        args = _arguments({_NAMES.get(name, name): value for name, value in given.items()})
        device.check_name(args.device)
        paddle.set_device(args.device)
        tokenizer = load_tokenizer(args.tokenizer_name_or_path, args.model_name_or_path)
        template = make_template(args, tokenizer)
        read_length(args, load_config(args.model_name_or_path, args.transformer_engine_backend))  # before the weights
        return cls(make_scorer(args, make_model(args)), tokenizer, template, args.tokenizer_name_or_path)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Self:
        """Do what `create_from_arg_obj` does, from "name=value,name=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)


def _arguments(given: dict[str, Any]) -> EvaluatedModel:
    if others := given.keys() - EvaluatedModel.__options__.keys():
        names = ", ".join([*_NAMES, *(name for name in EvaluatedModel.__options__ if name not in _NAMES.values())])
        raise ValueError(f"--model_args {', '.join(sorted(others))}: there is no such name; there are {names}")
    if "model_name_or_path" not in given:
        raise ValueError("--model_args: give pretrained=FOLDER, the checkpoint's")
    if isinstance(size := given.get("batch_size"), str):
        if not size.isdigit():
            raise ValueError(f"--batch_size {size}: give a number; none is looked for")
        given["batch_size"] = int(size)
    return EvaluatedModel(**given)
