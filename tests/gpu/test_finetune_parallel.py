"""LoRA on te over two GPUs through NCCL, compared with one GPU.

tests/multiprocess/distributed/test_finetune.py has the same with emulated kernels.
"""

import pytest

from paddle_te.native import library
from tests.multiprocess.distributed import test_finetune
from tests.multiprocess.distributed.test_finetune import exact, one_process, place  # noqa: F401 (fixtures)


@pytest.mark.parametrize("layout", test_finetune.LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_te_learns_as_on_one_gpu(gpu, place, exact, layout, precision):  # noqa: F811
    if len(library.gpus()) < 2:
        pytest.skip("needs 2 GPUs")
    if precision == "fp8" and "tp2" in layout:
        pytest.skip("this model's MLP, 112, over 2 ranks is no multiple of 16")
    flags = (test_finetune.HALF if precision == "bf16" else test_finetune.FP8) | test_finetune.SLOWLY
    if layout == "sep2" and precision == "fp8":
        flags |= dict(pad_to_multiple_of=32)  # 16 tokens a rank
    flags |= dict(device=gpu.partition(":")[0], lora_path=place / "start")
    name = f"{layout}-{precision}"
    want, weights = test_finetune.run(place, place / f"{name}-one", 1, **flags)
    losses, adapter = test_finetune.run(place, place / name, 2, **test_finetune.LAYOUTS[layout], **flags)
    test_finetune.check_alike(place, losses, adapter, want, weights, exact)
