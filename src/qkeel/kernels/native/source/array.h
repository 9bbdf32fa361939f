// Tensors, threads and errors as the kernels see them. Without a header of torch: these take seconds a file.
#pragma once
// Of the standard library, what the kernels use: the other files include it from here.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__clang_major__) ? __clang_major__ < 14 : defined(__GNUC__) && __GNUC__ < 12  // GCC 11 has no __builtin_shufflevector
#error qkeel expects GCC 12 or clang 14 or newer; set CXX to a newer compiler
#endif

// Torch's threads, of its stable C interface (torch/csrc/stable/c/shim.h).
#pragma GCC visibility push(default)
extern "C" {
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*f)(int64_t, int64_t, void*), void* context);
int32_t torch_get_thread_idx(uint32_t* index);
int32_t torch_get_num_threads(uint32_t* threads);
}
#pragma GCC visibility pop

namespace qkeel {

constexpr int64_t WIDEST = 1024;  // numbers in a head, at most, where a kernel has a buffer for them

enum class Type { FLOAT, BFLOAT16, HALF, DOUBLE, BOOL, LONG, OTHER };  // in the order of operators.cpp's codes

inline int64_t bytes(Type type) {
  if (type == Type::BOOL) return 1;
  return type == Type::BFLOAT16 || type == Type::HALF ? 2 : type == Type::FLOAT ? 4 : 8;
}

// Where the numbers of a tensor of up to four dimensions lie; without numbers for a tensor that is not given.
struct Array {
  void* data = nullptr;
  Type type = Type::FLOAT;
  bool given = false;
  int64_t dims = 0, size[4] = {}, stride[4] = {};

  int64_t numel() const {
    int64_t n = 1;
    for (int64_t i = 0; i < dims; ++i) n *= size[i];
    return n;
  }
  // The row at (b, h, t) of [b h t d], in its storage type.
  char* row(int64_t b, int64_t h, int64_t t) const {
    return static_cast<char*>(data) + (b * stride[0] + h * stride[1] + t * stride[2]) * bytes(type);
  }
  // The same numbers, those of dimensions of size 1 as often as wanted.
  Array broadcast() const {
    Array all = *this;
    for (int64_t i = 0; i < 4; ++i)
      if (size[i] == 1) all.stride[i] = 0;
    return all;
  }
  template <typename T> T* as() const { return static_cast<T*>(data); }
};

inline void expect(bool right, const char* expected) {
  if (!right) throw std::runtime_error(std::string("expected ") + expected);
}

// Memory of a kernel's own, which starts with a cache line.
struct Free {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Floats = std::unique_ptr<float[], Free>;
inline Floats floats(int64_t n) {
  return Floats(static_cast<float*>(::operator new[](n * sizeof(float), std::align_val_t(64))));
}

// f(from, to) over shares of begin .. end of at least `grain`, by torch's threads.
template <typename F> void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (end - begin <= grain) return f(begin, end);
  auto call = [](int64_t from, int64_t to, void* f) { (*static_cast<const F*>(f))(from, to); };
  if (torch_parallel_for(begin, end, grain, call, const_cast<F*>(&f)))
    throw std::runtime_error("a thread ended with an error, most likely for want of memory");
}

} // namespace qkeel
