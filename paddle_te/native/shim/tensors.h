// Tensors as Transformer Engine takes them.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "library.h"

// A TE handle for the length of a C++ scope.
class Handle {
 public:
  explicit Handle(int scaling_mode = kPerTensorScaling) {
    check_bound();
    handle_ = nvte_create_tensor(scaling_mode);
  }
  ~Handle() { nvte_destroy_tensor(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  operator NVTETensor() const { return handle_; }
  void set(int param, const NVTEBasicTensor& value) { nvte_set_tensor_param_v2(handle_, param, &value, sizeof value); }
  void set_scalar(int param, uintptr_t pointer) { set(param, {reinterpret_cast<void*>(pointer), kFloat32, {{1}, 1}}); }

 private:
  NVTETensor handle_;
};

// The shape of scale_inv of a matrix's row-wise data; that of the columnwise data is the transposed matrix's. cuBLAS
// wants the scales of 1 x 128 blocks transposed, and rows of scales whose lengths are multiples of 4
// (Float8BlockQuantizer::get_scale_shape in TE's pytorch/csrc/quantizer.cpp).
static NVTEShape scale_inv_shape(int scaling_mode, size_t rows, size_t cols) {
  constexpr size_t kBlock = 128;
  auto up = [](size_t n, size_t multiple) { return (n + multiple - 1) / multiple; };
  switch (scaling_mode) {
    case kBlockScaling1D: return {{up(cols, kBlock), 4 * up(rows, 4)}, 2};
    case kBlockScaling2D: return {{up(rows, kBlock), 4 * up(up(cols, kBlock), 4)}, 2};
    default: return {{1}, 1};
  }
}

// A view of device memory; owns the handle, not the memory.
struct Tensor {
  // Of the data, the transposed copy, and fp8's factors; 0 for none.
  struct Addresses {
    uintptr_t data, columnwise, scale, amax, scale_inv, columnwise_scale_inv;
  };

  NVTEBasicTensor data{};
  uintptr_t columnwise = 0, scale = 0, amax = 0, scale_inv = 0, columnwise_scale_inv = 0;
  Addresses given{};  // to the constructor
  int scaling_mode = kPerTensorScaling;
  Handle handle;

  Tensor() = default;  // an empty tensor, for what TE wants passed but does not use
  Tensor(uintptr_t pointer, const py::tuple& shape, int dtype, uintptr_t columnwise, uintptr_t scale, uintptr_t amax,
         uintptr_t scale_inv, uintptr_t columnwise_scale_inv, int scaling_mode)
      : given{pointer, columnwise, scale, amax, scale_inv, columnwise_scale_inv},
        scaling_mode(scaling_mode),
        handle(scaling_mode) {
    if (shape.size() > 14) throw py::value_error("a tensor has at most 14 dimensions");
    data.dtype = dtype;
    for (; data.shape.ndim < shape.size(); data.shape.ndim++)
      data.shape.data[data.shape.ndim] = to_integer(PyTuple_GET_ITEM(shape.ptr(), data.shape.ndim));
    point(given);
  }

  // Moves the view to other memory.
  void point(const Addresses& to) {
    columnwise = to.columnwise, scale = to.scale, amax = to.amax, scale_inv = to.scale_inv;
    columnwise_scale_inv = to.columnwise_scale_inv;
    data.data_ptr = reinterpret_cast<void*>(to.data);
    if (to.data || !columnwise) handle.set(kRowwiseData, data);
    if (columnwise) {
      if (data.shape.ndim != 2) throw py::value_error("a tensor with columnwise data must have 2 dimensions");
      handle.set(kColumnwiseData, {reinterpret_cast<void*>(columnwise), data.dtype, {{cols(), rows()}, 2}});
    }
    if (scale) handle.set_scalar(kScale, scale);
    if (amax) handle.set_scalar(kAmax, amax);
    if (to.data || !columnwise) set_scale_inv(kRowwiseScaleInv, scale_inv, rows(), cols());
    if (columnwise) {
      const bool is_shared = scaling_mode == kPerTensorScaling;
      set_scale_inv(kColumnwiseScaleInv, is_shared ? scale_inv : to.columnwise_scale_inv, cols(), rows());
    }
  }

  // rows, cols: of the data that is read with it.
  void set_scale_inv(int param, uintptr_t pointer, size_t rows, size_t cols) {
    if (!pointer) return;
    // cuBLASLt answers "functionality is not supported" otherwise, without saying why.
    if (pointer % 16) throw py::value_error("scale_inv must be 16-byte aligned");
    handle.set(param, {reinterpret_cast<void*>(pointer), kFloat32, scale_inv_shape(scaling_mode, rows, cols)});
  }

  size_t cols() const { return data.shape.ndim ? data.shape.data[data.shape.ndim - 1] : 1; }
  size_t rows() const {
    size_t n = 1;
    for (size_t i = 0; i + 1 < data.shape.ndim; i++) n *= data.shape.data[i];
    return n;
  }
  size_t numel() const { return rows() * cols(); }
  size_t bytes() const {
    static const size_t sizes[] = {1, 2, 4, 8, 4, 2, 2, 1, 1};  // of byte, int16, int32, int64, float32, ..., e5m2
    return numel() * sizes[data.dtype];
  }
  bool is_fp8() const { return data.dtype == kE4M3 || data.dtype == kE5M2; }
  py::tuple shape() const {
    py::tuple result(data.shape.ndim);
    for (size_t i = 0; i < data.shape.ndim; i++) result[i] = data.shape.data[i];
    return result;
  }
  std::string describe() const {
    if (!data.data_ptr && !columnwise) return "empty";
    std::ostringstream out;
    out << dtype_name(data.dtype) << " [";
    for (size_t i = 0; i < data.shape.ndim; i++) out << (i ? ", " : "") << data.shape.data[i];
    out << "]" << (!columnwise ? "" : data.data_ptr ? " with columnwise copy" : " columnwise only");
    return out.str();
  }
};

static const Tensor& empty_tensor() {
  static Tensor* tensor = new Tensor;  // never destroyed: TE may be gone when this process's statics are
  return *tensor;
}
static const Tensor& or_empty(const Tensor* tensor) { return tensor ? *tensor : empty_tensor(); }

using Named = std::initializer_list<std::pair<const char*, const Tensor*>>;

static std::string describe(const std::string& what, Named tensors) {
  std::string text = what;
  for (auto& [name, tensor] : tensors)
    if (tensor) text += std::string("\n  ") + name + ": " + tensor->describe();
  return text;
}

// Runs f; a C++ exception becomes TransformerEngineError with the entry point, TE's message and the tensors.
template <class F>
static void call(const char* name, Named tensors, F&& f) {
  try {
    f();
  } catch (py::error_already_set&) {
    throw;  // a Python error from the workspace's allocator
  } catch (const std::exception& e) {
    raise(describe(std::string(name) + " failed: " + e.what(), tensors));
  } catch (...) {
    raise(describe(std::string(name) + " failed with an unknown C++ exception", tensors));
  }
}
