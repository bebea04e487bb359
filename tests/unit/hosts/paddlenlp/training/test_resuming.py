"""What a run refuses to resume from."""

from types import SimpleNamespace

import pytest

from paddle_te.hosts.paddlenlp.training.resuming import check_fits
from paddle_te.weights import CheckpointError
from tests.unit.runs.completed import complete


def resume(checkpoint, script):
    ignores = dict(ignore_data_skip=True, ignore_load_lr_and_optim=True)
    check_fits(str(checkpoint), {"hidden_size": 8}, None, SimpleNamespace(SCRIPT=script, **ignores))


@pytest.mark.parametrize("there, here, flag", [
    ("pretrain", "finetune", "--model_name_or_path"),
    ("finetune", "pretrain", "--te_init_weight_path"),
    ("finetune", "dpo", "--model_name_or_path"),
])  # fmt: skip
def test_a_checkpoint_of_another_script(tmp_path, there, here, flag):
    """Whose step and schedule would end the run at once, or go on from another learning rate."""
    complete(tmp_path, {"script": there, "model": {"hidden_size": 8}})
    with pytest.raises(CheckpointError, match=f"was saved by run_{there}.py, .*: start from its weights, {flag} "):
        resume(tmp_path, here)
    resume(tmp_path, there)


def test_one_of_a_version_that_did_not_say_the_script(tmp_path):
    complete(tmp_path, {"model": {"hidden_size": 8}})
    resume(tmp_path, "finetune")
    with pytest.raises(CheckpointError, match="of another model: hidden_size is 4 there"):
        complete(tmp_path, {"model": {"hidden_size": 4}})
        resume(tmp_path, "finetune")
