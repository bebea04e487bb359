"""LoRA (Hu et al., 2021) on the decoder layers of backends paddle and transformer_engine, in PaddleNLP's LoRAModel.

y = W·x becomes y = W·x + scaling·B·A·x with W frozen. Each part of a fused weight has A and B of its own, under the
names and with the shapes that PaddleNLP's LoRALinear gives the native layer's projections:

    ….self_attention.layernorm_qkv.{q,k,v}_proj.{lora_A [in, r], lora_B [r, out]}
    ….self_attention.proj.o_proj…, ….layernorm_mlp.{gate,up,down}_proj…

The low-rank products are added to the GEMMs' outputs, not to the weights: a sum W + scaling·B·A would keep a copy of
every weight for backward, and its gradient needs the wgrad GEMMs that a frozen weight spares. So a layer with LoRA runs
norm, fc1, activation and fc2 as single operations, of the same `ops`; merged, it is the fused layer again.
"""

import re
from pathlib import Path

import paddle
from paddle import nn
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker
from paddle.distributed.fleet.utils.sequence_parallel_utils import mark_as_sequence_parallel_parameter
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.utils.env import LORA_CONFIG_NAME, LORA_WEIGHTS_NAME

from paddle_te.configs.families import family_of
from paddle_te.hosts.paddlenlp.decoder import TEDecoderLayer
from paddle_te.hosts.paddlenlp.loading import on_device, read_share
from paddle_te.hosts.paddlenlp.tensor_parallel import model_dims
from paddle_te.layers import LayerNormLinear, LayerNormMLP, Linear, dropout_add, stored_weights
from paddle_te.weights import SPLIT_AXIS, check_contents, te_layout
from paddle_te.weights.folder import open_checkpoint

ATTENTION = tuple(f"{part}_proj" for part in ("q", "k", "v", "o"))
MLP = tuple(f"{part}_proj" for part in ("gate", "up", "down"))
TARGETS = {"all": ATTENTION + MLP, "attention": ATTENTION, "mlp": MLP}


def target_modules(targets):
    """LoRAConfig's target_modules for "all", "attention" or "mlp", for every backend, native weights fused or not."""
    if targets not in TARGETS:
        raise ValueError(f"lora_targets={targets!r}; it may be {', '.join(TARGETS)}")
    fused = {"all": ["qkv_proj", "gate_up_fused_proj"], "attention": ["qkv_proj"], "mlp": ["gate_up_fused_proj"]}
    gpts = {"all": ["out_proj", "linear1", "linear2"], "attention": ["out_proj"], "mlp": ["linear1", "linear2"]}
    return [rf".*\.{name}" for name in (*TARGETS[targets], *fused[targets], *gpts[targets])]


class LowRank(nn.Layer):
    """A and B of one part. Parameters: lora_A [in_features, r], lora_B [r, out_features], of this rank.

    parallel_mode: that of the GEMM beside it. "column" splits B, "row" splits A; the r columns between them are what
    travels, so A's (B's) gradient is whole on every rank, or under sequence parallelism summed by the trainer.
    """

    def __init__(self, in_features, out_features, config, dtype, parallel_mode=None, tp=None):
        super().__init__()
        self.tp = tp
        self.scaling = config.scaling
        self.dropout = nn.Dropout(config.lora_dropout) if config.lora_dropout else None
        uniform = nn.initializer.KaimingUniform(negative_slope=5**0.5, nonlinearity="leaky_relu")
        make = lambda shape, init: self.create_parameter(shape, dtype=dtype, default_initializer=init)  # noqa: E731
        if tp is not None and parallel_mode == "row":
            with get_rng_state_tracker().rng_state():  # other random numbers on each rank
                self.lora_A = make([in_features, config.r], uniform)
        else:
            self.lora_A = make([in_features, config.r], uniform)
        self.lora_B = make([config.r, out_features], nn.initializer.Constant(0.0))
        if tp is not None:
            self._mark(*{"column": (self.lora_B, 1, self.lora_A), "row": (self.lora_A, 0, self.lora_B)}[parallel_mode])

    def _mark(self, split, axis, whole):
        split.is_distributed, split.split_axis = True, axis
        if self.tp.sequence_parallel:
            mark_as_sequence_parallel_parameter(whole)

    def delta(self):
        """What merging adds to the weight: float32 [out_features, in_features]."""
        a, b = self.lora_A.astype("float32"), self.lora_B.astype("float32")
        return paddle.matmul(a, b).transpose([1, 0]) * self.scaling


def _joined(tensors, axis):
    return tensors[0] if len(tensors) == 1 else paddle.concat(tensors, axis)


class _WithLoRA:
    """A te layer with LoRA on some of its parts; `enable` makes one out of the layer itself, as torch's parametrize.

    PLACE: where it is in a decoder layer. parts: `parts_of` its family.
    """

    PLACE = ""
    merged = disable_lora = False

    @classmethod
    def parts_of(cls, family):
        """{name of a weight: (names of its parts as of PaddleNLP's native projections, parallel_mode)}."""
        slots = {slot.name: slot for slot in te_layout(family=family).layer}
        found = {}
        for weight in cls.GEMM_WEIGHTS:
            parts = slots[f"transformer.{cls.PLACE}.{weight}"].parts
            found[weight] = tuple(f"{part}_proj" for part in parts), ("column", "row")[SPLIT_AXIS[parts[0]]]
        return found

    @classmethod
    def enable(cls, layer, family, sizes, names, config):
        """sizes: {part: rows of the fused weight}; names: the parts that get A and B."""
        layer.part_sizes, layer.parts = sizes, cls.parts_of(family)
        for weight_name, (parts, parallel_mode) in layer.parts.items():
            weight = getattr(layer, weight_name)
            for part in parts:
                if part in names:
                    shape = weight.shape[1], sizes[part]
                    layer.add_sublayer(part, LowRank(*shape, config, layer.params_dtype, parallel_mode, layer.tp))
        layer.__class__ = cls

    def plain(self):
        """Whether the layer computes as one without LoRA."""
        return self.merged or self.disable_lora

    def low_rank(self, x, weight):
        """What is added to the output of a weight's GEMM: scaling·x·A·B of its parts side by side, zeros for parts
        without LoRA; None where no part has it.

        The parts' A stand side by side and their B on a diagonal, so that there are two products for all of them: the
        large tensors are read and written once. The parts share x, and with it what is dropped of it.
        """
        parts, parallel_mode = self.parts[weight]
        found = [self._sub_layers[part] for part in parts if part in self._sub_layers]
        if not found:
            return None
        dropout, scaling = found[0].dropout, found[0].scaling  # of all parts
        z = paddle.matmul(x if dropout is None else dropout(x), _joined([part.lora_A for part in found], -1))
        if self.tp is not None:
            z = self.tp.enter(z) if parallel_mode == "column" else self.tp.leave(z)
        return paddle.matmul(z * scaling, self._diagonal_of_b(parts))

    def _diagonal_of_b(self, parts):
        """[sum of r, sum of the parts' rows]: B of each part with LoRA in rows of its own, in the part's columns."""
        rows = []
        for part in parts:
            if part in self._sub_layers:
                b = self._sub_layers[part].lora_B
                columns = [
                    b if other == part else paddle.zeros([b.shape[0], self.part_sizes[other]], b.dtype)
                    for other in parts
                ]
                rows.append(_joined(columns, -1))
        return _joined(rows, 0)

    def split_mapping(self):
        """[(parameter name, is_column)] of what tensor parallelism splits, for PaddleNLP's merging of ranks."""
        mode = {part: mode for parts, mode in self.parts.values() for part in parts}
        return [(f"{p}.lora_B", True) if mode[p] == "column" else (f"{p}.lora_A", False) for p in self._sub_layers]

    @paddle.no_grad()
    def with_products(self, name, weight, sign=1):
        """The weight of that name, a tensor, with the low-rank products added (sign -1: taken away)."""
        parts, _ = self.parts[name]
        deltas = [
            self._sub_layers[part].delta()
            if part in self._sub_layers
            else paddle.zeros([self.part_sizes[part], weight.shape[1]], "float32")
            for part in parts
        ]
        return (weight.astype("float32") + sign * paddle.concat(deltas, 0)).astype(weight.dtype)

    def merge(self, sign=1):
        """Adds the low-rank products to the weights (sign -1: takes them away); forward is then the fused layer's.

        Raises RuntimeError for weights in fp8, which would round them away.
        """
        if self.merged == (sign == 1):
            return
        if self.stored_weights:
            raise RuntimeError("the weights exist in fp8 only: merge into those that they were made from (save_merged)")
        for name in self.parts:
            weight = getattr(self, name)
            weight.set_value(self.with_products(name, weight, sign))
        self.merged = sign == 1

    def unmerge(self):
        self.merge(sign=-1)

    def disable(self):
        """Takes LoRA away, as it was before `enable` (but for what was merged)."""
        for part in list(self._sub_layers):
            del self._sub_layers[part]
        del self.part_sizes, self.parts
        for name in ("merged", "disable_lora"):
            self.__dict__.pop(name, None)
        self.__class__ = type(self).__mro__[2]  # the te layer

    def gemm(self, x, weight, bias, quantizers, residual=None):
        """x through a weight, by its name, with its bias and LoRA."""
        _, parallel_mode = self.parts[weight]
        ranks = dict(parallel_mode=parallel_mode if self.tp is not None else None, tp=self.tp)
        options = dict(bias=bias, residual=residual, quantizers=quantizers, **ranks)
        y, low_rank = self.ops.linear(x, self._parameters[weight], **options), self.low_rank(x, weight)
        return y if low_rank is None else y + low_rank


class LoRALayerNormLinear(_WithLoRA, LayerNormLinear):
    """layernorm_qkv with LoRA on q, k and v."""

    PLACE = "self_attention.layernorm_qkv"

    def forward(self, x, is_first_microbatch=None):
        if self.plain():
            return super().forward(x, is_first_microbatch)
        (quantizers,) = self.fp8.begin_forward(self.training, is_first_microbatch) or (None,)
        z = self.ops.normalize(x, self.norm())
        return self.gemm(z, "weight", self.bias, quantizers), x


class LoRALinear(_WithLoRA, Linear):
    """proj with LoRA."""

    PLACE = "self_attention.proj"

    def forward(self, x, residual=None, is_first_microbatch=None):
        y = super().forward(x, residual, is_first_microbatch)
        return y if self.plain() else y + self.low_rank(x, "weight")


class LoRALayerNormMLP(_WithLoRA, LayerNormMLP):
    """layernorm_mlp with LoRA on gate, if there is one, up and down."""

    PLACE = "layernorm_mlp"

    def forward(self, x, is_first_microbatch=None):
        if self.plain():
            return super().forward(x, is_first_microbatch)
        first, second = self.fp8.begin_forward(self.training, is_first_microbatch) or (None, None)
        z = self.ops.normalize(x, self.norm())
        act = self.ops.activate(self.gemm(z, "fc1_weight", self.fc1_bias, first), self.activation)
        y = self.gemm(act, "fc2_weight", self.fc2_bias, second, residual=None if self.dropout else x)
        return dropout_add(y, x, self.dropout, self.tp) if self.dropout else y


def _layers(decoder_layer, family):
    """[(layer, its LoRA class, sizes of its parts)] of a decoder layer of a Family."""
    attention, mlp = decoder_layer.transformer.self_attention, decoder_layer.transformer.layernorm_mlp
    layers = [(attention.layernorm_qkv, LoRALayerNormLinear), (attention.proj, LoRALinear), (mlp, LoRALayerNormMLP)]
    dims, degree = model_dims(decoder_layer.config), max(decoder_layer.config.tensor_parallel_degree, 1)

    def rows(name):
        return dims.part_shape(name.removesuffix("_proj"), degree)[0]

    return [
        (layer, make, {n: rows(n) for names, _ in make.parts_of(family).values() for n in names})
        for layer, make in layers
    ]


class TELoRAModel(LoRAModel):
    """PaddleNLP's LoRAModel (save_pretrained, from_pretrained, merge, unmerge) around a model with te's layers.

    lora_config.target_modules are matched against the names of the parts (see above), as against native projections.
    Raises ValueError for settings that LoRA on te's layers does not have, or when nothing matches.
    """

    def get_lora_model(self, model, lora_config):
        """The model, with LoRA in those of its layers whose parts match."""
        _check(lora_config)
        targets = lora_config.target_modules
        targets = [targets] if isinstance(targets, str) else targets
        found, family = False, family_of(model.config)
        names = {id(layer): name for name, layer in model.named_sublayers()}
        for decoder_layer in [layer for layer in model.sublayers() if isinstance(layer, TEDecoderLayer)]:
            for layer, make, sizes in _layers(decoder_layer, family):
                name = names[id(layer)]
                parts = [p for p in sizes if any(re.fullmatch(target, f"{name}.{p}") for target in targets)]
                if parts:
                    make.enable(layer, family, sizes, parts, lora_config)
                    found = True
                    if layer.tp is not None:
                        for parameter, is_column in layer.split_mapping():
                            self.add_lora_split_mapping(f"{name}.{parameter}", is_column)
        if not found:
            raise ValueError(f"LoRA: target_modules {targets} match nothing in {type(model).__name__}")
        return model

    def mark_only_lora_as_trainable(self):
        """Freezes all but LoRA and what matches lora_config.trainable_modules."""
        extra = self.lora_config.trainable_modules or []
        for name, weight in self.model.state_dict().items():
            weight.stop_gradient = "lora_" not in name and not any(re.fullmatch(e, name) for e in extra)
            if weight.dtype == paddle.uint8 and not weight.stop_gradient:
                raise ValueError(f"LoRA: {name} of trainable_modules exists in fp8 only, in which it cannot be trained")

    def set_state_dict(self, state_dict):
        """As PaddleNLP's, and in the model's dtype: an adapter trained in bfloat16 serves a float32 model too."""
        own = self.model.state_dict()
        cast = lambda name, value: paddle.to_tensor(value).astype(own[name].dtype) if name in own else value  # noqa: E731
        super().set_state_dict({name: cast(name, value) for name, value in state_dict.items()})

    @property
    def base_precision(self):
        """The precision in which alone the frozen weights exist: "fp8", or None for the model's own."""
        return "fp8" if stored_weights(self.model) else None

    def lora_layers(self):
        """The layers with LoRA."""
        return [layer for layer in self.model.sublayers() if isinstance(layer, _WithLoRA)]

    def merge(self):
        """Adds LoRA to the weights it stands beside, in all layers; they compute as without it from then on."""
        for layer in self.lora_layers():
            layer.merge()

    def unmerge(self):
        """Takes it out again, but for the weights' rounding."""
        for layer in self.lora_layers():
            layer.unmerge()

    def disable_lora(self):
        """Computes without LoRA until `enable_lora`."""
        for layer in self.lora_layers():
            layer.disable_lora = True

    def enable_lora(self):
        """Undoes `disable_lora`."""
        for layer in self.lora_layers():
            layer.disable_lora = False

    def restore_original_model(self):
        """The model without LoRA. What was merged stays in its weights; what was not is gone."""
        for layer in self.lora_layers():
            layer.disable()
        return self.model


def _check(config):
    """Raises ValueError for settings of a LoRAConfig that are not built."""
    plain = dict(
        pissa=False, loraga=False, use_mora=False, lora_use_mixer=False, do_qat=False, use_quick_lora=False,
        trainable_bias=None, enable_lora_list=None, lora_plus_scale=1.0,
    )  # fmt: skip
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise ValueError(f"LoRA of backends paddle and transformer_engine has no {name}: leave it at {value}")
    if config.r < 1:
        raise ValueError(f"LoRA: r={config.r}; it must be at least 1")


def lora_model_class(backend):
    """PaddleNLP's LoRAModel for backend "none", ours for the others."""
    return LoRAModel if backend == "none" else TELoRAModel


def lora_config(targets="all", r=32, lora_alpha=64, lora_dropout=0.0, dtype=None, tensor_parallel_degree=-1):
    """LoRAConfig for "all", "attention" or "mlp" projections of any backend. scaling = lora_alpha / r."""
    return LoRAConfig(
        target_modules=target_modules(targets),
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        dtype=dtype,
        tensor_parallel_degree=tensor_parallel_degree,
    )


def load_lora(model, folder, backend, merge=True):
    """`model` with the adapter in `folder` (LoRAModel.save_pretrained); merge adds it to the weights.

    Returns the model itself, or the LoRAModel around it where it is not merged. Raises FileNotFoundError where there is
    no adapter (PaddleNLP's from_pretrained would only log and go on), ValueError for the adapter of another backend,
    and CheckpointError, a ValueError, for files that are damaged or would run code when they are loaded.
    """
    for name in (LORA_CONFIG_NAME, LORA_WEIGHTS_NAME):
        if not (Path(folder) / name).is_file():
            raise FileNotFoundError(f"{Path(folder) / name}: no such file; {folder} holds no LoRA adapter")
    for name in ("lora_model_state*", "peft_model*"):  # which of them PaddleNLP loads depends on what else is there
        for path in Path(folder).glob(name):
            check_contents(path)
    lora = lora_model_class(backend).from_pretrained(model, str(folder))
    _check_names(lora, folder)
    if not merge:
        return lora
    lora.merge()
    return lora.model


def _check_names(lora, folder):
    """set_state_dict skips what it does not find: an adapter of other layers would do nothing."""
    there = set(paddle.load(str(Path(folder) / LORA_WEIGHTS_NAME), return_numpy=True))
    wanted = {name for name in lora.model.state_dict() if "lora_" in name}
    if there != wanted:
        example = sorted(there ^ wanted)[0]
        raise ValueError(
            f"{folder}: the adapter's weights are not those of this model and backend (for instance {example}); "
            "LoRA of backend none fits native layers, that of paddle and transformer_engine theirs"
        )


def save_merged(lora, folder, base=None):
    """Adds the adapter to the weights and saves the model, as a checkpoint without LoRA, in `folder`. One process.

    base: the folder that the model was loaded from, for one whose weights exist in fp8 only: they are read there again
    and stay on the host, so that the merged ones are those of a model that was never quantized.
    """
    model = lora.model
    stored = stored_weights(model)
    if not stored:
        lora.merge()
    weights = {name: weight for name, weight in model.state_dict().items() if "lora_" not in name}
    for name, array in read_share(open_checkpoint(base), model.config, stored) if stored else ():
        layer, own_name = stored[name]
        weight = on_device(array).astype(layer.params_dtype)
        weights[name] = (layer.with_products(own_name, weight) if isinstance(layer, _WithLoRA) else weight).cpu()
    model.save_pretrained(str(folder), state_dict=weights)
