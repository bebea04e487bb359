"""A layout's memory against the GPUs', before anything starts."""

import pytest

from paddle_te.launch import devices, pretrain
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.plan import make_plan

# Llama-3-8B on eight GPUs, as a README had it: 103 GB on each
WORDS = "meta-llama/Meta-Llama-3-8B none 1 8 1 1 1 1 false 8192 stage1 te fp8".split()
DRY = dict(DRY_RUN="1", MOCK_DATA="1", DEVICE="nvgpu", DEVICES="0,1,2,3,4,5,6,7", CUSTOM_DEVICE_ROOT="")


@pytest.fixture
def listing(monkeypatch):
    def show(*names):
        lines = [f"GPU {i}: {name} (UUID: GPU-{i})" for i, name in enumerate(names)]
        monkeypatch.setattr(devices, "_gpu_listing", lambda: lines)

    show()
    return show


def plan(words=WORDS, **environ):
    return make_plan(pretrain, words, DRY | environ)


def test_what_does_not_fit_is_refused_with_what_does(listing):
    with pytest.raises(LaunchError) as error:
        plan(GPU="h100")
    text = str(error.value)
    assert "103.3 GB on each H100, which has 79.5 (gradients" in text and "sharding_stage=" in text
    assert text.endswith("CHECK_MEMORY=0 starts it all the same") and "\n" not in text
    assert plan(GPU="h100", CHECK_MEMORY="0") and plan(GPU="h200") and plan(), "no GPU: nothing is known"


def test_experts_that_need_not_be_divided(listing):
    """Without EP the same layout fits: the number to give back is part of what to change."""
    words = "ibm-granite/granite-3.0-1b-a400m-base none 8 8 1 1 1 2 false 4096 stage1 te fp8".split()
    with pytest.raises(LaunchError, match="the fastest first: OVERLAP=true EP=1 [(]55 GB[)]"):
        plan(words, GPU="h100", EP="4")


@pytest.mark.parametrize("name, refused", [("NVIDIA H100 80GB HBM3", True), ("NVIDIA H200", False),
                                           ("NVIDIA H100 NVL", False), ("NVIDIA GH200 480GB", False)])  # fmt: skip
def test_the_cards_at_hand(listing, name, refused):
    listing(*[name] * 8)
    if refused:
        with pytest.raises(LaunchError, match="^memory: "):
            plan()
    else:
        assert plan()


def test_a_card_that_is_not_here_is_refused(listing):
    listing(*["NVIDIA H200"] * 8)
    with pytest.raises(LaunchError, match="GPU: h100 is not what is here, NVIDIA H200; leave it out"):
        plan(GPU="h100", DRY_RUN="0")
