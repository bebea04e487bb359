"""Bad values for every command: one line that names what is wrong, status 2 (1 from the tool that makes data), before
any model is made or data is written. In this process, through the commands' main functions."""

import json
import sys
from pathlib import Path

import pytest

from paddle_te.configs import read
from paddle_te.data import prepare as prepare_data
from paddle_te.data.prepare import encoding, reading
from paddle_te.hosts.paddlenlp.evaluation import evaluate
from paddle_te.hosts.paddlenlp.training import finetune, pretrain
from paddle_te.launch import __main__ as launcher
from paddle_te.options import evaluation, layers, pretraining, training, tuning
from paddle_te.options import launcher as launcher_options
from paddle_te.options.option import Option
from paddle_te.runs.lock import NAME as LOCK
from paddle_te.weights import command

PRETRAIN = dict(model_name_or_path="tiny-llama-demo", tokenizer_name_or_path="none", mock_data="true", device="cpu")
PRETRAIN |= dict(do_train="true", max_steps=2, output_dir="out", max_seq_length=16)
FINETUNE = dict(
    model_name_or_path="model", dataset_name_or_path="data", output_dir="out", do_train="true", device="cpu"
)
EVALUATE = dict(model_name_or_path="model", prompts="a")
CONVERT = dict(input_ckpt_path="model", output_ckpt_path="out", mode="te2hf")
PREPARE = dict(input_path="lines.jsonl", output_prefix="made/corpus", tokenizer_name="model")
TRAINED = [  # by run_pretrain.py and run_finetune.py
    *[("learning_rate", value) for value in ("nan", "inf", "-inf", "0", "-1e-3", "fast")],
    *[("weight_decay", value) for value in ("nan", "-0.1", "inf")],
    *[("max_grad_norm", value) for value in ("nan", "-1", "inf")],
    *[(name, value) for name in ("adam_beta1", "adam_beta2") for value in ("2", "1", "-0.1", "nan")],
    *[("adam_epsilon", value) for value in ("nan", "-1e-8", "0")],
    *[("warmup_ratio", value) for value in ("nan", "-0.1", "1.5")],
    *[("sharding", value) for value in ("stage9", "stage1 stage2", " ", "offload")],
    *[(f"{kind}_parallel_degree", "-3") for kind in ("tensor", "pipeline", "sharding", "sep", "context", "expert")],
    *[(name, value) for name in ("save_steps", "logging_steps") for value in ("0", "-1", "1.5")],
    *[(name, "0") for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")],
    *[(name, "-1") for name in ("warmup_steps", "dataloader_num_workers", "save_total_limit", "eval_steps")],
    *[("seed", value) for value in ("-1", "4294967296", "x")],
    *[("virtual_pp_degree", "0"), ("fp16_opt_level", "O9"), ("optim", "sgdd"), ("lr_scheduler_type", "sine")],
    *[("save_strategy", "never"), ("recompute_granularity", "half"), ("num_train_epochs", "nan")],
    *[("transformer_engine_backend", "te"), ("fp8_recipe", "mxfp8")],
    *[("fp8_amax_history_len", "0"), ("on_nan", "ignore"), ("spike_factor", "nan"), ("device", "tpu")],
    *[("freeze", "["), ("label_smoothing_factor", "1")],
    *[("early_stopping_patience", "0"), ("early_stopping_patience", "2")],
    *[("resume_from_checkpoint", "latest"), ("bf16", "maybe"), ("output_dir", "file"), ("output_dir", "file/below")],
    *[(name, "100000000000") for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")],
    *[(name, "100000000000") for name in ("save_steps", "logging_steps", "warmup_steps", "tensor_parallel_degree")],
    *[("dataloader_num_workers", "100000"), ("fp8_amax_history_len", "100000000000"), ("save_total_limit", "9" * 99)],
    *[("learning_rate", "1e400"), ("learning_rate", "1e39"), ("learning_rate", "1e-50"), ("adam_epsilon", "1e-99")],
    *[("seed", str(2**64)), ("data_seed", "-1"), ("weight_decay", "-inf")],
    *[("output_dir", value) for value in ("", " ", "a" * 300, "a/" * 2100, "out\udc80", "out\nput", "out\x1b[31m")],
    *[("staging_dir", ""), ("logging_dir", "a" * 300), ("logging_dir", "file/below"), ("output_dir", "out\0put")],
]
PRETRAINED = [
    *[("max_seq_length", value) for value in ("0", "-5", "long")],
    *[("min_learning_rate", value) for value in ("nan", "-1")],
    *[("decay_steps", "0"), ("eval_iters", "0"), ("split", "a,b,c"), ("split", "-1,2,3"), ("split", "nan,1,1")],
    *[("model_name_or_path", "llama-9b"), ("freeze", "no such weight"), ("freeze", ".")],
    *[("tokenizer_name_or_path", "nowhere"), ("te_init_weight_path", "nowhere")],
    *[(name, "") for name in ("model_name_or_path", "te_init_weight_path", "data_cache")],
    *[("max_seq_length", "100000000000"), ("eval_iters", "100000000000"), ("decay_steps", "1" * 30)],
    *[("tokenizer_name_or_path", "a" * 300), ("te_init_weight_path", "a" * 5000), ("model_name_or_path", "\udcff")],
]
FINETUNED = [
    *[("lora_rank", "0"), ("lora_alpha", "-1"), ("lora_dropout", "1"), ("lora_targets", "everything")],
    *[("src_length", "0"), ("max_length", "-1"), ("pad_to_multiple_of", "0"), ("model_name_or_path", "nowhere")],
    *[("merge_lora", "true"), ("min_learning_rate", "1e-6")],
    *[(name, "100000000000") for name in ("src_length", "max_length", "pad_to_multiple_of", "lora_rank", "lora_alpha")],
    *[(name, "") for name in ("model_name_or_path", "dataset_name_or_path", "lora_path")],
    *[("dataset_name_or_path", "a" * 300), ("lora_path", "\udcff"), ("lora_alpha", "0")],
]
EVALUATED = [
    *[("top_p", value) for value in ("5", "-0.1", "nan")],
    *[("temperature", value) for value in ("nan", "-1", "inf")],
    *[(name, "0") for name in ("batch_size", "limit", "max_new_tokens", "max_seq_length")],
    *[("top_k", "-1"), ("seed", "-1"), ("dtype", "int8"), ("device", "tpu")],
    *[("fp8_recipe", "other"), ("model_name_or_path", "nowhere"), ("output_file", "file/results.json")],
    *[("output_file", "folder"), ("transformer_engine_backend", "te")],
    *[(name, "100000000000") for name in ("batch_size", "limit", "max_new_tokens", "max_seq_length", "top_k", "seed")],
    *[("output_file", "a" * 300), ("output_file", ""), ("model_name_or_path", ""), ("temperature", "1e-60")],
    *[("perplexity", ""), ("boolq", "a" * 300), ("lambada", "\udcff")],
]
CONVERTED = [
    *[("mode", "te2te"), ("format", "zip"), ("workers", "0"), ("workers", "-1"), ("max_shard_size", "0")],
    *[("max_shard_size", "large"), ("dtype", "int8"), ("tensor_parallel_degree", "0"), ("num_attention_heads", "-4")],
    *[("workers", "100000"), ("tensor_parallel_degree", "9" * 9), ("workers", "²"), ("workers", "9" * 5000)],
    *[
        (f"{end}_ckpt_path", value)
        for end in ("input", "output")
        for value in ("", "a" * 300, "\udcff", "a\nb", "a\0b")
    ],
]
PREPARED = [
    *[
        ("workers", "0"),
        ("workers", "-2"),
        ("workers", "x"),
        ("input_path", "nowhere"),
    ],
    *[("workers", "100000"), ("workers", "9" * 5000)],
    *[(name, value) for name in ("input_path", "output_prefix") for value in ("", "a" * 300, "\udcff", "a\0b")],
]
LAUNCHED = [
    *[("TP", value) for value in ("0", "-1", "two", "9" * 5000)],
    *[("LEARNING_RATE", value) for value in ("nan", "inf", "0")],
    *[("SAVE_STEPS", "0"), ("SP", "maybe"), ("sharding_stage", "stage9"), ("precision", "fp4"), ("DEVICES", "0,0")],
    *[("EXP_NAME", value) for value in ("../..", "../beside", "/elsewhere", ".", "a/../../..")],
    *[(name, "100000000000") for name in ("TP", "PP", "CP", "GA", "batch_size_per_device", "max_seqlen", "NNODES")],
    *[(name, "100000000000") for name in ("MAX_STEPS", "SAVE_STEPS", "MAX_RESTARTS", "MASTER_PORT", "STEP_TIMEOUT")],
    *[("LEARNING_RATE", "1e400"), ("TERM_GRACE", "1e300"), ("START_TIMEOUT", "nan"), ("FSDP", "100000000000")],
    *[(name, value) for name in ("OUTPUT_BASE", "EXP_NAME", "model_name") for value in ("a" * 300, "a\nb", "\udcff")],
    *[("OUTPUT_DIR", "a" * 300), ("OUTPUT_DIR", "a\0b"), ("init_weight", "a" * 5000), ("tokenizer_name", "a" * 300)],
]


def words(settings, name, value):
    return [str(word) for key, word in (settings | {name: value}).items() for word in (f"--{key}", word)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder to run in, where nothing is made: no model, no data."""
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "data", "folder"):
        Path(folder).mkdir()
    Path("file").touch()
    Path("model/config.json").write_text(json.dumps(read("tiny-llama-demo")))
    Path("lines.jsonl").write_text('{"text": "a"}\n')
    for module in (pretrain, finetune, evaluate):
        monkeypatch.setattr(module, "make_model", lambda *_: pytest.fail("the bad value was accepted"))


def refusal(monkeypatch, caplog, capfd, main, argv):
    """(status, what was said) of a command that has a bad value."""
    caplog.clear()
    monkeypatch.setattr(sys, "argv", ["command", *argv])
    with pytest.raises(SystemExit) as stop:
        main()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    return stop.value.code, "\n".join([*errors, *capfd.readouterr().err.strip().splitlines()[-1:]])


@pytest.mark.parametrize(
    "main, settings, name, value",
    [
        *[(pretrain.main, PRETRAIN, *case) for case in TRAINED + PRETRAINED],
        *[(finetune.main, FINETUNE, *case) for case in TRAINED + FINETUNED],
        *[(evaluate.main, EVALUATE, *case) for case in EVALUATED],
    ],
)
def test_scripts(monkeypatch, caplog, capfd, main, settings, name, value):
    argv = words(settings, name, value)
    status, said = refusal(monkeypatch, caplog, capfd, main, argv)
    said = said.splitlines()
    assert status == 2 and said and "Traceback" not in said[0]
    assert name in said[0] or value in said[0], said[0]
    assert len(said) <= 2 and len(said[0]) < 1600, said  # in the log and on the screen
    assert not [path for path in Path(".").glob("out/*") if path.name != LOCK]


ARGUMENTS = ["[1, 2]", "1", "null", '{"max_steps": }', "", "[" * 5000, '{"max_steps": [1, 2]}', '{"no_such": 1}']


@pytest.mark.parametrize("text", ARGUMENTS, ids=range(len(ARGUMENTS)))
@pytest.mark.parametrize("main, settings", [(pretrain.main, PRETRAIN), (evaluate.main, EVALUATE)])
def test_files_of_arguments(monkeypatch, caplog, capfd, main, settings, text):
    Path("arguments.json").write_text(text)
    others = {name: value for name, value in settings.items() if name != "max_steps"}
    argv = ["arguments.json", *words(others, "device", "cpu")]
    status, said = refusal(monkeypatch, caplog, capfd, main, argv)
    assert status == 2 and any(
        word in said for word in ("arguments.json", "--max_steps", "--no_such", "no flag before it")
    )


def test_a_folder_of_arguments(monkeypatch, caplog, capfd):
    Path("arguments.json").mkdir()
    status, said = refusal(monkeypatch, caplog, capfd, pretrain.main, ["arguments.json"])
    assert status == 2 and "arguments.json" in said


@pytest.mark.parametrize("name, value", CONVERTED)
def test_converter(monkeypatch, caplog, capfd, name, value):
    status, said = refusal(monkeypatch, caplog, capfd, command.main, words(CONVERT, name, value))
    assert status == 2 and f"--{name}" in said and not Path("out").exists()


@pytest.mark.parametrize(
    "content", [{"a": 1}, {"weight_map": {"a": 1}}, {"weight_map": [1, 2]}, {"weight_map": 3}, [1]]
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model_state.pdparams.index.json"])
def test_an_index_that_is_none(monkeypatch, caplog, capfd, name, content):
    Path("model", name).write_text(json.dumps(content))
    for shard in ("model-00001-of-00002.safetensors", "model_state-00001-of-00002.pdparams"):
        if shard.endswith(name.split(".")[1]):
            Path("model", shard).touch()
    status, said = refusal(monkeypatch, caplog, capfd, command.main, words(CONVERT, "mode", "te2hf"))
    assert status not in (None, 0) and name in str(status), (status, said)


@pytest.mark.parametrize("name, value", PREPARED)
def test_data(capfd, name, value):
    try:
        status = prepare_data.main(words(PREPARE, name, value))
    except SystemExit as stop:
        status = stop.code
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert status in (1, 2) and (name in said or value in said), said
    assert not Path("made").exists()


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "[" * 100_000, '{"text": 1}', "nothing", '["text"]'])
def test_lines_of_data(line):
    chunk = reading.Chunk(Path("lines.jsonl"), 1, [line.encode()], len(line))
    with pytest.raises(reading.PrepareError, match="lines.jsonl, line 1: "):
        encoding.Encoder(None, None).encode(chunk)


@pytest.mark.parametrize("name, value", LAUNCHED)
def test_launcher(monkeypatch, capfd, name, value):
    for variable, text in dict(MOCK_DATA="1", DEVICE="cpu", OUTPUT_BASE="outputs").items():
        monkeypatch.setenv(variable, text)
    arguments = dict(model_name="tiny-llama-demo", tokenizer_name="none", TP=1, backend="pd", precision="fp32", GA=1)
    status = launcher.main(["pretrain", *(f"--{key}={word}" for key, word in (arguments | {name: value}).items())])
    said = capfd.readouterr().err
    assert status == 2 and said.startswith(f"error: {name}") and said.count("\n") == 1
    assert not Path("outputs").exists()


def test_every_number_has_a_bound():
    """And every text must be one that files and terminals can hold."""
    listed = [
        each
        for module in (launcher_options, layers, training, pretraining, tuning, evaluation)
        for each in vars(module).values()
    ]
    options = [option for each in listed if isinstance(each, tuple) for option in each if isinstance(option, Option)]
    assert len(options) > 150
    for option in [*options, *training.PADDLENLPS]:
        if option.kind.type in (int, float):
            assert option.kind.fault(10**300), option.name
        if option.kind.type is str and not option.kind.values and option.kind.read is str:
            assert option.kind.fault("a\0"), option.name


@pytest.mark.parametrize("value", ["\udcff", "a\0b"])
def test_prompts(monkeypatch, caplog, capfd, value):
    status, said = refusal(monkeypatch, caplog, capfd, evaluate.main, words(EVALUATE, "prompts", value))
    assert status == 2 and said.startswith("--prompts "), said
