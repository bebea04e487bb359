"""The activations between an MLP's two GEMMs, under Transformer Engine's names."""

# How wide fc1's output is, in widths of the activation's: gated ones have a gate, which is activated, and beside it
# what the gate multiplies (Shazeer, 2020). gelu is its tanh form (Hendrycks and Gimpel, 2016).
FC1_WIDTHS = {"swiglu": 2, "geglu": 2, "gelu": 1, "relu": 1}
