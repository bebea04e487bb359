"""Trains PaddleNLP's Llama for four steps: python train.py {one|tp|sharding3}; from test_plugin.py."""

import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

RANK, SIZE = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])


def start(mode):
    paddle.set_device(f"nvgpu:{RANK}")
    strategy = fleet.DistributedStrategy()
    degrees = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
    degrees[{"one": "dp_degree", "tp": "mp_degree", "sharding3": "sharding_degree"}[mode]] = SIZE
    strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)
    return degrees["mp_degree"]


def make_model(degree):
    config = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    paddle.set_default_dtype("bfloat16")
    model = LlamaForCausalLM(
        LlamaConfig(
            **config,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_flash_attention=False,
            tensor_parallel_degree=degree,
            tensor_parallel_rank=RANK if degree > 1 else 0,
            tensor_parallel_output=True,
            dtype="bfloat16",
        )
    )
    paddle.set_default_dtype("float32")
    random = np.random.RandomState(5)
    for parameter in model.parameters():
        if len(parameter.shape) == 1:
            continue
        shape, axis = list(parameter.shape), getattr(parameter, "split_axis", None)
        split = degree > 1 and parameter.is_distributed
        if split:
            shape[axis] *= degree
        value = random.standard_normal(shape).astype("float32") * 0.05
        if split:
            value = np.split(value, degree, axis)[RANK]
        parameter.set_value(paddle.to_tensor(value).astype(parameter.dtype))
    return model


def main():
    mode = sys.argv[1]
    degree = start(mode)
    model = make_model(degree)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters(), multi_precision=True)
    if mode == "tp":
        model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    if mode == "sharding3":
        # far below the default of 2**20 elements, at which a small model stays whole
        model, optimizer, _ = dist.sharding.group_sharded_parallel(model, optimizer, "p_g_os", segment_size=100)
        print("SLICED", sum(getattr(p, "fw_storage", None) is not None for p in model.parameters()))
    data = np.random.RandomState(7).randint(0, 256, (2, 32)).astype("int64")
    ids = paddle.to_tensor(data[RANK : RANK + 1] if mode == "sharding3" else data)
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids)
        loss = loss[0] if isinstance(loss, (list, tuple)) else loss
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        total = loss.astype("float32").detach()
        if mode == "sharding3":
            dist.all_reduce(total)
            total = total / SIZE
        print("LOSS", float(total), flush=True)


if __name__ == "__main__":
    main()
