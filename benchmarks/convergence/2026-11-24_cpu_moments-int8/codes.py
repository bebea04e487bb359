"""Print the errors of one rounding of AdamW's moments to 8 bits, by NumPy.

Blocks of 256 elements whose gradients are normal, with sizes that are log-normal within a block; moments as AdamW has
them after many steps with beta1 0.9 and beta2 0.999. Error of the first moment: of moment / root, root mean square over
that of moment / root; of the second moment's root: relative, root mean square.
"""

import numpy as np

BLOCKS, BLOCK = 4000, 256
rng = np.random.default_rng(0)


def dynamic_map(signed):
    """The dynamic map of bitsandbytes (functional.create_dynamic_map), 8 bits."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        means = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += [*means, *(-means if signed else [])]
    return np.sort(numbers)


def from_table(values, table):
    """values [blocks, 256] rounded to the nearest of a table times the block's greatest magnitude."""
    greatest = np.abs(values).max(1, keepdims=True)
    return table[np.searchsorted((table[1:] + table[:-1]) / 2, values / greatest)] * greatest


def from_codes(values, levels, stochastic):
    """values rounded to unit * code**4 with their sign, as paddle_te/training/compact_states.py does it."""
    unit = np.abs(values).max(1, keepdims=True) / float(levels) ** 4
    in_units = np.abs(values) / unit
    code = np.floor(in_units**0.25)
    share = (in_units - code**4) / ((code + 1) ** 4 - code**4)
    code += (rng.random(values.shape) if stochastic else 0.5) < share
    return np.sign(values) * unit * np.maximum(code, levels == 255) ** 4


def rms(array):
    return np.sqrt(np.mean(array**2))


for sigma in (0.5, 1, 2):
    size = np.exp(sigma * rng.standard_normal((BLOCKS, BLOCK)))
    moment = size * np.sqrt(0.1 / 1.9) * rng.standard_normal(size.shape)
    second = size**2 * (1 + np.sqrt(2 * 0.001 / 1.999) * rng.standard_normal(size.shape))
    root, table_root = np.sqrt(second), np.sqrt(from_table(second, dynamic_map(False)))
    rounded = [from_table(moment, dynamic_map(True))] + [from_codes(moment, 127, way) for way in (False, True)]
    roots = [table_root] + [from_codes(root, 255, way) for way in (False, True)]
    of_first = [rms((array - moment) / root) / rms(moment / root) for array in rounded]
    of_root = [rms(array / root - 1) for array in roots]
    print(f"sigma {sigma}: table to the nearest, code**4 to the nearest, code**4 stochastically")
    print("  first moment  ", *(f"{error:.2%}" for error in of_first))
    print("  root of second", *(f"{error:.2%}" for error in of_root))
