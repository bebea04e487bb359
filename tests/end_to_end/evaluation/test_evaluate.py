"""run_eval.py as a user runs it, and its numbers against transformers' on the same weights."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.evaluation import evaluate
from paddle_te.hosts.paddlenlp.evaluation import harness as harness_command
from tests import chats
from tests.small_checkpoints import random_words, save_models, save_tokenizer, write_lines

UNIT = Path(__file__).parents[2] / "unit/data"
SCRIPT = Path(__file__).parents[3] / "llm/llama/run_eval.py"
HARNESS = importlib.util.find_spec("lm_eval") is not None
WITHOUT_HARNESS = pytest.mark.skipif(HARNESS, reason="lm_eval is installed: nothing to refuse")
WITH_HARNESS = pytest.mark.skipif(not HARNESS, reason="no lm_eval here; PEERS=1 bash scripts/test.sh installs it")
PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON", sys.executable)  # one that has torch and transformers


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Checkpoints of one model, a tokenizer, and a file for each task."""
    folder = tmp_path_factory.mktemp("eval")
    paddle.seed(11)
    generator = np.random.default_rng(11)
    save_models(folder, seed=11)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    words = lambda count: random_words(generator, count)  # noqa: E731
    write_lines(folder / "docs.jsonl", [{"text": words(n)} for n in (4, 30, 12)])
    write_lines(
        folder / "boolq.jsonl", [{"passage": words(9), "question": words(3), "answer": i < 2} for i in range(4)]
    )
    write_lines(folder / "choice.jsonl", [{"query": words(5), "choices": [words(2), words(1)], "gold": 1}] * 2)
    chats.save_tokenizer(folder / "chats", chats.MARKED["llama"])
    write_lines(folder / "chats.jsonl", [chats.CONVERSATIONS[name] for name in ("plain", "system", "thoughts")])
    return folder


def run(monkeypatch, place, backend, output, **flags):
    flags = (
        dict(
            model_name_or_path=place / backend,
            tokenizer_name_or_path=place / "tokenizer",
            transformer_engine_backend=backend,
            max_seq_length=48,
            batch_size=3,
            output_file=output,
        )
        | flags
    )
    values = {key: value if isinstance(value, list) else [value] for key, value in flags.items()}
    words = [str(word) for key, value in values.items() for word in (f"--{key}", *value)]
    monkeypatch.setattr(sys, "argv", ["run_eval.py", *words])
    evaluate.main()
    return json.loads(Path(output).read_text())["results"]


def tasks(place):
    docs = place / "docs.jsonl"
    return dict(
        perplexity=docs,
        lambada=docs,
        boolq=place / "boolq.jsonl",
        multiple_choice=place / "choice.jsonl",
        prompts="for",
    )


def test_none_and_pd_give_the_same_numbers(monkeypatch, place, tmp_path, capsys):
    none, pd = (run(monkeypatch, place, name, tmp_path / "out" / name, **tasks(place)) for name in ("none", "paddle"))
    assert set(none) == {"perplexity", "lambada", "boolq", "multiple_choice", "generation"}
    assert none.pop("generation") == pd.pop("generation")
    for task, metrics in none.items():
        assert pd[task] == pytest.approx(metrics, rel=1e-4), task
    assert "perplexity: loss" in capsys.readouterr().out


def test_fp8_is_near(monkeypatch, place, tmp_path):
    plain = run(monkeypatch, place, "paddle", tmp_path / "a", perplexity=place / "docs.jsonl")
    fp8 = run(monkeypatch, place, "paddle", tmp_path / "b", perplexity=place / "docs.jsonl", use_fp8="true")
    assert plain != fp8
    assert fp8["perplexity"]["loss"] == pytest.approx(plain["perplexity"]["loss"], rel=0.1)
    flags = dict(use_fp8="true", fp8_lm_head="true")
    head = run(monkeypatch, place, "paddle", tmp_path / "c", perplexity=place / "docs.jsonl", prompts="for", **flags)
    assert head["perplexity"] != fp8["perplexity"] and head["generation"]
    assert head["perplexity"]["loss"] == pytest.approx(plain["perplexity"]["loss"], rel=0.1)


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(), "nothing to do"),
        pytest.param(dict(lm_eval="boolq"), "pip install 'paddle_te[harness]'", marks=WITHOUT_HARNESS),
        (dict(lambada="nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (dict(perplexity="nowhere"), "prepare-data"),
        (dict(prompts="a", top_k=8), "--top_k and --top_p choose what is sampled from"),
        (dict(prompts="a", batch_size=0), "--batch_size 0"),
        (dict(prompts="a", use_fp8="true", transformer_engine_backend="transformer_engine"), "leave out --use_fp8"),
        (dict(prompts="a", dtype="bfloat16"), "use float32"),
        (dict(prompts="a", use_fp8="true", fp8_recipe="delayed"), "--fp8_recipe current"),
        (dict(prompts="a", use_fp8="true", fp8_dpa="true"), "--fp8_dpa true needs --fp8_recipe delayed"),
        (dict(prompts="a", fp8_lm_head="true"), "--fp8_lm_head true needs --use_fp8 true"),
        (dict(prompts="a", model_name_or_path="nowhere"), "nowhere"),
        (dict(prompts="a", pipeline_parallel_degree=2), "it must divide the number of processes, 1"),
        (dict(prompts="a", max_new_tokens=128), "of prompt 1 that is beyond the model's 128 positions"),
        (dict(prompts="a", max_seq_length=129), "--max_seq_length 129: the model has 128 positions"),
        (dict(prompts="a\udcff"), "it must be in UTF-8"),
        (dict(prompts="a", apply_chat_template="true"), "has no chat template: give one in a file to --chat_template"),
        (dict(prompts="a", chat_template_kwargs='{"x": 1}'), "--chat_template_kwargs: the tokenizer"),
        (dict(prompts="a", chat_template_kwargs="[1]"), "--chat_template_kwargs [1]: give an object"),
        (dict(prompts="a", chat_template="nowhere.jinja"), "--chat_template nowhere.jinja: cannot be read"),
        (dict(prompts="a", system_instruction="b"), "--system_instruction is a turn of chats"),
        (dict(prompts_file="nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (dict(prompts="a", output_file=""), "--output_file : it must be a path, and is empty"),
        (dict(prompts="a", output_file="/proc/out"), "--output_file: /proc/out cannot be written: No such file"),
    ],
)
def test_errors_are_one_line(monkeypatch, place, tmp_path, caplog, flags, message):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, place, "paddle", tmp_path / "out", **flags)
    assert stop.value.code == 2 and message in caplog.text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["prompts_file", "perplexity", "lambada", "boolq", "multiple_choice"])
def test_data_are_read_before_the_model(monkeypatch, place, tmp_path, caplog, name):
    monkeypatch.setattr(evaluate, "make_model", None)
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "half of a pair: \\ud83d"}\n')
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, place, "paddle", tmp_path / "out", **{name: data})
    assert ended.value.code == 2 and f"{data}:1: holds U+D83D" in caplog.text


def test_chats(monkeypatch, place, tmp_path, capsys):
    """A text that is made a chat is that conversation, and answers that a file has are kept beside the model's."""
    records = [{"messages": chats.turns("Hi", "Hello", system="s")}, {"src": ["Hi"], "system": "s"}, {"text": "Hi"}]
    settings = dict(tokenizer_name_or_path=place / "chats", max_new_tokens=5, system_instruction="s")
    settings |= dict(apply_chat_template="true", prompts_file=write_lines(tmp_path / "chats.jsonl", records))
    generation = run(monkeypatch, place, "paddle", tmp_path / "out", prompts=["Hi"], **settings)["generation"]
    assert len({item["output"] for item in generation}) == 1
    asked = chats.turns("Hi", system="s")
    given = [{"src": "Hi"}, {"messages": asked, "tgt": "Hello"}, {"messages": asked}, {"src": "Hi"}]
    assert [{key: value for key, value in item.items() if key != "output"} for item in generation] == given
    assert capsys.readouterr().out.count("Hi ▸ ") == 4
    other = run(monkeypatch, place, "paddle", tmp_path / "plain", **settings | dict(apply_chat_template="false"))
    assert [item["output"] == generation[0]["output"] for item in other["generation"]] == [True, True, False]


def test_results_are_kept_where_their_file_cannot_be_written(monkeypatch, place, caplog):
    """/dev/full is a disk without room."""
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, place, "paddle", "/dev/full", prompts="for")
    assert ended.value.code == 1 and "--output_file: /dev/full could not be written: No space left" in caplog.text
    kept = Path(caplog.text.rpartition("its content is in ")[2].strip())
    assert json.loads(kept.read_text())["results"]["generation"][0]["src"] == "for"
    kept.unlink()


def test_finished_tasks_are_kept_where_a_later_one_fails(monkeypatch, place, tmp_path, caplog, capsys):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(evaluate, "generate_text", fails)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, place, "paddle", tmp_path / "out", prompts="for", multiple_choice=place / "choice.jsonl")
    assert ended.value.code == 2 and "out of memory" in caplog.text
    found = json.loads((tmp_path / "out").read_text())
    assert found["unfinished"] == "out of memory" and found["results"].keys() == {"multiple_choice"}
    assert "multiple_choice: examples 2" in capsys.readouterr().out


def test_a_checkpoint_of_the_other_layout_is_refused(monkeypatch, place, tmp_path, caplog):
    with pytest.raises(SystemExit):
        run(monkeypatch, place, "none", tmp_path / "out", prompts="a", model_name_or_path=place / "paddle")
    assert "--mode te2pd" in caplog.text


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
{how}
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]"""
GENERATION = """output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["STOP"], max_gen_toks: 6, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]"""


@WITH_HARNESS
@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_tasks_of_the_harness(monkeypatch, place, tmp_path, backend, seed):
    """The harness's multiple choice and perplexity are run_eval's own, and it finds the texts that run_eval generates.

    The text of one prompt is cut where the task says, so that it is only right when that is done.
    """
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    generator, prompts = np.random.default_rng(seed), ["for", "def the"]
    questions = [
        {"query": random_words(generator, 4), "choices": [random_words(generator, n) for n in (1, 3)], "gold": i}
        for i in (0, 1, 1, 0, 1)
    ]
    choice = write_lines(tmp_path / "choice.jsonl", questions)
    own = dict(perplexity=place / "docs.jsonl", multiple_choice=choice, max_new_tokens=6)
    own = run(monkeypatch, place, backend, tmp_path / "own", **own | dict(prompts=prompts[0]))
    texts = [own["generation"][0]["output"]]
    texts += run(monkeypatch, place, backend, tmp_path / "o", prompts=prompts[1], max_new_tokens=6)["generation"][0:1]
    texts[1] = texts[1]["output"]
    stop = texts[1][len(texts[1]) // 2 :][:3]
    wanted = [texts[0].partition(stop)[0], texts[1].partition(stop)[0]]
    answers = write_lines(
        tmp_path / "answers.jsonl", [{"query": q, "answer": a} for q, a in zip(prompts, wanted, strict=True)]
    )
    files = []
    for name, data, how in (
        ("choice", choice, CHOICE),
        ("rolling", place / "docs.jsonl", ROLLING),
        ("generation", answers, GENERATION.replace('"STOP"', json.dumps(stop))),
    ):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(TASK.format(name=f"own_{name}", data=data, how=how))
    got = run(monkeypatch, place, backend, tmp_path / "harness", lm_eval=files)
    assert set(got) == {"lm_eval own_choice", "lm_eval own_rolling", "lm_eval own_generation"}
    assert got["lm_eval own_choice"]["acc"] == own["multiple_choice"]["accuracy"]
    assert got["lm_eval own_choice"]["acc_norm"] == own["multiple_choice"]["accuracy_norm"]
    for name in ("word_perplexity", "bits_per_byte"):
        assert got["lm_eval own_rolling"][name] == pytest.approx(own["perplexity"][name], rel=1e-6)
    assert got["lm_eval own_generation"]["exact_match"] == 1.0


def harness(monkeypatch, place, output, model_args, **flags):
    """The harness's own command on the model of backend paddle; its results."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data = write_lines(
        output / "choice.jsonl", [{"query": "the", "choices": ["names", "a"], "gold": i} for i in (0, 1)]
    )
    task = output / "choice.yaml"
    task.write_text(TASK.format(name="own_choice", data=data, how=CHOICE))
    flags = dict(model="paddle_te", model_args=model_args, tasks=task, output_path=output) | flags
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", ["paddle-te lm_eval", *words])
    harness_command.main()
    (found,) = output.rglob("results_*.json")
    return json.loads(found.read_text())["results"]["own_choice"]


@WITH_HARNESS
def test_chats_of_the_harness(monkeypatch, place, tmp_path):
    """It finds the answers that run_eval gives to the same chats, and the log-likelihoods of answers to them.

    In its own command the template comes from --model_args.
    """
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    settings = dict(tokenizer_name_or_path=place / "chats", apply_chat_template="true", system_instruction="Be kind.")
    questions = ["Hi", "Why?"]
    own = run(monkeypatch, place, "paddle", tmp_path / "o", prompts=questions, max_new_tokens=6, **settings)
    answers = [{"query": item["src"], "answer": item["output"].partition("STOP")[0]} for item in own["generation"]]
    task = tmp_path / "chats.yaml"
    data = write_lines(tmp_path / "answers.jsonl", answers)
    task.write_text(TASK.format(name="own_chats", data=data, how=GENERATION))
    got = run(monkeypatch, place, "paddle", tmp_path / "h", lm_eval=task, **settings)
    assert got["lm_eval own_chats"]["exact_match"] == 1.0
    plain = run(monkeypatch, place, "paddle", tmp_path / "p", lm_eval=task, tokenizer_name_or_path=place / "chats")
    assert plain["lm_eval own_chats"]["exact_match"] < 1.0

    from paddle_te.hosts.paddlenlp.evaluation.registered import PaddleTE

    model = f"pretrained={place / 'paddle'},tokenizer={place / 'chats'},transformer_engine_backend=paddle"
    model = PaddleTE.create_from_arg_string(f"{model},max_seq_length=48", {"batch_size": 2})
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = model.apply_chat_template(asked)
    ids = json.loads((UNIT / "prompts_of_transformers.json").read_text())["llama"]["system"]
    assert model._request(text, "Hello").context == ids[:-1], "the harness asks for blanks at a context's end, too"
    assert model._tokens(text) == ids
    begun = model.apply_chat_template([*asked, {"role": "assistant", "content": "It is"}], add_generation_prompt=False)
    assert begun == text + "It is"
    assert model.chat_template("default") == chats.MARKED["llama"]
    with pytest.raises(ValueError, match="no chat template 'rag'"):
        model.chat_template("rag")
    assert "chats" in model.tokenizer_name


@WITH_HARNESS
def test_the_harness_knows_our_models(monkeypatch, place, tmp_path):
    """Its own command gives run_eval.py's numbers, of a model by the name paddle_te."""
    model = f"pretrained={place / 'paddle'},tokenizer={place / 'tokenizer'},transformer_engine_backend=paddle"
    got = harness(monkeypatch, place, tmp_path, f"{model},max_seq_length=48", batch_size=3, device="cpu")
    own = run(monkeypatch, place, "paddle", tmp_path / "own", multiple_choice=tmp_path / "choice.jsonl")
    assert got["acc,none"] == own["multiple_choice"]["accuracy"]
    assert got["acc_norm,none"] == own["multiple_choice"]["accuracy_norm"]


@WITH_HARNESS
@pytest.mark.parametrize(
    "model_args, flags, message",
    [
        ("dtype=float32", {}, "give pretrained=FOLDER"),
        ("pretrained=nowhere", {}, "nowhere: there is no such folder"),
        ("pretrained=nowhere,revision=main", {}, "revision: there is no such name; there are pretrained, tokenizer"),
        ("pretrained=nowhere", dict(batch_size="auto"), "--batch_size auto: give a number"),
    ],
)
def test_models_that_the_harness_cannot_have(model_args, flags, message):
    from paddle_te.hosts.paddlenlp.evaluation.registered import PaddleTE

    with pytest.raises((ValueError, FileNotFoundError), match=message):
        PaddleTE.create_from_arg_string(model_args, flags)


@WITHOUT_HARNESS
def test_its_command_says_how_the_harness_is_installed(caplog):
    with pytest.raises(SystemExit) as stop:
        harness_command.main()
    assert stop.value.code == 2 and "pip install 'paddle_te[harness]'" in caplog.text


@WITH_HARNESS
def test_a_task_that_the_harness_has_not(monkeypatch, place, tmp_path, caplog):
    monkeypatch.setattr(evaluate, "make_model", None)  # not read before that is told
    for name, reason in ("no_such_task", "no such task"), ("no_such.yaml", "no such file"):
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, place, "paddle", tmp_path / "out", lm_eval=name)
        assert stop.value.code == 2 and f"--lm_eval {name}: " in caplog.text and reason in caplog.text


# What transformers makes of the same token ids: nats and number of the tokens asked for, and a greedy continuation.
TRANSFORMERS = """
import json, sys, torch, transformers
folder, requests, prompts = sys.argv[1], *map(json.loads, sys.argv[2:])
model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
answers = []
with torch.no_grad():
    for context, continuation in requests:
        labels = torch.tensor([[-100] * len(context) + continuation])
        loss = model(torch.tensor([context + continuation]), labels=labels).loss
        answers.append(-loss.item() * len(continuation))
    settings = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    texts = [model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), **settings)[0, len(p):].tolist()
             for p in prompts]
print(json.dumps([answers, texts]))
"""


@pytest.fixture(scope="module")
def transformers():
    probe = subprocess.run([PYTHON, "-c", "import torch, transformers"], capture_output=True, text=True, check=False)
    if probe.returncode:
        reason = probe.stderr.strip().splitlines()[-1]
        pytest.skip(f"{PYTHON} lacks torch or transformers ({reason}); PADDLE_TE_HF_PYTHON may name another Python")


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_likelihoods_and_tokens_are_transformers(transformers, place, backend, seed):
    from paddle_te.hosts.paddlenlp.evaluation.tasks import Request, Scorer
    from paddle_te.hosts.paddlenlp.generation import left_padded
    from paddle_te.hosts.paddlenlp.loading import load_model

    generator = np.random.default_rng(seed)
    model = load_model(place / backend, backend)
    requests = [[generator.integers(3, 400, n).tolist() for n in generator.integers(1, 20, 2)] for _ in range(6)]
    prompts = [generator.integers(3, 400, n).tolist() for n in (4, 9, 6)]
    arguments = [PYTHON, "-c", TRANSFORMERS, place / "hf", json.dumps(requests), json.dumps(prompts)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    want, texts = json.loads(result.stdout)
    got = [answer.logprob for answer in Scorer(model, 64, progress=False)([Request(*pair) for pair in requests])]
    assert got == pytest.approx(want, rel=1e-4)
    tokens, _ = model.generate(**left_padded(prompts), max_new_tokens=12, eos_token_id=1000, pad_token_id=0)
    assert tokens.tolist() == texts


# What transformers makes of a folder's model, tokenizer and chats: the answers, and the mean loss over those they have.
TRANSFORMERS_CHATS = """
import json, sys, torch, transformers
folder, chats = sys.argv[1], [json.loads(line) for line in open(sys.argv[2])]
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
texts, nats, tokens = [], 0, 0
with torch.no_grad():
    for chat in chats:
        made = tokenizer.apply_chat_template(
            chat["messages"], return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True)
        ids, mask = made["input_ids"], torch.tensor(made["assistant_masks"]).reshape(1, -1).bool()
        count = int(mask[:, 1:].sum())
        nats += count * model(ids, labels=torch.where(mask, ids, -100)).loss.item()
        tokens += count
        asked = tokenizer.apply_chat_template(
            chat["messages"][:-1], add_generation_prompt=True, return_dict=True, return_tensors="pt")["input_ids"]
        made = model.generate(asked, max_new_tokens=32, do_sample=False)[0, asked.shape[1]:].tolist()
        ended = made[-1] in model.generation_config.eos_token_id  # here such a token may be an ordinary one
        texts.append(tokenizer.decode(made[:-1] if ended else made, skip_special_tokens=True))
print(json.dumps([texts, nats / tokens, tokens]))
"""


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_chats_are_transformers(transformers, monkeypatch, place, tmp_path, backend, seed):
    """The same answers, up to the first of the end tokens of generation_config.json, and the same loss of answers."""
    folder = tmp_path / "model"
    shutil.copytree(place / "hf", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "chats" / name, folder)
    generator = np.random.default_rng(seed)
    ends = generator.choice(np.arange(3, 400), 30, replace=False).tolist()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": 0}))
    texts = lambda count: [random_words(generator, n) for n in generator.integers(1, 5, count)]  # noqa: E731
    file = write_lines(tmp_path / "c.jsonl", [{"messages": chats.turns(*texts(n))} for n in (2, 4, 2, 4, 2, 2)])
    done = subprocess.run([PYTHON, "-c", TRANSFORMERS_CHATS, folder, file], capture_output=True, text=True, check=True)
    want, loss, tokens = json.loads(done.stdout)
    settings = dict(model_name_or_path=folder, tokenizer_name_or_path=folder, max_new_tokens=32, max_seq_length=128)
    got = run(monkeypatch, place, backend, tmp_path / "out", prompts_file=file, perplexity=file, **settings)
    assert [item["output"] for item in got["generation"]] == want
    assert (got["perplexity"]["tokens"], got["perplexity"]["conversations"]) == (tokens, 6)
    assert got["perplexity"]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_weights_that_are_not_finite_are_refused(monkeypatch, place, tmp_path, caplog, backend):
    """Paddle's CPU would make a perplexity of ln(vocabulary) of them."""
    broken = tmp_path / "broken"
    shutil.copytree(place / backend, broken)
    weights = paddle.load(str(broken / "model_state.pdparams"))
    name = sorted(weights)[0]
    weights[name] = paddle.full_like(weights[name], float("nan"))
    paddle.save(weights, str(broken / "model_state.pdparams"))
    output = tmp_path / "results.json"
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, place, backend, output, model_name_or_path=broken, perplexity=place / "docs.jsonl")
    assert ended.value.code == 2 and not output.exists()
    assert f"the weights of {broken} hold NaN or infinity: {name}; nothing was evaluated" in caplog.text


def test_logits_that_are_not_finite_are_refused(monkeypatch, place, tmp_path, caplog):
    load = evaluate.make_model

    def too_large(args):
        model = load(args)
        model.lm_head.weight.set_value(paddle.full_like(model.lm_head.weight, 3e38))
        return model

    monkeypatch.setattr(evaluate, "make_model", too_large)
    output = tmp_path / "results.json"
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, place, "paddle", output, perplexity=place / "docs.jsonl")
    assert ended.value.code == 2 and not output.exists()
    assert "the model's logits are not finite, though its weights are" in caplog.text
