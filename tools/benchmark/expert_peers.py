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


class _TorchExperts(TorchPeer):
    """PyTorch's part: norm, router and residual around `mlp`."""

    def _route(self, z: Any) -> Any:
        """Return the logits of forced balance, as `layers.moe.router` has them."""
        torch, dims = self.torch, self.dims
        logits = torch.nn.functional.linear(z.float(), self.router.float())
        first = (torch.arange(dims.tokens, device=self.device) * dims.topk).unsqueeze(1)
        forced = -((torch.arange(dims.experts, device=self.device) - first) % dims.experts).float() / dims.experts
        return logits - logits.detach() + forced


class PlainExperts(_TorchExperts):
    """One expert after the other, in PyTorch's functions: the reference, in float32."""

    def __init__(self, problem: ExpertProblem, **options: Any) -> None:
        super().__init__(problem, **options)
        self.weights = {name: self.tensor(bits).requires_grad_() for name, bits in problem.weights.items()}
        self.router, self.module_parameters = self.weights["router"], list(self.weights.values())

    def forward(self) -> Any:
        """Return the layer's output."""
        torch, functional = self.torch, self.torch.nn.functional
        z = functional.rms_norm(self.x, (self.dims.hidden,), self.weights["ln"], EPSILON)
        chosen, experts = self._route(z).topk(self.dims.topk, -1)
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


class TETorchExperts(_TorchExperts):
    """Transformer Engine's PyTorch parts, as Megatron-Core puts them together: RMSNorm, fused router, permutation with
    probabilities, GroupedLinear, ScaledSwiGLU.

    split: GEMMs expert by expert, whose rows the host must know; else those that read them on the device, which TE has
    for bf16 and current scaling. (It takes the former by itself where it lacks the latter.)
    """

    def __init__(self, problem: ExpertProblem, precision: str = "bf16", split: bool = False, **options: Any) -> None:
        super().__init__(problem, **options)
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        dims, where = problem.dims, dict(params_dtype=self.dtype, device=self.device)
        self.te, self.precision, self.recipe = te, precision, recipe_of(recipe, precision)
        self.norm = te.RMSNorm(dims.hidden, eps=EPSILON, dtype=self.dtype, device=self.device)
        self.router = self.torch.nn.Parameter(self.tensor(problem.weights["router"]))
        linear = partial(te.GroupedLinear, dims.experts, bias=False, use_grouped_tensor=not split, **where)
        self.fc1, self.fc2 = linear(dims.hidden, 2 * dims.ffn), linear(dims.ffn, dims.hidden)
        self.activation = te.ops.ScaledSwiGLU()
        with self.torch.no_grad():
            self.norm.weight.copy_(self.tensor(problem.weights["ln"]))
            for name, module in (("fc1", self.fc1), ("fc2", self.fc2)):
                for expert, weight in enumerate(self._of_experts(module)):
                    weight.copy_(self.tensor(problem.weights[name][expert]))
        modules = self.norm, self.fc1, self.fc2
        self.module_parameters = [self.router, *(p for module in modules for p in module.parameters())]

    def _of_experts(self, module: Any) -> list[Any]:
        return [getattr(module, f"weight{expert}") for expert in range(self.dims.experts)]

    def forward(self) -> Any:
        """Return the layer's output."""
        from transformer_engine.pytorch.permutation import moe_permute_with_probs, moe_unpermute
        from transformer_engine.pytorch.router import fused_topk_with_score_function

        dims = self.dims
        with self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            z = self.norm(self.x)
            options = dims.topk, False, None, None, None, "softmax", None
            probs, routing_map = fused_topk_with_score_function(self._route(z), *options)
            rows = routing_map.sum(0)
            permuted, of_rows, places = moe_permute_with_probs(z, probs, routing_map, dims.rows)
            act = self.activation(self.fc1(permuted, rows), of_rows)
            return moe_unpermute(self.fc2(act, rows), places, restore_shape=z.shape) + self.x

    def gradients(self) -> dict[str, Any]:
        """Return {weight: gradient}."""
        stacked = {
            name: self.torch.stack([weight.grad for weight in self._of_experts(module)])
            for name, module in (("fc1", self.fc1), ("fc2", self.fc2))
        }
        return {"ln": self.norm.weight.grad, "router": self.router.grad} | stacked


PRECISIONS = ("bf16", *FP8_RECIPES)
PEERS: dict[str, Any] = {
    **{f"te_torch_{precision}": partial(TETorchExperts, precision=precision) for precision in PRECISIONS},
    **{f"te_torch_split_{p}": partial(TETorchExperts, precision=p, split=True) for p in ("bf16", "fp8_current")},
    **{f"paddle_te_{precision}": partial(PaddleExperts, precision=precision) for precision in PRECISIONS},
}
