"""Small random checkpoints, written by paddle.save and the safetensors library, in every arrangement of files."""

import json
import re

import numpy as np
import paddle
from safetensors.numpy import save_file

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def random_bits(rng, shape, dtype):
    """Random bits, NaNs and infinities among them: a conversion must not interpret them."""
    size = np.dtype(STORAGE[dtype]).itemsize
    return rng.integers(0, 256, (*shape, size), np.uint8).view(STORAGE[dtype])[..., 0]


class Model:
    """Sizes of a model, and its weights in PaddleNLP's unfused native layout. family: its model_type."""

    def __init__(
        self,
        rng,
        dtype="float32",
        layers=2,
        heads=4,
        kv_heads=2,
        hidden=32,
        intermediate=48,
        vocab=24,
        family="llama",
    ):
        self.family, self.biased = family, family == "qwen2"
        self.dtype, self.layers, self.heads, self.kv_heads = dtype, layers, heads, kv_heads
        self.hidden, self.intermediate, self.vocab = hidden, intermediate, vocab
        kv = hidden // heads * kv_heads
        shapes = {f"{family}.embed_tokens.weight": (vocab, hidden)}
        for n in range(layers):
            shapes |= {
                f"{family}.layers.{n}.self_attn.q_proj.weight": (hidden, hidden),
                f"{family}.layers.{n}.self_attn.k_proj.weight": (hidden, kv),
                f"{family}.layers.{n}.self_attn.v_proj.weight": (hidden, kv),
                f"{family}.layers.{n}.self_attn.o_proj.weight": (hidden, hidden),
                f"{family}.layers.{n}.mlp.gate_proj.weight": (hidden, intermediate),
                f"{family}.layers.{n}.mlp.up_proj.weight": (hidden, intermediate),
                f"{family}.layers.{n}.mlp.down_proj.weight": (intermediate, hidden),
                f"{family}.layers.{n}.input_layernorm.weight": (hidden,),
                f"{family}.layers.{n}.post_attention_layernorm.weight": (hidden,),
            }
            if self.biased:
                sizes = zip("qkv", (hidden, kv, kv), strict=True)
                shapes |= {f"{family}.layers.{n}.self_attn.{part}_proj.bias": (size,) for part, size in sizes}
        shapes |= {f"{family}.norm.weight": (hidden,), "lm_head.weight": (hidden, vocab)}
        self.native = {name: random_bits(rng, shape, dtype) for name, shape in shapes.items()}

    @property
    def config(self):
        return {
            "architectures": [f"{self.family.title()}ForCausalLM"],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
        }

    def fused(self, qkv=True, ffn=True):
        """The native weights fused by PaddleNLP's own function."""
        from paddlenlp.transformers.conversion_utils import fuse_param_func

        fuse, state = fuse_param_func(), dict(self.native)
        for n in range(self.layers):
            at, mlp = f"{self.family}.layers.{n}.self_attn.", f"{self.family}.layers.{n}.mlp."
            for kind in ("weight", "bias")[: 1 + self.biased] if qkv else ():
                parts = [state.pop(f"{at}{part}_proj.{kind}") for part in "qkv"]
                kwargs = dict(is_qkv=True, num_heads=self.heads, num_key_value_heads=self.kv_heads)
                state[f"{at}qkv_proj.{kind}"] = fuse(parts, **kwargs)
            if ffn:
                parts = [state.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
                state[f"{mlp}gate_up_fused_proj.weight"] = fuse(parts)
        return state

    def te(self):
        """The weights in Transformer Engine's layout, put together by hand."""
        state = {name: tensor for name, tensor in self.native.items() if ".layers." not in name}
        for n in range(self.layers):
            old, new = f"{self.family}.layers.{n}.", f"{self.family}.layers.{n}.transformer."
            qkv = [self.native[f"{old}self_attn.{part}_proj.weight"] for part in "qkv"]
            gate_up = [self.native[f"{old}mlp.{part}_proj.weight"] for part in ("gate", "up")]
            attention, mlp = f"{new}self_attention.", f"{new}layernorm_mlp."
            state |= {
                f"{attention}layernorm_qkv.ln_weight": self.native[f"{old}input_layernorm.weight"],
                f"{attention}layernorm_qkv.weight": np.concatenate(qkv, 1).T,
                f"{attention}proj.weight": self.native[f"{old}self_attn.o_proj.weight"].T,
                f"{mlp}ln_weight": self.native[f"{old}post_attention_layernorm.weight"],
                f"{mlp}fc1_weight": np.concatenate(gate_up, 1).T,
                f"{mlp}fc2_weight": self.native[f"{old}mlp.down_proj.weight"].T,
            }
            if self.biased:
                biases = [self.native[f"{old}self_attn.{part}_proj.bias"] for part in "qkv"]
                state[f"{attention}layernorm_qkv.bias"] = np.concatenate(biases)
        return state

    def rank(self, tp, degree):
        """One tensor parallel rank's native weights, split as PaddleNLP's _get_tensor_parallel_mappings says."""
        state = {}
        for name, tensor in self.native.items():
            column = name.endswith(("q_proj.weight", "gate_proj.weight", "up_proj.weight"))
            column |= name == "lm_head.weight" and self.vocab % degree == 0
            column |= name.endswith("q_proj.bias")
            column |= re.search(r"[kv]_proj\.(weight|bias)$", name) is not None and self.kv_heads % degree == 0
            row = name.endswith(("o_proj.weight", "down_proj.weight"))
            row |= "embed" in name and self.vocab % degree == 0
            axis = -1 if column else 0 if row else None
            state[name] = tensor if axis is None else np.split(tensor, degree, axis)[tp]
        return state


def save_pdparams(path, state, dtype):
    """What paddle.save writes for a state dict."""
    tensors = {k: paddle.to_tensor(np.ascontiguousarray(v)) for k, v in state.items()}
    assert all(str(t.dtype) == f"paddle.{dtype}" for t in tensors.values())
    paddle.save(tensors, str(path))


def save_safetensors(path, state, _=None):
    """What PaddleNLP's save_pretrained writes: bfloat16 as U16."""
    save_file({k: np.ascontiguousarray(v) for k, v in state.items()}, path, metadata={"format": "np"})


SAVERS = {".pdparams": ("model_state", save_pdparams), ".safetensors": ("model", save_safetensors)}


def save_single(folder, state, dtype, suffix=".pdparams", variant=""):
    """One file, e.g. model_state.tp00.pdparams."""
    folder.mkdir(exist_ok=True, parents=True)
    stem, save = SAVERS[suffix]
    save(folder / f"{stem}{variant and '.'}{variant}{suffix}", state, dtype)


def save_shards(folder, state, dtype, place, suffix=".pdparams"):
    """Shards and their index; place(name) says which shard, from 1, a tensor goes to."""
    folder.mkdir(exist_ok=True, parents=True)
    stem, save = SAVERS[suffix]
    count = max(map(place, state))
    names = {n: f"{stem}-{n:05d}-of-{count:05d}{suffix}" for n in range(1, count + 1)}
    for n, name in names.items():
        save(folder / name, {k: v for k, v in state.items() if place(k) == n}, dtype)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total, "note": "kept"}, "weight_map": {k: names[place(k)] for k in state}}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))


def save_config(folder, model):
    (folder / "config.json").write_text(json.dumps(model.config))


def load_folder(folder):
    """{file name: {tensor name: array}} of all weight files of a folder."""
    from safetensors.numpy import load_file as load_safetensors

    loaded = {p.name: paddle.load(str(p), return_numpy=True) for p in folder.glob("*.pdparams")}
    return loaded | {p.name: load_safetensors(p) for p in folder.glob("*.safetensors")}


def assert_same(got, expected):
    """The same names, shapes, dtypes and bits."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].shape == tensor.shape, name
        assert got[name].dtype == tensor.dtype, name
        assert got[name].tobytes() == np.ascontiguousarray(tensor).tobytes(), name
