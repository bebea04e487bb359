"""Fine-tuning on te against pd: LoRA over the fused weights, packed samples, likelihoods, the scripts."""

import json

import numpy as np
import paddle
import pytest

from paddle_te.configs.families import FAMILIES
from paddle_te.hosts.paddlenlp.evaluation.tasks import Request, Scorer
from paddle_te.hosts.paddlenlp.lora import TELoRAModel, lora_config
from paddle_te.hosts.paddlenlp.training.finetune_datasets import IGNORED, Collator, FinetuneDataArguments
from paddle_te.models.lora import TARGETS
from paddle_te.ops.te import attention_support
from paddle_te.options.lora import Adapter
from tests.end_to_end.evaluation.test_evaluate import run as run_eval
from tests.end_to_end.training.test_finetune import place, run  # noqa: F401 (place is a fixture)
from tests.small_models import (
    FP8_FAMILIES,
    LORA_PARTS,
    MIXTURES,
    PD,
    TE,
    TE_FAMILIES,
    VOCABULARY,
    array,
    first,
    make,
    truth,
    weights_of,
)
from tests.te_weights import relative

HALF = "bfloat16"
OTHERS = [family for family in TE_FAMILIES if family != "llama"]
SIZES = dict(initializer_range=0.06)  # as well-conditioned as a trained model: roundings stay what they are
FP8 = {"delayed": dict(use_fp8=True, fp8_recipe="delayed"), "current": dict(use_fp8=True, fp8_recipe="current")}


def loss_of(model, batch):
    return first(model(**{name: paddle.to_tensor(value) for name, value in batch.items()}))


def whole(generator, batch=2, length=32):
    ids = generator.integers(0, VOCABULARY, [batch, length])
    return dict(input_ids=ids, labels=ids)


# ---- LoRA


def with_lora(model, targets, weights=None):
    lora = TELoRAModel(model, lora_config(Adapter(targets=targets, rank=16), model.config.dtype))
    for name, parameter in lora.model.named_parameters():
        if "lora_" in name:
            value = weights[name] if weights else 0.1 * np.random.standard_normal(parameter.shape).astype("float32")
            parameter.set_value(paddle.to_tensor(value).astype(parameter.dtype))
    return lora


def lora_models(gpu, targets, family="llama", **settings):
    """(pd in float32, pd in bf16, te in bf16), with the same weights, A and B."""
    model, weights = truth(**SIZES, family=family)
    exact = with_lora(model, targets)
    adapter = weights_of(exact.model)
    for name, parameter in exact.model.named_parameters():
        parameter.set_value(paddle.to_tensor(adapter[name]))
    plain = with_lora(make(gpu, PD, HALF, weights, **SIZES, family=family), targets, adapter)
    te = make(gpu, TE, HALF, weights, **SIZES, family=family, **settings)
    return exact, plain, with_lora(te, targets, adapter)


def loss_and_gradients(lora, batch):
    lora.train()
    loss = loss_of(lora, batch)
    loss.backward()
    gradients = {name: array(p.grad) for name, p in lora.model.named_parameters() if p.grad is not None}
    assert gradients and all("lora_" in name for name in gradients)
    return loss.item(), gradients


def check_gradients(got, want, plain, experts=False):
    """As near the truth `want` as `plain`, pd's in the same precision, within what chance makes of rounding: of some of
    these small models' gradients it leaves little. A wrong gradient is off by about its own length. experts: a token
    may get another one in each of the three."""
    assert got.keys() == want.keys()
    whole = lambda gradients: np.concatenate([gradients[name].ravel() for name in want])  # noqa: E731
    error, yardstick = relative(whole(got), whole(want)), relative(whole(plain), whole(want))
    if experts:
        assert error <= 0.5, error
        return
    assert error <= 2 * yardstick + 1e-2, (error, yardstick)
    for name, gradient in want.items():
        error, yardstick = relative(got[name], gradient), relative(plain[name], gradient)
        assert error <= 4 * yardstick + 3e-2, (name, error, yardstick)


@pytest.mark.parametrize(
    "family, targets", [("llama", targets) for targets in TARGETS] + [(other, "all") for other in OTHERS]
)
def test_lora_gradients(gpu, seed, family, targets):
    exact, plain, te = lora_models(gpu, targets, family)
    batch = whole(np.random.default_rng(seed))
    got, bound = loss_and_gradients(te, batch), loss_and_gradients(plain, batch)
    paddle.set_device("cpu")
    want = loss_and_gradients(exact, batch)
    assert got[0] == pytest.approx(want[0], rel=5e-3)
    if family not in MIXTURES:
        parts = LORA_PARTS[targets] - (not FAMILIES[family].gated)
        assert len(got[1]) == 2 * 2 * parts  # A and B in two layers
    check_gradients(got[1], want[1], bound[1], family in MIXTURES)


@pytest.mark.parametrize("in_fp8", [False, True], ids=["base", "base_in_fp8_only"])
@pytest.mark.parametrize("recipe", FP8)
def test_lora_gradients_in_fp8(gpu, seed, recipe, in_fp8):
    """The frozen GEMMs round as fp8 does, A and B do not: te's gradients are as far from the truth as pd's emulated."""
    exact, _, te = lora_models(gpu, "all", in_fp8=in_fp8, **FP8[recipe])
    paddle.set_device("cpu")
    weights = weights_of(exact.model)
    emulated = make(
        "cpu", PD, "float32", {n: w for n, w in weights.items() if "lora_" not in n}, **SIZES, **FP8[recipe]
    )
    emulated = with_lora(emulated, "all", weights)
    batch = whole(np.random.default_rng(seed))
    want, bound = loss_and_gradients(exact, batch), loss_and_gradients(emulated, batch)
    paddle.set_device(gpu)
    got = loss_and_gradients(te, batch)
    assert got[0] == pytest.approx(want[0], rel=5e-2)
    check_gradients(got[1], want[1], bound[1])


def test_merging_keeps_the_logits(gpu, seed):
    exact, _, te = lora_models(gpu, "all")
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, [2, 24])
    te.eval(), exact.eval()
    logits = lambda: array(first(te(paddle.to_tensor(ids))))  # noqa: E731
    apart = logits()
    te.disable_lora()
    plain = logits()
    te.enable_lora()
    te.merge()
    merged = logits()
    paddle.set_device("cpu")
    want = array(first(exact(paddle.to_tensor(ids))))
    assert relative(plain, want) > 0.3, "LoRA makes no difference"
    # bf16's rounding: 2 to 5 % of these models' logits
    assert relative(apart, want) < 8e-2 and relative(merged, want) < 8e-2 and relative(merged, apart) < 8e-2


# ---- packed samples


def sample(*documents):
    """A pack of documents, lists of token ids."""
    lengths = [len(document) for document in documents]
    inputs = np.concatenate(documents)
    labels = np.concatenate([[*document[1:], IGNORED] for document in documents])
    return dict(input_ids=inputs, labels=labels, lengths=lengths)


def packed(samples):
    arguments = FinetuneDataArguments(src_length=16, max_length=64, zero_padding=True, pad_to_max_length=True)
    return Collator(arguments)(samples)


def documents(generator, *lengths):
    return [generator.integers(0, VOCABULARY, length).tolist() for length in lengths]


def batch_of_documents(generator):
    return packed([sample(*documents(generator, 20, 9, 30)), sample(*documents(generator, 7, 40))])


def test_packed_documents_do_not_see_each_other(gpu, seed):
    """Each document's logits are those of pd in float32 for it alone, and do not move a bit with its neighbours."""
    exact, weights = truth(**SIZES)
    model = make(gpu, TE, HALF, weights, **SIZES)
    exact.eval(), model.eval()
    generator = np.random.default_rng(seed)
    parts = documents(generator, 20, 9, 30)

    def logits(parts):
        batch = packed([sample(*parts)])
        del batch["labels"]
        return array(loss_of(model, batch))[0]

    got = logits(parts)
    other = logits([documents(generator, 20)[0], parts[1], documents(generator, 30)[0]])
    assert (other[20:29] == got[20:29]).all() and not (other[:20] == got[:20]).all()
    paddle.set_device("cpu")
    start = 0
    for part in parts:
        want = array(first(exact(paddle.to_tensor([part]))))[0]
        assert relative(got[start : start + len(part)], want) < 3e-2
        start += len(part)


def train(model, batches):
    """Losses of AdamW steps with float32 master weights, and the gradients of the first."""
    model.train()
    optimizer = paddle.optimizer.AdamW(2e-3, parameters=model.parameters(), multi_precision=True)
    losses, gradients = [], None
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        gradients = gradients or {name: array(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize(
    "family, precision",
    [("llama", "current"), ("granite", "bf16"), ("granite", "delayed")]
    + [(family, "bf16") for family in TE_FAMILIES]
    + [(family, "delayed") for family in FP8_FAMILIES],
)
def test_packed_steps(gpu, seed, family, precision):
    """Full recompute runs the boundaries through backward as well."""
    if family == "gpt_oss" and (present := attention_support.cudnn_version()) < attention_support.CUDNN_PACKED_OFFSET:
        pytest.skip("cuDNN {}.{}: its gradient of sinks over packed documents is right from 9.26 on".format(*present))
    sizes = SIZES | dict(family=family)
    settings = dict(recompute=True, recompute_granularity="full") | FP8.get(precision, {})
    generator = np.random.default_rng(seed)
    batches = [batch_of_documents(generator) for _ in range(2)] * 4
    exact, weights = truth(**sizes)
    want, exact_gradients = train(exact, batches)
    where = (gpu, PD, HALF) if precision == "bf16" else ("cpu", PD, "float32")
    _, plain_gradients = train(make(*where, weights, **sizes, **FP8.get(precision, {})), batches[:1])
    model = make(gpu, TE, HALF, weights, **sizes, **settings)
    model.recompute_enable()
    got, gradients = train(model, batches)
    assert want[-1] < want[0] - 0.3
    # in fp8 the paths part while the loss falls to a third: up to 5 % was seen; in bf16 with experts 3 %
    close = 1e-1 if precision != "bf16" or family in MIXTURES else 1e-2
    np.testing.assert_allclose(got, want, rtol=close)
    check_gradients(gradients, exact_gradients, plain_gradients, family in MIXTURES)


# ---- likelihoods


@pytest.mark.parametrize("family, precision", [("llama", "fp8")] + [(family, "bf16") for family in TE_FAMILIES])
def test_likelihoods(gpu, seed, family, precision):
    generator = np.random.default_rng(seed)
    requests = [Request(*documents(generator, 1 + n % 7, 1 + n % 5)) for n in range(24)]
    exact, weights = truth(**SIZES, family=family)
    answers = lambda model: Scorer(model.eval() or model, 32, batch_size=8, progress=False)(requests)  # noqa: E731
    want = answers(exact)
    settings = FP8["current"] if precision == "fp8" else {}
    got = answers(make(gpu, TE, HALF, weights, **SIZES, family=family, **settings))
    per_token = lambda found: np.array(  # noqa: E731
        [answer.logprob / len(request.continuation) for answer, request in zip(found, requests, strict=True)]
    )
    differences = np.abs(per_token(got) - per_token(want))
    spread = per_token(want).std()
    assert differences.mean() < (0.02 if precision == "bf16" else 0.15) * spread, (differences, spread)


# ---- the scripts


LORA = dict(lora="true", learning_rate=1e-2)
BASE_IN_FP8 = LORA | dict(use_fp8="true", fp8_recipe="current", quantize_base="fp8")
SCRIPTS = {
    "full": dict(zero_padding="true"),
    "lora": LORA,
    "base_in_fp8": BASE_IN_FP8,
    "transposes_kept": BASE_IN_FP8 | dict(keep_fp8_transpose_cache="true"),
}


@pytest.mark.parametrize("flags", SCRIPTS.values(), ids=SCRIPTS)
def test_scripts(gpu, monkeypatch, place, tmp_path, flags):  # noqa: F811
    """run_finetune.py and run_eval.py on te in bf16, also over a base in fp8: losses and perplexity of pd."""
    device = gpu.split(":")[0]
    half = dict(bf16="true", fp16_opt_level="O2", device=device)
    small = place / "paddle"  # its layout is te's, too
    want = run(monkeypatch, place, tmp_path / "pd", PD, **flags)
    got = run(monkeypatch, place, tmp_path / "te", TE, model_name_or_path=small, **flags, **half)
    steps = sorted(want)
    np.testing.assert_allclose([got[i] for i in steps], [want[i] for i in steps], rtol=2e-2)
    lines = [json.dumps({"text": json.loads(line)["src"]}) for line in open(place / "data/train.json")]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    results = []
    for source, backend, settings in (("pd", PD, {}), ("te", TE, dict(dtype=HALF, device=device))):
        source = tmp_path / source
        where = dict(lora_path=source, model_name_or_path=small) if "lora" in flags else dict(model_name_or_path=source)
        where |= dict(tokenizer_name_or_path=place / "tokenizer", perplexity=tmp_path / "docs.jsonl", prompts="for")
        results.append(run_eval(monkeypatch, place, backend, tmp_path / f"{source.name}.json", **where, **settings))
    assert results[1]["perplexity"]["loss"] == pytest.approx(results[0]["perplexity"]["loss"], rel=2e-2)
    assert len(results[1]["generation"]) == 1
