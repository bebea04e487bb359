"""TransformerLayer: a whole decoder layer."""

from paddle import nn

from paddle_te.fp8 import bind_model
from paddle_te.layers.attention import MultiHeadAttention
from paddle_te.layers.linear import LayerNormMLP


class TransformerLayer(nn.Layer):
    """Pre-norm decoder layer with attention (MHA or GQA) and an MLP.

    hidden_size, ffn_hidden_size, num_attention_heads: of the whole layer, not of one rank.
    num_gqa_groups: key and value heads; None is num_attention_heads.
    layernorm_epsilon: of both norms.
    max_sequence_length: s; needed under sequence parallelism, where activations arrive as [b·s/tp, h].
    set_parallel_mode: split weights over fleet's model-parallel group. sequence_parallel: split tokens as well.
    init_method, output_layer_init_method: initializers of (qkv, fc1) and (proj, fc2); None is Normal(0, 0.02).
    params_dtype: of the parameters; None is Paddle's default dtype.
    fuse_wgrad_accumulation: add weight gradients to `parameter.main_grad` (float32) inside the GEMMs, or put them there
        where `parameter.overwrite_main_grad` is set; they set it back.
    add_qkv_bias: a bias of the projection to q, k and v, and no other (Megatron-Core's name).
    bias: a bias of each of the four GEMMs.
    hidden_dropout: probability with which each number that either half adds to its input is dropped in training.
    attention_dropout: probability with which each number of the softmax is. TE's default is 0.1 for both.
    kv_channels: the size of one head; None is hidden_size / num_attention_heads.
    self_attn_mask_type: as DotProductAttention's attn_mask_type.
    layer_number: the layer's place in the model; an attribute for who reads it, as nothing here depends on it.
    qk_norm_type: "RMSNorm" norms each head of q and k, with qk_norm_eps and a weight for q and one for k that all heads
        share; qk_norm_before_rope: before they are rotated (as Qwen3) instead of after. None: no such norm.
    attn_input_format: "bshd" for activations [b, s, h], "sbhd" for [s, b, h]. The latter costs two copies in attention.
    window_size: (left, 0): a query sees itself and at most `left` tokens before it; (-1, 0) and None: all of them.
    softmax_scale: of the scores before the softmax; None is 1 / √d, d the size of one head.
    normalization: "RMSNorm" or "LayerNorm", of both norms. zero_centered_gamma: they multiply by 1 + weight, which is 0
        at first.
    activation: of the MLP: "swiglu" or "geglu", which are gated, "gelu" or "relu". gelu is its tanh form.
    cp_comm_type: how attention sees whole sequences whose tokens are split over fleet's sep group; TE's name, see
        `distributed.context_parallel`. None: sequences are whole. max_sequence_length is that of whole ones.
    recompute_modules: parts that backward computes again, so that their results take no memory until then. Megatron's
        names: "layernorm", the outputs of both norms; "core_attn", rotation and attention; "mlp", all of the MLP that
        its second GEMM needs; and "mlp_act", the MLP's activation alone.
    activation_func_fp8_input_store: the MLP keeps its first GEMM's output for backward in fp8 (MXFP8: blocks of 32
        numbers, each with a power of 2), from which backward computes the activation's gradient and what it computes
        again of it. ffn_hidden_size / tp must be a multiple of 32. Not with "mlp" or mlp_chunk_tokens, which keep
        nothing there.
    mlp_chunk_tokens: where there are more tokens, the MLP's GEMMs take so many of them at a time, in forward and in
        backward, which computes each such chunk again, so that what the MLP needs in between takes the memory of one
        chunk. In fp8 a multiple of 16, with block scaling of 128, for each rank of sequence parallelism; hidden_size a
        multiple of 8. 0: all tokens at once.
    backend: "transformer_engine" or "paddle".
    Raises ValueError for sizes that do not divide and for other names than these, and what the backend raises where it
    cannot run.
    """

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        num_attention_heads,
        num_gqa_groups=None,
        layernorm_epsilon=1e-5,
        max_sequence_length=None,
        set_parallel_mode=False,
        sequence_parallel=False,
        init_method=None,
        output_layer_init_method=None,
        params_dtype=None,
        fuse_wgrad_accumulation=False,
        add_qkv_bias=False,
        window_size=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=None,
        kv_channels=None,
        self_attn_mask_type="causal",
        layer_number=None,
        qk_norm_type=None,
        qk_norm_eps=1e-6,
        qk_norm_before_rope=False,
        attn_input_format="bshd",
        bias=False,
        normalization="RMSNorm",
        zero_centered_gamma=False,
        activation="swiglu",
        cp_comm_type=None,
        recompute_modules=(),
        activation_func_fp8_input_store=False,
        mlp_chunk_tokens=0,
        backend="transformer_engine",
    ):
        super().__init__()
        self.layer_number = layer_number
        shared = dict(
            bias=bias,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            set_parallel_mode=set_parallel_mode,
            sequence_parallel=sequence_parallel,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            params_dtype=params_dtype,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            hidden_dropout=hidden_dropout,
            recompute_modules=recompute_modules,
            backend=backend,
        )
        self.self_attention = MultiHeadAttention(
            hidden_size,
            num_attention_heads,
            num_gqa_groups,
            layernorm_epsilon,
            max_sequence_length,
            add_qkv_bias=add_qkv_bias,
            window_size=window_size,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            kv_channels=kv_channels,
            attn_mask_type=self_attn_mask_type,
            layer_number=layer_number,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            attn_input_format=attn_input_format,
            cp_comm_type=cp_comm_type,
            **shared,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_func_fp8_input_store=activation_func_fp8_input_store,
            mlp_chunk_tokens=mlp_chunk_tokens,
            **shared,
        )
        bind_model(self)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        rotary_pos_emb=None,
        recompute_core_attention=False,
        is_first_microbatch=None,
        past_key_value=None,
        use_cache=False,
        cu_seqlens=None,
    ):
        """hidden_states: [b, s, h], with attn_input_format sbhd [s, b, h], or under sequence parallelism [b·s/tp, h],
        tokens in that order -> the same shape and dtype. With cp_comm_type they are of this rank's tokens, and all else
        of whole sequences.

        attention_mask: as DotProductAttention's.
        rotary_pos_emb: angles, float32 [s, d] or [b, s, d], of `RotaryPositionEmbedding`; None: nothing is rotated.
        recompute_core_attention: as MultiHeadAttention's.
        is_first_microbatch: True quantizes the weights and keeps their fp8 copies, False uses the kept ones, None
        keeps nothing. Matters under `fp8_autocast` only.
        past_key_value, use_cache: as MultiHeadAttention's; with use_cache the result is (output, (k, v)).
        cu_seqlens: int32 [documents + 1], where packed documents begin and end, as DotProductAttention's.
        """
        layers = self._sub_layers  # see layers.linear._Layer
        out = layers["self_attention"](
            hidden_states,
            rotary_pos_emb,
            attention_mask,
            recompute_core_attention,
            is_first_microbatch,
            past_key_value,
            use_cache,
            cu_seqlens,
        )
        if not use_cache:
            return layers["layernorm_mlp"](out, is_first_microbatch)
        out, present_key_value = out
        return layers["layernorm_mlp"](out, is_first_microbatch), present_key_value
