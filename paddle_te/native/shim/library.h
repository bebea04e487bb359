// The entry points of the libraries, and the errors that calls of them raise.
#pragma once

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <string>

#include "declarations.h"

namespace py = pybind11;
static bool g_bound = false;

// Resolves every function above in the libraries (handles of dlopen). Raises ImportError naming those missing.
static void bind(uintptr_t te, uintptr_t cudart, uintptr_t driver) {
  if (g_bound) throw py::import_error("already bound: tensors and statics hold handles of that library");
  std::string missing;
  auto find = [&](uintptr_t library, const char* name) {
    void* symbol = dlsym(reinterpret_cast<void*>(library), name);
    if (!symbol) missing += std::string(missing.empty() ? "" : ", ") + name;
    return symbol;
  };
#define RESOLVE_IN(library, name) name = reinterpret_cast<decltype(name)>(find(library, #name));
#define RESOLVE_TE(result, name, arguments) RESOLVE_IN(te, name)
#define RESOLVE_CUDART(result, name, arguments) RESOLVE_IN(cudart, name)
#define RESOLVE_DRIVER(result, name, arguments) RESOLVE_IN(driver, name)
  TE_FUNCTIONS(RESOLVE_TE)
  CUDART_FUNCTIONS(RESOLVE_CUDART)
  DRIVER_FUNCTIONS(RESOLVE_DRIVER)
  g_bound = missing.empty();
  if (!g_bound) throw py::import_error("entry points missing from the libraries: " + missing);
}

static PyObject* g_error = nullptr;  // paddle_te.native.errors.TransformerEngineError

[[noreturn]] static void raise(const std::string& message) {
  PyErr_SetString(g_error, message.c_str());
  throw py::error_already_set();
}

static int64_t to_integer(PyObject* object) {  // pybind11's own cast costs more than all the rest of a Tensor
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

static void check_bound() {
  if (!g_bound) throw py::import_error("paddle_te.native.load() has not been called");
}

static void check_cuda(const char* name, int code) {
  if (code) raise(std::string(name) + " failed: " + cudaGetErrorString(code));
}

static std::string dtype_name(int dtype) {
  static const char* names[] = {"byte",    "int16",    "int32",    "int64",   "float32",
                                "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"};
  return 0 <= dtype && dtype < 9 ? names[dtype] : "dtype " + std::to_string(dtype);
}
