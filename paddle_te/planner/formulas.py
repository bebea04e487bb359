"""The text of --explain: the formulas of `memory` and `speed` in short, and where they come from."""

# {field of Memory: formula}
MEMORY = {
    "weights": "2 bytes of each of a stage's weights, 1 where it exists in fp8 only and no transposed copy is kept, / "
    "TP; with LoRA the adapters'; those of a second model that is the reference",
    "gradients": "2 or 4 bytes likewise, of those that are there when a step needs most: none yet where the last step "
    "let them go, with an update in backward only new ones; a rank's own in stages 2 and 3 [1]",
    "states": "master weight and two moments (12 bytes, or as the flags say; with Muon one moment of a matrix) / "
    "sharding; less the host's share [1]",
    "fp8_weights": "1 byte of each weight of a GEMM for its transpose; 2 with several micro-batches",
    "activations": "what a layer keeps of a token (a sum of its tensors) × layers × tokens / TP × those in flight [2]",
    "working": "the greatest of: logits and their gradients; lm_head's backward; what a layer's backward needs for a "
    "moment; and 32 MiB of cuBLAS",
}
# {part of `time_of_step`: formula}
TIME = {
    "layers": "micro-batches × layers × (6·tokens·weights, of frozen ones 4, / GEMM rate + "
    "6·tokens·sequence·hidden / attention rate + bytes of norms, casts and activation / HBM rate, and what is computed "
    "again) / TP; with a window of w tokens w·(2 - w / sequence) instead of the sequence",
    "host": "ms of the trainer between two steps, and what the CPU takes longer to launch the layers, and what is "
    "computed again of them, than the GPU to compute them",
    "tensor parallel": "4 all-gathers and 4 reduce-scatters of a layer, 2 more gathers in backward [2, 3], "
    "without what GEMMs hide",
    "dispatch": "EP: 2 all-gathers and 2 reduce-scatters of all ranks' tokens in each layer with experts, or "
    "all-to-alls of the tokens that have experts there [3]",
    "shared sequences": "SEP: all-to-alls of q, k, v and the output [4]; CP: keys and values beside attention [5]",
    "stage transfers": "an activation and its gradient for each micro-batch and virtual stage / link",
    "head": "micro-batches × (6·tokens·embedding / head's GEMM rate + bytes of the loss / HBM rate)",
    "reference": "micro-batches × a forward of layers and head: 2·tokens·weights / GEMM rate, a quarter of attention, "
    "a third of the bytes",
    "accumulation": "for each micro-batch after the first bytes a weight / HBM rate: 8 for main gradients; for those "
    "in bf16 4 where GEMMs add them up, in one process, and 6 where Paddle does",
    "bubble": "(PP - 1) / VP × a micro-batch's time in a stage's layers [6]",
    "sharding": "reduce-scatter of gradients, all-gather of weights (ring [3]), less what computation hides [1]",
    "offload": "bytes / PCIe rate, less what runs beside: the layers between, updates, with an update in backward "
    "backward; at least the copies of pieces that have no slot [7]",
    "optimizer": "bytes of gradients, weights and states / AdamW's rate, with moments in 8 bits its arithmetic; "
    "what else is done with gradients / HBM rate; of Muon 5·(4·m²·n + 2·m³) operations a matrix of m ≤ n / GEMM rate "
    "and 62 bytes an element / HBM rate",
}
SOURCES = (
    "[1] Rajbhandari et al. 2020, ZeRO (arXiv:1910.02054)",
    "[2] Korthikanti et al. 2022, sequence parallelism and recompute (arXiv:2205.05198)",
    "[3] Patarasuk and Yuan 2009, ring collectives: S bytes over n ranks send S·(n-1)/n",
    "[4] Jacobs et al. 2023, DeepSpeed-Ulysses (arXiv:2309.14509)",
    "[5] Liu et al. 2023, ring attention (arXiv:2310.01889)",
    "[6] Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473)",
    "[7] Ren et al. 2021, ZeRO-Offload (arXiv:2101.06840), but that the GPU computes the update",
)
