"""The grammars of --fp8_skip_layers and --fp8_fallback."""

import pytest

from paddle_te.options.fp8 import FALLBACK, SKIP_LAYERS, Fallback, skipped_layers


@pytest.mark.parametrize("text, layers, skipped", [
    ("first:1,last:2", 6, {0, 4, 5}), ("last:1", 6, {5}), ("first:2", 6, {0, 1}), ("", 6, set()),
    ("last:1, first:1", 3, {0, 2}), ("first:4,last:4", 6, {0, 1, 2, 3, 4, 5}),
])  # fmt: skip
def test_skipped_layers(text, layers, skipped):
    assert skipped_layers(text, layers) == skipped and not SKIP_LAYERS.fault(text)


@pytest.mark.parametrize("text", ["first", "first:0", "first:-1", "middle:1", "first:1,first:2", "1", ",", "first:1.5"])
def test_no_layers(text):
    assert SKIP_LAYERS.fault(text)


def test_fallback():
    both = Fallback.of("bf16:underflows=0.3, saturated=0")
    assert both.action == "bf16" and both.limits.underflows == 0.3 and both.limits.saturated == 0
    assert both.limits.relative_error > 1e30 and Fallback.of("") is None
    assert Fallback.of("warn:relative_error=1").action == "warn"


@pytest.mark.parametrize(
    "text",
    ["bf16", "bf16:", "fp16:underflows=0.1", "warn:underflow=0.1", "warn:underflows=2", "warn:underflows=nan",
     "warn:underflows=0.1,underflows=0.2", "warn:underflows", "warn:underflows=-0.1"],
)  # fmt: skip
def test_no_fallback(text):
    assert FALLBACK.fault(text)
