"""What every peer computes: one decoder layer, forward and backward, on the same numbers."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

EPSILON = 1e-5  # of all norms
NORMS = ("ln1", "ln2", "q_norm", "k_norm")
GEMMS = ("qkv", "proj", "fc1", "fc2")


@dataclass(frozen=True)
class Variant:
    """What a layer is made of, under the names of TransformerLayer's arguments; by default as a Llama's.

    add_qkv_bias: the projection to q, k and v has a bias. bias: all GEMMs have. qk_norm_type: of each head of q and k,
    before they are rotated with qk_norm_before_rope.
    """

    add_qkv_bias: bool = False
    bias: bool = False
    normalization: str = "RMSNorm"
    activation: str = "swiglu"
    qk_norm_type: str | None = None
    qk_norm_before_rope: bool = False


QWEN2 = Variant(add_qkv_bias=True)
QWEN3 = Variant(qk_norm_type="RMSNorm", qk_norm_before_rope=True)
GPT = Variant(bias=True, normalization="LayerNorm", activation="gelu")


@dataclass(frozen=True)
class Dims:
    """Sizes of one layer and of its input [batch, sequence, hidden].

    documents: packed into each sequence, all of one length, which do not see each other.
    rope_base: None for a layer without rotary positions. kv_channels: a head's size; None for hidden / heads.
    """

    batch: int
    sequence: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    rope_base: float | None = 10000.0
    documents: int = 1
    variant: Variant = Variant()
    kv_channels: int | None = None

    @property
    def unpacked(self):
        """The sizes of the documents by themselves, one a sequence."""
        documents = self.documents
        return replace(self, batch=self.batch * documents, sequence=self.sequence // documents, documents=1)

    @property
    def head_dim(self):
        return self.kv_channels or self.hidden // self.heads

    @property
    def config(self):
        """These sizes as transformers' and PaddleNLP's LlamaConfig, and Qwen2Config, name them."""
        head_dim = {"head_dim": self.head_dim} if self.variant.qk_norm_type else {}  # in Qwen3's config.json
        return head_dim | {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.sequence,
            "rms_norm_eps": EPSILON,
            "rope_theta": self.rope_base,
        }

    @property
    def shapes(self):
        """Return the shapes of weights, [out, in], and then of biases, named after their weight with _bias.

        qkv is q, k and v stacked on out; fc1 is gate and up where there is a gate.
        """
        weights = {
            "ln1": (self.hidden,),
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "proj": (self.hidden, self.heads * self.head_dim),
            "ln2": (self.hidden,),
            "fc1": ((2 if self.variant.activation == "swiglu" else 1) * self.ffn, self.hidden),
            "fc2": (self.hidden, self.ffn),
        }
        if self.variant.qk_norm_type:
            weights |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        biased = ["ln1", "ln2"] if self.variant.normalization == "LayerNorm" else []
        biased += [name for name in GEMMS if self.variant.bias or self.variant.add_qkv_bias and name == "qkv"]
        return weights | {f"{name}_bias": weights[name][:1] for name in biased}

    @property
    def parameters(self):
        """Number of elements in all weights and biases."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    @property
    def flops(self):
        """Floating-point operations of a forward and backward.

        6 per token and weight of the GEMMs; attention's two products, 4·s²·h·d forward and twice that backward,
        halved by the causal mask, s the length of a document.
        """
        gemm = 6 * self.batch * self.sequence * sum(int(np.prod(self.shapes[name])) for name in GEMMS)
        return gemm + 3 * 4 * self.unpacked.batch * self.unpacked.sequence**2 * self.heads * self.head_dim // 2


SIZES = {
    "7b-b1": Dims(1, 4096, 4096, 11008, 32, 32),  # Llama-2-7B
    "7b-b2": Dims(2, 4096, 4096, 11008, 32, 32),
    "8b-s8192": Dims(1, 8192, 4096, 14336, 32, 8, 500000.0),  # Llama-3-8B
    "8b-s8192-d8": Dims(1, 8192, 4096, 14336, 32, 8, 500000.0, documents=8),
    "70b-b1": Dims(1, 4096, 8192, 28672, 64, 8, 500000.0),  # Llama-3-70B; Llama-2-70B differs in the base alone
    "qwen2.5-7b": Dims(1, 4096, 3584, 18944, 28, 4, 1000000.0, variant=QWEN2),
    "qwen3-8b": Dims(1, 4096, 4096, 12288, 32, 8, 1000000.0, variant=QWEN3),
    "gpt-5b": Dims(4, 2048, 4096, 16384, 32, 32, None, variant=GPT),
}
# Small enough that the GPU always waits for the host: its time is the host's cost of launching a layer.
TINY = Dims(1, 128, 512, 1024, 8, 8)


def bf16_bits(shape, mean, scale, seed):
    """uint16 array: bfloat16 numbers from N(mean, scale²), cut from float32 rather than rounded."""
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    numbers *= scale
    numbers += mean
    return np.ascontiguousarray(numbers.view(np.uint16)[..., 1::2])  # a little-endian float32's upper half


def as_float32(bits):
    """float32 array of the numbers in a bf16_bits array."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Problem:
    """Random weights and biases (by name of `Dims.shapes`), input x and output gradient dy [b, s, h], as bf16_bits."""

    def __init__(self, dims, seed):
        self.dims = dims
        activations = (dims.batch, dims.sequence, dims.hidden)
        draws = {
            name: partial(bf16_bits, shape, *((1.0, 0.1) if name in NORMS else (0.0, 0.02)))
            for name, shape in dims.shapes.items()
        }
        draws["x"] = partial(bf16_bits, activations, 0.0, 1.0)
        draws["dy"] = partial(bf16_bits, activations, 0.0, 1e-3)
        with ThreadPoolExecutor() as pool:  # NumPy draws outside the interpreter lock
            futures = {name: pool.submit(draw, [seed, i]) for i, (name, draw) in enumerate(draws.items())}
        arrays = {name: future.result() for name, future in futures.items()}
        self.x, self.dy = arrays.pop("x"), arrays.pop("dy")
        self.weights = arrays

    @property
    def unpacked(self):
        """The same numbers with one document a sequence, for layers that know no packed ones."""
        problem = copy.copy(self)
        problem.dims = dims = self.dims.unpacked
        problem.x, problem.dy = (array.reshape(dims.batch, dims.sequence, -1) for array in (self.x, self.dy))
        return problem
