"""Train matrices with torch.optim.Muon: python muon_peers.py IN.npz OUT.npz. Imports nothing of Paddle's.

IN: "weight.NAME" and "grad.STEP.NAME" of several matrices, and the numbers "rate", "decay", "momentum", "wide". OUT:
the weights after the steps by name. wide: Newton–Schulz computes in float32, where torch has bfloat16.
"""

import sys

import numpy as np
import torch


def main():
    given = np.load(sys.argv[1])
    if given["wide"]:
        torch.Tensor.bfloat16 = torch.Tensor.clone  # torch's first line casts, and it divides the result in place
    names = [key.removeprefix("weight.") for key in given if key.startswith("weight.")]
    weights = {name: torch.nn.Parameter(torch.tensor(given[f"weight.{name}"])) for name in names}
    optimizer = torch.optim.Muon(
        weights.values(),
        lr=float(given["rate"]),
        weight_decay=float(given["decay"]),
        momentum=float(given["momentum"]),
        adjust_lr_fn="match_rms_adamw",
    )
    steps = {key.split(".")[1] for key in given if key.startswith("grad.")}
    for step in range(len(steps)):
        for name, weight in weights.items():
            weight.grad = torch.tensor(given[f"grad.{step}.{name}"])
        optimizer.step()
    np.savez(sys.argv[2], **{name: weight.detach().numpy() for name, weight in weights.items()})


main()
