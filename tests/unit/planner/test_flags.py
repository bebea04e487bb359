"""The Job that the launcher has of a run, as the planner counts it."""

import pytest

from paddle_te.job.words import job_of
from paddle_te.launch import finetune, pretrain
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.plan import make_plan
from paddle_te.planner.layout import COUNTED
from paddle_te.planner.layout import layout as layout_of
from tests.unit.planner.test_search import write_model

ENVIRON = {"DRY_RUN": "1", "MOCK_DATA": "1", "DEVICE": "nvgpu", "CUSTOM_DEVICE_ROOT": ""}


def launched(gpus=2, job=pretrain, extra="", **arguments):
    """The Job that the launcher has of a job of Llama-3-8B with te in fp8."""
    given = dict(model_name="llama-3-8b", tokenizer_name="none") if job is pretrain else {}
    given |= dict(PP=1, VP=1) if job is pretrain else {}
    given |= dict(batch_size_per_device=1, FSDP=1, TP=1, GA=1, SP="false", backend="te", precision="fp8")
    given |= dict(max_seqlen=8192, DEVICES=",".join(map(str, range(gpus))))
    words = [f"--{name}={value}" for name, value in (given | arguments).items()]
    return make_plan(job, words, ENVIRON | {"EXTRA_ARGS": extra})[0].layout


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (dict(gpus=1, GA=16), layout_of(1, 8192, micro_batches=16)),
        # over several devices of nvgpu the launcher keeps main gradients, in every layout
        (dict(TP=2, SP="true", GA=4), layout_of(2, 8192, tp=2, micro_batches=4, main_grads=True)),
        (dict(PP=2, GA=2), layout_of(2, 8192, pp=2, micro_batches=2, main_grads=True)),
        (dict(), layout_of(2, 8192, main_grads=True)),
        (
            dict(gpus=4, FSDP="all", sharding_stage="stage2", GA=2),
            layout_of(4, 8192, sharding=4, stage=2, micro_batches=2, overlap=True, main_grads=True),
        ),
        (dict(FSDP=2, sharding_stage="stage3"), layout_of(2, 8192, sharding=2, stage=3, main_grads=True)),
        (dict(TP=2, extra="--amp_master_grad false"), layout_of(2, 8192, tp=2)),
        # an update in backward keeps no gradients
        (
            dict(TP=2, extra="--optimizer_in_backward last_norm"),
            layout_of(2, 8192, tp=2, optimizer_in_backward="last_norm"),
        ),
        (
            dict(gpus=1, recompute="core_attn", extra="--recompute_modules layernorm mlp_act --fp8_lm_head"),
            layout_of(1, 8192, recompute="core_attn", recompute_modules=("layernorm", "mlp_act"), fp8_head=True),
        ),
        (
            dict(gpus=1, extra="--optim_moments int8 --offload_optimizer 0.5 --use_fused_linear_cross_entropy 1"),
            layout_of(1, 8192, optim_moments="int8", offload_optimizer=0.5, loss_in_chunks=True),
        ),
    ],
)
def test_the_launchers_layout(arguments, expected):
    found = launched(**arguments)
    degrees = ("tp", "pp", "vp", "sep", "cp", "sharding_ranks", "stage", "overlaps", "batch", "micro_batches", "tokens")
    for name in (*degrees, "world", "precision", "recomputed", *COUNTED):
        if name != "recompute_modules" or found.recompute_modules or expected.recompute_modules:
            assert getattr(found, name) == getattr(expected, name), name


def test_the_launchers_layout_of_an_adapter(tmp_path):
    write_model(tmp_path)
    (tmp_path / "train.json").write_text('{"src": "a", "tgt": "b"}\n')
    folders = dict(model_name=tmp_path, dataset=tmp_path, output=tmp_path / "out")
    extra = "--lora_rank 16 --quantize_base fp8 --keep_fp8_transpose_cache true"
    found = launched(1, finetune, extra, method="lora-mlp", max_seqlen=4096, **folders)
    assert (found.lora_rank, found.lora_targets, found.fp8_base) == (16, "mlp", True) and found.sequence == 4096
    assert found.keep_fp8_transpose_cache


def test_what_the_planner_does_not_know_has_no_layout():
    assert launched(backend="pd") is None


def test_a_wrong_value_is_named():
    with pytest.raises(LaunchError, match=r"EXTRA_ARGS: --optim_moments: 'half' must be one of float32, bfloat16"):
        launched(extra="--optim_moments half")


def test_flags_without_a_degree_shard_over_all_ranks_that_are_left():
    found = job_of(["--sharding", "stage1", "--tensor_parallel_degree", "2", "--max_seq_length", "64"], world=8)
    assert (found.tp, found.sharding_ranks, found.batch) == (2, 4, 8)
