"""Kernels of paddle_te/native/kernels on the CPU, by g++; without float16, whose casts are PTX."""

import ctypes
import functools
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from paddle_te.native import DType, kernels

FOLDER = Path(kernels.__file__).parent
SHARED = 48 << 10  # bytes of a block
NUMPY = {DType.FLOAT32: np.float32, DType.BFLOAT16: ml_dtypes.bfloat16}

# CUDA's language, and casts to bfloat16 and fp8, which are PTX. A block's threads run in turn, each until it waits for
# others; threads of the system would spend most of their time on barriers. Rounds and blocks take opposite orders, the
# first of which begins with the last thread: where a barrier is missing some thread reads what is not there yet.
HARNESS = r"""
#include <math.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <utility>
#define __device__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
constexpr unsigned kLargestBlock = 1024, kStackBytes = 64 << 10;
struct Thread {
  ucontext_t context;
  bool ended;
  char* stack;
};
static Thread threads[kLargestBlock];
static ucontext_t scheduler;
struct Barrier {
  unsigned arrived, passed;
  void wait(unsigned count) {
    const unsigned before = passed;
    if (++arrived == count) arrived = 0, passed++;
    while (passed == before) swapcontext(&threads[threadIdx.x].context, &scheduler);
  }
};
static Barrier of_block, of_masks[kLargestBlock];  // by their first threads
static void __syncthreads() { of_block.wait(blockDim.x); }
static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static float exponential(float x) { return static_cast<float>(exp(static_cast<double>(x))); }
#define expf exponential
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
template <class T>
static void atomicMax(T* at, T value) { *at = std::max(*at, value); }
static void atomicAdd(unsigned long long* at, unsigned long long value) { *at += value; }
struct uint4 { unsigned x, y, z, w; };
static void __stcs(uint4* at, const uint4& value) { *at = value; }
static float rsqrtf(float x) { return static_cast<float>(1 / sqrt(static_cast<double>(x))); }
static unsigned of_threads[kLargestBlock];
static unsigned __reduce_max_sync(unsigned, unsigned value) {  // all threads of a block call it
  of_threads[threadIdx.x] = value;
  __syncthreads();
  const unsigned* warp = of_threads + threadIdx.x / 32 * 32;
  value = *std::max_element(warp, warp + 32);
  __syncthreads();
  return value;
}
static unsigned __reduce_add_sync(unsigned, unsigned value) {  // all threads of a block call it
  of_threads[threadIdx.x] = value;
  __syncthreads();
  value = 0;
  for (int i = 0; i < 32; i++) value += of_threads[threadIdx.x / 32 * 32 + i];
  __syncthreads();
  return value;
}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static unsigned __ballot_sync(unsigned mask, bool vote) {  // all threads of a block call it
  return __reduce_add_sync(mask, vote ? 1u << threadIdx.x % 32 : 0);
}
static void sync_of(unsigned mask) {  // the threads of a warp's mask, or of the block where it is all
  if (mask == 0xffffffff) return __syncthreads();
  const unsigned first = threadIdx.x / 32 * 32 + __builtin_ctz(mask);
  of_masks[first].wait(__builtin_popcount(mask));
}
static float __shfl_xor_sync(unsigned mask, float value, int lanes) {  // all threads of the mask call it
  of_threads[threadIdx.x] = __float_as_uint(value);
  sync_of(mask);
  value = __uint_as_float(of_threads[threadIdx.x ^ lanes]);
  sync_of(mask);
  return value;
}
template <int mantissa, int bias, int greatest>  // greatest: the bits of the greatest number
struct Float8 {
  static constexpr float kGreatest = mantissa == 3 ? 448 : 57344;
  static float number(unsigned bits) {
    const int exponent = bits >> mantissa & (0x7f >> mantissa), fraction = bits & ((1 << mantissa) - 1);
    const double size = ldexp(fraction + (exponent ? 1 << mantissa : 0), (exponent ? exponent : 1) - bias - mantissa);
    return bits & 0x80 ? -size : size;
  }
  static void unpack(unsigned short bits, float& low, float& high) {
    low = number(bits & 0xff), high = number(bits >> 8);
  }
  static unsigned of(float x) {
    const unsigned sign = signbit(x) ? 0x80 : 0;
    if (x != x) return sign | 0x7f;
    const int exponent = x == 0 ? 1 - bias : fmax(1 - bias, ilogb(x));
    const double steps = nearbyint(ldexp(fabs(x), mantissa - exponent));  // of numbers with this exponent
    const double bits = ((exponent + bias - 1) << mantissa) + steps;
    return sign | (bits < greatest ? static_cast<int>(bits) : greatest);
  }
  static unsigned short pack(float low, float high) { return of(low) | of(high) << 8; }
};
static float off_by_one(float x) { return nextafterf(1 / x, 0); }
#define e4m3 ptx_e4m3
#define e5m2 ptx_e5m2
#define approximate_reciprocal ptx_approximate_reciprocal
#define from_float ptx_from_float
#include "types.cuh"
#undef e4m3
#undef e5m2
#undef approximate_reciprocal
#undef from_float
#define approximate_reciprocal off_by_one
static void from_float(float x, bfloat16& y) {
  const unsigned bits = __float_as_uint(x);
  y.bits = x != x ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
static void from_float(float x, float& y) { y = x; }
using e4m3 = Float8<3, 7, 0x7e>;
using e5m2 = Float8<2, 15, 0x7b>;
@KERNEL@
template <class... P, size_t... I>
static void call(void (*kernel)(P...), const long long* a, std::index_sequence<I...>) {
  kernel((P)a[I]...);
}
template <class... P>
struct Launch {
  static inline void (*kernel)(P...);
  static inline const long long* arguments;
  static void thread() {
    call(kernel, arguments, std::index_sequence_for<P...>());
    threads[threadIdx.x].ended = true;
  }
};
static void run_block(void (*thread)()) {
  for (unsigned t = 0; t < blockDim.x; t++) {
    Thread& each = threads[t];
    getcontext(&each.context);
    if (!each.stack) each.stack = new char[kStackBytes];
    each.context.uc_stack.ss_sp = each.stack, each.context.uc_stack.ss_size = kStackBytes;
    each.context.uc_link = &scheduler, each.ended = false;
    makecontext(&each.context, thread, 0);
  }
  for (unsigned round = 0, left = blockDim.x; left; round++)
    for (unsigned i = 0; i < blockDim.x; i++) {
      threadIdx.x = (round + blockIdx.x) % 2 ? i : blockDim.x - 1 - i;
      Thread& each = threads[threadIdx.x];
      if (each.ended) continue;
      swapcontext(&scheduler, &each.context);
      left -= each.ended;
    }
}
template <class... P>
static void run(void (*kernel)(P...), unsigned grid, unsigned block, const long long* a) {
  Launch<P...>::kernel = kernel, Launch<P...>::arguments = a;
  gridDim.x = grid, blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) run_block(Launch<P...>::thread);
}
"""


class OnCPU:
    """Stands for the extension and its stream: launches on the CPU the kernels that paddle_te.native asks for.

    A file is compiled once for each set of macros.
    """

    capability = (9, 0)

    def __init__(self, gxx, new_folder):
        self._library = functools.cache(lambda file, defines: compiled(gxx, new_folder("kernels"), file, dict(defines)))

    def install(self, monkeypatch):
        """Let all modules of paddle_te.native that launch kernels hand them over by their names."""
        compile_for_gpu = kernels.kernel
        for name, module in [*sys.modules.items()]:
            if name.startswith("paddle_te.native.") and getattr(module, "kernel", None) is compile_for_gpu:
                monkeypatch.setattr(module, "kernel", lambda *key, **defines: (*key, defines))

    def launch(self, kernel, grid, block, shared_bytes, stream, *arguments):
        name, file, capability, defines = kernel
        assert capability == self.capability and stream is self
        assert shared_bytes <= SHARED
        name = "NAME" if name == defines.get("NAME") else name
        function = getattr(self._library(file, tuple(defines.items())), f"launch_{name}")
        function(grid, block, (ctypes.c_longlong * len(arguments))(*map(int, arguments)))


def compiled(gxx, folder, file, defines):
    """The library of a file in FOLDER, whose last lines instantiate a macro for bfloat16, float16 and float, or which
    is compiled with these `defines`. Its launch_KERNEL(grid, block, arguments) runs a kernel."""
    source = (FOLDER / file).read_text()
    source = re.sub(r"^[A-Z_]+\((bfloat16|float16)\)$", "", source, flags=re.M)
    dynamic = r"extern __shared__ (\S+) (\w+)\[\];"
    memories = dict.fromkeys(re.findall(dynamic, source))
    shared = "".join(f"{type} {name}[{SHARED} / sizeof({type})];\n" for type, name in memories)
    source = re.sub(dynamic, r"extern \1 \2[];", source)
    plain = re.sub(r"__launch_bounds__\([^)]*\)|\\\n", "", source)
    names = dict.fromkeys(re.findall(r'extern "C" __global__ void\s+(\w+)(##T)?\(', plain))
    code = HARNESS.replace("@KERNEL@", shared + source) + "".join(
        f'extern "C" void launch_{kernel}(unsigned grid, unsigned block, const long long* a) '
        f"{{ run({kernel}, grid, block, a); }}\n"
        for kernel in (name + ("float" if typed else "") for name, typed in names)
    )
    (folder / "kernel.cpp").write_text(code)
    # a kernel's shared memory is its library's own, and not that of another one with other macros
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-fno-gnu-unique", f"-I{FOLDER}"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run([gxx, *options, folder / "kernel.cpp", "-o", folder / "libkernel.so"], check=True)
    return ctypes.CDLL(str(folder / "libkernel.so"))


def address(array):
    return array.ctypes.data


def aligned(shape, dtype=np.float32):
    """A poisoned array at an address of 16 bytes, as device memory is: NaN, or an integer's greatest bits."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + 16, 0xFF, np.uint8)
    start = -address(memory) % 16
    return memory[start : start + size].view(dtype).reshape(shape)
