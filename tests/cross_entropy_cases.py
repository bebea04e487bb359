"""Random logits' parts and labels, and the cross-entropy of their product in float64."""

import numpy as np


def reference(hidden, weight, labels, ignore_index=-100, smoothing=0.0):
    """(loss, d hidden, d weight) in float64; weight [h, vocab]. smoothing: as torch's label_smoothing."""
    x, w, y = hidden.reshape(-1, hidden.shape[-1]).astype("float64"), weight.astype("float64"), labels.ravel()
    logits = x @ w
    log_softmax = logits - logits.max(-1, keepdims=True)
    log_softmax -= np.log(np.exp(log_softmax).sum(-1, keepdims=True))
    kept = np.flatnonzero(y != ignore_index)
    wanted = np.zeros_like(logits)
    wanted[kept] = smoothing / logits.shape[1]
    wanted[kept, y[kept]] += 1 - smoothing
    dlogits = np.where(wanted.any(-1, keepdims=True), np.exp(log_softmax) - wanted, 0)
    count = max(len(kept), 1)
    loss = -(wanted * log_softmax).sum() / count
    return loss, (dlogits @ w.T / count).reshape(hidden.shape), x.T @ dlogits / count


def draw(seed, batch=2, tokens=19, h=16, vocab=41):
    generator = np.random.default_rng(seed)
    hidden, weight = generator.standard_normal((batch, tokens, h)), generator.standard_normal((h, vocab))
    labels = generator.integers(0, vocab, (batch, tokens))
    labels[0, 3:7] = -100
    return hidden.astype("float32"), weight.astype("float32"), labels
