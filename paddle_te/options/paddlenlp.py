"""What PaddleNLP's files of arguments may say and these scripts do not have."""

from collections.abc import Mapping

from paddle_te.options.lora import RSLORA_PLUS
from paddle_te.options.removed import asks_for_nothing, without_removed

# The value that asks for nothing, and what there is instead
UNSUPPORTED = {
    "eval_with_do_generation": (False, "paddle-te evaluate --prompts generates"),
    "save_generation_output": (False, "paddle-te evaluate --prompts generates"),
    "pissa": (False, "--lora is the one there is"),
    "vera": (False, "--lora is the one there is"),
    "lokr": (False, "--lora is the one there is"),
    "reft": (False, "--lora is the one there is"),
    "prefix_tuning": (False, "--lora is the one there is"),
    "neftune": (False, "training adds no noise"),
    "autotuner_benchmark": (False, "tools/benchmark/throughput.py measures"),
    "benchmark": (False, "tools/benchmark/throughput.py measures"),
    "weight_quantize_algo": (None, "--quantize_base fp8 keeps frozen weights in fp8"),
    "use_long_sequence_strategies": (False, "sequences are as long as the model's positions"),
}
# Those that say how the same is computed: samples read one by one, LoRA's products in fewer calls, and a mask by which
# packed documents and answers do not see each other, which they never do
WITHOUT_EFFECT = {"lazy", "use_quick_lora", "flash_mask"}
# Words of PaddleNLP's for several flags, where they are true
EXPANDED: Mapping[str, Mapping[str, object]] = {
    "rslora_plus": RSLORA_PLUS,
}


def without_unsupported(values: Mapping[str, object]) -> dict[str, object]:
    """Return {flag: value} without those of UNSUPPORTED and REMOVED, which ask for nothing or raise ValueError.

    Without those of WITHOUT_EFFECT as well, and with the flags that words of EXPANDED stand for, whose values override
    the file's, as in PaddleNLP.
    """
    values = without_removed(values)
    for name, (nothing, remedy) in UNSUPPORTED.items():
        if name in values and not asks_for_nothing(values[name], nothing):
            raise ValueError(f"{name} {str(values[name]).lower()}: is not supported; {remedy}")
    gone = {*UNSUPPORTED, *EXPANDED, *WITHOUT_EFFECT}
    kept = {name: value for name, value in values.items() if name not in gone}
    for name, expanded in EXPANDED.items():
        kept |= {} if asks_for_nothing(values.get(name, False), False) else expanded
    return kept
