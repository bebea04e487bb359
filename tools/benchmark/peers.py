"""The contestants: one small class for each implementation of a decoder layer.

Each takes a `problem.Problem` and offers step() (gradients cleared, forward, backward), results(), the CUDA stream it
works on and its peak memory. Frameworks are imported when a peer is built: an absent one costs only its own rows.
"""

import contextlib
import sys
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

from tools.benchmark.problem import EPSILON, GEMMS, Variant, as_float32

QKV = ("qkv", "qkv_bias")


class Peer:
    """A layer with its weights and inputs. Subclasses define forward(), gradients() and their framework's part.

    module_parameters: all parameters. x, dy: input and output gradient.
    stream: the cudaStream_t as an int, None on a CPU.
    precision: "bf16" or one of FP8_RECIPES: peers of one precision are compared with each other.
    note: what a reader of the result should know, "" if nothing.
    """

    stream = None
    precision = "bf16"
    note = ""

    def scope(self):
        """The context of a forward; one may be inside another of its kind."""
        return contextlib.nullcontext()

    def release(self):
        """Drops all gradients, so that a step allocates them anew."""
        self.x.grad = None
        for parameter in self.module_parameters:
            parameter.grad = None

    def step(self):
        self.release()
        self.backward(self.forward())

    def results(self):
        """{"y", "dx" and "d" + weight: tensor} of one step, as PyTorch tensors on the peer's device."""
        self.release()
        y = self.forward()
        self.backward(y)
        return {"y": self.to_torch(y), "dx": self.to_torch(self.x.grad)} | {
            f"d{name}": gradient for name, gradient in self.gradients().items()
        }

    def peak_memory(self):
        """Bytes that a step needs at its greatest, by the count of the framework's allocator; None on a CPU.

        Counted from before the peer was built: parameters, input and output gradient, fp8 copies, saved activations,
        workspaces and gradients (float32 ones where wgrad accumulation is fused). What a library keeps once for the
        whole process (cuBLAS workspaces) is there before, when another layer of the same kind has run.
        """
        if self.stream is None:
            return None
        self.release()
        self.reset_peak()
        self.step()
        self.release()
        return self.peak() - self.before


class TorchPeer(Peer):
    """PyTorch's part. packs: it can keep packed documents apart. llamas_only: it has no other family's layers."""

    packs, llamas_only = False, False

    def __init__(self, problem, device="cuda", dtype="bfloat16"):
        import torch

        if problem.dims.documents > 1 and not self.packs:
            raise NotImplementedError("this peer is measured on whole sequences only, not on packed documents")
        if self.llamas_only and problem.dims.variant != Variant():
            raise NotImplementedError("this peer is measured as a Llama's layer only")
        self.torch = torch
        self.dims, self.device, self.dtype = problem.dims, device, getattr(torch, dtype)
        if device != "cpu":
            self.stream = torch.cuda.current_stream().cuda_stream
            self.before = torch.cuda.memory_allocated()
        self.x = self.tensor(problem.x).requires_grad_()
        self.dy = self.tensor(problem.dy)

    def tensor(self, bits):
        bf16 = self.torch.from_numpy(bits.view("int16")).view(self.torch.bfloat16)
        return bf16.to(device=self.device, dtype=self.dtype, copy=True)

    def backward(self, y):
        y.backward(self.dy)

    def to_torch(self, tensor):
        return tensor.detach()

    def reset_peak(self):
        self.torch.cuda.reset_peak_memory_stats()

    def peak(self):
        return self.torch.cuda.max_memory_allocated()


class PlainTorch(TorchPeer):
    """PyTorch's functions, as one would write the layer by hand; attention is SDPA with its own choice of kernel."""

    def __init__(self, problem, compile=False, exact_attention=False, **options):
        super().__init__(problem, **options)
        torch, dims = self.torch, self.dims
        self.weights = {name: self.tensor(bits).requires_grad_() for name, bits in problem.weights.items()}
        self.module_parameters = list(self.weights.values())
        self.rotate = lambda t: t
        if dims.rope_base is not None:
            frequency = dims.rope_base ** (-torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim)
            angles = torch.outer(torch.arange(dims.sequence, dtype=torch.float32), frequency)
            angles = torch.cat([angles, angles], -1)[:, None].to(self.device)
            self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
            self.rotate = self._rotate
        self.attention = self._exact_attention if exact_attention else self._attention
        self.layer = torch.compile(self._layer, dynamic=False) if compile else self._layer

    def _rotate(self, t):
        first, second = t.chunk(2, -1)
        return t * self.cos + self.torch.cat([-second, first], -1) * self.sin

    def _attention(self, q, k, v):
        grouped = self.dims.heads != self.dims.kv_heads
        return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def _exact_attention(self, q, k, v):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH):  # the others may use TF32 or bf16 inside
            return self._attention(q, k, v)

    def _norm(self, name, x):
        functional, weight = self.torch.nn.functional, self.weights[name]
        if self.dims.variant.normalization == "LayerNorm":
            return functional.layer_norm(x, weight.shape, weight, self.weights[f"{name}_bias"], EPSILON)
        return functional.rms_norm(x, weight.shape, weight, EPSILON)

    def _linear(self, name, x):
        return self.torch.nn.functional.linear(x, self.weights[name], self.weights.get(f"{name}_bias"))

    def _activate(self, x):
        functional = self.torch.nn.functional
        if self.dims.variant.activation == "gelu":
            return functional.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    def _layer(self, x):
        dims = self.dims
        sizes = [dims.heads * dims.head_dim] + [dims.kv_heads * dims.head_dim] * 2
        qkv = self._linear("qkv", self._norm("ln1", x))
        q, k, v = (t.unflatten(-1, (-1, dims.head_dim)) for t in qkv.split(sizes, -1))
        if dims.variant.qk_norm_type:
            q, k = self._norm("q_norm", q), self._norm("k_norm", k)
        context = self.attention(*(t.transpose(1, 2) for t in (self.rotate(q), self.rotate(k), v)))
        h = x + self._linear("proj", context.transpose(1, 2).flatten(2))
        return h + self._linear("fc2", self._activate(self._linear("fc1", self._norm("ln2", h))))

    def forward(self):
        return self.layer(self.x)

    def gradients(self):
        return {name: weight.grad for name, weight in self.weights.items()}


def exact_results(make, exact=None):
    """results() of what make(a peer's class) returns, in float32 PyTorch.

    exact: the class; by default PlainTorch with exact attention. None, said on stderr, without PyTorch.
    """
    try:
        import torch
    except ImportError as error:
        print(f"errors are not measured: {error}", file=sys.stderr)
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    return make(partial(exact or partial(PlainTorch, exact_attention=True), dtype="float32")).results()


class HuggingFace(TorchPeer):
    """transformers' LlamaDecoderLayer with SDPA."""

    llamas_only = True

    def __init__(self, problem, **options):
        super().__init__(problem, **options)
        torch, dims = self.torch, self.dims
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = LlamaConfig(**dims.config, attn_implementation="sdpa")
        with torch.device(self.device):
            self.layer = LlamaDecoderLayer(config, 0).to(self.dtype)
            positions = torch.arange(dims.sequence)[None].expand(dims.batch, -1)
            self.rope = LlamaRotaryEmbedding(config)(self.x, positions)
        attention, mlp = self.layer.self_attn, self.layer.mlp
        self.parts = {  # one of our fused weights is several of theirs, stacked on out
            "ln1": [self.layer.input_layernorm],
            "qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
            "proj": [attention.o_proj],
            "ln2": [self.layer.post_attention_layernorm],
            "fc1": [mlp.gate_proj, mlp.up_proj],
            "fc2": [mlp.down_proj],
        }
        self.module_parameters = list(self.layer.parameters())
        with torch.no_grad():
            for name, modules in self.parts.items():
                rows = [module.weight.shape[0] for module in modules]
                for module, part in zip(modules, self.tensor(problem.weights[name]).split(rows), strict=True):
                    module.weight.copy_(part)

    def forward(self):
        output = self.layer(self.x, position_embeddings=self.rope, attention_mask=None)
        return output[0] if isinstance(output, tuple) else output  # transformers 4 and 5

    def gradients(self):
        return {
            name: self.torch.cat([module.weight.grad for module in modules]) for name, modules in self.parts.items()
        }


def layer_parameters(layer, dims, norm):
    """{name of dims.shapes: parameter} of a TransformerLayer; norm: what its norms' parameters begin with."""
    qkv, proj, mlp = layer.self_attention.layernorm_qkv, layer.self_attention.proj, layer.layernorm_mlp
    places = {
        "ln1": (qkv, norm),
        "qkv": (qkv, ""),
        "proj": (proj, ""),
        "ln2": (mlp, norm),
        "fc1": (mlp, "fc1_"),
        "fc2": (mlp, "fc2_"),
        "q_norm": (getattr(layer.self_attention, "q_norm", None), ""),
        "k_norm": (getattr(layer.self_attention, "k_norm", None), ""),
    }
    found = {}
    for name in dims.shapes:
        module, prefix = places[name.removesuffix("_bias")]
        found[name] = getattr(module, prefix + ("bias" if name.endswith("_bias") else "weight"))
    return found


def te_torch_layer(dims, dtype, device, attn_input_format="bshd", **options):
    """Transformer Engine's own PyTorch TransformerLayer of `dims`. options: more of its arguments.

    It knows biases of all GEMMs or none: for those of qkv alone its LayerNormLinear is replaced by one that has them.
    """
    import transformer_engine.pytorch as te

    where = dict(params_dtype=dtype, device=device)
    layer = te.TransformerLayer(
        dims.hidden,
        dims.ffn,
        dims.heads,
        num_gqa_groups=dims.kv_heads,
        kv_channels=dims.head_dim,
        layernorm_epsilon=EPSILON,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        bias=dims.variant.bias,
        normalization=dims.variant.normalization,
        activation=dims.variant.activation,
        qk_norm_type=dims.variant.qk_norm_type,
        qk_norm_eps=EPSILON,
        qk_norm_before_rope=dims.variant.qk_norm_before_rope,
        attn_input_format=attn_input_format,
        **where,
        **options,
    )
    if dims.variant.add_qkv_bias:
        kept = {name: value for name, value in options.items() if name == "fuse_wgrad_accumulation"}
        out, hidden = dims.shapes["qkv"]
        layer.self_attention.layernorm_qkv = te.LayerNormLinear(
            hidden, out, eps=EPSILON, bias=True, normalization=dims.variant.normalization, **kept, **where
        )
    return layer


def te_torch_angles(dims, device):
    """Transformer Engine's own angles of rotary positions; None for a layer without."""
    import transformer_engine.pytorch as te

    if dims.rope_base is None:
        return None
    return te.RotaryPositionEmbedding(dims.head_dim, rotary_base=dims.rope_base)(dims.sequence).to(device)


# By precision, the name that recipes have in Transformer Engine and here.
FP8_RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
}


def recipe_of(module, precision, **options):
    """An object of a module's recipe for a precision, otherwise with its defaults; None for bf16."""
    name = FP8_RECIPES.get(precision)
    return name and getattr(module, name)(**options)


class TakesTEsArguments:
    """Part of a peer whose `layer` takes a TransformerLayer's arguments. documents: {argument: value} that tell packed
    ones apart."""

    def forward(self):
        with self.scope():
            return self.layer(
                self.x,
                rotary_pos_emb=self.freqs,
                is_first_microbatch=self.is_first_microbatch,
                **self.documents,
            )


class TETorch(TakesTEsArguments, TorchPeer):
    """Transformer Engine's own PyTorch TransformerLayer, fused qkv in its default (interleaved) order.

    Packed documents are its layout thd: all tokens in one row [t, h], told apart by cu_seqlens.
    """

    packs = True

    def __init__(self, problem, precision="bf16", cached=False, fuse_wgrad=False, fp8_dpa=False, **options):
        super().__init__(problem, **options)
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        dims = self.dims
        self.precision = precision
        self.recipe = recipe_of(recipe, precision, fp8_dpa=fp8_dpa)
        self.autocast = te.autocast
        layout = "thd" if dims.documents > 1 else "bshd"
        self.layer = te_torch_layer(dims, self.dtype, self.device, layout, fuse_wgrad_accumulation=fuse_wgrad)
        self.parameters = layer_parameters(self.layer, dims, "layer_norm_")
        self.module_parameters = list(self.layer.parameters())
        with self.torch.no_grad():
            for name, parameter in self.parameters.items():
                weight = self.tensor(problem.weights[name])
                parameter.copy_(self._interleave(weight) if name in QKV else weight)
        self.main_grads = {}
        if fuse_wgrad:
            for name in GEMMS:
                main_grad = self.torch.zeros_like(self.parameters[name], dtype=self.torch.float32)
                self.main_grads[name] = self.parameters[name].main_grad = main_grad
        self.freqs, self.documents = te_torch_angles(dims, self.device), {}
        if dims.documents > 1:
            self._pack()
        self.is_first_microbatch = None
        if cached:
            self.is_first_microbatch = True
            self.step()  # quantizes the weights and keeps them
            self.is_first_microbatch = False

    def _pack(self):
        """x and dy as rows of tokens, and the layer's arguments that say where a document ends."""
        length, count = self.dims.unpacked.sequence, self.dims.unpacked.batch
        self.x = self.x.detach().view(-1, self.dims.hidden).requires_grad_()
        self.dy = self.dy.view(-1, self.dims.hidden)
        ends = self.torch.arange(0, (count + 1) * length, length, dtype=self.torch.int32, device=self.device)
        self.documents = {"self_attn_mask_type": "padding_causal"}
        for side in "q", "kv":
            self.documents |= {f"cu_seqlens_{side}": ends, f"max_seqlen_{side}": length}

    def _interleave(self, qkv):
        """Rows q, k, v of weight or bias -> one group after another, each its q heads, its k and its v head."""
        dims = self.dims
        q, k, v = qkv.split([dims.heads * dims.head_dim] + [dims.kv_heads * dims.head_dim] * 2)
        groups = [t.view(dims.kv_heads, -1, dims.head_dim, *qkv.shape[1:]) for t in (q, k, v)]
        return self.torch.cat(groups, 1).view_as(qkv)

    def _stack(self, qkv):
        """_interleave's inverse."""
        dims = self.dims
        groups = qkv.view(dims.kv_heads, -1, dims.head_dim, *qkv.shape[1:])
        queries = dims.heads // dims.kv_heads
        return self.torch.cat([t.reshape(-1, *qkv.shape[1:]) for t in groups.split([queries, 1, 1], 1)])

    def scope(self):
        return self.autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def results(self):
        for main_grad in self.main_grads.values():
            main_grad.zero_()
        results = super().results()
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

        if not (_attention_backends["use_fused_attention"] or _attention_backends["use_flash_attention"]):
            self.note = "unfused attention: cuDNN was not usable for TE"  # it falls back without a word
        return results

    def gradients(self):
        gradients = {name: self.main_grads.get(name, parameter.grad) for name, parameter in self.parameters.items()}
        return {name: self._stack(grad) if name in QKV else grad for name, grad in gradients.items()}


class _DeviceArray:
    """A Paddle tensor's memory under the CUDA array interface, so that PyTorch reads it in place."""

    def __init__(self, tensor):
        self._owner = tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        typestr = {"paddle.bfloat16": "<i2", "paddle.float32": "<f4"}[str(tensor.dtype)]
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _next_layer():
    """What follows a layer in a model: a PyLayer apply(y, dy) whose backward hands dy to y.

    Paddle's backward(y, dy) copies dy first (and starts a thread for the copy on a custom device), as no layer
    inside a model sees it.
    """
    import paddle

    class NextLayer(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, y, dy):
            ctx.dy = dy
            return paddle.empty([1], y.dtype)

        @staticmethod
        def backward(ctx, _):
            return ctx.dy, None

    return NextLayer


def start_on_paddles(device):
    """Lets Paddle compute on the CPU ("cpu") or the first GPU from now on. Returns that place's name in Paddle, its
    stream and the allocator's count, the last two None on a CPU.

    Raises RuntimeError where Paddle sees no GPU.
    """
    import paddle

    from paddle_te import device as paddle_device
    from paddle_te.env import training_device

    kind = "cpu" if device == "cpu" else training_device()
    if kind == "cpu":
        if device != "cpu":
            raise RuntimeError(
                "Paddle sees no GPU: build nvgpu and set CUSTOM_DEVICE_ROOT to the folder of its library"
            )
        paddle.set_device("cpu")
        return "cpu", None, None
    paddle.set_device(f"{kind}:0")
    paddle_device.reset_peak_memory()
    return f"{kind}:0", paddle_device.raw_stream(), paddle_device.peak_memory()


class PaddleTE(TakesTEsArguments, Peer):
    """This project's TransformerLayer, backend "transformer_engine" or "paddle"."""

    def __init__(
        self,
        problem,
        precision="bf16",
        cached=False,
        fuse_wgrad=False,
        fp8_dpa=False,
        backend="transformer_engine",
        device="cuda",
        dtype="bfloat16",
    ):
        import paddle

        from paddle_te import device as paddle_device
        from paddle_te import fp8

        self.paddle, self.paddle_device, self.next_layer = paddle, paddle_device, _next_layer()
        self.dims, self.dtype, self.precision = problem.dims, dtype, precision
        self.device, self.stream, self.before = start_on_paddles(device)
        # the other peers' beginning, so that all have the same histories; a cached one's first step never ends
        beginning = dict(first_step="delayed") if precision == "fp8_delayed" else {}
        recipe = recipe_of(fp8, precision, fp8_dpa=fp8_dpa, **beginning)
        self.autocast = partial(fp8.fp8_autocast, True, recipe) if recipe else contextlib.nullcontext
        self.build(problem, backend, fuse_wgrad)
        self.x, self.dy = self._input(problem.x), self._input(problem.dy)
        self.x.stop_gradient = False
        self.is_first_microbatch = None
        if cached:
            self.is_first_microbatch = True
            self.step()
            self.is_first_microbatch = False

    def build(self, problem, backend, fuse_wgrad):
        """The layer with its weights, and what else forward() needs."""
        from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer
        from paddle_te.ops import documents

        dims = self.dims
        self.layer = TransformerLayer(
            dims.hidden,
            dims.ffn,
            dims.heads,
            num_gqa_groups=dims.kv_heads,
            kv_channels=dims.head_dim,
            layernorm_epsilon=EPSILON,
            qk_norm_eps=EPSILON,
            init_method=self.paddle.nn.initializer.Constant(0.0),  # overwritten; random numbers cost seconds at 70B
            backend=backend,
            params_dtype=self.dtype,
            fuse_wgrad_accumulation=fuse_wgrad,
            **asdict(dims.variant),
        )
        self.parameters = layer_parameters(self.layer, dims, "ln_")
        self.module_parameters = self.layer.parameters()
        for name, parameter in self.parameters.items():
            parameter.set_value(self._array(problem.weights[name]))
        self.main_grads = {}
        if fuse_wgrad:
            for name in GEMMS:
                main_grad = self.paddle.zeros(self.parameters[name].shape, "float32")
                self.main_grads[name] = self.parameters[name].main_grad = main_grad
        self.freqs, self.documents = None, {}
        if dims.rope_base is not None:
            rope = RotaryPositionEmbedding(dims.head_dim, rotary_base=dims.rope_base)
            self.freqs = rope(dims.sequence)
        if dims.documents > 1:
            rows = [[dims.unpacked.sequence] * dims.documents] * dims.batch
            self.documents = dict(cu_seqlens=self.paddle.to_tensor(documents.cu_seqlens(rows)))
            self.freqs = rope.at(self.paddle.to_tensor(documents.positions(rows)))

    def _array(self, bits):
        return bits if self.dtype == "bfloat16" else as_float32(bits)  # Paddle takes uint16 for bfloat16

    def _input(self, bits):
        tensor = self.paddle.empty(bits.shape, self.dtype)
        tensor.set_value(self._array(bits))
        return tensor

    @contextlib.contextmanager
    def scope(self):
        with self.autocast():
            yield

    def backward(self, y):
        self.next_layer.apply(y, self.dy).backward()

    def results(self):
        for main_grad in self.main_grads.values():
            main_grad.zero_()
        return super().results()

    def to_torch(self, tensor):
        import torch

        if self.device == "cpu":
            return torch.from_numpy(tensor.numpy())
        self.paddle.device.synchronize()
        array = torch.as_tensor(_DeviceArray(tensor), device="cuda")
        return array.view(torch.bfloat16) if array.dtype == torch.int16 else array

    def gradients(self):
        return {
            name: self.to_torch(self.main_grads.get(name, parameter.grad))
            for name, parameter in self.parameters.items()
        }

    def reset_peak(self):
        self.paddle_device.reset_peak_memory()

    def peak(self):
        return self.paddle_device.peak_memory()


class AdaptedPaddleTE(PaddleTE):
    """The same with LoRA of rank 16 on all of its GEMMs, whose weights are frozen."""

    def build(self, problem, backend, fuse_wgrad):
        super().build(problem, backend, fuse_wgrad)
        from paddle_te.layers import lora

        dims, attention, mlp = self.dims, self.layer.self_attention, self.layer.layernorm_mlp
        kv = dims.kv_heads * dims.head_dim
        qkv = {"weight": {"q_proj": dims.heads * dims.head_dim, "k_proj": kv, "v_proj": kv}}
        fc1 = {"gate_proj": dims.ffn, "up_proj": dims.ffn}
        adapted = (
            (lora.LoRALayerNormLinear, attention.layernorm_qkv, qkv),
            (lora.LoRALinear, attention.proj, {"weight": {"o_proj": dims.hidden}}),
            (lora.LoRALayerNormMLP, mlp, {"fc1_weight": fc1, "fc2_weight": {"down_proj": dims.hidden}}),
        )
        for parameter in self.module_parameters:
            parameter.stop_gradient = True
        config = SimpleNamespace(r=16, scaling=2.0, lora_dropout=0.0)
        for kind, layer, parts in adapted:
            kind.enable(layer, parts, [part for rows in parts.values() for part in rows], config)
        self.module_parameters = self.layer.parameters()


def _variants(prefix, peer):
    """The rows of a Transformer Engine layer. "cached": a later micro-batch, whose fp8 weights are kept."""
    variants = {prefix + "_bf16": partial(peer), prefix + "_bf16_fused_wgrad": partial(peer, fuse_wgrad=True)}
    for precision in FP8_RECIPES:
        variants[f"{prefix}_{precision}"] = partial(peer, precision=precision)
        variants[f"{prefix}_{precision}_cached"] = partial(peer, precision=precision, cached=True)
    for cached in (False, True):
        dpa = partial(peer, precision="fp8_delayed", fp8_dpa=True, cached=cached)
        variants[prefix + "_fp8_delayed_dpa" + "_cached" * cached] = dpa
    variants[prefix + "_fp8_delayed_cached_fused_wgrad"] = partial(
        peer, precision="fp8_delayed", cached=True, fuse_wgrad=True
    )
    return variants


PEERS = {
    "hf_bf16": HuggingFace,
    "torch_bf16": PlainTorch,
    "torch_compile_bf16": partial(PlainTorch, compile=True),
    **_variants("te_torch", TETorch),
    **_variants("paddle_te", PaddleTE),
}

# what trains no weights of the problem: for the time to launch a layer
LAUNCHED_ONLY = {
    "paddle_te_bf16_lora": partial(AdaptedPaddleTE),
    "paddle_te_fp8_delayed_lora": partial(AdaptedPaddleTE, precision="fp8_delayed"),
}
