"""Kernels of paddle_te/native/kernels on threads of the CPU, by g++; in float32 only, as 16-bit casts are PTX."""

import ctypes
import re
import subprocess
from pathlib import Path

from paddle_te.native import kernels

FOLDER = Path(kernels.__file__).parent

# CUDA's language: one thread a CUDA thread, blocks one after another.
HARNESS = r"""
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <thread>
#include <vector>
#define __device__ inline
#define __global__
#define __shared__
#define __launch_bounds__(...)
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }
static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
@KERNEL@
template <class... P, size_t... I>
static void call(void (*kernel)(P...), const long long* a, std::index_sequence<I...>) {
  kernel((P)a[I]...);
}
template <class... P>
static void run(void (*kernel)(P...), unsigned grid, unsigned block, const long long* a) {
  pthread_barrier_init(&barrier, nullptr, block);
  for (unsigned b = 0; b < grid; b++) {
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < block; t++)
      threads.emplace_back([=] {
        threadIdx.x = t, blockIdx.x = b, blockDim.x = block;
        call(kernel, a, std::index_sequence_for<P...>());
      });
    for (auto& thread : threads) thread.join();
  }
}
"""


class OnCPU:
    """Stands for the extension and its stream; `module.kernel` must return its arguments as a tuple."""

    capability = (9, 0)

    def __init__(self, gxx, folder, file):
        """file: in FOLDER; its last lines instantiate a macro for bfloat16, float16 and float."""
        source = (FOLDER / file).read_text()
        source = re.sub(r"^[A-Z_]+\((bfloat16|float16)\)$", "", source, flags=re.M)
        source = re.sub(r"extern __shared__ float (\w+)\[\];", r"extern float \1[];", source)
        shared = "".join(f"float {name}[1024];\n" for name in re.findall(r"extern float (\w+)\[\];", source))
        plain = re.sub(r"__launch_bounds__\([^)]*\)|\\\n", "", source)
        names = re.findall(r'extern "C" __global__ void\s+(\w+)(##T)?\(', plain)
        code = HARNESS.replace("@KERNEL@", shared + source) + "".join(
            f'extern "C" void launch_{kernel}(unsigned grid, unsigned block, const long long* a) '
            f"{{ run({kernel}, grid, block, a); }}\n"
            for kernel in (name + ("float" if typed else "") for name, typed in names)
        )
        (folder / "kernel.cpp").write_text(code)
        command = [gxx, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{FOLDER}"]
        subprocess.run([*command, folder / "kernel.cpp", "-o", folder / "libkernel.so"], check=True)
        self.file, self.library = file, ctypes.CDLL(str(folder / "libkernel.so"))

    def launch(self, kernel, grid, block, shared_bytes, stream, *arguments):
        name, file, capability = kernel
        assert (file, capability) == (self.file, self.capability) and stream is self
        assert shared_bytes <= 4096  # the harness's
        getattr(self.library, f"launch_{name}")(grid, block, (ctypes.c_longlong * len(arguments))(*map(int, arguments)))
