// The memory limit: what every optimizer must do at least, and nothing else. Reads a gradient and some leaves of
// state, changes the leaves in place, and writes a copy in 16 bits if there is one. In one pass over blocks, as
// wide as the compiler can.
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t block = 1 << 16;

float read(const float* grad, int64_t i) { return grad[i]; }

float read(const uint16_t* grad, int64_t i) {
  uint32_t bits = uint32_t(grad[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <int leaves, bool copy, typename Grad>
void touch(float* __restrict__ p, float* __restrict__ m, float* __restrict__ v, const Grad* __restrict__ grad,
           uint16_t* __restrict__ out, int64_t size) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t start = 0; start < size; start += block) {
    const int64_t end = start + block < size ? start + block : size;
    for (int64_t i = start; i < end; i++) {
      const float g = read(grad, i);
      p[i] += g;
      m[i] += g;
      if (leaves == 3) v[i] += g;
      if (copy) out[i] = uint16_t(i);
    }
  }
}

template <typename Grad>
void choose(int leaves, float* p, float* m, float* v, const Grad* grad, uint16_t* out, int64_t size) {
  if (leaves == 3) {
    out ? touch<3, true>(p, m, v, grad, out, size) : touch<3, false>(p, m, v, grad, out, size);
  } else {
    out ? touch<2, true>(p, m, v, grad, out, size) : touch<2, false>(p, m, v, grad, out, size);
  }
}

}  // namespace

extern "C" void limit(int leaves, float* p, float* m, float* v, const void* grad, int grad_bits, uint16_t* out,
                      int64_t size) {
  if (grad_bits == 32) {
    choose(leaves, p, m, v, static_cast<const float*>(grad), out, size);
  } else {
    choose(leaves, p, m, v, static_cast<const uint16_t*>(grad), out, size);
  }
}
