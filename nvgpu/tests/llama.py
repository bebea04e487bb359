"""Trains PaddleNLP's Llama for four steps on one device: python llama.py DEVICE DTYPE SEED"""

import sys

import numpy as np
import paddle
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

TINY = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def make_model(dtype, random):
    paddle.set_default_dtype(dtype)
    config = LlamaConfig(
        **TINY, num_key_value_heads=2, max_position_embeddings=64, use_flash_attention=False, dtype=dtype
    )
    model = LlamaForCausalLM(config)
    paddle.set_default_dtype("float32")
    for parameter in model.parameters():
        if len(parameter.shape) > 1:
            value = random.standard_normal(parameter.shape).astype("float32") * 0.05
            parameter.set_value(paddle.to_tensor(value).astype(parameter.dtype))
    return model


def main():
    device, dtype, seed = sys.argv[1:]
    random = np.random.RandomState(int(seed))
    paddle.set_device(device)
    model = make_model(dtype, random)
    optimizer = paddle.optimizer.AdamW(
        1e-3,
        parameters=model.parameters(),
        multi_precision=dtype != "float32",
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    ids = paddle.to_tensor(random.randint(0, 256, (2, 32)).astype("int64"))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    for step in range(4):
        print("STEP", step, file=sys.stderr, flush=True)
        loss = model(input_ids=ids, labels=ids)
        loss = loss[0] if isinstance(loss, (list, tuple)) else loss
        loss.backward()
        assert all(p.grad.place == ids.place for p in model.parameters()), "a gradient left the device"
        optimizer.step()
        optimizer.clear_grad()
        print("LOSS", float(loss), flush=True)
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()], "a weight moved"
    print("DONE")


if __name__ == "__main__":
    main()
