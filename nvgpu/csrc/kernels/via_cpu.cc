// Kernels without code for the device: Paddle's CPU kernels, on copies of the tensors (in the host runtime on the
// tensors themselves). Paddle falls back to them by itself, but loses two things that these wrappers keep:
//  - float16 and bfloat16, which most CPU kernels lack: computed in float32 and rounded;
//  - the storage of an output that is there already, so that an operation in place also changes the tensor's views.
// Each takes its signature from the CPU kernel's declaration. NVGPU_TRACE=1 names those that run.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "../trace.h"
#include "common.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/elementwise_grad_kernel.h"
#include "paddle/phi/kernels/expand_as_grad_kernel.h"
#include "paddle/phi/kernels/flip_kernel.h"
#include "paddle/phi/kernels/gather_nd_grad_kernel.h"
#include "paddle/phi/kernels/gather_nd_kernel.h"
#include "paddle/phi/kernels/index_sample_grad_kernel.h"
#include "paddle/phi/kernels/index_sample_kernel.h"
#include "paddle/phi/kernels/layer_norm_grad_kernel.h"
#include "paddle/phi/kernels/layer_norm_kernel.h"
#include "paddle/phi/kernels/logsumexp_grad_kernel.h"
#include "paddle/phi/kernels/logsumexp_kernel.h"
#include "paddle/phi/kernels/masked_select_kernel.h"
#include "paddle/phi/kernels/p_norm_grad_kernel.h"
#include "paddle/phi/kernels/p_norm_kernel.h"
#include "paddle/phi/kernels/pad_kernel.h"
#include "paddle/phi/kernels/put_along_axis_kernel.h"
#include "paddle/phi/kernels/roll_kernel.h"
#include "paddle/phi/kernels/take_along_axis_grad_kernel.h"
#include "sort.h"

namespace nvgpu {
namespace {

bool IsShort(DataType type) { return type == DataType::FLOAT16 || type == DataType::BFLOAT16; }
DataType HostType(DataType type) { return IsShort(type) ? DataType::FLOAT32 : type; }
bool MemoryIsShared() { return std::strcmp(runtime::Name(), "host") == 0; }

// The tensor in the CPU kernel's type, still on the device.
Tensor Widened(const Context& context, const Tensor& tensor) {
  if (!IsShort(tensor.dtype())) return tensor;
  Tensor wide = Temporary(context, DataType::FLOAT32, DimsOf(tensor));
  math::Cast(StreamOf(context), tensor.data(), TypeOf(tensor), wide.data(), Type::kFloat, tensor.numel());
  return wide;
}

// A CPU tensor of these contents; in the host runtime it shares the memory and keeps it alive.
Tensor ToHost(const Context& context, const Tensor& tensor) {
  if (!tensor.has_allocation() || tensor.place().GetType() == phi::AllocationType::CPU) return tensor;
  if (tensor.capacity() == 0) {  // a gradient kernel's input of which only the shape is needed
    phi::DenseTensorMeta meta = tensor.meta();
    meta.dtype = HostType(meta.dtype);
    return Tensor(std::make_shared<phi::Allocation>(nullptr, 0, phi::CPUPlace()), meta);
  }
  const Tensor wide = Widened(context, tensor);
  phi::DenseTensorMeta meta = wide.meta();
  const size_t bytes = wide.numel() * WidthOf(wide);
  if (MemoryIsShared()) {
    runtime::Synchronize(StreamOf(context));
    void* data = const_cast<void*>(wide.data());
    meta.offset = 0;
    std::shared_ptr<phi::Allocation> alias(new phi::Allocation(data, bytes, phi::CPUPlace()),
                                           [keep = wide.Holder()](phi::Allocation* allocation) { delete allocation; });
    return Tensor(alias, meta);
  }
  Tensor host;
  host.Resize(wide.dims());
  CpuContext().Alloc(&host, wide.dtype());
  runtime::Copy(host.data(), wide.data(), bytes, runtime::CopyKind::kDeviceToHost, StreamOf(context));
  return host;
}

// Puts the CPU kernel's result into `out`, in the type and, where it fits, the storage that `out` has.
void ToDevice(const Context& context, const Tensor& host, DataType type, Tensor* out) {
  const bool narrow = IsShort(type) && host.dtype() == DataType::FLOAT32;
  out->Resize(host.dims());
  Tensor wide = narrow ? Temporary(context, DataType::FLOAT32, DimsOf(host)) : *out;
  void* to = context.Alloc(narrow ? &wide : out, host.dtype());
  runtime::Copy(to, host.data(), host.numel() * WidthOf(host), runtime::CopyKind::kHostToDevice, StreamOf(context));
  if (narrow) {
    void* short_data = context.Alloc(out, type);
    math::Cast(StreamOf(context), to, Type::kFloat, short_data, TypeOf(type), host.numel());
  }
}

// ---- one argument on its way to the CPU kernel and, for outputs, back

template <typename Arg>
struct Argument {
  Argument(const Context&, Arg arg) : arg(arg) {}
  Arg Get() { return arg; }
  void Return() {}
  Arg arg;
};
template <>
struct Argument<DataType> {
  Argument(const Context&, DataType type) : type(HostType(type)) {}
  DataType Get() { return type; }
  void Return() {}
  DataType type;
};
template <>
struct Argument<const Tensor&> {
  Argument(const Context& context, const Tensor& tensor) : host(ToHost(context, tensor)) {}
  const Tensor& Get() { return host; }
  void Return() {}
  Tensor host;
};
template <>
struct Argument<const paddle::optional<Tensor>&> {
  Argument(const Context& context, const paddle::optional<Tensor>& tensor) {
    if (tensor) host = ToHost(context, *tensor);
  }
  const paddle::optional<Tensor>& Get() { return host; }
  void Return() {}
  paddle::optional<Tensor> host;
};
template <>
struct Argument<const std::vector<const Tensor*>&> {
  Argument(const Context& context, const std::vector<const Tensor*>& tensors) {
    hosts.reserve(tensors.size());
    for (const Tensor* tensor : tensors) {
      hosts.push_back(ToHost(context, *tensor));
      pointers.push_back(&hosts.back());
    }
  }
  const std::vector<const Tensor*>& Get() { return pointers; }
  void Return() {}
  std::vector<Tensor> hosts;
  std::vector<const Tensor*> pointers;
};
template <>
struct Argument<Tensor*> {
  Argument(const Context& context, Tensor* out) : context(context), out(out) {
    if (out == nullptr) return;
    phi::DenseTensorMeta meta = out->meta();
    meta.dtype = HostType(meta.dtype);
    meta.strides = meta.calc_strides(meta.dims);
    meta.offset = 0;
    host.set_meta(meta);
  }
  Tensor* Get() { return out == nullptr ? nullptr : &host; }
  void Return() {
    if (out != nullptr && host.has_allocation()) ToDevice(context, host, out->dtype(), out);
  }
  const Context& context;
  Tensor* out;
  Tensor host;
};

// ---- the wrapper of one kernel

const phi::Kernel* CpuKernel(const char* name, DataType type) {
  const auto& kernels = phi::KernelFactory::Instance().kernels();
  const auto named = kernels.find(name);
  if (named == kernels.end()) return nullptr;
  const auto found = named->second.find({phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, HostType(type)});
  return found == named->second.end() ? nullptr : &found->second;
}

inline DataType TypeOfFirst() { return DataType::UNDEFINED; }
template <typename First, typename... Rest>
DataType TypeOfFirst(const First& first, const Rest&... rest) {
  if constexpr (std::is_same_v<First, Tensor>) {
    return first.dtype();
  } else {
    return TypeOfFirst(rest...);
  }
}

template <typename Name, typename Function>
struct ViaCpu;
template <typename Name, typename... Args>
struct ViaCpu<Name, void (*)(const phi::CPUContext&, Args...)> {
  static void Run(const Context& context, Args... args) {
    TraceKernel(Name::kName);
    const phi::Kernel* kernel = CpuKernel(Name::kName, TypeOfFirst(args...));
    const auto function = kernel->GetVariadicKernelFn<void (*)(const phi::DeviceContext&, Args...)>();
    std::tuple<Argument<Args>...> arguments(Argument<Args>(context, args)...);
    std::apply([&](auto&... argument) { function(CpuContext(), argument.Get()...); }, arguments);
    std::apply([](auto&... argument) { (argument.Return(), ...); }, arguments);
  }
  static void Register() {
    Types types = kComputable;
    types.erase(std::remove_if(types.begin(), types.end(),
                               [](DataType type) { return CpuKernel(Name::kName, type) == nullptr; }),
                types.end());
    nvgpu::Register<&ViaCpu::Run>(Name::kName, types);
  }
};

}  // namespace

// The kernel's name, and the function that Paddle declares for it.
#define NVGPU_VIA_CPU(X)                            \
  X(elementwise_pow_grad, ElementwisePowGradKernel) \
  X(expand_as_grad, ExpandAsGradKernel)             \
  X(expm1, Expm1Kernel)                             \
  X(expm1_grad, Expm1GradKernel)                    \
  X(flip, FlipKernel)                               \
  X(gather_nd, GatherNdKernel)                      \
  X(gather_nd_grad, GatherNdGradKernel)             \
  X(index_sample, IndexSampleKernel)                \
  X(index_sample_grad, IndexSampleGradKernel)       \
  X(layer_norm, LayerNormKernel)                    \
  X(layer_norm_grad, LayerNormGradKernel)           \
  X(log1p, Log1pKernel)                             \
  X(log1p_grad, Log1pGradKernel)                    \
  X(logsumexp, LogsumexpKernel)                     \
  X(logsumexp_grad, LogsumexpGradKernel)            \
  X(masked_select, MaskedSelectKernel)              \
  X(p_norm, PNormKernel)                            \
  X(p_norm_grad, PNormGradKernel)                   \
  X(pad, PadKernel)                                 \
  X(roll, RollKernel)                               \
  X(round, RoundKernel)                             \
  X(softplus, SoftplusKernel)                       \
  X(softplus_grad, SoftplusGradKernel)

#define NVGPU_NAME(name, function)               \
  struct Name_##name {                           \
    static constexpr const char kName[] = #name; \
  };
NVGPU_VIA_CPU(NVGPU_NAME)
NVGPU_NAME(put_along_axis, )
NVGPU_NAME(take_along_axis_grad, )
#undef NVGPU_NAME

void TakeAlongAxisGradViaCpu(const Context& context, const Tensor& x, const Tensor& index, const Tensor& out_grad,
                             int axis, Tensor* x_grad) {
  using Declared = decltype(&phi::TakeAlongAxisGradKernel<float, phi::CPUContext>);
  ViaCpu<Name_take_along_axis_grad, Declared>::Run(context, x, index, out_grad, axis, x_grad);
}

void PutAlongAxisViaCpu(const Context& context, const Tensor& x, const Tensor& index, const Tensor& value, int axis,
                        const std::string& reduce, bool include_self, Tensor* out) {
  using Declared = decltype(&phi::PutAlongAxisKernel<float, phi::CPUContext>);
  ViaCpu<Name_put_along_axis, Declared>::Run(context, x, index, value, axis, reduce, include_self, out);
}

void RegisterViaCpu() {
#define NVGPU_REGISTER(name, function) \
  ViaCpu<Name_##name, decltype(&phi::function<float, phi::CPUContext>)>::Register();
  NVGPU_VIA_CPU(NVGPU_REGISTER)
#undef NVGPU_REGISTER
}

}  // namespace nvgpu
