// What the Paddle-facing kernels share: from Paddle's tensors to the raw pointers of math/math.h, and registration.
//
// A kernel here is one plain function for all element types: it looks at the tensor's type when it runs. Paddle calls
// kernels through untyped pointers, where a wrong signature runs and computes nonsense; NVGPU_KERNEL therefore compares
// each function with Paddle's own declaration at compile time.
#pragma once

#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "../math/math.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_registry.h"

namespace nvgpu {

using Context = phi::CustomContext;
using Tensor = phi::DenseTensor;
using math::Dims;
using phi::DataType;
using Types = std::vector<DataType>;

inline const Types kFloats = {DataType::FLOAT32, DataType::FLOAT64, DataType::FLOAT16, DataType::BFLOAT16};
inline const Types kNumbers = {DataType::FLOAT32,  DataType::FLOAT64, DataType::FLOAT16,
                               DataType::BFLOAT16, DataType::INT64,   DataType::INT32};
inline const Types kComputable = {DataType::FLOAT32, DataType::FLOAT64, DataType::FLOAT16, DataType::BFLOAT16,
                                  DataType::INT64,   DataType::INT32,   DataType::BOOL,    DataType::UINT8,
                                  DataType::INT8,    DataType::INT16};
inline const Types kMovable = {DataType::FLOAT32,       DataType::FLOAT64,    DataType::FLOAT16,   DataType::BFLOAT16,
                               DataType::INT64,         DataType::INT32,      DataType::BOOL,      DataType::UINT8,
                               DataType::INT8,          DataType::INT16,      DataType::COMPLEX64, DataType::COMPLEX128,
                               DataType::FLOAT8_E4M3FN, DataType::FLOAT8_E5M2};
inline const Types kIntegers = {DataType::INT64, DataType::INT32, DataType::BOOL,
                                DataType::UINT8, DataType::INT8,  DataType::INT16};
inline const Types kIndices = {DataType::INT64, DataType::INT32};

inline constexpr char kDeviceType[] = "nvgpu";

inline Stream StreamOf(const Context& context) { return context.stream(); }

inline Type TypeOf(DataType type) {
  switch (type) {
    case DataType::BOOL: return Type::kBool;
    case DataType::UINT8: return Type::kUint8;
    case DataType::INT8: return Type::kInt8;
    case DataType::INT16: return Type::kInt16;
    case DataType::INT32: return Type::kInt32;
    case DataType::INT64: return Type::kInt64;
    case DataType::FLOAT16: return Type::kHalf;
    case DataType::BFLOAT16: return Type::kBfloat16;
    case DataType::FLOAT32: return Type::kFloat;
    case DataType::FLOAT64: return Type::kDouble;
    default: return Type::kNone;
  }
}
inline Type TypeOf(const Tensor& tensor) { return TypeOf(tensor.dtype()); }
inline size_t WidthOf(const Tensor& tensor) { return phi::SizeOf(tensor.dtype()); }

inline Dims DimsOf(const Tensor& tensor) { return common::vectorize(tensor.dims()); }
Dims DenseStrides(const Dims& dims);
int64_t CountOf(const Dims& dims);
// NumPy's rule; -1 is the last axis.
int64_t AxisOf(int64_t axis, int64_t rank);
// The tensor as an input over `dims`, to which it broadcasts from the right.
math::Input Broadcast(const Tensor& tensor, const Dims& dims);

// The value for integer and for other tensors.
math::Number NumberOf(const phi::Scalar& scalar);

const phi::CPUContext& CpuContext();

// A tensor of its own for results on their way.
Tensor Temporary(const Context& context, DataType type, const Dims& dims);
void Copy(const Context& context, const Tensor& from, Tensor* to);  // `to` gets from's type and has its dims already
// Sums `wide`, of dims `dims`, over what was broadcast from `small`'s dims, into `small`, and rounds to its type.
void SumTo(const Context& context, const Tensor& wide, Tensor* small);
// The same with other dims for the two, such as Paddle's tensors of at most nine axes cannot have.
void SumTo(const Context& context, const Tensor& wide, const Dims& dims, Dims kept, Tensor* small);

// ---- registration

using ArgsDef = void (*)(const phi::KernelKey&, phi::Kernel*);
inline void NoArgsDef(const phi::KernelKey&, phi::Kernel*) {}
template <phi::DataType type>
void OutputIs(const phi::KernelKey&, phi::Kernel* kernel) {
  kernel->OutputAt(0).SetDataType(type);
}
inline void OutputVaries(const phi::KernelKey&, phi::Kernel* kernel) {
  kernel->OutputAt(0).SetDataType(DataType::UNDEFINED);
}

// Paddle's own kind of exception: others, thrown in a backward pass, end the process.
template <auto function, typename Signature>
struct Guarded;
template <auto function, typename... Args>
struct Guarded<function, void (*)(const Context&, Args...)> {
  static void Run(const Context& context, Args... args) {
    try {
      function(context, std::forward<Args>(args)...);
    } catch (const common::enforce::EnforceNotMet&) {
      throw;
    } catch (const std::exception& error) {
      PADDLE_THROW(common::errors::External("%s", error.what()));
    }
  }
};

template <auto function>
void Register(const char* name, const Types& types, ArgsDef args_def = NoArgsDef) {
  using Signature = decltype(function);
  using Implementation = phi::KernelImpl<Signature, &Guarded<function, Signature>::Run>;
  for (DataType type : types) {
    phi::KernelRegistrar(phi::RegType::OUTER, name, kDeviceType, phi::DataLayout::ALL_LAYOUT, type,
                         phi::KernelArgsParseFunctor<Signature>::Parse, args_def, &Implementation::Compute,
                         reinterpret_cast<void*>(&Implementation::VariadicCompute));
  }
}

#define NVGPU_KERNEL(name, function, declaration, ...)                                                       \
  static_assert(std::is_same_v<decltype(&function), decltype(&phi::declaration<float, phi::CustomContext>)>, \
                #name " has not the signature that Paddle declares");                                        \
  Register<&function>(#name, __VA_ARGS__)

// Between a start and an end of the same thread nvgpu_multi_tensor_adamw only takes its arguments.
// RunDeferred launches. What lies at the addresses must stay there until then, or until the next start, which forgets
// it.
void StartDeferring();
void EndDeferring();
void RunDeferred();

// One a file; called by InitPlugin.
void RegisterMoves();
void RegisterElementwise();
void RegisterReductions();
void RegisterProducts();
void RegisterLosses();
void RegisterNorms();
void RegisterAttention();
void RegisterTraining();
void RegisterRandom();
void RegisterViaCpu();

}  // namespace nvgpu
