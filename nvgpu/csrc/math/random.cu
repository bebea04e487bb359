// Random numbers from counters.
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

struct Words {
  uint32_t value[4];
};

NVGPU_FN inline Words Philox(RandomState state, int64_t i) {
  Words c = {{static_cast<uint32_t>(i), static_cast<uint32_t>(static_cast<uint64_t>(i) >> 32),
              static_cast<uint32_t>(state.offset), static_cast<uint32_t>(state.offset >> 32)}};
  uint32_t key0 = static_cast<uint32_t>(state.seed), key1 = static_cast<uint32_t>(state.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t low = uint64_t(0xD2511F53u) * c.value[0], high = uint64_t(0xCD9E8D57u) * c.value[2];
    c = {{static_cast<uint32_t>(high >> 32) ^ c.value[1] ^ key0, static_cast<uint32_t>(high),
          static_cast<uint32_t>(low >> 32) ^ c.value[3] ^ key1, static_cast<uint32_t>(low)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// In [0, 1), of 24 bits.
NVGPU_FN inline float Unit(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

template <typename T>
struct UniformLoop {
  T* out;
  float low, high;
  RandomState state;
  NVGPU_FN void operator()(int64_t i) const {
    const float u = Unit(Philox(state, i).value[0]);
    out[i] = Convert<T>(static_cast<Compute<T>>(low + (high - low) * u));
  }
};

template <typename T>
struct NormalLoop {  // Box and Muller's transform
  T* out;
  float mean, deviation;
  RandomState state;
  NVGPU_FN void operator()(int64_t i) const {
    const Words words = Philox(state, i);
    const float radius = std::sqrt(-2.0f * std::log(1.0f - Unit(words.value[0])));
    const float value = radius * std::cos(6.283185307179586f * Unit(words.value[1]));
    out[i] = Convert<T>(static_cast<Compute<T>>(mean + deviation * value));
  }
};

template <typename T>
struct DropoutLoop {
  T* out;
  uint8_t* mask;
  const T* x;
  float p;
  Compute<T> scale;
  RandomState state;
  NVGPU_FN void operator()(int64_t i) const {
    const bool keep = Unit(Philox(state, i).value[0]) >= p;
    if (mask != nullptr) mask[i] = keep;
    out[i] = Convert<T>(keep ? static_cast<Compute<T>>(x[i]) * scale : Compute<T>(0));
  }
};

template <typename T>
struct MaskedScaleLoop {
  T* out;
  const uint8_t* mask;
  const T* x;
  Compute<T> scale;
  NVGPU_FN void operator()(int64_t i) const {
    out[i] = Convert<T>(mask[i] ? static_cast<Compute<T>>(x[i]) * scale : Compute<T>(0));
  }
};

template <typename Function>
void For(Type type, Function function) {
  if (!ForFloats(type, function)) throw std::invalid_argument("nvgpu: random numbers must be floats");
}

}  // namespace

void Uniform(Stream stream, Type type, void* out, double low, double high, RandomState state, int64_t count) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEach(stream, count,
            UniformLoop<T>{static_cast<T*>(out), static_cast<float>(low), static_cast<float>(high), state});
  });
}

void Normal(Stream stream, Type type, void* out, double mean, double deviation, RandomState state, int64_t count) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEach(stream, count,
            NormalLoop<T>{static_cast<T*>(out), static_cast<float>(mean), static_cast<float>(deviation), state});
  });
}

void Dropout(Stream stream, Type type, void* out, uint8_t* mask, const void* x, double p, double scale,
             RandomState state, int64_t count) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEach(stream, count,
            DropoutLoop<T>{static_cast<T*>(out), mask, static_cast<const T*>(x), static_cast<float>(p),
                           static_cast<Compute<T>>(scale), state});
  });
}

void MaskedScale(Stream stream, Type type, void* out, const uint8_t* mask, const void* x, double scale, int64_t count) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEach(stream, count,
            MaskedScaleLoop<T>{static_cast<T*>(out), mask, static_cast<const T*>(x), static_cast<Compute<T>>(scale)});
  });
}

}  // namespace nvgpu::math
