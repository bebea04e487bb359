"""A layer of experts in several implementations: norm, router, experts and residual, forward and backward.

The router's logits are replaced by ones that give each expert as many tokens; its gradient stays that of the logits.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from tools.benchmark.peers import FP8_RECIPES, PaddleTE, TorchPeer, recipe_of
from tools.benchmark.problem import EPSILON, bf16_bits


@dataclass(frozen=True)
class ExpertDims:
    """Sizes of one layer, and the tokens of its input [tokens, hidden]."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    documents: ClassVar[int] = 1  # what TorchPeer asks of a layer

    @property
    def rows(self) -> int:
        """Return the rows of all experts."""
        return self.tokens * self.topk

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights: fc1 has an expert's gate rows and then its up rows."""
        return {
            "ln": (self.hidden,),
            "router": (self.experts, self.hidden),
            "fc1": (self.experts, 2 * self.ffn, self.hidden),
            "fc2": (self.experts, self.hidden, self.ffn),
        }

    @property
    def flops(self) -> int:
        """Return the floating-point operations of the experts' and the router's GEMMs, forward and backward."""
        return 6 * (self.rows * 3 * self.hidden * self.ffn + self.tokens * self.hidden * self.experts)


SIZES = {
    "mixtral": ExpertDims(16384, 4096, 14336, 8, 2),  # Mixtral-8x7B
    "qwen3-30b": ExpertDims(16384, 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "olmoe": ExpertDims(16384, 2048, 1024, 64, 8),  # OLMoE-1B-7B
}


class ExpertProblem:
    """Random weights, by name of `ExpertDims.shapes`, input x and output gradient dy [tokens, hidden], as bf16_bits."""

    def __init__(self, dims: ExpertDims, seed: int) -> None:
        self.dims = dims
        tokens = dims.tokens, dims.hidden
        wanted = {**dims.shapes, "x": tokens, "dy": tokens}
        with ThreadPoolExecutor() as pool:  # NumPy draws outside the interpreter lock
            made = {name: self._draw(pool, shape, name, [seed, i]) for i, (name, shape) in enumerate(wanted.items())}
        arrays = {name: np.concatenate([part.result() for part in parts]) for name, parts in made.items()}
        self.x, self.dy, self.weights = arrays.pop("x"), arrays.pop("dy"), arrays

    @staticmethod
    def _draw(pool: ThreadPoolExecutor, shape: tuple[int, ...], name: str, seed: list[int]) -> list[Any]:
        """Return futures: of each expert, or of the whole."""
        mean, scale = {"ln": (1.0, 0.1), "x": (0.0, 1.0), "dy": (0.0, 1e-3)}.get(name, (0.0, 0.02))
        parts, part_shape = (shape[0], (1, *shape[1:])) if len(shape) == 3 else (1, shape)
        return [pool.submit(bf16_bits, part_shape, mean, scale, [*seed, part]) for part in range(parts)]


class PaddleExperts(PaddleTE):
    """This project's MoELayer, backend "transformer_engine" or "paddle"."""

    def build(self, problem: ExpertProblem, backend: str, fuse_wgrad: bool) -> None:
        """Make the layer with its weights."""
        from paddle_te.layers.moe import MoELayer

        dims = problem.dims
        self.layer = MoELayer(
            dims.hidden,
            dims.ffn,
            dims.experts,
            moe_router_topk=dims.topk,
            moe_router_force_load_balancing=True,
            layernorm_epsilon=EPSILON,
            init_method=self.paddle.nn.initializer.Constant(0.0),  # overwritten
            backend=backend,
            params_dtype=self.dtype,
            fuse_wgrad_accumulation=fuse_wgrad,
        )
        experts = self.layer.experts
        self.parameters = {"ln": self.layer.ln_weight, "router": self.layer.router.weight}
        self.parameters |= {"fc1": experts.fc1_weight, "fc2": experts.fc2_weight}
        self.module_parameters = self.layer.parameters()
        self.main_grads = {}
        for name, parameter in self.parameters.items():
            parameter.set_value(self._array(problem.weights[name]))
            if fuse_wgrad and name.startswith("fc"):
                self.main_grads[name] = parameter.main_grad = self.paddle.zeros(parameter.shape, "float32")

    def forward(self) -> Any:
        """Return the layer's output."""
        with self.scope():
            return self.layer(self.x, is_first_microbatch=self.is_first_microbatch)


def balanced(z: Any, router: Any, topk: int) -> Any:
    """Return the logits [tokens, experts] of forced balance, as `layers.moe.router` has them, in PyTorch."""
    import torch

    logits = torch.nn.functional.linear(z.float(), router.float())
    tokens, experts = logits.shape
    first = (torch.arange(tokens, device=z.device) * topk).unsqueeze(1)
    forced = -((torch.arange(experts, device=z.device) - first) % experts).float() / experts
    return logits - logits.detach() + forced


class PlainExperts(TorchPeer):
    """One expert after the other, in PyTorch's functions: the reference, in float32."""

    def __init__(self, problem: ExpertProblem, **options: Any) -> None:
        super().__init__(problem, **options)
        self.weights = {name: self.tensor(bits).requires_grad_() for name, bits in problem.weights.items()}
        self.router, self.module_parameters = self.weights["router"], list(self.weights.values())

    def forward(self) -> Any:
        """Return the layer's output."""
        torch, functional = self.torch, self.torch.nn.functional
        z = functional.rms_norm(self.x, (self.dims.hidden,), self.weights["ln"], EPSILON)
        chosen, experts = balanced(z, self.router, self.dims.topk).topk(self.dims.topk, -1)
        probs, out = torch.softmax(chosen, -1), self.x
        for expert in range(self.dims.experts):
            token, place = (experts == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(z[token], self.weights["fc1"][expert]).chunk(2, -1)
            act = functional.silu(gate) * up * probs[token, place, None].to(self.dtype)
            out = out.index_add(0, token, functional.linear(act, self.weights["fc2"][expert]))
        return out

    def gradients(self) -> dict[str, Any]:
        """Return {weight: gradient}."""
        return {name: weight.grad for name, weight in self.weights.items()}


def te_torch_experts(dims: ExpertDims, dtype: Any, device: str, split: bool = False) -> Any:
    """Return Transformer Engine's PyTorch parts in a module, as Megatron-Core puts them together.

    RMSNorm, fused router, permutation with probabilities, GroupedLinear, ScaledSwiGLU, residual; x is [..., hidden].
    split: GEMMs expert by expert, whose rows the host must know; else those that read them on the device, which TE has
    for bf16 and current scaling. (It takes the former by itself where it lacks the latter.)
    """
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.permutation import moe_permute_with_probs, moe_unpermute
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = te.RMSNorm(dims.hidden, eps=EPSILON, dtype=dtype, device=device)
            weight = torch.empty(dims.experts, dims.hidden, dtype=dtype, device=device)
            self.router = torch.nn.Parameter(torch.nn.init.normal_(weight, std=0.02))
            where = dict(params_dtype=dtype, device=device)
            linear = partial(te.GroupedLinear, dims.experts, bias=False, use_grouped_tensor=not split, **where)
            self.fc1, self.fc2 = linear(dims.hidden, 2 * dims.ffn), linear(dims.ffn, dims.hidden)
            self.activation = te.ops.ScaledSwiGLU()

        def forward(self, x: Any, is_first_microbatch: bool | None = None) -> Any:
            z = self.norm(x).view(-1, dims.hidden)
            options = dims.topk, False, None, None, None, "softmax", None
            probs, routing_map = fused_topk_with_score_function(balanced(z, self.router, dims.topk), *options)
            rows, first = routing_map.sum(0), dict(is_first_microbatch=is_first_microbatch)
            permuted, of_rows, places = moe_permute_with_probs(z, probs, routing_map, len(z) * dims.topk)
            act = self.activation(self.fc1(permuted, rows, **first), of_rows)
            return moe_unpermute(self.fc2(act, rows, **first), places, restore_shape=z.shape).view(x.shape) + x

    return Experts()


MOST_GROUPS = 64  # experts for which TE's grouped GEMM has room


def te_torch_mixture_layer(mixture: Any, dims: Any, dtype: Any, device: str, layer_number: int) -> Any:
    """Return a decoder layer of `te_torch_experts` behind TE's MultiheadAttention, called as TE's TransformerLayer.

    mixture: a `step.Mixture`. dims: `problem.Dims` of the layer, whose ffn is an expert's.
    """
    import torch
    import transformer_engine.pytorch as te

    sizes = ExpertDims(dims.batch * dims.sequence, dims.hidden, dims.ffn, mixture.experts, mixture.topk)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = te.MultiheadAttention(
                dims.hidden,
                dims.heads,
                kv_channels=dims.head_dim,
                attention_dropout=0.0,
                layernorm_epsilon=EPSILON,
                layer_number=layer_number,
                num_gqa_groups=dims.kv_heads,
                input_layernorm=True,
                normalization="RMSNorm",
                fuse_qkv_params=True,
                bias=False,
                qkv_format="bshd",
                qk_norm_type=dims.variant.qk_norm_type,
                qk_norm_eps=EPSILON,
                qk_norm_before_rope=dims.variant.qk_norm_before_rope,
                params_dtype=dtype,
                device=device,
            )
            self.experts = te_torch_experts(sizes, dtype, device, split=mixture.experts > MOST_GROUPS)

        def forward(self, x: Any, rotary_pos_emb: Any = None, is_first_microbatch: bool | None = None) -> Any:
            x = x + self.attention(x, rotary_pos_emb=rotary_pos_emb, is_first_microbatch=is_first_microbatch)
            return self.experts(x, is_first_microbatch=is_first_microbatch)

    return Layer()


class TETorchExperts(TorchPeer):
    """`te_torch_experts`."""

    def __init__(self, problem: ExpertProblem, precision: str = "bf16", split: bool = False, **options: Any) -> None:
        super().__init__(problem, **options)
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        self.te, self.precision, self.recipe = te, precision, recipe_of(recipe, precision)
        self.layer = te_torch_experts(problem.dims, self.dtype, self.device, split)
        with self.torch.no_grad():
            for name, weight in (("ln", self.layer.norm.weight), ("router", self.layer.router)):
                weight.copy_(self.tensor(problem.weights[name]))
            for name, module in self._linears():
                for expert, weight in enumerate(self._of_experts(module)):
                    weight.copy_(self.tensor(problem.weights[name][expert]))
        self.module_parameters = list(self.layer.parameters())

    def _linears(self) -> list[tuple[str, Any]]:
        return [("fc1", self.layer.fc1), ("fc2", self.layer.fc2)]

    def _of_experts(self, module: Any) -> list[Any]:
        return [getattr(module, f"weight{expert}") for expert in range(self.dims.experts)]

    def forward(self) -> Any:
        """Return the layer's output."""
        with self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.layer(self.x)

    def gradients(self) -> dict[str, Any]:
        """Return {weight: gradient}."""
        stacked = {
            name: self.torch.stack([weight.grad for weight in self._of_experts(module)])
            for name, module in self._linears()
        }
        return {"ln": self.layer.norm.weight.grad, "router": self.layer.router.grad} | stacked


PRECISIONS = ("bf16", *FP8_RECIPES)
PEERS: dict[str, Any] = {
    **{f"te_torch_{precision}": partial(TETorchExperts, precision=precision) for precision in PRECISIONS},
    **{f"te_torch_split_{p}": partial(TETorchExperts, precision=p, split=True) for p in ("bf16", "fp8_current")},
    **{f"paddle_te_{precision}": partial(PaddleExperts, precision=precision) for precision in PRECISIONS},
}
