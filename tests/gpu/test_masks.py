"""te's attention with each attn_mask_type: pd's in float32 as the truth."""

import pytest

from tests.mask_cases import MASKS, check_mask


@pytest.mark.parametrize("mask_type, what, seen", MASKS)
def test_te_sees_what_pd_sees(gpu, poisoned, seed, mask_type, what, seen):
    check_mask(gpu, "bfloat16", mask_type, what, seen, seed)
