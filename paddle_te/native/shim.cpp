// Transformer Engine's C library for Python.
//
// Why not ctypes: TE reports errors as C++ exceptions, which would end the process, and one layer makes a few hundred
// calls. TE's functions are resolved with dlsym in bind() (shim/library.h), so this needs neither CUDA's nor TE's
// headers. The folder shim has a header for each concern; here is the module that Python sees.
//
// TE's handles live in Tensor objects and in locals here: none can leak. All work goes to the given Stream.
#include "shim/attention.h"
#include "shim/copies.h"
#include "shim/elementwise.h"
#include "shim/experts.h"
#include "shim/gemm.h"
#include "shim/launch.h"
#include "shim/steps.h"

PYBIND11_MODULE(_shim, m) {
  using namespace pybind11::literals;
  m.doc() = "Transformer Engine's C library: tensors, one function an entry point. Call paddle_te.native.load() first.";
  g_module = m.ptr();
  g_error = py::object(py::module_::import("paddle_te.native.errors").attr("TransformerEngineError")).release().ptr();

  // What TE throws outside of call(): no handle left in its pool.
  py::register_local_exception_translator([](std::exception_ptr exception) {
    try {
      std::rethrow_exception(exception);
    } catch (const py::builtin_exception&) {
      throw;
    } catch (const std::runtime_error& e) {
      PyErr_SetString(g_error, e.what());
    }
  });

  m.def("bind", &bind, "te"_a, "cudart"_a, "driver"_a,
        "Resolves all entry points in three dlopen handles. ImportError names the missing ones.");
  m.attr("SIZES") = py::dict("NVTEShape"_a = sizeof(NVTEShape), "NVTEBasicTensor"_a = sizeof(NVTEBasicTensor),
                             "NVTETensorPack"_a = sizeof(NVTETensorPack));

  py::class_<Tensor>(m, "Tensor", py::module_local(), R"(A view of device memory, which it does not own.

data: device address of the row-major data (0: none, factors only); shape: tuple of ints; dtype: types.DType.
columnwise: address of the transposed copy [cols, rows] that Hopper's fp8 GEMM needs; 2 dimensions only.
scale, amax, scale_inv: addresses of float32 scalars on the device; scale_inv must be 16-byte aligned. Functions that
produce fp8 read `scale`, write `scale_inv`, and raise `amax` to the input's greatest magnitude. A bfloat16 output
with `amax` makes rmsnorm_fwd and swiglu write it as well.
scaling_mode: types.ScalingMode. With block scaling there is no scale and no amax. scale_inv is float32
[cols / 128, rows] for blocks of 1 x 128 and [rows / 128, cols / 128 rounded up to 4] for 128 x 128; columnwise_scale_inv,
of the transposed copy, the same of the transposed matrix.)")
      .def(py::init<uintptr_t, const py::tuple&, int, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int>(),
           "data"_a, "shape"_a, "dtype"_a, "columnwise"_a = 0, "scale"_a = 0, "amax"_a = 0, "scale_inv"_a = 0,
           "columnwise_scale_inv"_a = 0, "scaling_mode"_a = int{kPerTensorScaling})
      .def_property_readonly("data_ptr", [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data.data_ptr); })
      .def_readonly("columnwise", &Tensor::columnwise)
      .def_property_readonly("shape", &Tensor::shape)
      .def_property_readonly("dtype", [](const Tensor& t) { return t.data.dtype; })
      .def("__repr__", [](const Tensor& t) { return "Tensor(" + t.describe() + ")"; });

  py::class_<Sequence>(m, "Sequence", py::module_local(),
                       R"(Calls that are made again and again, on other memory each time.

calls: a tuple of (name, arguments), of functions of this module. tensors: a tuple of those among the arguments that move.
Raises AttributeError, TypeError or ValueError, as the call would, for what cannot be called or recorded.)")
      .def(py::init<const py::tuple&, const py::tuple&>(), "tensors"_a, "calls"_a)
      .def(
          "run", [](const Sequence& sequence, const py::list& bases) { sequence.run(Bases(bases)); }, "bases"_a,
          R"(Moves the tensors, and makes the calls.

An address index << 48 | offset, given to a Tensor's constructor or an argument of its own, becomes bases[index] + offset;
bases: a list, whose first element counts for nothing. Where a tensor was given no address it gets none.)");

  py::class_<Steps>(m, "Steps", py::module_local(), R"(Sequences with the memory that they need.

kept: (arguments of an allocation, or None; [(index, offset)] of the memory that lies in it). temporary: [(index, offset)]
of the memory that lies in what a run is given for it.
steps: [(new, run, result, ends)]. new: [(index, arguments)] to allocate; run: a Sequence, or a function that takes the
list of all memory; result: the index of what the function returns, -1 for nothing; ends: indices of what to let go.)")
      .def(py::init<Steps::Whole, Steps::Pieces, std::vector<Steps::Step>>(), "kept"_a, "temporary"_a, "steps"_a)
      .def("run", &Steps::run, "memories"_a, "allocate"_a, "temporary"_a,
           R"(Allocates memory by allocate(*arguments), and makes the calls.

memories: a list of objects with data_ptr(), or of addresses, by index, None where there is none; completed here.
memories[0] is what is kept: it is allocated here, or given. temporary: likewise, in which what is temporary lies.)");

  m.def("counts", &counts,
        R"(How often each function has started work since the module was loaded, as {(name, precision): number}.

precision: fp8 if any tensor is, else the first one's dtype; "" for calls without tensors.)");

  py::class_<Stream>(m, "Stream", py::module_local(), R"(A CUDA stream of the current device, and its scratch memory.

handle: the cudaStream_t as an int. allocate(bytes): returns device memory as an object with data_ptr(); called when
more scratch memory is needed than there is (after the stream has been synchronised, if there was some).)")
      .def(py::init<uintptr_t, py::function>(), "handle"_a, "allocate"_a)
      .def_property_readonly("handle", [](const Stream& s) { return reinterpret_cast<uintptr_t>(s.handle); })
      .def_readonly("sm_count", &Stream::sm_count)
      .def_property_readonly("capability", [](const Stream& s) { return py::make_tuple(s.major, s.minor); })
      .def_property_readonly("workspace_size", &Stream::workspace_size);

  py::class_<HostMemory>(m, "HostMemory", py::module_local(), "Pinned memory of the host, of so many bytes.")
      .def(py::init<size_t>(), "bytes"_a)
      .def_readonly("bytes", &HostMemory::bytes)
      .def("data_ptr", &HostMemory::data_ptr);

  py::class_<Event>(m, "Event", py::module_local(), "What a CopyStream had been given when `mark` made this.")
      .def("hold", &Event::hold, "stream"_a, "What the Stream is given from now on waits for it.")
      .def("wait", &Event::wait, py::call_guard<py::gil_scoped_release>(), "The host waits for it.");

  py::class_<CopyStream>(m, "CopyStream", py::module_local(),
                         "A CUDA stream of its own, for copies that run beside other streams' work.")
      .def(py::init<>())
      .def("follow", &CopyStream::follow, "stream"_a, "Copies from now on wait for what the Stream has been given.")
      .def("follow", &CopyStream::follow_event, "event"_a,
           "Copies from now on wait for an Event of another CopyStream.")
      .def("copy", &CopyStream::copy, "destination"_a, "source"_a, "bytes"_a,
           "Between addresses on the device and in HostMemory, which must stay until the copy is over.")
      .def("mark", &CopyStream::mark, "An Event of the copies so far.");

  define(m, "layernorm_fwd", &layernorm_fwd, "x"_a, "gamma"_a, "beta"_a, "epsilon"_a, "z"_a, "mu"_a, "rsigma"_a,
         "stream"_a, "zero_centered_gamma"_a = false,
         "z = (x - mean(x)) / std(x) * gamma + beta. x, z: [tokens, h]; z may be fp8; mu, rsigma: float32 [tokens], "
         "mean(x) and 1 / std(x). zero_centered_gamma: 1 + gamma in gamma's place.");
  define(m, "layernorm_bwd", &layernorm_bwd, "dz"_a, "x"_a, "mu"_a, "rsigma"_a, "gamma"_a, "dx"_a, "dgamma"_a,
         "dbeta"_a, "stream"_a, "zero_centered_gamma"_a = false, "dx, dgamma and dbeta from dz. All in x's dtype.");
  define(m, "rmsnorm_fwd", &rmsnorm_fwd, "x"_a, "gamma"_a, "epsilon"_a, "z"_a, "rsigma"_a, "stream"_a,
         "zero_centered_gamma"_a = false,
         "z = x / rms(x) * gamma. x, z: [tokens, h]; z may be fp8; rsigma: float32 [tokens], 1 / rms(x). "
         "zero_centered_gamma: as layernorm_fwd's.");
  define(m, "rmsnorm_bwd", &rmsnorm_bwd, "dz"_a, "x"_a, "rsigma"_a, "gamma"_a, "dx"_a, "dgamma"_a, "stream"_a,
         "add"_a = nullptr, "zero_centered_gamma"_a = false,
         "dx and dgamma from dz; dx has `add`, a residual's gradient, added. All in x's dtype.");
  define(m, "quantize", &quantize, "input"_a, "output"_a, "stream"_a,
         "fp8 output = input * scale, its transposed copy too where it has one; writes scale_inv and amax.");
  define(m, "quantize_blocks", &quantize_blocks, "input"_a, "output"_a, "force_pow_2_scales"_a, "amax_epsilon"_a,
         "stream"_a,
         "fp8 output with block scaling from the input's amax in each block, its transposed copy too where it has one; "
         "writes their scale_inv. force_pow_2_scales: scales are powers of 2. amax_epsilon: the least amax.");
  define(m, "quantize_dbias", &quantize_dbias, "input"_a, "output"_a, "dbias"_a, "stream"_a,
         "quantize, and dbias [cols] = the sum of input's rows, in input's dtype, in one pass. output [rows, cols] has "
         "its transposed copy.");
  define(m, "dequantize", &dequantize, "input"_a, "output"_a, "stream"_a, "output = fp8 input * scale_inv.");
  define(m, "transpose", &transpose, "input"_a, "output"_a, "stream"_a, "output [n, m] = input [m, n] transposed.");
  const char* gated =
      "output [tokens, f] = act(input[:, :f]) * input[:, f:]; output may be fp8. act: swiglu silu, "
      "geglu gelu in its tanh form.";
  const char* plain = "output = act(input); output may be fp8. gelu is its tanh form.";
  const char* gradient =
      "The gradient of the activation's input from its output's; output may be fp8, but a gated activation then writes "
      "no transposed copy.";
  const char* transposed = "The gradient in fp8 with its transposed copy, in one kernel.";
  const char* with_dbias =
      "The gradient in fp8 with its transposed copy, and dbias [cols] = the sum of its rows, in one "
      "pass. dbias: in grad's dtype.";
#define DEFINE_TWO(name, text) define(m, #name, &name, "input"_a, "output"_a, "stream"_a, text);
#define DEFINE_THREE(name, text) define(m, #name, &name, "grad"_a, "input"_a, "output"_a, "stream"_a, text);
#define DEFINE_WITH_DBIAS(name) \
  define(m, #name, &name, "grad"_a, "input"_a, "output"_a, "dbias"_a, "stream"_a, with_dbias);
#define DEFINE_GATED(name)        \
  DEFINE_TWO(name, gated)         \
  DEFINE_THREE(d##name, gradient) \
  DEFINE_THREE(d##name##_cast_transpose, transposed)
#define DEFINE_PLAIN(name)        \
  DEFINE_TWO(name, plain)         \
  DEFINE_THREE(d##name, gradient) \
  DEFINE_WITH_DBIAS(quantize_dbias_d##name)
  GATED_ACTIVATIONS(DEFINE_GATED)
  PLAIN_ACTIVATIONS(DEFINE_PLAIN)
  define(m, "gemm", &gemm, "A"_a, "B"_a, "D"_a, "transa"_a, "transb"_a, "stream"_a, "accumulate"_a = false,
         "split_accumulator"_a = false, "bias"_a = nullptr, "dbias"_a = nullptr, "alpha"_a = 1.0f, "beta"_a = 1.0f,
         R"(D [n, m] (+)= op(B) [n, k] · op(A) [k, m], op by BLAS's column-major rule:
A is [m, k] if transa else [k, m]; B is [k, n] if transb else [n, k]. With weight W [out, in], tokens x [t, in]:
y = gemm(W, x, y, True, False); dx = gemm(W, dy, dx, False, False); dW = gemm(x, dy, dW, False, True).
accumulate: adds to D (a residual, or a float32 main gradient). alpha: what the product is multiplied by; beta: with
accumulate, what D is. split_accumulator: fp8's exact sum, for gradients.
bias [m]: added to each row of D (of y). dbias [n]: written, the sum of op(B)'s columns (of dW's GEMM the bias's
gradient); cuBLAS has none in fp8, see quantize_dbias. Both in D's dtype.)");
  define(m, "grouped_gemm", &grouped_gemm, "A"_a, "B"_a, "D"_a, "transa"_a, "transb"_a, "experts"_a, "counts"_a,
         "offsets_a"_a, "offsets_b"_a, "offsets_d"_a, "factors"_a, "stream"_a, "accumulate"_a = false,
         "split_accumulator"_a = false, "scale_inv_a"_a = 0, "scale_inv_b"_a = 0, "C"_a = nullptr,
         R"(gemm for each expert: with weights W [experts * out, in] and tokens x [t, in], the experts' rows one behind
the other, y = grouped_gemm(W, x, y, True, False, ...), dx = grouped_gemm(W, dy, dx, False, False, ...), dW =
grouped_gemm(x, dy, dW, False, True, ...). The last need not be zeros for an expert without rows.
counts: address of the experts' rows, int64 [experts]; they may sum up to less than t. offsets_a, offsets_b, offsets_d:
of where an expert's rows begin in A, B and D, in numbers, int64 [experts + 1]; not read for weights. factors: address
of what products are multiplied by, float32, and 16 bytes behind it of what C is, 0 where nothing is added. C: what is
added, of D's form; with accumulate D. scale_inv_a, scale_inv_b: of fp8 operands, float32 [experts]; a transposed copy
is each expert's. Hopper needs cuBLAS 13.4 for it, in fp8 13.5, with block scaling 13.6.)");
  define(m, "quantize_grouped_blocks", &quantize_grouped_blocks, "input"_a, "output"_a, "experts"_a, "counts"_a,
         "offsets"_a, "force_pow_2_scales"_a, "amax_epsilon"_a, "stream"_a,
         R"(quantize_blocks for each expert's matrix: its copies and their scales lie behind those of the one before.
counts, offsets: as grouped_gemm's of one operand, of which 128 divides an expert's rows; 0 for weights.)");
  define(m, "scaled_swiglu", &scaled_swiglu, "input"_a, "scales"_a, "output"_a, "stream"_a,
         "output = swiglu(input) * scales[:, None]. scales: float32 [tokens].");
  define(m, "scaled_dswiglu", &scaled_dswiglu, "grad"_a, "input"_a, "scales"_a, "output"_a, "dscales"_a, "stream"_a,
         "The gradients of scaled_swiglu's input and, float32 [tokens], scales from its output's.");
  define(m, "scaled_clamped_swiglu", &scaled_clamped_swiglu, "input"_a, "scales"_a, "output"_a, "limit"_a, "alpha"_a,
         "offset"_a, "stream"_a,
         "output = g sigmoid(alpha g) (u + offset) * scales[:, None], g = min(input[:, :f], limit), u = input[:, f:] "
         "between -limit and limit. scales: float32 [tokens].");
  define(m, "scaled_clamped_dswiglu", &scaled_clamped_dswiglu, "grad"_a, "input"_a, "scales"_a, "output"_a, "dscales"_a,
         "limit"_a, "alpha"_a, "offset"_a, "stream"_a,
         "The gradients of scaled_clamped_swiglu's input and, float32 [tokens], scales from its output's.");
  define(m, "topk_forward", &topk_forward, "logits"_a, "expert_bias"_a, "probs"_a, "routing_map"_a, "scores"_a,
         "topk"_a, "pre_softmax"_a, "num_groups"_a, "group_topk"_a, "scaling_factor"_a, "sigmoid"_a, "stream"_a,
         "probs, float32 like logits [tokens, experts], and routing_map, bytes, of the topk greatest; scores: float32 "
         "for topk_backward. expert_bias: float32 [experts] or None. num_groups, group_topk: -1 for no groups.");
  define(m, "topk_backward", &topk_backward, "routing_map"_a, "scores"_a, "dprobs"_a, "dlogits"_a, "topk"_a,
         "pre_softmax"_a, "scaling_factor"_a, "sigmoid"_a, "stream"_a, "dlogits from dprobs.");
  define(m, "amax_and_scale_update", &amax_and_scale_update, "amax_history"_a, "scale"_a, "algo"_a, "fp8_dtype"_a,
         "margin"_a, "stream"_a,
         "Delayed scaling, in place: scale [n] from float32 amax_history [len, n], which is then rolled by one.");
  define(m, "compute_amax", &compute_amax, "input"_a, "output"_a, "stream"_a, "output's amax = max(abs(input)).");
  define(m, "compute_scale_from_amax", &compute_scale_from_amax, "output"_a, "stream"_a,
         "Current scaling: fp8 output's scale = fp8's greatest value / amax.");
  define(m, "rope", &rope, "input"_a, "freqs"_a, "output"_a, "backward"_a, "stream"_a,
         "TE's rotary embedding on [b, s, h, d], half-split (NeoX) convention; freqs: angles, float32 [s, 1, 1, d].");
  define(
      m, "attention_fwd", &attention_fwd, "q"_a, "k"_a, "v"_a, "out"_a, "stats"_a, "scale"_a, "layout"_a, "mask"_a,
      "is_training"_a, "stream"_a, "dropout"_a = 0.f, "rng_state"_a = nullptr, "cu_seqlens"_a = nullptr,
      "bias"_a = nullptr, "s"_a = nullptr, "window"_a = -1, "softmax_offset"_a = nullptr,
      R"(out [b, s, h, d] = softmax(scale q·kᵀ + mask + bias)·v. q: [b, s, h, d]; k, v: [b, keys, kv heads, d], at the
addresses that `layout` (types.QKVLayout) implies. stats: float32 [b, h, s, 1], kept for backward. mask: types.Mask; the padding
masks need cu_seqlens, int32 [b + 1]. The layouts of THD have sequences of any lengths one after another: q and out are
[tokens, h, d], k and v [tokens, kv heads, d], stats [tokens, h, 1], and cu_seqlens (with a padding mask) end with tokens.
dropout needs rng_state, int64 [2]: seed, offset. bias: [b or 1, h or 1, s,
keys], in q's dtype; cuDNN takes none with a padding mask. In fp8 (q, k, v and out): s has scale, amax and scale_inv of
the softmax, and no data; out's scale_inv is not written. window: how many keys before its own a query sees; -1: all.
softmax_offset: float32 [h], a score of each head that counts in the softmax's sum and has no value; stats include it.)");
  define(
      m, "attention_bwd", &attention_bwd, "q"_a, "k"_a, "v"_a, "out"_a, "dout"_a, "stats"_a, "dq"_a, "dk"_a, "dv"_a,
      "scale"_a, "layout"_a, "mask"_a, "stream"_a, "dropout"_a = 0.f, "deterministic"_a = false,
      "rng_state"_a = nullptr, "cu_seqlens"_a = nullptr, "bias"_a = nullptr, "dbias"_a = nullptr, "s"_a = nullptr,
      "dp"_a = nullptr, "window"_a = -1, "softmax_offset"_a = nullptr, "dsoftmax_offset"_a = nullptr,
      "dq, dk, dv, laid out as q, k, v are; dbias, the bias's gradient, which cuDNN always computes. In fp8: s as in "
      "forward, dp the same for the softmax's gradient; dq's, dk's and dv's scale_inv are not written. "
      "dsoftmax_offset: "
      "float32 [h], the gradient of forward's softmax_offset.");
  define(m, "memcpy_async", &memcpy_async, "destination"_a, "source"_a, "stream"_a, "destination = source, as bytes.");
  define(m, "memset_async", &memset_async, "destination"_a, "value"_a, "bytes"_a, "stream"_a);
  Function& launched = new_function("launch");
  m.def(
      "launch",
      [&launched](uintptr_t kernel, unsigned grid, unsigned block, unsigned shared_bytes, Stream& stream,
                  const py::args& arguments) {
        enter<uintptr_t, unsigned, unsigned, unsigned, Stream&, const KernelArguments&>(
            launched, launch, kernel, grid, block, shared_bytes, stream, KernelArguments(arguments));
      },
      "kernel"_a, "grid"_a, "block"_a, "shared_bytes"_a, "stream"_a,
      "Launches a kernel of native/kernels; its arguments, ints, follow.");
}
