"""Losses, rewards and gradients of preferences beside Hugging Face's TRL, in a process of its own, on the same model.

PADDLE_TE_HF_PYTHON names a Python that has torch, transformers and trl; without it this one is tried.
"""

import json
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest

from paddle_te.data.tokenizer import load_tokenizer
from paddle_te.hosts.paddlenlp import answers
from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.loading import from_pretrained, load_config
from paddle_te.hosts.paddlenlp.training.preference_datasets import (
    GOOD,
    LENGTHS,
    PRESENT,
    PreferenceCollator,
    PreferenceDataArguments,
    create_dataset,
)
from paddle_te.hosts.paddlenlp.training.preference_reference import log_probabilities
from paddle_te.training.preference_loss import Answer, Answers, KTOLoss, PairLoss
from tests import chats
from tests.small_checkpoints import save_models, write_lines

PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON", sys.executable)


def missing():
    probe = subprocess.run(
        [PYTHON, "-c", "import torch, transformers, trl"], capture_output=True, text=True, check=False
    )
    return probe.stderr.strip().splitlines()[-1] if probe.returncode else None


pytestmark = pytest.mark.skipif(
    bool(REASON := missing()), reason=f"{PYTHON} lacks torch, transformers or trl ({REASON}); see PADDLE_TE_HF_PYTHON"
)

# cases: {name: (trainer, its configuration)}. ORPO's loss of tokens is left out: TRL's has those of questions, too.
TRL = """
import json, sys, numpy, torch, trl
from datasets import load_dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
folder, cases = sys.argv[1], json.loads(sys.argv[2])
file = f"{folder}/tokenizer/tokenizer.json"
tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="</s>", pad_token="</s>")
load = lambda name: AutoModelForCausalLM.from_pretrained(f"{folder}/{name}/hf", torch_dtype=torch.float32)
found = {}
for name, (kind, settings) in cases.items():
    data = load_dataset("json", data_files=f"{folder}/{'kto' if kind == 'KTO' else 'pairs'}.json", split="train")
    config = getattr(trl, f"{kind}Config")(
        output_dir=f"{folder}/trl", per_device_train_batch_size=len(data), use_cpu=True, bf16=False, report_to=[],
        max_length=None, max_prompt_length=None, dataloader_pin_memory=False, **settings)
    roles = ("reference", "policy") if kind == "KTO" else ("policy", "reference")  # so that the KL is above 0
    model = load(roles[0])
    more = {"ref_model": load(roles[1])} if kind in ("DPO", "KTO") else {}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=config, train_dataset=data, processing_class=tokenizer, **more)
    model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    loss, metrics = trainer.get_batch_loss_metrics(model, batch)
    if kind == "ORPO":
        chosen, rejected, *_ = trainer.concatenated_forward(model, batch)
        loss = -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    model.zero_grad()
    loss.backward()
    numpy.savez(f"{folder}/{name}.npz", **{key: p.grad.numpy() for key, p in model.named_parameters()})
    found[name] = {"loss": loss.item()} | {key: float(value) for key, value in metrics.items()}
print(json.dumps(found))
"""
CASES = {
    "sigmoid": ("DPO", dict(beta=0.3), PairLoss(beta=0.3)),
    "smoothed": ("DPO", dict(beta=0.3, label_smoothing=0.2), PairLoss(beta=0.3, label_smoothing=0.2)),
    "sft": ("DPO", dict(beta=0.3, rpo_alpha=0.7), PairLoss(beta=0.3, sft_loss_ratio=0.7)),
    "hinge": ("DPO", dict(beta=0.3, loss_type="hinge"), PairLoss("hinge", beta=0.3)),
    "ipo": ("DPO", dict(beta=0.3, loss_type="ipo"), PairLoss("ipo", beta=0.3)),
    "sppo_hard": ("DPO", dict(beta=0.3, loss_type="sppo_hard"), PairLoss("sppo_hard", beta=0.3)),
    "nca_pair": ("DPO", dict(beta=0.3, loss_type="nca_pair"), PairLoss("nca_pair", beta=0.3)),
    "simpo": (
        "CPO", dict(beta=2.0, loss_type="simpo", simpo_gamma=0.4, cpo_alpha=0.0),
        PairLoss("simpo", beta=2.0, simpo_gamma=0.4),
    ),
    "or": ("ORPO", dict(beta=0.3), PairLoss("or", beta=0.3, pref_loss_ratio=0.3)),
    "kto": ("KTO", dict(beta=0.3, desirable_weight=1.2, undesirable_weight=0.9), KTOLoss(0.3, 1.2, 0.9)),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models, a tokenizer, and what TRL makes of them."""
    folder = tmp_path_factory.mktemp("trl")
    for name, seed in (("policy", 3), ("reference", 4)):
        (folder / name).mkdir()
        paddle.seed(seed)
        save_models(folder / name, seed=seed, initializer_range=0.1)
    chats.save_tokenizer(folder / "tokenizer")
    generator = np.random.default_rng(3)
    word = lambda most: "".join(generator.choice(list("abcd"), generator.integers(1, most)))  # noqa: E731
    pairs = [{"prompt": word(9), "chosen": word(6), "rejected": f"{word(7)}d"} for _ in range(6)]
    write_lines(folder / "pairs.json", pairs)
    labelled = [{"prompt": word(9), "completion": word(7), "label": n % 3 > 0} for n in range(7)]
    write_lines(folder / "kto.json", labelled)
    cases = json.dumps({name: case[:2] for name, case in CASES.items()})
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([PYTHON, "-c", TRL, folder, cases], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder, json.loads(ran.stdout.splitlines()[-1])


def model_of(folder, backend):
    config = load_config(folder / backend, backend)
    answers.configure(config)
    model = from_pretrained(model_class(config), folder / backend, config, "float32")
    answers.give_log_probabilities(model)
    return model


@pytest.fixture(scope="module", params=["none", "paddle"])
def models(request, place):
    with paddle.utils.unique_name.guard():
        return (
            request.param,
            model_of(place[0] / "policy", request.param),
            model_of(place[0] / "reference", request.param),
        )


def gradients_of(folder, name, backend):
    """TRL's gradients under the names and in the layout of a backend's weights."""
    theirs = dict(np.load(folder / f"{name}.npz"))
    flat = lambda array: array.T if array.ndim == 2 else array  # noqa: E731
    if backend == "none":
        kept = {n.replace("model.", "llama.", 1): g if "embed" in n else flat(g) for n, g in theirs.items()}
        return kept
    found = {
        "llama.embed_tokens.weight": theirs["model.embed_tokens.weight"],
        "llama.norm.weight": theirs["model.norm.weight"],
        "lm_head.weight": theirs["lm_head.weight"].T,
    }
    for layer in (0, 1):
        of, to = f"model.layers.{layer}", f"llama.layers.{layer}.transformer"
        joined = lambda part, names, of=of: np.concatenate([theirs[f"{of}.{part}.{n}_proj.weight"] for n in names])  # noqa: E731
        found |= {
            f"{to}.self_attention.layernorm_qkv.weight": joined("self_attn", "qkv"),
            f"{to}.self_attention.layernorm_qkv.ln_weight": theirs[f"{of}.input_layernorm.weight"],
            f"{to}.self_attention.proj.weight": joined("self_attn", "o"),
            f"{to}.layernorm_mlp.ln_weight": theirs[f"{of}.post_attention_layernorm.weight"],
            f"{to}.layernorm_mlp.fc1_weight": joined("mlp", ["gate", "up"]),
            f"{to}.layernorm_mlp.fc2_weight": joined("mlp", ["down"]),
        }
    return found


def batch_of(folder, labelled, backend):
    """The whole data set as one packed batch."""
    name = "kto" if labelled else "pairs"
    data_args = PreferenceDataArguments(max_seq_len=64, max_prompt_len=32)
    rows = create_dataset([folder / f"{name}.json"], load_tokenizer(folder / "tokenizer"), None, data_args, labelled)
    assert 1 < len(rows) < len(rows.pairs)  # several pairs share a row
    batch = PreferenceCollator(64, masked=backend == "none")([rows[number] for number in range(len(rows))])
    return {name: paddle.to_tensor(value) for name, value in batch.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("name", CASES)
def test_trl_computes_the_same(place, models, name):
    (folder, found), (backend, policy, reference), loss = place, models, CASES[name][2]
    inputs = batch_of(folder, name == "kto", backend)
    if name == "kto":
        policy, reference = reference, policy
    with paddle.no_grad():
        known = (
            log_probabilities(reference, inputs) if loss.needs_reference else [paddle.zeros_like(inputs[PRESENT])] * 2
        )
    policy.clear_gradients()
    given = zip(log_probabilities(policy, inputs), known, inputs[LENGTHS].unbind(0), strict=True)
    outcome = loss(Answers(*(Answer(*each) for each in given), inputs[PRESENT], inputs[GOOD]))
    total = sum(outcome.parts)
    want = found[name]
    assert total.item() == pytest.approx(want["loss"], rel=1e-5)
    total.backward()
    mine = loss.metrics({key: value.item() for key, value in outcome.sums.items()})
    for kind in ("rewards", "logps"):
        for answer in ("chosen", "rejected"):
            theirs = want.get(f"{kind}/{answer}") or want[f"{kind}/{answer}_sum"] / want[f"count/{answer}"]
            if (name, kind) != ("ipo", "logps"):
                assert mine[f"{kind}/{answer}"] == pytest.approx(theirs, rel=1e-5, abs=1e-5), (kind, answer)
    if name == "kto":
        assert mine["kl"] == pytest.approx(want["kl"], rel=1e-5) and want["kl"] > 0
    else:
        assert mine["rewards/accuracies"] == pytest.approx(want["rewards/accuracies"])
    wanted = gradients_of(folder, name, backend)
    weights = {key: weight for key, weight in policy.named_parameters()}
    assert wanted.keys() == weights.keys()
    for key, gradient in wanted.items():
        error = np.linalg.norm(weights[key].grad.numpy() - gradient) / np.linalg.norm(gradient)
        assert error < 1e-5, (key, error)
