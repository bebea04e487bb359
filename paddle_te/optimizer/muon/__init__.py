"""Muon: momentum of each matrix, made nearly orthogonal by Newton–Schulz, and AdamW for all other weights.

The form is Moonlight's (Liu et al. 2025, arXiv:2502.16982): Nesterov's momentum, five Newton–Schulz steps in bfloat16
(float32 weights: in float32), an update times 0.2 · sqrt(max(rows, columns)), so that its root mean square is AdamW's,
and AdamW's decay. One learning rate and one decay therefore serve both.

`matrices` says what is a matrix, `exchange` brings those that ranks divide to one rank and back, `plan` says which are
updated together and by whom, `step` is the optimizer.
"""

from paddle_te.optimizer.muon.step import Muon, bind_muon, use_muon

__all__ = ["Muon", "bind_muon", "use_muon"]
