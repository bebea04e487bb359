"""Random logits' parts and labels, and the cross-entropy of their product in float64."""

import numpy as np


def reference(hidden, weight, labels, ignore_index=-100):
    """(loss, d hidden, d weight) in float64; weight [h, vocab]."""
    x, w, y = hidden.reshape(-1, hidden.shape[-1]).astype("float64"), weight.astype("float64"), labels.ravel()
    logits = x @ w
    log_softmax = logits - logits.max(-1, keepdims=True)
    log_softmax -= np.log(np.exp(log_softmax).sum(-1, keepdims=True))
    kept = np.flatnonzero(y != ignore_index)
    dlogits = np.zeros_like(logits)
    dlogits[kept] = np.exp(log_softmax[kept])
    dlogits[kept, y[kept]] -= 1
    count = max(len(kept), 1)
    loss = -log_softmax[kept, y[kept]].sum() / count
    return loss, (dlogits @ w.T / count).reshape(hidden.shape), x.T @ dlogits / count


def draw(seed, batch=2, tokens=19, h=16, vocab=41):
    generator = np.random.default_rng(seed)
    hidden, weight = generator.standard_normal((batch, tokens, h)), generator.standard_normal((h, vocab))
    labels = generator.integers(0, vocab, (batch, tokens))
    labels[0, 3:7] = -100
    return hidden.astype("float32"), weight.astype("float32"), labels
