"""Which layouts are found, and the command."""

import json
import shlex
from dataclasses import fields, replace

import pytest

from paddle_te import configs
from paddle_te.launch import finetune, pretrain
from paddle_te.launch.plan import make_plan
from paddle_te.planner import command, formulas
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import by_flag, extra_arguments, memory_text, recompute_text
from paddle_te.planner.measured import all_that_ran, has_run, speed_of
from paddle_te.planner.memory import fits, memory_of_step
from paddle_te.planner.model import Model
from paddle_te.planner.ranking import computed_again, costs, rank
from paddle_te.planner.search import search
from tests import small_tokenizers

LORA = dict(rank=16, targets="attention", fp8_base=True)
H200 = GPUS["h200"]
FLOAT32 = dict(optim_moments="float32", master_weights="float32", optimizer_in_backward="off")
EIGHT_B_ON_2 = Model.of(configs.read("llama-3-8b")), H200, 2, 8192, 8192, "fp8"


def find(name, gpus, tokens=2**20, sequence=4096):
    return search(Model.of(configs.read(name)), H200, gpus, sequence, tokens, "fp8")


def test_all_have_the_tokens_that_were_asked_for():
    found = find("llama-3-8b", 8)
    ranks = [rank(plan) for plan in found.plans]
    assert ranks == sorted(ranks)
    for plan in [*found.plans, *found.too_large.values()]:
        layout = plan.layout
        assert layout.tokens_per_step == 2**20 and layout.tp * layout.pp * layout.data == 8
    assert {"none", "layernorm", "full"} <= {recompute_text(plan.layout) for plan in found.plans}
    assert {plan.layout.offload_activations > 0 for plan in found.plans} == {False, True}


def test_parts_of_layers_that_are_computed_again():
    """The cheapest that fit: the more, the less room there is."""
    texts = {recompute_text(plan.layout) for plan in find("meta-llama/Meta-Llama-3-70B", 16, sequence=8192).plans}
    assert {"none", "layernorm", "layernorm + mlp", "layernorm + mlp + core_attn", "full"} <= texts


def test_as_many_layers_go_to_the_host_as_must():
    """With one layer fewer there it would not fit: Llama-3-8B on one GPU, float32 states."""
    model, gpu = EIGHT_B_ON_2[0], H200
    found = search(model, gpu, 1, 8192, 8192, "fp8", **FLOAT32)
    best = next(plan for plan in found.plans if plan.layout.offload_activations)
    count = best.layout.offload_activations
    assert count > 0 and fits(best.memory, model, best.layout, gpu)
    fewer = best.layout.but(offload_activations=count - 1)
    assert not fits(memory_of_step(model, fewer), model, fewer, gpu)


def test_the_mlp_in_chunks():
    """Where it does not fit otherwise, and never of short sequences."""
    model, states = EIGHT_B_ON_2[0], dict(optim_moments="bfloat16", master_weights="bf16_remainder")
    best = search(model, H200, 1, 131072, 2 * 131072, "fp8", **states).plans[0].layout
    assert best.mlp_in_chunks and "--mlp_chunk_tokens 16384" in extra_arguments(best)
    at_once = best.but(mlp_chunk_tokens=0)
    assert not fits(memory_of_step(model, at_once), model, at_once, H200)
    assert memory_text(best) == "full, MLP in chunks of 16384"
    assert not any(plan.layout.mlp_chunk_tokens for plan in find("llama-3-8b", 8).plans)


def test_as_many_states_go_to_the_host_as_must():
    """With a hundredth less there it would not fit: Llama-3-8B, whose many micro-batches a step hide the copies."""
    model, gpu = EIGHT_B_ON_2[0], H200
    best = search(model, gpu, 1, 8192, 16 * 8192, "fp8", **FLOAT32).plans[0]
    assert best.layout.offload_optimizer > 0 and fits(best.memory, model, best.layout, gpu)
    less = best.layout.but(offload_optimizer=best.layout.offload_optimizer - 0.01)
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


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_experts_are_divided(gpus):
    """By ranks of sharding, and by tensor parallel ones, in layouts that fit and that the launcher takes as printed."""
    model = Model.of(configs.read("qwen3-30b-a3b"))
    found = search(model, H200, gpus, 4096, 16 * gpus * 4096, "fp8", optimizer_in_backward="off").plans
    first = {plan.layout.ep: plan for plan in reversed(found)}
    assert 2 in first and all(plan.layout.tp == 1 for ep, plan in first.items() if ep > 1)
    assert any(plan.layout.tp > 1 for plan in found)
    for ep, plan in first.items():
        assert fits(plan.memory, model, plan.layout, H200)
        flags = dry_run(pretrain, ["paddle-te", *command.launch_words("qwen3-30b-a3b", plan.layout)], gpus)
        assert f"--expert_parallel_degree {ep} " in flags


def test_experts_are_divided_as_the_user_says():
    model, asked = Model.of(configs.read("allenai/OLMoE-1B-7B-0924")), (H200, 4, 4096, 64 * 4096, "bf16")
    given = dict(expert_parallel_degree=4, moe_token_dispatcher_type="alltoall")
    layouts = [plan.layout for plan in search(model, *asked, **given).plans]
    assert layouts and {(layout.ep, layout.moe_token_dispatcher_type) for layout in layouts} == {(4, "alltoall")}
    assert not any(plan.layout.ep > 1 for plan in find("llama-3-8b", 2).plans)


def test_what_does_not_fit_says_what_it_needs():
    """70B: 16 bytes a parameter are 1129 GB, which no rank of DP4 has."""
    found = find("meta-llama/Meta-Llama-3-70B", 4)
    assert not found.plans and found.too_large["DP4"].memory.total > 1129e9


def test_a_family_without_a_pipeline():
    layouts = [plan.layout for plan in find("mistralai/Mistral-7B-v0.1", 8).plans]
    assert layouts and all(layout.pp == 1 for layout in layouts)


def test_flags_that_go_together_in_no_layout_are_named():
    with pytest.raises(ValueError, match="--optim muon with --optim_moments int8"):
        search(*EIGHT_B_ON_2, optim="muon", optim_moments="int8")


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
    for gpus, in_backward, kept in ((1, "off", False), (2, "off", True), (2, "last_norm", False)):
        found = search(model, H200, gpus, *asked, optimizer_in_backward=in_backward)
        layouts = [plan.layout for plan in (*found.plans, *found.too_large.values())]
        assert layouts and {layout.amp_master_grad for layout in layouts} == {kept}
    layout = layouts[0].but(optimizer_in_backward="off", amp_master_grad=True)
    assert "amp_master_grad" not in extra_arguments(layout)
    assert "--amp_master_grad false" in extra_arguments(layout.but(amp_master_grad=False))


def test_an_update_in_backward_takes_one_micro_batch_on_tensor_parallel_ranks(monkeypatch, capsys):
    layouts = [plan.layout for plan in search(*EIGHT_B_ON_2, optimizer_in_backward="unclipped").plans]
    assert layouts and {(layout.tp, layout.data, layout.micro_batches) for layout in layouts} == {(2, 1, 1)}
    line = "llama-3-8b --gpus 1 --optim_moments bfloat16 --optimizer_in_backward unclipped"
    status, shown = run(monkeypatch, capsys, line)
    assert status == 0 and "--optimizer_in_backward unclipped" in shown.out and "--max_grad_norm 0" in shown.out


def test_lora(monkeypatch, capsys, tmp_path):
    """With the launcher's command for it; what does not go together is refused."""
    line = "meta-llama/Meta-Llama-3-70B --gpus 1 --seq 4096 --tokens_per_step 4096 --lora_rank 16 --quantize_base fp8"
    status, shown = run(monkeypatch, capsys, line)
    assert status == 0 and "full" in shown.out
    assert "--model_name=MODEL --dataset=DATASET --output=OUTPUT" in shown.out, "a known name has no folder of weights"
    assert "Put your own folders in place of MODEL (the folder with the model's weights and tokenizer), " in shown.out
    found = search(
        Model.of(configs.read("llama-3-8b")),
        H200,
        4,
        4096,
        2**18,
        "fp8",
        lora=dict(rank=16, targets="attention", fp8_base=True),
    )
    assert {(plan.layout.pp, plan.layout.sharing) for plan in found.plans} == {(1, 1)}
    assert all(plan.layout.stage == 2 or plan.layout.sharding_ranks == 1 for plan in found.plans)
    assert not any(plan.layout.mlp_chunk_tokens or plan.layout.offload_optimizer for plan in found.plans)
    layout = next(plan.layout for plan in found.plans if plan.layout.sharding_ranks == 4)
    words = ["paddle-te", *command.launch_words(str(tmp_path), layout)]
    write_model(tmp_path)
    (tmp_path / "train.json").write_text('{"src": "a", "tgt": "b"}\n')
    words = [word.replace("DATASET", str(tmp_path)).replace("OUTPUT", str(tmp_path / "out")) for word in words]
    flags = dry_run(finetune, words, 4)
    wanted = "--lora true", "--lora_rank 16", "--lora_targets attention", "--quantize_base fp8", "--sharding stage2"
    for flag in wanted:
        assert flag in flags
    for wrong, said in (
        ("--lora_targets mlp", "--lora_targets without --lora_rank"),
        ("--lora_rank 4 --quantize_base fp8 --precision bf16", "needs --precision fp8"),
        ("--lora_rank 4 --offload_optimizer 0.5", "too small to be moved"),
    ):
        status, shown = run(monkeypatch, capsys, f"llama-3-8b --gpus 1 {wrong}")
        assert status == 2 and said in shown.err


def test_transposes_of_a_base_in_fp8_are_kept_where_they_fit(monkeypatch, capsys):
    """Unless the user decides."""
    adapter = "--lora_rank 16 --quantize_base fp8"
    line = f"meta-llama/Llama-2-7b --gpus 1 --gpu h100 --seq 4096 --tokens_per_step 4096 --show 1 {adapter}"
    for given, kept in (("", True), ("--keep_fp8_transpose_cache false", False)):
        status, shown = run(monkeypatch, capsys, f"{line} {given}")
        assert status == 0 and ("none, transposes kept" in shown.out) == kept
        assert ("--keep_fp8_transpose_cache true" in shown.out) == kept
    large = "meta-llama/Meta-Llama-3-70B --gpus 1 --seq 4096 --tokens_per_step 4096"
    for given, kept in (("", 0), ("--keep_fp8_transpose_cache true", 1)):
        status, shown = run(monkeypatch, capsys, f"{large} {adapter} {given}")
        assert status == kept and ("transposes kept" in shown.out) == kept
    status, shown = run(monkeypatch, capsys, f"{large} --lora_rank 16 --keep_fp8_transpose_cache true")
    assert status == 2 and "needs --quantize_base fp8" in shown.err


def test_tuning_on_preferences(monkeypatch, capsys):
    line = "Qwen/Qwen2.5-7B --gpus 1 --gpu h100 --seq 8192 --tokens_per_step 65536 --show 1 --explain"
    status, shown = run(monkeypatch, capsys, f"{line} --task dpo --lora_rank 32 --quantize_base fp8")
    assert status == 0 and "paddle-te dpo --model_name=MODEL --dataset=DATASET" in shown.out
    assert (
        "'--EXTRA_ARGS=--lora_rank 32 --quantize_base fp8 --keep_fp8_transpose_cache true'" in shown.out
        and "  reference " in shown.out
    )
    status, shown = run(monkeypatch, capsys, f"{line.replace('--gpus 1', '--gpus 8')} --task kto")
    assert status == 0 and "paddle-te kto" in shown.out and "--method=full" in shown.out
    line = "meta-llama/Meta-Llama-3-70B --gpus 8 --gpu h100 --seq 8192 --show 20 --lora_rank 32 --quantize_base fp8"
    status, shown = run(monkeypatch, capsys, f"{line} --task dpo")
    assert status == 0 and "\nPP4 × stage1 over 2 " in shown.out and " --PP=1 " in shown.out
    status, shown = run(monkeypatch, capsys, line)  # fine-tuning has none
    assert status == 0 and "PP" not in shown.out


def test_swiglus_input_in_fp8_is_asked_for(monkeypatch, capsys):
    """It is in no layout that computes that input again, and in none where it was not asked for."""
    line = "llama-3-8b --gpus 1 --tokens_per_step 8192 --optim_moments float32 --master_weights float32 --show 20"
    status, shown = run(monkeypatch, capsys, f"{line} --activation_func_fp8_input_store true")
    assert status == 0 and "--activation_func_fp8_input_store true" in shown.out
    assert "one GPU  layernorm + mlp_act, SwiGLU's input in fp8  1 × 1" in shown.out
    assert "one GPU  full  " in shown.out
    _, shown = run(monkeypatch, capsys, line)
    assert "SwiGLU" not in shown.out and "fp8_input_store" not in shown.out


def test_states_are_searched_for_unless_they_are_given():
    """Llama-3-8B on one H100, which holds none of AdamW's states in float32."""
    model, gpu, asked = EIGHT_B_ON_2[0], GPUS["h100"], (1, 8192, 16 * 8192, "fp8")
    found = search(model, gpu, *asked).plans
    best = found[0].layout
    assert (best.optim_moments, best.master_weights) == ("bfloat16", "bf16_remainder") and best.offload_optimizer > 0.9
    assert {plan.layout.optim_moments for plan in found} == {"float32", "bfloat16", "int8"}
    assert any(plan.layout.offload_activations and plan.layout.offload_optimizer for plan in found)
    assert all(fits(memory_of_step(model, plan.layout), model, plan.layout, gpu) for plan in found)
    given = search(model, gpu, *asked, optim_moments="int8", offload_activations=0).plans
    assert {(plan.layout.optim_moments, plan.layout.offload_activations) for plan in given} == {("int8", 0)}
    assert not search(model, gpu, *asked, **FLOAT32).plans
    one_batch = search(model, gpu, 1, 8192, 8192, "fp8").plans
    assert {plan.layout.optimizer_in_backward for plan in one_batch} == {"off", "last_norm"}
    assert len(costs(found[0].layout)) == 1 and not costs(best.but(optim_moments="float32"))


def test_states_in_float32_where_they_fit():
    plans = search(EIGHT_B_ON_2[0], H200, 4, 8192, 64 * 8192, "fp8").plans
    assert plans[0].layout.optimizer == FLOAT32


def test_what_is_given_of_a_layers_memory():
    settings = dict(recompute_modules=("mlp_act",), loss_in_chunks=True, fp8_attention=True)
    plans = search(*EIGHT_B_ON_2, **settings).plans
    assert plans and all(
        getattr(plan.layout, name) == each for plan in plans for name, each in by_flag(settings).items()
    )
    assert "--fp8_dpa true" in extra_arguments(plans[0].layout)


def test_near_ties_are_won_by_what_ran_and_is_simple(monkeypatch):
    """A kind of layout that never ran must be 5 % faster; a further thing that one consists of must gain 1 %."""
    plan = search(*EIGHT_B_ON_2).plans[0]
    simple = replace(plan, layout=plan.layout.but(recompute=False, recompute_modules=()))
    assert has_run(simple.layout)

    def wins(factor, layout):
        return min(simple, replace(simple, layout=layout, times={"": factor * simple.milliseconds}), key=rank).layout

    again = simple.layout.but(recompute_modules=("layernorm",))
    assert wins(0.995, again) == simple.layout and wins(0.985, again) == again
    never_ran = simple.layout.but(release_grads=True)
    monkeypatch.setattr("paddle_te.planner.ranking.has_run", lambda layout: layout != never_ran)
    assert wins(0.96, never_ran) == simple.layout and wins(0.94, never_ran) == never_ran


def test_of_equal_times_the_least_is_computed_again():
    """A small model, which waits for the CPU: on an H100 full recompute took 87 ms in the place of 35."""
    for gpus in (1, 2):
        best = search(Model.of(configs.read("llama-125m")), GPUS["h100"], gpus, 2048, gpus * 4096, "fp8").plans[0]
        assert computed_again(best.layout) == 0 and not best.layout.use_fused_linear_cross_entropy


def test_what_was_measured():
    ran = next(each for each in all_that_ran() if each.layout.pp == 2 and not each.layout.fp8_lm_head)
    assert ran.gpu == GPUS["h100"] and speed_of(ran.model, ran.layout, ran.gpu) == ran.tokens_per_second
    assert speed_of(ran.model, ran.layout, H200) is None and has_run(ran.layout)
    assert not has_run(ran.layout.but(world=4, tensor_parallel_degree=2))


def test_the_card_at_hand_is_the_default(monkeypatch, capsys):
    for listing, title in (
        (["GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)"], "H100: its"),
        (["GPU 0: NVIDIA GH200 480GB"], ""),
        ([], ""),
    ):
        monkeypatch.setattr("paddle_te.runs.nvidia.listing", lambda lines=listing: lines)
        _, shown = run(monkeypatch, capsys, "llama-125m --gpus 1")
        assert ("H100: its" in shown.out) == bool(title)


def test_the_table_says_what_was_measured_and_what_states_cost(monkeypatch, capsys):
    status, shown = run(monkeypatch, capsys, "meta-llama/Meta-Llama-3-8B --gpus 2 --gpu h100")
    rows = [line for line in shown.out.splitlines() if line.startswith("TP2 ")]
    assert status == 0 and "bfloat16 + remainders: 6 B" in rows[0] and "kind ran on H200" in rows[0]
    assert "never ran" in shown.out and "14,209 tokens/s" in shown.out
    assert "  moments in bfloat16: they are rounded at random after each step;" in shown.out


def write_model(folder):
    (folder / "config.json").write_text(json.dumps(configs.read("llama-3-8b")))
    (folder / "model.safetensors").touch()
    small_tokenizers.write(folder, small_tokenizers.folders()["llama3"])


def test_it_explains(monkeypatch, capsys):
    status, shown = run(monkeypatch, capsys, "llama-3-8b --gpus 4 --explain --gpu h100")
    assert status == 0 and "taken over from the H200; 23 steps that" in shown.out
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
