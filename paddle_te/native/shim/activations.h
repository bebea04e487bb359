// Transformer Engine's activations, each once: X(the other arguments, name). A gated one's input has the gate and,
// beside it, what the gate multiplies. All else is made from these lists: declarations, calls and the module's
// functions. Python has the same names in paddle_te/ops/activations.py.
#pragma once

#define GATED_ACTIVATIONS(X, ...) X(swiglu, ##__VA_ARGS__) X(geglu, ##__VA_ARGS__)
#define PLAIN_ACTIVATIONS(X, ...) X(gelu, ##__VA_ARGS__) X(relu, ##__VA_ARGS__)
