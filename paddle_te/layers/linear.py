"""Linear, LayerNormLinear, LayerNormMLP and RMSNorm."""

import paddle
from paddle import nn
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker
from paddle.distributed.fleet.utils.sequence_parallel_utils import mark_as_sequence_parallel_parameter

from paddle_te.distributed import TensorParallel
from paddle_te.fp8 import ModuleScaling
from paddle_te.layers.checks import one_of, probability
from paddle_te.layers.dropout import dropout_add
from paddle_te.ops import get_ops

PARALLEL_MODES = (None, "column", "row")


def local_size(size, tp, what):
    """`size` divided over the ranks of `tp`. Raises ValueError where it does not divide."""
    ranks = 1 if tp is None else tp.size
    if size % ranks:
        raise ValueError(f"{what}={size} is not divisible by the tensor parallel size {ranks}")
    return size // ranks


class BackendLayer(nn.Layer):
    """A layer whose math is `self.ops`, the backend's.

    dropout_in_training: the probability with which it drops numbers.
    """

    dropout_in_training = 0.0

    def __init__(self, backend):
        super().__init__()
        get_ops(backend)  # refuses what it does not know
        self.backend = backend

    @property
    def ops(self):
        """A module, hence no attribute: those are copied with the layer, which modules cannot be."""
        return get_ops(self.backend)

    @property
    def dropout(self):
        """The probability in the layer's mode: 0 in evaluation."""
        return self.dropout_in_training if self.training else 0.0


class _Layer(BackendLayer):
    """What the layers share: the ranks, the fp8 state and the creation of parameters.

    Every forward takes parameters from `_parameters` and layers from `_sub_layers`: as attributes nn.Layer finds them
    after a lookup that failed, which takes several times as long.
    """

    def __init__(self, backend, params_dtype, num_gemms=0, set_parallel_mode=False, sequence_parallel=False):
        super().__init__(backend)
        self.params_dtype = params_dtype or paddle.get_default_dtype()
        self.tp = TensorParallel.from_fleet(sequence_parallel) if set_parallel_mode or sequence_parallel else None
        self.fp8 = ModuleScaling(num_gemms, self.ops.amax_and_scale_update) if num_gemms else None

    def create_bias(self, size):
        """Zeros [size]: this rank's part of the bias of a column-parallel GEMM."""
        bias = self.create_parameter(
            [size], dtype=self.params_dtype, is_bias=True, default_initializer=nn.initializer.Constant(0.0)
        )
        if self.tp is not None:
            bias.is_distributed, bias.split_axis = True, 0
        return bias

    def create_norm_weight(self, size):
        weight = self.create_parameter(
            [size], dtype=self.params_dtype, default_initializer=nn.initializer.Constant(1.0)
        )
        if self.tp is not None and self.tp.sequence_parallel:
            # each rank sees other tokens: the trainer sums this gradient over the group
            mark_as_sequence_parallel_parameter(weight)
        return weight

    def create_weight(self, shape, init_method, split_axis=None):
        """A [out, in] weight; split_axis is the axis that the ranks share, None where each holds all of it."""
        make = lambda: self.create_parameter(  # noqa: E731
            shape, dtype=self.params_dtype, default_initializer=init_method or nn.initializer.Normal(0.0, 0.02)
        )
        if self.tp is None or split_axis is None:
            return make()
        with get_rng_state_tracker().rng_state():  # other random numbers on each rank
            weight = make()
        weight.is_distributed = True
        weight.split_axis = split_axis
        return weight


class RMSNorm(_Layer):
    """y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019).

    Parameters: weight [hidden_size]. sequence_parallel: each rank has other tokens, so that the weight's gradient is to
    be summed over them. Other arguments: as TransformerLayer's.
    """

    def __init__(self, hidden_size, eps=1e-5, params_dtype=None, sequence_parallel=False, backend="transformer_engine"):
        super().__init__(backend, params_dtype, sequence_parallel=sequence_parallel)
        self.eps = eps
        self.weight = self.create_norm_weight(hidden_size)

    def forward(self, x):
        """[..., hidden_size] -> the same shape and dtype."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class Linear(_Layer):
    """y = x · weightᵀ (+ residual), without bias.

    Parameters: weight [out_features, in_features], split over the tensor parallel ranks on axis 0 (`parallel_mode`
    "column") or 1 ("row").
    sequence_parallel: a column-parallel one's input, and a row-parallel one's output, are this rank's tokens.
    init_method: the weight's initializer; None is Normal(0, 0.02). Other arguments: as TransformerLayer's.
    Raises ValueError for another parallel_mode, and for sizes that the ranks do not divide.
    """

    def __init__(
        self,
        in_features,
        out_features,
        parallel_mode=None,
        sequence_parallel=False,
        init_method=None,
        params_dtype=None,
        fuse_wgrad_accumulation=False,
        backend="transformer_engine",
    ):
        one_of(PARALLEL_MODES, parallel_mode=parallel_mode)
        super().__init__(backend, params_dtype, 1, parallel_mode is not None, sequence_parallel)
        self.parallel_mode = parallel_mode if self.tp is not None else None
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        split_axis = {"column": 0, "row": 1, None: None}[self.parallel_mode]
        shape = [out_features, in_features]
        if split_axis is not None:
            shape[split_axis] = local_size(shape[split_axis], self.tp, ("out_features", "in_features")[split_axis])
        self.weight = self.create_weight(shape, init_method, split_axis)

    def forward(self, x, residual=None, is_first_microbatch=None):
        """[..., in_features of this rank] -> [..., out_features of this rank]; residual, if any, is of that shape and
        added. is_first_microbatch: as TransformerLayer's."""
        quantizers = self.fp8.begin_forward(self.training, is_first_microbatch)
        return self.ops.linear(
            x,
            self._parameters["weight"],
            residual=residual,
            parallel_mode=self.parallel_mode,
            tp=self.tp,
            quantizers=quantizers and quantizers[0],
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
        )


class LayerNormLinear(_Layer):
    """y = RMSNorm(x) · weightᵀ (+ bias), column parallel.

    Parameters: ln_weight [in_features], weight [out_features / tp, in_features]; with `bias`, bias [out_features / tp],
    zeros at first.
    init_method: the weight's initializer; None is Normal(0, 0.02). Other arguments: as TransformerLayer's.
    """

    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        set_parallel_mode=False,
        sequence_parallel=False,
        init_method=None,
        params_dtype=None,
        fuse_wgrad_accumulation=False,
        bias=False,
        backend="transformer_engine",
    ):
        super().__init__(backend, params_dtype, 1, set_parallel_mode, sequence_parallel)
        self.eps = eps
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.ln_weight = self.create_norm_weight(in_features)
        rows = local_size(out_features, self.tp, "out_features")
        self.weight = self.create_weight([rows, in_features], init_method, 0)
        self.bias = self.create_bias(rows) if bias else None

    def forward(self, x, is_first_microbatch=None):
        """[..., in] -> ([..., out of this rank], x).

        The second value is x again: use it for the residual branch, so that backward adds both gradients of x
        inside the norm's kernel.
        """
        quantizers, parameters = self.fp8.begin_forward(self.training, is_first_microbatch), self._parameters
        return self.ops.layernorm_linear(
            x,
            parameters["ln_weight"],
            parameters["weight"],
            self.eps,
            bias=parameters.get("bias"),
            tp=self.tp,
            quantizers=quantizers and quantizers[0],
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
        )


class LayerNormMLP(_Layer):
    """y = x + dropout(SwiGLU(RMSNorm(x) · fc1ᵀ) · fc2ᵀ), the residual included.

    Parameters: ln_weight [hidden_size], fc1_weight [2 · ffn_hidden_size / tp, hidden_size] (this rank's gate rows,
    then its up rows), fc2_weight [hidden_size, ffn_hidden_size / tp]. SwiGLU: Shazeer, 2020.
    Arguments: as TransformerLayer's.
    """

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        eps=1e-5,
        set_parallel_mode=False,
        sequence_parallel=False,
        init_method=None,
        output_layer_init_method=None,
        params_dtype=None,
        fuse_wgrad_accumulation=False,
        hidden_dropout=0.0,
        backend="transformer_engine",
    ):
        super().__init__(backend, params_dtype, 2, set_parallel_mode, sequence_parallel)
        self.dropout_in_training = probability(hidden_dropout=hidden_dropout)
        self.eps = eps
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        ffn = local_size(ffn_hidden_size, self.tp, "ffn_hidden_size")
        self.ln_weight = self.create_norm_weight(hidden_size)
        self.fc1_weight = self.create_weight([2 * ffn, hidden_size], init_method, 0)
        self.fc2_weight = self.create_weight([hidden_size, ffn], output_layer_init_method or init_method, 1)

    def forward(self, x, is_first_microbatch=None):
        """[..., hidden_size] -> the same shape and dtype. is_first_microbatch: as TransformerLayer's."""
        parameters, dropout = self._parameters, self.dropout
        out = self.ops.layernorm_mlp(
            x,
            parameters["ln_weight"],
            parameters["fc1_weight"],
            parameters["fc2_weight"],
            self.eps,
            add_residual=not dropout,
            tp=self.tp,
            quantizers=self.fp8.begin_forward(self.training, is_first_microbatch) or (None, None),
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
        )
        return dropout_add(*out, dropout, self.tp) if dropout else out
