// Transformer Engine, the CUDA runtime and driver, NVRTC's and the libraries' versions, as functions that return at
// once: what is left is the host's own time. null_te.py loads it.
#include <array>
#include <cstddef>
#include <cstdint>

namespace declared {
#include "declarations.h"
}
using namespace declared;

#define EXPORT extern "C" __attribute__((visibility("default")))
#define NULL_FUNCTION(result, name, arguments) \
  EXPORT result name arguments {               \
    using Result = result;                     \
    return Result();                           \
  }

#define cudaDeviceGetAttribute unused  // defined below
TE_FUNCTIONS(NULL_FUNCTION)
CUDART_FUNCTIONS(NULL_FUNCTION)
DRIVER_FUNCTIONS(NULL_FUNCTION)
#undef cudaDeviceGetAttribute

static int attribute(int number) {
  switch (number) {
    case kMultiProcessorCount: return 132;
    case kComputeCapabilityMajor: return 9;
    default: return 0;
  }
}
EXPORT int cudaDeviceGetAttribute(int* value, int number, int) { return *value = attribute(number), 0; }

// What Python calls: NVRTC compiles nothing, whose kernels have the address 0.
NULL_FUNCTION(int, nvrtcCreateProgram, (void**, const char*, const char*, int, const char**, const char**))
NULL_FUNCTION(int, nvrtcCompileProgram, (void*, int, const char**))
NULL_FUNCTION(int, nvrtcGetCUBINSize, (void*, size_t*))
NULL_FUNCTION(int, nvrtcGetCUBIN, (void*, char*))
NULL_FUNCTION(int, nvrtcDestroyProgram, (void**))
NULL_FUNCTION(int, cuLibraryLoadData, (void**, const void*, void*, void*, unsigned, void*, void*, unsigned))
NULL_FUNCTION(int, cuLibraryGetKernel, (void**, void*, const char*))
EXPORT int cuDeviceGetCount(int* count) { return *count = 1, 0; }
EXPORT int cuDeviceGetAttribute(int* value, int number, int) { return *value = attribute(number), 0; }
EXPORT size_t cudnnGetVersion() { return 92600; }
EXPORT size_t cublasLtGetVersion() { return 130600; }
