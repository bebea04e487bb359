"""Which layouts are found, and the command."""

import json
import shlex
from dataclasses import fields, replace

import pytest

from paddle_te import configs
from paddle_te.launch import finetune, pretrain
from paddle_te.launch.plan import make_plan
from paddle_te.planner import GPUS, Lora, Model, command, formulas, memory_of_step, search
from paddle_te.planner.memory import fits

H200 = GPUS["h200"]
EIGHT_B_ON_2 = Model.of(configs.read("llama-3-8b")), H200, 2, 8192, 8192, "fp8"


def find(name, gpus, tokens=2**20, sequence=4096):
    return search(Model.of(configs.read(name)), H200, gpus, sequence, tokens, "fp8")


def test_all_have_the_tokens_that_were_asked_for():
    found = find("llama-3-8b", 8)
    ranks = [plan.milliseconds * (1.03 if plan.layout.offloads else 1) for plan in found.plans]
    assert ranks == sorted(ranks)
    for plan in [*found.plans, *found.too_large.values()]:
        layout = plan.layout
        assert layout.tokens_per_step == 2**20 and layout.tp * layout.pp * layout.data == 8
    assert {"none", "layernorm", "full"} <= {plan.layout.recompute_text for plan in found.plans}
    assert {plan.layout.offload_activations > 0 for plan in found.plans} == {False, True}


def test_parts_of_layers_that_are_computed_again():
    """The cheapest that fit: the more, the less room there is."""
    texts = {plan.layout.recompute_text for plan in find("meta-llama/Meta-Llama-3-70B", 16, sequence=8192).plans}
    assert {"none", "layernorm", "layernorm + mlp", "layernorm + mlp + core_attn", "full"} <= texts


def test_as_many_layers_go_to_the_host_as_must():
    """With one layer fewer there the fastest would not fit: Llama-3-8B on one GPU, float32 states."""
    model, gpu = EIGHT_B_ON_2[0], H200
    best = search(model, gpu, 1, 8192, 8192, "fp8").plans[0]
    count = best.layout.offload_activations
    assert count > 0 and fits(best.memory, model, best.layout, gpu)
    fewer = replace(best.layout, offload_activations=count - 1)
    assert not fits(memory_of_step(model, fewer), model, fewer, gpu)


def test_the_mlp_in_chunks():
    """Where it does not fit otherwise, and never of short sequences."""
    model, states = EIGHT_B_ON_2[0], dict(optim_moments="bfloat16", master_weights="bf16_remainder")
    best = search(model, H200, 1, 131072, 2 * 131072, "fp8", **states).plans[0].layout
    assert best.mlp_in_chunks and "--mlp_chunk_tokens 16384" in best.extra_arguments()
    at_once = replace(best, mlp_chunk_tokens=0)
    assert not fits(memory_of_step(model, at_once), model, at_once, H200)
    assert best.memory_text == "full, MLP in chunks of 16384"
    assert not any(plan.layout.mlp_chunk_tokens for plan in find("llama-3-8b", 8).plans)


def test_as_many_states_go_to_the_host_as_must():
    """With a hundredth less there it would not fit: Llama-3-8B, whose many micro-batches a step hide the copies."""
    model, gpu = EIGHT_B_ON_2[0], H200
    best = search(model, gpu, 1, 8192, 16 * 8192, "fp8").plans[0]
    assert best.layout.offload_optimizer > 0 and fits(best.memory, model, best.layout, gpu)
    less = replace(best.layout, offload_optimizer=best.layout.offload_optimizer - 0.01)
    assert not fits(memory_of_step(model, less), model, less, gpu)
    given = search(model, gpu, 1, 8192, 16 * 8192, "fp8", offload_optimizer=0.5)
    assert {plan.layout.offload_optimizer for plan in given.plans} == {0.5}


def test_long_sequences_are_shared():
    """SEP by heads, CP without a window, neither with learned positions, and none where sequences are short."""

    def degrees(name, sequence, gpus=8):
        found = find(name, gpus, gpus * sequence, sequence)
        layouts = [plan.layout for plan in (*found.plans, *found.too_large.values())]
        assert all(layout.stage == 1 or layout.sharing == 1 for layout in layouts)
        return {layout.sep for layout in layouts}, {layout.cp for layout in layouts}

    assert degrees("llama-3-8b", 8192) == ({1}, {1})
    assert degrees("llama-3-8b", 65536) == ({1, 2, 4, 8}, {1, 2, 4, 8})
    assert degrees("Qwen/Qwen2.5-0.5B", 32768)[0] == {1, 2}  # of 2 key-value heads
    assert degrees("mistralai/Mistral-7B-v0.1", 32768)[1] == {1}
    assert degrees("gpt-5b", 65536, gpus=4) == ({1}, {1})


def test_what_does_not_fit_says_what_it_needs():
    """70B: 16 bytes a parameter are 1129 GB, which no rank of DP4 has."""
    found = find("meta-llama/Meta-Llama-3-70B", 4)
    assert not found.plans and found.too_large["DP4"].memory.total > 1129e9


def test_a_family_without_a_pipeline():
    layouts = [plan.layout for plan in find("mistralai/Mistral-7B-v0.1", 8).plans]
    assert layouts and all(layout.pp == 1 for layout in layouts)


@pytest.mark.parametrize("tokens, message", [(5000, "no multiple of the sequence"), (4096, "no layout of 7 GPUs")])
def test_tokens_that_cannot_be(tokens, message):
    with pytest.raises(ValueError, match=message):
        find("llama-3-8b", 7, tokens)


def run(monkeypatch, capsys, line):
    monkeypatch.setattr("sys.argv", ["paddle-te plan", *shlex.split(line)])
    status = command.main()
    return status, capsys.readouterr()


def dry_run(job, words, gpus):
    """A printed command as it stands, up to what it would start on another machine."""
    devices = ",".join(map(str, range(gpus)))
    environ = {"CUSTOM_DEVICE_ROOT": "", "DRY_RUN": "1", "DEVICE": "nvgpu", "DEVICES": devices}
    assert words[:2] == ["paddle-te", job.__name__.rpartition(".")[2]]
    return shlex.join(make_plan(job, words[2:], environ)[0].command)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_launcher_takes_the_command(monkeypatch, capsys, gpus):
    status, shown = run(monkeypatch, capsys, f"meta-llama/Llama-3.2-1B --gpus {gpus} --seq 2048")
    assert status == 0
    words = shlex.split(next(line for line in shown.out.splitlines() if "paddle-te pretrain" in line))
    assert "trains on random tokens. To train on your data, put --DATA_PATH=FOLDER in place of --MOCK" in shown.out
    flags = dry_run(pretrain, words, gpus)
    assert "--tokenizer_name_or_path meta-llama/Llama-3.2-1B " in flags, "the model's own"
    assert f"--sharding_parallel_degree {gpus}" in flags or gpus == 1
    assert ("overlap" in flags) == (gpus > 1)


def test_main_gradients_are_counted_where_the_launcher_keeps_them():
    """Over several GPUs, 4 bytes a weight, unless they are used up at once; on one in bf16."""
    model, _, _, *asked = EIGHT_B_ON_2
    for gpus, settings, kept in ((1, {}, False), (2, {}, True), (2, dict(optimizer_in_backward="last_norm"), False)):
        found = search(model, H200, gpus, *asked, **settings)
        layouts = [plan.layout for plan in (*found.plans, *found.too_large.values())]
        assert layouts and {layout.main_grads for layout in layouts} == {kept}
    layout = replace(layouts[0], optimizer_in_backward="off", main_grads=True)
    assert "amp_master_grad" not in layout.extra_arguments()
    assert "--amp_master_grad false" in replace(layout, main_grads=False).extra_arguments()


def test_an_update_in_backward_takes_one_micro_batch_on_tensor_parallel_ranks(monkeypatch, capsys):
    layouts = [plan.layout for plan in search(*EIGHT_B_ON_2, optimizer_in_backward="unclipped").plans]
    assert layouts and {(layout.tp, layout.data, layout.micro_batches) for layout in layouts} == {(2, 1, 1)}
    line = "llama-3-8b --gpus 1 --optim_moments bfloat16 --optimizer_in_backward unclipped"
    status, shown = run(monkeypatch, capsys, line)
    assert status == 0 and "--optimizer_in_backward unclipped --max_grad_norm 0" in shown.out


def test_lora(monkeypatch, capsys, tmp_path):
    """With the launcher's command for it; what does not go together is refused."""
    line = "meta-llama/Meta-Llama-3-70B --gpus 1 --seq 4096 --tokens_per_step 4096 --lora_rank 16 --quantize_base fp8"
    status, shown = run(monkeypatch, capsys, line)
    assert status == 0 and "full" in shown.out
    assert "--model_name=MODEL --dataset=DATASET --output=OUTPUT" in shown.out, "a known name has no folder of weights"
    assert "Put your own folders in place of MODEL (the folder with the model's weights and tokenizer), " in shown.out
    found = search(
        Model.of(configs.read("llama-3-8b")), H200, 4, 4096, 2**18, "fp8", lora=Lora(16, "attention", fp8_base=True)
    )
    assert {(plan.layout.pp, plan.layout.stage, plan.layout.sharing) for plan in found.plans} == {(1, 2, 1)}
    assert not any(plan.layout.mlp_chunk_tokens or plan.layout.offload_optimizer for plan in found.plans)
    layout = next(plan.layout for plan in found.plans if plan.layout.sharding == 4)
    words = command.launch_words(str(tmp_path), layout)
    write_model(tmp_path)
    (tmp_path / "train.json").write_text("")
    words = [word.replace("DATASET", str(tmp_path)).replace("OUTPUT", str(tmp_path / "out")) for word in words]
    flags = dry_run(finetune, words, 4)
    for flag in ("--lora 1", "--lora_rank 16", "--lora_targets attention", "--quantize_base fp8", "--sharding stage2"):
        assert flag in flags
    for wrong, said in (
        ("--lora_targets mlp", "--lora_targets without --lora_rank"),
        ("--lora_rank 4 --quantize_base fp8 --precision bf16", "needs --precision fp8"),
        ("--lora_rank 4 --offload_optimizer 0.5", "too small to be moved"),
    ):
        status, shown = run(monkeypatch, capsys, f"llama-3-8b --gpus 1 {wrong}")
        assert status == 2 and said in shown.err


def test_swiglus_input_in_fp8_is_asked_for(monkeypatch, capsys):
    """It is in no layout that computes that input again, and in none where it was not asked for."""
    line = "llama-3-8b --gpus 1 --tokens_per_step 8192"
    status, shown = run(monkeypatch, capsys, f"{line} --activation_func_fp8_input_store true")
    assert status == 0 and "--activation_func_fp8_input_store true" in shown.out
    assert "one GPU  layernorm + mlp_act, SwiGLU's input in fp8  1 × 1" in shown.out
    assert "one GPU  full  " in shown.out
    _, shown = run(monkeypatch, capsys, line)
    assert "SwiGLU" not in shown.out and "fp8_input_store" not in shown.out


def write_model(folder):
    (folder / "config.json").write_text(json.dumps(configs.read("llama-3-8b")))
    (folder / "model.safetensors").touch()


def test_it_explains(monkeypatch, capsys):
    status, shown = run(monkeypatch, capsys, "llama-3-8b --gpus 4 --explain --gpu h100")
    assert status == 0 and "taken over from the H200; nine steps of" in shown.out
    assert "nvlink" in shown.out and "optimizer" in shown.out
    assert formulas.TIME["layers"] in shown.out and formulas.MEMORY["states"] in shown.out
    best = search(*EIGHT_B_ON_2).plans[0]
    parts = {part.name for part in fields(best.memory)}
    assert formulas.TIME.keys() == best.times.keys() and formulas.MEMORY.keys() == parts


def test_nothing_fits(monkeypatch, capsys):
    status, shown = run(monkeypatch, capsys, "meta-llama/Llama-2-70b --gpus 2 --seq 4096")
    assert status == 1 and "No layout fits" in shown.out and "PP2" in shown.out


def test_unknown_models_are_named(monkeypatch, capsys):
    status, shown = run(monkeypatch, capsys, "llama-9 --gpus 2")
    assert status == 2 and "neither a folder nor a known model" in shown.err
