"""Folders with weights in fp8 by blocks, as DeepSeek-V3's: read as bfloat16, beside Paddle's own e4m3."""

import json

import numpy as np
import paddle
import pytest

from paddle_te.weights import CheckpointError, convert, safetensors
from paddle_te.weights.float8 import BLOCK, FLOAT8, SCALES, BlockScaledRef, with_scales
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.tensors import TensorRef, in_float32

SAID = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
LAYER = ("q_proj", "k_proj", "v_proj", "o_proj")


def quantized(weight):
    """(bytes, scales, what they are worth in bfloat16) of a float32 matrix, by Paddle's casts."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = np.random.default_rng(1).uniform(0.5, 2, (rows, columns)).astype("float32") / 64
    whole = np.kron(scales, np.ones((BLOCK, BLOCK), "float32"))[: weight.shape[0], : weight.shape[1]]
    numbers = paddle.to_tensor(np.clip(weight / whole, -440, 440)).astype("float8_e4m3fn")
    worth = paddle.to_tensor(numbers.astype("float32").numpy() * whole).astype("bfloat16")
    return numbers.view("uint8").numpy(), scales, worth.astype("float32").numpy()


def write(path, tensors):
    """A safetensors file of {name: array}; uint8 are e4m3 numbers, uint16 bfloat16's bits."""
    codes, header, data = {"uint8": "F8_E4M3", "uint16": "BF16", "float32": "F32"}, {}, b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": codes[str(array.dtype)], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def bits(array):
    return (np.ascontiguousarray(array, "float32").view("uint32") >> 16).astype("uint16")


@pytest.fixture
def folder(tmp_path, seed):
    """(a Llama's folder, what its weights in fp8 are worth)."""
    random, path = np.random.default_rng(seed), tmp_path / "model"
    path.mkdir()
    said = dict(model_type="llama", vocab_size=64, hidden_size=160, intermediate_size=96, num_hidden_layers=1)
    said |= dict(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, torch_dtype="bfloat16")
    (path / "config.json").write_text(json.dumps(said | {"quantization_config": SAID}))
    layer, worth = "model.layers.0.", {}
    shapes = dict.fromkeys([f"{layer}self_attn.{name}" for name in LAYER], (160, 160))
    shapes |= {f"{layer}mlp.gate_proj": (96, 160), f"{layer}mlp.up_proj": (96, 160), f"{layer}mlp.down_proj": (160, 96)}
    tensors = {
        name: bits(random.standard_normal((64, 160))) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    tensors |= {f"{name}.weight": bits(np.ones(160)) for name in norms}
    for name, shape in shapes.items():
        numbers, scales, worth[f"{name}.weight"] = quantized(random.standard_normal(shape).astype("float32"))
        tensors |= {f"{name}.weight": numbers, f"{name}.weight{SCALES}": scales}
    write(path / "model.safetensors", tensors)
    return path, worth


def test_weights_are_read_as_bfloat16(folder):
    path, worth = folder
    (rank,) = open_checkpoint(path).ranks.values()
    for name, expected in worth.items():
        ref = rank.tensors[name]
        assert isinstance(ref, BlockScaledRef) and ref.dtype == "bfloat16"
        assert (in_float32(ref.read()) == expected).all(), name


def test_there_and_back(folder, tmp_path, capsys):
    """The converter writes bfloat16 weights, and no word of fp8."""
    path, worth = folder
    convert(path, tmp_path / "te", "hf2te", progress=False)
    assert "weights in fp8 are read as bfloat16" in capsys.readouterr().out
    convert(tmp_path / "te", tmp_path / "back", "te2hf", progress=False)
    back = safetensors.read(tmp_path / "back/model.safetensors")
    assert all((in_float32(back[name].read()) == expected).all() for name, expected in worth.items())
    assert not [name for name in back if name.endswith(SCALES)]
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def test_all_bytes():
    numbers = np.arange(256, dtype="uint8").reshape(2, 128)
    expected = paddle.to_tensor(numbers).view("float8_e4m3fn").astype("float32").numpy()

    class InMemory:
        def __init__(self, array, dtype):
            self.array, self.dtype, self.shape, self.path = array, dtype, array.shape, None

        def read(self):
            return self.array

    ref = BlockScaledRef(InMemory(numbers, FLOAT8), InMemory(np.ones((1, 1), "float32"), "float32"))
    assert np.array_equal(in_float32(ref.read()), expected, equal_nan=True)


@pytest.mark.parametrize(
    "scales, words", [(None, "has no 'w_scale_inv', the scales of its blocks"), ((1, 1), r"\[2, 1\] are the blocks")]
)
def test_scales_that_do_not_fit(tmp_path, scales, words):
    tensors = {"w": TensorRef(tmp_path / "f", 0, FLOAT8, (200, 64))}
    if scales:
        tensors["w_scale_inv"] = TensorRef(tmp_path / "f", 0, "float32", scales)
    with pytest.raises(CheckpointError, match=words):
        with_scales(tensors)
