// The module's functions: counted, called at once or recorded, and recorded ones run as a Sequence.
#pragma once

#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "copies.h"

// Where recorded addresses are in one run. Such an address is index << 48 | offset and becomes bases[index] + offset.
class Bases {
 public:
  explicit Bases(size_t count) : bases_(count) {}
  explicit Bases(const py::list& bases) : bases_(bases.size()) {
    for (size_t i = 0; i < bases_.size(); i++) bases_[i] = to_integer(PyList_GET_ITEM(bases.ptr(), i));
  }
  void set(size_t index, uintptr_t base) { bases_.at(index) = base; }
  static size_t index(int64_t address) { return address < 0 ? 0 : address >> 48; }
  uintptr_t at(uintptr_t address) const {
    const size_t number = index(address);
    if (number >= bases_.size()) throw py::index_error("no base for index " + std::to_string(number));
    return bases_[number] + (address & ((uintptr_t{1} << 48) - 1));
  }
  // What a tensor's constructor was given: 0 where that was no recorded address.
  uintptr_t of_tensor(uintptr_t address) const { return index(address) ? at(address) : 0; }
  // An integer among arguments: itself where it is no recorded address.
  int64_t of_number(int64_t number) const { return index(number) ? at(number) : number; }

 private:
  std::vector<uintptr_t> bases_;
};

// A kernel's parameters, pointers and long longs.
struct KernelArguments {
  static constexpr size_t kMost = 24;

  explicit KernelArguments(const py::args& arguments) : count(arguments.size()) {
    if (count > kMost) throw py::value_error("too many kernel arguments");
    for (size_t i = 0; i < count; i++) values[i] = to_integer(PyTuple_GET_ITEM(arguments.ptr(), i));
  }

  size_t count;
  int64_t values[kMost];
};

// How a recorded call keeps an argument, and gets it back in each run: objects by address, numbers by value.
template <class T>
struct Kept {
  using Type = std::decay_t<T>;
  static const Type& keep(const Type& value) { return value; }
  static const Type& get(const Type& value, const Bases&) { return value; }
};
template <class T>
struct KeptObject {
  using Type = T*;
  static T* keep(T& object) { return &object; }
  static T& get(T* object, const Bases&) { return *object; }
};
template <>
struct Kept<const Tensor&> : KeptObject<const Tensor> {};
template <>
struct Kept<Stream&> : KeptObject<Stream> {};
template <>
struct Kept<uintptr_t> {
  using Type = uintptr_t;
  static uintptr_t keep(uintptr_t value) { return value; }
  static uintptr_t get(uintptr_t value, const Bases& bases) { return bases.of_number(value); }
};
template <>
struct Kept<const KernelArguments&> {
  using Type = KernelArguments;
  static const KernelArguments& keep(const KernelArguments& values) { return values; }
  static KernelArguments get(KernelArguments arguments, const Bases& bases) {
    for (size_t i = 0; i < arguments.count; i++) arguments.values[i] = bases.of_number(arguments.values[i]);
    return arguments;
  }
};

// In which precision a call computes: fp8 if any tensor is, else the first one's dtype; "" for calls without tensors.
class Precision {
 public:
  static constexpr size_t kCount = kE5M2 + 2;

  void see(const Tensor& tensor) {
    if (tensor.is_fp8() || number_ == 0) number_ = 1 + (tensor.is_fp8() ? int{kE4M3} : tensor.data.dtype);
  }
  void see(const Tensor* tensor) {
    if (tensor) see(*tensor);
  }
  template <class T>
  void see(const T&) {}

  size_t number() const { return number_; }
  static std::string name(size_t number) {
    return number == 0 ? "" : number == 1 + kE4M3 ? "fp8" : dtype_name(static_cast<int>(number) - 1);
  }

 private:
  size_t number_ = 0;
};

// A function of this module that starts work, and how often it has, by precision.
struct Function {
  const char* name;
  std::array<int64_t, Precision::kCount> counts{};
};
static std::deque<Function> g_functions;

static py::dict counts() {
  py::dict result;
  for (const Function& counted : g_functions)
    for (size_t i = 0; i < counted.counts.size(); i++)
      if (counted.counts[i]) result[py::make_tuple(counted.name, Precision::name(i))] = counted.counts[i];
  return result;
}

static PyObject* g_module = nullptr;

// Calls that are made again and again, on other memory each time. Their arguments are converted once.
class Sequence {
 public:
  Sequence(const py::tuple& tensors, const py::tuple& calls) : tensors_(tensors), arguments_(calls) {
    for (py::handle tensor : tensors) moved_.push_back(&tensor.cast<Tensor&>());
    const Scope scope(this);
    for (py::handle object : calls) {
      const auto [name, arguments] = object.cast<std::pair<py::str, py::tuple>>();
      const size_t before = calls_.size();
      py::handle(g_module).attr(name)(*arguments);  // which comes back here, see record
      if (calls_.size() != before + 1) throw py::value_error(std::string(name) + " cannot be recorded");
    }
  }

  void run(const Bases& bases) const {
    for (Tensor* tensor : moved_) {
      const auto& from = tensor->given;
      tensor->point({bases.of_tensor(from.data), bases.of_tensor(from.columnwise), bases.of_tensor(from.scale),
                     bases.of_tensor(from.amax), bases.of_tensor(from.scale_inv),
                     bases.of_tensor(from.columnwise_scale_inv)});
    }
    for (const Call& call : calls_) {
      call.make(bases);
      call.count++;
    }
  }

  // The call for the Sequence that is being made, if one is.
  template <class... Args>
  static bool record(Function& counted, void (*function)(Args...), const Precision& precision, Args... args) {
    if (!recording_) return false;
    std::tuple<typename Kept<Args>::Type...> kept(Kept<Args>::keep(args)...);
    auto make = [function, kept](const Bases& bases) {
      std::apply([&](const auto&... values) { function(Kept<Args>::get(values, bases)...); }, kept);
    };
    recording_->calls_.push_back({make, counted.counts[precision.number()]});
    return true;
  }

 private:
  struct Scope {
    explicit Scope(Sequence* sequence) { recording_ = sequence; }
    ~Scope() { recording_ = nullptr; }
  };
  struct Call {
    std::function<void(const Bases&)> make;
    int64_t& count;
  };
  inline static Sequence* recording_ = nullptr;  // the interpreter's lock is held from beginning to end

  py::tuple tensors_, arguments_;  // keep alive what the calls and moved_ point to
  std::vector<Tensor*> moved_;
  std::vector<Call> calls_;
};

// Makes the call, unless it is recorded. What raises has not run and is not counted.
template <class... Args>
static void enter(Function& counted, void (*function)(Args...), Args... args) {
  Precision precision;
  (precision.see(args), ...);
  if (Sequence::record<Args...>(counted, function, precision, args...)) return;
  function(args...);
  counted.counts[precision.number()]++;
}

static Function& new_function(const char* name) { return g_functions.emplace_back(Function{name}); }

// m.def for what starts work.
template <class... Args, class... Extra>
static void define(py::module_& m, const char* name, void (*function)(Args...), const Extra&... extra) {
  Function& counted = new_function(name);
  m.def(name, [&counted, function](Args... args) { enter<Args...>(counted, function, args...); }, extra...);
}

// TE's own sizes (transformer_engine/pytorch/module/base.py): 32 MiB, and 1 KiB for alignment and NVFP4's scalars.
constexpr size_t kGemmWorkspace = 32 * 1024 * 1024 + 1024;

// Bytes of a number of these dtypes.
static size_t bytes_of(int dtype) {
  switch (dtype) {
    case kInt64: return 8;
    case kInt32:
    case kFloat32: return 4;
    case kFloat16:
    case kBFloat16: return 2;
    default: return 1;
  }
}

// Entry points with a scratch tensor: called with an empty one they fill in the shape and the dtype they need. The
// answer depends on `key` alone and is kept.
using Key = std::array<int64_t, 13>;

template <class F>
static void call_with_workspace(const Key& key, Stream& stream, F&& f) {
  static std::map<Key, NVTEBasicTensor> answers;
  auto it = answers.find(key);
  if (it == answers.end()) {
    Handle query;
    f(query);
    NVTEBasicTensor answer{};
    size_t written = 0;
    nvte_get_tensor_param_v2(query, kRowwiseData, &answer, sizeof answer, &written);
    it = answers.emplace(key, answer).first;
  }
  const int dtype = it->second.dtype;
  const NVTEShape& shape = it->second.shape;
  size_t bytes = bytes_of(dtype);
  for (size_t i = 0; i < shape.ndim; i++) bytes *= shape.data[i];
  Handle workspace;
  if (bytes <= kGemmWorkspace) {
    workspace.set(kRowwiseData, {stream.workspace(bytes), dtype, shape});
    f(workspace);
  } else {
    // cuDNN's backward sums dq in float32: as large as an activation, so activations get it back in between.
    py::object memory = stream.temporary(bytes);
    auto pointer = memory.attr("data_ptr")().cast<uintptr_t>();
    workspace.set(kRowwiseData, {reinterpret_cast<void*>(pointer), dtype, shape});
    f(workspace);
  }
}

static bool aligned(std::initializer_list<const Tensor*> tensors) {
  for (auto tensor : tensors)
    if (reinterpret_cast<uintptr_t>(tensor->data.data_ptr) % 16) return false;
  return true;
}
