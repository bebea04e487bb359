"""The shim's declarations (shim/declarations.h) against the headers of the installed Transformer Engine and CUDA."""

import re
import subprocess
from pathlib import Path

import pytest

from paddle_te.native import library
from paddle_te.native.types import DType, Mask, QKVLayout, ScalingMode

PROGRAM = r"""
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <type_traits>
#include <vector>

#include <transformer_engine/activation.h>
#include <transformer_engine/cast.h>
#include <transformer_engine/cast_transpose_noop.h>
#include <transformer_engine/fused_attn.h>
#include <transformer_engine/fused_rope.h>
#include <transformer_engine/fused_router.h>
#include <transformer_engine/gemm.h>
#include <transformer_engine/normalization.h>
#include <transformer_engine/recipe.h>
#include <transformer_engine/transformer_engine.h>
#include <transformer_engine/transpose.h>

namespace shim {
@DECLARATIONS@
}

// Same number of parameters, each of the same size and the same register class.
template <class... T> struct List {};
template <class A, class B>
constexpr bool same = std::is_void_v<A> ? std::is_void_v<B>
    : sizeof(std::conditional_t<std::is_void_v<A>, int, A>) == sizeof(std::conditional_t<std::is_void_v<B>, int, B>) &&
      std::is_floating_point_v<A> == std::is_floating_point_v<B>;
template <class... A, class... B>
constexpr bool equal(List<A...>, List<B...>) {
  if constexpr (sizeof...(A) != sizeof...(B)) return false;
  else return (same<A, B> && ... && true);
}
template <class F> struct Types;
template <class R, class... A> struct Types<R(A...)> { using list = List<R, A...>; };
#define CHECK_FUNCTION(result, name, arguments)                                              \
  static_assert(equal(Types<std::remove_pointer_t<decltype(shim::name)>>::list{},            \
                      Types<std::remove_pointer_t<decltype(&::name)>>::list{}), #name);
TE_FUNCTIONS(CHECK_FUNCTION) CUDART_FUNCTIONS(CHECK_FUNCTION) DRIVER_FUNCTIONS(CHECK_FUNCTION)

#define SAME(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #theirs);
@ENUMERATORS@
static_assert(sizeof(shim::NVTEShape) == sizeof(NVTEShape) &&
              sizeof(shim::NVTEBasicTensor) == sizeof(NVTEBasicTensor) &&
              sizeof(shim::NVTETensorPack) == sizeof(NVTETensorPack), "sizes");
static_assert(offsetof(shim::NVTEBasicTensor, dtype) == offsetof(NVTEBasicTensor, dtype) &&
              offsetof(shim::NVTEBasicTensor, shape) == offsetof(NVTEBasicTensor, shape) &&
              offsetof(shim::NVTEShape, ndim) == offsetof(NVTEShape, ndim) &&
              offsetof(shim::NVTETensorPack, size) == offsetof(NVTETensorPack, size), "offsets");
"""

TENSOR_PARAMS = "RowwiseData ColumnwiseData Scale Amax RowwiseScaleInv ColumnwiseScaleInv".split()
DTYPES = {"BYTE": "Byte", "INT32": "Int32", "INT64": "Int64", "FLOAT32": "Float32", "FLOAT16": "Float16"}
DTYPES |= {"BFLOAT16": "BFloat16", "FLOAT8_E4M3": "Float8E4M3", "FLOAT8_E5M2": "Float8E5M2"}
MASKS = {"NONE": "NO", "PADDING": "PADDING", "CAUSAL": "CAUSAL", "PADDING_CAUSAL": "PADDING_CAUSAL"}
# shim.cpp's short names of attention attributes; the others are spelled as in the header.
LONG = {
    "Aux": "AuxCtxTensors",
    "Mask": "AttnMaskType",
    "WindowLeft": "WindowSizeLeft",
    "WindowRight": "WindowSizeRight",
    "BottomRight": "BottomRightDiagonal",
    "Scale": "AttnScale",
    "ScaleInvFormat": "QKVScaleInvFormat",
}
CONSTANTS = [
    ("kPerTensorScaling", "NVTE_DELAYED_TENSOR_SCALING"),
    ("kBlockScaling1D", "NVTE_BLOCK_SCALING_1D"),
    ("kBlockScaling2D", "NVTE_BLOCK_SCALING_2D"),
    ("kForcePow2Scales", "kNVTEQuantizationConfigForcePow2Scales"),
    ("kAmaxEpsilon", "kNVTEQuantizationConfigAmaxEpsilon"),
    ("kBiasTensor", "kNVTEMatmulConfigBiasTensor"),
    ("kDBiasTensor", "kNVTEMatmulConfigDBiasTensor"),
    ("kUseSplitAccumulator", "kNVTEMatmulConfigUseSplitAccumulator"),
    ("kSMCount", "kNVTEMatmulConfigSMCount"),
    ("kGroupedSMCount", "kNVTEGroupedMatmulConfigSMCount"),
    ("kGroupedSplitAccumulator", "kNVTEGroupedMatmulConfigUseSplitAccumulator"),
    ("kRowwiseData", "kNVTEGroupedRowwiseData"),
    ("kColumnwiseData", "kNVTEGroupedColumnwiseData"),
    ("kRowwiseScaleInv", "kNVTEGroupedRowwiseScaleInv"),
    ("kColumnwiseScaleInv", "kNVTEGroupedColumnwiseScaleInv"),
    ("kFirstDims", "kNVTEGroupedFirstDims"),
    ("kOffsets", "kNVTEGroupedTensorOffsets"),
    ("kFormatBSHD", "NVTE_BSHD"),
    ("kFormatTHD", "NVTE_THD"),
    ("kFormatNotSet", "NVTE_QKV_Format_NOT_SET"),
    ("kLayoutT3HD", "NVTE_T3HD"),
    ("kLayoutTHD", "NVTE_THD_THD_THD"),
    ("kPaddingMask", "NVTE_PADDING_MASK"),
    ("kCausalMask", "NVTE_CAUSAL_MASK"),
    ("kPaddingCausalMask", "NVTE_PADDING_CAUSAL_MASK"),
    ("kNoBias", "NVTE_NO_BIAS"),
    ("kPostScaleBias", "NVTE_POST_SCALE_BIAS"),
    ("kVanillaSoftmax", "NVTE_VANILLA_SOFTMAX"),
    ("kLearnableSoftmax", "NVTE_LEARNABLE_SOFTMAX"),
    ("kMultiProcessorCount", "cudaDevAttrMultiProcessorCount"),
    ("kComputeCapabilityMajor", "cudaDevAttrComputeCapabilityMajor"),
    ("kComputeCapabilityMinor", "cudaDevAttrComputeCapabilityMinor"),
    ("kE4M3", "kNVTEFloat8E4M3"),
    ("kE5M2", "kNVTEFloat8E5M2"),
    ("kByte", "kNVTEByte"),
    ("kInt64", "kNVTEInt64"),
    ("kFloat32", "kNVTEFloat32"),
]


def includes():
    te, _ = library.find_transformer_engine()
    if not te:
        pytest.skip(f"Transformer Engine is not installed (nor {library.LIBRARY_VARIABLE} set)")
    headers = Path(te).resolve().parents[1] / "common" / "include"
    if not (headers / "transformer_engine" / "fused_attn.h").is_file():
        pytest.skip(f"Transformer Engine's headers are not at {headers}")
    cuda = library.include_folder(library.cuda_major(te))
    if not cuda or not (Path(cuda) / "cuda.h").is_file():
        pytest.skip("CUDA's headers are not installed")
    return [headers, cuda]


def attributes(source, kind):
    names = re.search(rf"enum {kind}Param {{(.*?)}};", source, re.S)[1]
    return [name.strip()[len("kFwd") :] for name in names.split(",")]


def test_declarations(gxx, tmp_path):
    folders = includes()
    shim = Path(library.__file__).parent / "shim"
    source = (shim / "activations.h").read_text() + (shim / "declarations.h").read_text()
    declarations = re.sub(r"#pragma once|#include .*", "", source)
    pairs = [(f"shim::{ours}", theirs) for ours, theirs in CONSTANTS]
    pairs += [(f"shim::k{name}", f"kNVTE{name}") for name in TENSOR_PARAMS]
    pairs += [
        (f"shim::k{kind}{name}", f"kNVTEFusedAttn{kind}Params{LONG.get(name, name)}")
        for kind in ("Fwd", "Bwd")
        for name in attributes(source, kind)
    ]
    pairs += [(f"shim::k{kind}Stream + 1", f"kNVTEFusedAttn{kind}ParamsNumAttributes") for kind in ("Fwd", "Bwd")]
    pairs += [(str(int(DType[name])), f"kNVTE{theirs}") for name, theirs in DTYPES.items()]
    pairs += [(str(int(Mask[name])), f"NVTE_{theirs}_MASK") for name, theirs in MASKS.items()]
    pairs += [(str(int(layout)), f"NVTE_{layout.name}") for layout in QKVLayout]
    pairs += [(str(int(mode)), f"NVTE_{mode.name}") for mode in ScalingMode]
    assert set(DTYPES) == {d.name for d in DType} and set(MASKS) == {m.name for m in Mask}

    def compile(pairs):
        text = "\n".join(f"SAME({ours}, {theirs})" for ours, theirs in pairs)
        program = tmp_path / "check.cpp"
        program.write_text(PROGRAM.replace("@DECLARATIONS@", declarations).replace("@ENUMERATORS@", text))
        command = [gxx, "-std=c++17", "-fsyntax-only", *(f"-I{folder}" for folder in folders), program]
        return subprocess.run(command, capture_output=True, text=True)

    result = compile(pairs)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "static assertion failed: kNVTEByte" in compile([("1", "kNVTEByte")]).stderr  # the check can fail
