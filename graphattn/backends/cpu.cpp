// Attention along the edges of a graph on CPU: forward, backward, and the sorting of edges.
//
// A plain C interface that Python calls through ctypes. It includes no header of torch, so one binary
// serves every version. `Attention` below is the one argument; cpu.py mirrors it field by field.
//
// Every row of a result has one owner, so there are no atomic additions: a pass over targets gives the
// output and the gradient of the query, a pass over sources gives the gradients of key, value and
// what belongs to edges. Scores are computed again in each pass; nothing of the size of edges times
// heads is kept. Rows of more than UNIT edges are cut into pieces, whose results are merged in a fixed
// order. How a row is cut depends on that row alone, and so do its results, bit by bit, for any number
// of threads and whatever else is in the graph.
//
// The file includes itself once for each instruction set: its second part is written in vectors of
// WIDTH floats and compiled into a namespace of its own. The processor decides when it is loaded.

#ifndef GRAPHATTN_ISA

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using std::int64_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

// Edges and rows of one unit of work; the longest row that is not cut.
constexpr int64_t UNIT = 1024;
// Edges that are scored together.
constexpr int64_t BLOCK = 16;
// Rows of memory are asked for this many edges before they are used.
constexpr int64_t AHEAD = 16;
// Multiplications that are worth a thread of their own.
constexpr int64_t WORK_OF_A_THREAD = 1 << 16;

enum Status { DONE = 0, OUT_OF_MEMORY = 1 };
enum Dtype : int64_t { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// A tensor [batch, nodes, heads, dim]: heads and dim are contiguous, the rest has strides, counted in
// elements.
struct Rows {
  char* data;
  int64_t batch_stride;
  int64_t row_stride;
};

// One call. Tensors along nodes are [batch, nodes, heads, dim], along edges [batch, num_edges, heads]
// in the caller's order. "Wide" is float32, or float64 for float64 inputs; what is not said to have
// another dtype is wide. What is not Rows is contiguous. Null: not given, or not asked for.
struct Attention {
  int64_t batch, num_dst, num_src, num_edges, heads, key_heads, head_dim, value_dim, edge_dim;
  int64_t dtype, threads;
  // Edges by target, and by source (backward only). Null edge_id: the caller's order is by target.
  const int64_t *dst_ptr, *src_index, *edge_id;
  const int64_t *src_ptr, *dst_index, *edge_id_by_src;
  double scale, dropout;
  int64_t seed;
  // Inputs, in `dtype`.
  Rows query, key, value;
  // Inputs along edges, each in its own dtype: bias, and edge_attr [num_edges, edge_dim]. A bias that
  // all of the batch shares has batch stride 0.
  const char *bias, *edge_attr;
  int64_t bias_dtype, bias_batch_stride, edge_attr_dtype;
  // [batch, num_dst, heads, edge_dim]: what each target multiplies edge_attr with.
  const char* query_edge;
  // Results: out and weights in `dtype`; mixed, the weighted sum of edge_attr, shaped as query_edge;
  // softmax [batch, num_dst, 2, heads], the largest score and the reciprocal of the sum of
  // exponentials. Their one logarithm could not tell scores of 1e5 apart.
  char *out, *weights, *mixed, *softmax;
  // Backward: gradients of the results, the first two in `dtype`.
  Rows grad_out;
  const char *grad_weights, *grad_mixed;
  // Backward: gradients of the inputs, the first three in `dtype`. grad_bias has one batch where the
  // bias has.
  char *grad_query, *grad_key, *grad_value;
  char *grad_bias, *grad_query_edge, *grad_edge_attr;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class Body>
void for_each_unit(int64_t units, int64_t threads, Body body) {
// Clang's OpenMP would need another library than the one that torch loads.
#if defined(_OPENMP) && !defined(__clang__)
  // A single thread stays out of OpenMP, whose pool may be gone after a fork.
  if (std::min(threads, units) > 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(std::min(threads, units)))
    for (int64_t unit = 0; unit < units; ++unit) body(unit);
    return;
  }
#endif
  (void)threads;
  for (int64_t unit = 0; unit < units; ++unit) body(unit);
}

// Units of work over rows and their edges. Row r takes the positions from ptr[r] + r to
// ptr[r + 1] + r, and unit u the rows that start at the positions from u * UNIT on. Of a row that is
// cut, piece k goes to the k-th unit after its own, where the row itself takes the positions.
int64_t count_units(int64_t rows, int64_t edges) { return (rows + edges + UNIT - 1) / UNIT; }

// The first row that starts at `position` or after it.
int64_t first_row(const int64_t* ptr, int64_t rows, int64_t position) {
  int64_t low = 0, high = rows;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (ptr[middle] + middle < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Calls row(r) for whole rows and piece(r, begin, end, slot) for pieces of cut ones. A unit has one
// piece of an earlier row at most, in slot 2 * unit, and the first of one row in slot 2 * unit + 1.
template <class Row, class Piece>
void visit_unit(const int64_t* ptr, int64_t rows, int64_t unit, Row row, Piece piece) {
  int64_t first = first_row(ptr, rows, unit * UNIT);
  if (first > 0) {
    int64_t r = first - 1, begin = ptr[r] + (unit - (ptr[r] + r) / UNIT) * UNIT;
    if (ptr[r + 1] - ptr[r] > UNIT && begin < ptr[r + 1])
      piece(r, begin, std::min(begin + UNIT, ptr[r + 1]), 2 * unit);
  }
  for (int64_t r = first; r < rows && ptr[r] + r < (unit + 1) * UNIT; ++r) {
    if (ptr[r + 1] - ptr[r] > UNIT)
      piece(r, ptr[r], ptr[r] + UNIT, 2 * unit + 1);
    else
      row(r);
  }
}

// The cut row that starts in `unit`, or -1: after it no other can.
int64_t cut_row(const int64_t* ptr, int64_t rows, int64_t unit) {
  int64_t r = first_row(ptr, rows, (unit + 1) * UNIT) - 1;
  return r >= 0 && ptr[r] + r >= unit * UNIT && ptr[r + 1] - ptr[r] > UNIT ? r : -1;
}

// The kernel of this system may back them by pages of 2 MiB: fresh pages of 4 KiB cost more than what
// is written to them.
void ask_for_huge_pages(char* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t HUGE = uintptr_t(1) << 21;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + HUGE - 1) & ~(HUGE - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(HUGE - 1);
  if (data != nullptr && end > begin)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// Sorting ##########################################################################################

// Stable counting sort of `count` edges by key(e) < rows. Fills ptr [rows + 1]; put = put_from(first)
// is told the place of each edge from `first` on, put(e, place).
template <class Key, class PutFrom>
int counting_sort(int64_t count, int64_t rows, int64_t threads, int64_t* ptr, Key key, PutFrom put_from) {
  // Each part counts for itself; no more parts than make their counters as many as the edges.
  int64_t parts = std::max<int64_t>(1, std::min({threads, count / (rows + 1), count / 32768}));
  std::unique_ptr<int64_t, Free> counters(
      static_cast<int64_t*>(std::calloc(parts * (rows + 1), sizeof(int64_t))));
  if (counters == nullptr) return OUT_OF_MEMORY;
  auto bound = [&](int64_t part) { return count * part / parts; };
  for_each_unit(parts, parts, [&](int64_t part) {
    int64_t* own = counters.get() + part * (rows + 1);
    for (int64_t e = bound(part); e < bound(part + 1); ++e) ++own[key(e)];
  });
  int64_t place = 0;
  for (int64_t r = 0; r < rows; ++r) {
    ptr[r] = place;
    for (int64_t part = 0; part < parts; ++part)
      place += std::exchange(counters.get()[part * (rows + 1) + r], place);
  }
  ptr[rows] = place;
  for_each_unit(parts, parts, [&](int64_t part) {
    int64_t* own = counters.get() + part * (rows + 1);
    auto put = put_from(bound(part));
    for (int64_t e = bound(part); e < bound(part + 1); ++e) put(e, own[key(e)]++);
  });
  return DONE;
}

struct Kernels {
  int (*forward[4])(const Attention&);
  int (*backward[4])(const Attention&);
};

}  // namespace

#if defined(__x86_64__)

#define GRAPHATTN_ISA avx512
#define WIDTH 16
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#include "cpu.cpp"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef GRAPHATTN_ISA
#undef WIDTH

#define GRAPHATTN_ISA avx2
#define WIDTH 8
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include "cpu.cpp"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef GRAPHATTN_ISA
#undef WIDTH

#endif  // __x86_64__

// What every processor has: SSE2 on x86-64, NEON on AArch64.
#define GRAPHATTN_ISA plain
#define WIDTH 4
#include "cpu.cpp"
#undef GRAPHATTN_ISA
#undef WIDTH

namespace {

// 0 plain, 1 AVX2, 2 AVX-512.
int best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

std::atomic<int> isa{best_isa()};

const Kernels& kernels() {
#if defined(__x86_64__)
  if (isa == 2) return avx512::kernels;
  if (isa == 1) return avx2::kernels;
#endif
  return plain::kernels;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int graphattn_forward(const Attention* call) { return kernels().forward[call->dtype](*call); }

EXPORT int graphattn_backward(const Attention* call) { return kernels().backward[call->dtype](*call); }

// Takes instruction set `wanted`, or the best one below it that there is; returns which.
EXPORT int graphattn_use_isa(int wanted) { return isa = std::min(wanted, best_isa()); }

// Smallest and largest source, smallest and largest target, and whether targets are in order.
EXPORT void graphattn_scan_edges(int64_t num_edges, int64_t threads, const int64_t* source,
                          const int64_t* target, int64_t* found) {
  int64_t parts = std::max<int64_t>(1, std::min(threads, num_edges / 32768));
  std::atomic<bool> in_order{true};
  std::atomic<int64_t> bound[4] = {{INT64_MAX}, {INT64_MIN}, {INT64_MAX}, {INT64_MIN}};
  auto keep = [](std::atomic<int64_t>& kept, int64_t x, bool smallest) {
    int64_t seen = kept;
    while ((smallest ? x < seen : x > seen) && !kept.compare_exchange_weak(seen, x)) {
    }
  };
  for_each_unit(parts, parts, [&](int64_t part) {
    int64_t first = num_edges * part / parts, end = num_edges * (part + 1) / parts;
    int64_t own[4] = {INT64_MAX, INT64_MIN, INT64_MAX, INT64_MIN};
    bool sorted = true;
    for (int64_t e = first; e < end; ++e) {
      own[0] = std::min(own[0], source[e]);
      own[1] = std::max(own[1], source[e]);
      own[2] = std::min(own[2], target[e]);
      own[3] = std::max(own[3], target[e]);
      sorted &= target[std::max<int64_t>(e - 1, 0)] <= target[e];
    }
    for (int i = 0; i < 4; ++i) keep(bound[i], own[i], i % 2 == 0);
    if (!sorted) in_order = false;
  });
  for (int i = 0; i < 4; ++i) found[i] = bound[i];
  found[4] = in_order;
}

// From the caller's order to the by-target arrays. A null edge_id says that targets are in order.
EXPORT int graphattn_sort_by_target(int64_t num_edges, int64_t num_dst, int64_t threads,
                             const int64_t* source, const int64_t* target, int64_t* dst_ptr,
                             int64_t* src_index, int64_t* edge_id) {
  if (edge_id == nullptr) {
    int64_t parts = std::max<int64_t>(1, std::min(threads, num_edges / 32768));
    for_each_unit(parts, parts, [&](int64_t part) {
      int64_t first = num_edges * part / parts, end = num_edges * (part + 1) / parts;
      for (int64_t e = first; e < end; ++e) {
        src_index[e] = source[e];
        for (int64_t i = e == 0 ? -1 : target[e - 1]; i < target[e]; ++i) dst_ptr[i + 1] = e;
      }
    });
    for (int64_t i = num_edges == 0 ? -1 : target[num_edges - 1]; i < num_dst; ++i)
      dst_ptr[i + 1] = num_edges;
    return DONE;
  }
  return counting_sort(
      num_edges, num_dst, threads, dst_ptr, [=](int64_t e) { return target[e]; },
      [=](int64_t) {
        return [=](int64_t e, int64_t place) {
          src_index[place] = source[e];
          edge_id[place] = e;
        };
      });
}

// From by-target arrays to by-source ones. A null edge_id says that the caller's order is by target.
EXPORT int graphattn_sort_by_source(int64_t num_edges, int64_t num_dst, int64_t num_src, int64_t threads,
                             const int64_t* dst_ptr, const int64_t* src_index,
                             const int64_t* edge_id, int64_t* src_ptr, int64_t* dst_index,
                             int64_t* edge_id_by_src) {
  return counting_sort(
      num_edges, num_src, threads, src_ptr, [=](int64_t e) { return src_index[e]; },
      [=](int64_t first) {
        int64_t row = std::upper_bound(dst_ptr, dst_ptr + num_dst + 1, first) - dst_ptr - 1;
        return [=](int64_t e, int64_t place) mutable {
          while (dst_ptr[row + 1] <= e) ++row;
          dst_index[place] = row;
          edge_id_by_src[place] = edge_id == nullptr ? e : edge_id[e];
        };
      });
}

#else  // one instruction set, WIDTH floats wide ####################################################

namespace {
namespace GRAPHATTN_ISA {

#define INLINE inline __attribute__((always_inline))

// Vectors of the accumulation type: as many bytes as the registers have.
template <class A>
struct Vectors;

template <>
struct Vectors<float> {
  static constexpr int64_t LANES = WIDTH;
  typedef float Vector __attribute__((vector_size(4 * WIDTH)));
  typedef int32_t Integer __attribute__((vector_size(4 * WIDTH)));
  typedef float Unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
};

template <>
struct Vectors<double> {
  static constexpr int64_t LANES = WIDTH / 2;
  typedef double Vector __attribute__((vector_size(4 * WIDTH)));
  typedef int64_t Integer __attribute__((vector_size(4 * WIDTH)));
  typedef double Unaligned __attribute__((vector_size(4 * WIDTH), aligned(8), may_alias));
};

typedef uint16_t Half16 __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t Half16Unaligned __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
typedef uint32_t Word __attribute__((vector_size(4 * WIDTH)));
typedef uint64_t Long __attribute__((vector_size(8 * WIDTH)));

template <class A>
using Vec = typename Vectors<A>::Vector;

template <class T>
struct AccumulateOf {
  typedef float type;
};
template <>
struct AccumulateOf<double> {
  typedef double type;
};

template <class A>
INLINE Vec<A> broadcast(A x) {
  return Vec<A>{} + x;
}

// Loading and storing ##############################################################################

INLINE Vec<float> load(const float* p) {
  return *reinterpret_cast<const Vectors<float>::Unaligned*>(p);
}
INLINE Vec<double> load(const double* p) {
  return *reinterpret_cast<const Vectors<double>::Unaligned*>(p);
}

INLINE Word widen_bits(Half16 bits) {
#if WIDTH == 16
  return (Word)_mm512_cvtepu16_epi32((__m256i)bits);
#elif WIDTH == 8
  return (Word)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, Word);
#endif
}

INLINE Vec<float> widen_bfloat16(Half16 bits) { return (Vec<float>)(widen_bits(bits) << 16); }

INLINE Vec<float> widen_float16(Half16 bits) {
#if WIDTH == 16
  return (Vec<float>)_mm512_cvtph_ps((__m256i)bits);
#elif WIDTH == 8
  return (Vec<float>)_mm256_cvtph_ps((__m128i)bits);
#else
  // The exponent is shifted into place and corrected by a product, which is right for subnormal
  // numbers too; infinity and NaN have all bits of the exponent set in both formats.
  Word wide = widen_bits(bits);
  Word rest = (wide & 0x7fff) << 13;
  Vec<float> value = (Vec<float>)rest * 0x1p112f;
  Word special = (Word)(rest >= (0x7c00u << 13)) & 0x7f800000;
  return (Vec<float>)((Word)value | special | ((wide & 0x8000) << 16));
#endif
}

INLINE Vec<float> load(const Bfloat16* p) {
  return widen_bfloat16(*reinterpret_cast<const Half16Unaligned*>(p));
}

INLINE Vec<float> load(const Float16* p) {
  return widen_float16(*reinterpret_cast<const Half16Unaligned*>(p));
}

// The first n < LANES elements; the rest is zero and never read.
#if WIDTH == 16
INLINE Vec<float> load_first(const float* p, int64_t n) {
  return (Vec<float>)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
INLINE Vec<double> load_first(const double* p, int64_t n) {
  return (Vec<double>)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
}
INLINE Half16 load_first_bits(const void* p, int64_t n) {
  return (Half16)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
}
#else
template <class A>
INLINE Vec<A> load_first(const A* p, int64_t n) {
  Vec<A> x = {};
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
INLINE Half16 load_first_bits(const void* p, int64_t n) {
  Half16 x = {};
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<const uint16_t*>(p)[i];
  return x;
}
#endif
INLINE Vec<float> load_first(const Bfloat16* p, int64_t n) {
  return widen_bfloat16(load_first_bits(p, n));
}
INLINE Vec<float> load_first(const Float16* p, int64_t n) {
  return widen_float16(load_first_bits(p, n));
}

INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE float widen(Bfloat16 x) { return load_first(&x, 1)[0]; }
INLINE float widen(Float16 x) { return load_first(&x, 1)[0]; }

INLINE void narrow(float x, float* p) { *p = x; }
INLINE void narrow(double x, double* p) { *p = x; }
// Round to nearest, ties to even; NaN stays NaN.
INLINE void narrow(float x, Bfloat16* p) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  p->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}
INLINE void narrow(float x, Float16* p) {
#if WIDTH >= 8
  p->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff, half;
  if (rest > 0x7f800000) {
    half = 0x7e00;
  } else if (rest >= 0x477ff000) {  // 65520 and more round to infinity
    half = 0x7c00;
  } else if (rest < 0x38800000) {  // subnormal: the sum leaves the rounded bits at the bottom
    float shifted;
    std::memcpy(&shifted, &rest, 4);
    shifted += 0.5f;
    std::memcpy(&half, &shifted, 4);
    half -= 0x3f000000;
  } else {
    half = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
  }
  p->bits = static_cast<uint16_t>(sign | half);
#endif
}

INLINE void store(float* p, Vec<float> x) { *reinterpret_cast<Vectors<float>::Unaligned*>(p) = x; }
INLINE void store(double* p, Vec<double> x) {
  *reinterpret_cast<Vectors<double>::Unaligned*>(p) = x;
}
INLINE void store(Bfloat16* p, Vec<float> x) {
  Word bits = (Word)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *reinterpret_cast<Half16Unaligned*>(p) =
      __builtin_convertvector(x != x ? Word{} + 0x7fc0 : rounded, Half16);
}
INLINE void store(Float16* p, Vec<float> x) {
#if WIDTH == 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif WIDTH == 8
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int64_t i = 0; i < WIDTH; ++i) narrow(x[i], p + i);
#endif
}

// The last vector of `to` is filled up with zeros.
template <class A, class T>
INLINE void widen_row(const T* from, int64_t n, A* to) {
  constexpr int64_t L = Vectors<A>::LANES;
  int64_t i = 0;
  for (; i + L <= n; i += L) store(to + i, load(from + i));
  if (i < n) store(to + i, load_first(from + i, n - i));
}

template <class A, class T>
INLINE void narrow_row(const A* from, int64_t n, A factor, T* to) {
  constexpr int64_t L = Vectors<A>::LANES;
  int64_t i = 0;
  for (; i + L <= n; i += L) store(to + i, load(from + i) * factor);
  for (; i < n; ++i) narrow(from[i] * factor, to + i);
}

// Elements of a tensor along edges, whatever its dtype.
template <class A>
void widen_any(const char* from, int64_t dtype, int64_t offset, int64_t n, A* to) {
  for (int64_t i = 0; i < n; ++i) {
    int64_t at = offset + i;
    to[i] = dtype == FLOAT32    ? static_cast<A>(reinterpret_cast<const float*>(from)[at])
            : dtype == FLOAT64  ? static_cast<A>(reinterpret_cast<const double*>(from)[at])
            : dtype == BFLOAT16 ? widen(reinterpret_cast<const Bfloat16*>(from)[at])
                                : widen(reinterpret_cast<const Float16*>(from)[at]);
  }
}

// Arithmetic #######################################################################################

// exp for each lane: 2^n * e^r with |r| <= ln(2) / 2. Below the range of normal numbers it is zero.
INLINE Vec<float> exponential(Vec<float> x) {
  constexpr float LOWEST = -87.33654f;
  Vec<float> bounded = x < LOWEST ? broadcast(LOWEST) : x;
  bounded = bounded > 88.72283f ? broadcast(88.72283f) : bounded;
  Vec<float> shifted = bounded * 1.44269504f + 0x1.8p23f;
  Vec<float> n = shifted - 0x1.8p23f;
  Vec<float> r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec<float> p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  typedef Vectors<float>::Integer Integer;
  Vec<float> result = (Vec<float>)((Integer)p + ((Integer)shifted << 23));
  return x < LOWEST ? Vec<float>{} : result;
}

INLINE Vec<double> exponential(Vec<double> x) {
  constexpr double LOWEST = -708.396418532264;
  Vec<double> bounded = x < LOWEST ? broadcast(LOWEST) : x;
  bounded = bounded > 709.782712893384 ? broadcast(709.782712893384) : bounded;
  Vec<double> shifted = bounded * 1.4426950408889634 + 0x1.8p52;
  Vec<double> n = shifted - 0x1.8p52;
  Vec<double> r = bounded - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  Vec<double> p = broadcast(1.0 / 6227020800.0);
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  typedef Vectors<double>::Integer Integer;
  Vec<double> result = (Vec<double>)((Integer)p + ((Integer)shifted << 52));
  return x < LOWEST ? Vec<double>{} : result;
}

// Sums over lanes go through shuffles that stay within 16 bytes or move 16 bytes as one, which all
// instruction sets have. Lane of (a, b) that lane `i` takes in a step, from the first or second half.
template <class A>
constexpr int64_t fold_lane(int64_t step, int64_t i, int64_t second) {
  constexpr int64_t L = Vectors<A>::LANES, QUAD = 16 / sizeof(A);
  if (step == 1 && QUAD == 4)  // a0 b0 a1 b1 | a2 b2 a3 b3
    return i / 4 * 4 + i % 4 / 2 + 2 * second + i % 2 * L;
  if (step == 1)  // a0 b0 | a1 b1
    return i / 2 * 2 + second + i % 2 * L;
  if (step < QUAD)  // a0 a1 b0 b1 | a2 a3 b2 b3
    return i / 4 * 4 + i % 2 + 2 * second + i % 4 / 2 * L;
  int64_t quad = i / QUAD, half = L / QUAD / 2;  // even quads of a, then of b | odd ones
  return (2 * (quad % half) + second) * QUAD + i % QUAD + quad / half * L;
}

#if defined(__clang__) || __GNUC__ >= 12
template <class A, int64_t STEP, int64_t SECOND, size_t... I>
INLINE Vec<A> take_half(Vec<A> a, Vec<A> b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, fold_lane<A>(STEP, I, SECOND)...);
}
#else
template <class A, int64_t STEP, int64_t SECOND, size_t... I>
INLINE Vec<A> take_half(Vec<A> a, Vec<A> b, std::index_sequence<I...>) {
  return __builtin_shuffle(a, b, typename Vectors<A>::Integer{fold_lane<A>(STEP, I, SECOND)...});
}
#endif

template <class A>
using Lanes = std::make_index_sequence<Vectors<A>::LANES>;

// Lane i of the result is the sum of all lanes of x[i]; x is used up.
template <class A, int64_t STEP = 1>
INLINE Vec<A> sum_each(Vec<A>* x) {
  constexpr int64_t COUNT = Vectors<A>::LANES / STEP;
  if constexpr (COUNT == 1) {
    return x[0];
  } else {
#pragma GCC unroll 8
    for (int64_t i = 0; i < COUNT / 2; ++i)
      x[i] = take_half<A, STEP, 0>(x[2 * i], x[2 * i + 1], Lanes<A>{}) +
             take_half<A, STEP, 1>(x[2 * i], x[2 * i + 1], Lanes<A>{});
    return sum_each<A, 2 * STEP>(x);
  }
}

// Maximum or sum over groups of EDGES lanes; every lane of a group gets it.
template <class A, int64_t BY, size_t... I>
INLINE Vec<A> swap_lanes(Vec<A> x, std::index_sequence<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, x, (I ^ BY)...);
#else
  return __builtin_shuffle(x, typename Vectors<A>::Integer{(I ^ BY)...});
#endif
}

template <class A, int64_t EDGES, int64_t BY = 1>
INLINE Vec<A> group_max(Vec<A> x) {
  if constexpr (BY >= EDGES || BY >= Vectors<A>::LANES) {
    return x;
  } else {
    Vec<A> y = swap_lanes<A, BY>(x, Lanes<A>{});
    return group_max<A, EDGES, 2 * BY>(x > y ? x : y);
  }
}

template <class A, int64_t EDGES, int64_t BY = 1>
INLINE Vec<A> group_sum(Vec<A> x) {
  if constexpr (BY >= EDGES || BY >= Vectors<A>::LANES)
    return x;
  else
    return group_sum<A, EDGES, 2 * BY>(x + swap_lanes<A, BY>(x, Lanes<A>{}));
}

// Blocks of edges ##################################################################################
//
// Numbers of a block are laid out [heads, EDGES] with EDGES 4, 8 or 16, so that a vector holds the
// edges of one head, or of several heads where edges are few.

// Asks for vector v of a row, once for each line of the cache.
template <class A, class T>
INLINE void prefetch_vector(const T* row, int64_t v) {
  constexpr int64_t BYTES = Vectors<A>::LANES * sizeof(T);
  if (v * BYTES % 64 == 0) __builtin_prefetch(reinterpret_cast<const char*>(row) + v * BYTES);
}

template <class A, int64_t EDGES>
struct Layout {
  static constexpr int64_t LANES = Vectors<A>::LANES;
  static constexpr int64_t HEADS = LANES > EDGES ? LANES / EDGES : 1;  // of a vector
  static constexpr int64_t PARTS = EDGES > LANES ? EDGES / LANES : 1;  // vectors of a head
  static constexpr int64_t GROUP = EDGES > LANES ? LANES : EDGES;
};

// to[h, b] = <own[h], rows[b][h]>. VECTORS: the dim in vectors, 0 when it is another. With each load
// goes a prefetch of the same place in a row of `next`: spread out like this, those never keep the
// loads of what is at hand waiting.
template <int64_t EDGES, int64_t VECTORS, class A, class T>
INLINE void dot_heads(const A* own, const int64_t* own_at, const T* const* rows,
                      const T* const* next, const int64_t* row_at, int64_t heads, int64_t dim,
                      A* to) {
  typedef Layout<A, EDGES> Y;
  constexpr int64_t L = Y::LANES;
  for (int64_t h = 0; h < heads; h += Y::HEADS) {
    for (int64_t part = 0; part < Y::PARTS; ++part) {
      Vec<A> product[L];
#pragma GCC unroll 4
      for (int64_t i = 0; i < Y::HEADS; ++i) {
        int64_t head = std::min(h + i, heads - 1);
        const A* mine = own + own_at[head];
        if constexpr (VECTORS > 0) {
          Vec<A> left[VECTORS];
          for (int64_t v = 0; v < VECTORS; ++v) left[v] = load(mine + v * L);
#pragma GCC unroll 16
          for (int64_t b = 0; b < Y::GROUP; ++b) {
            const T *row = rows[part * L + b] + row_at[head];
            const T *ahead = next[part * L + b] + row_at[head];
            Vec<A> sum = left[0] * load(row);
            prefetch_vector<A>(ahead, 0);
            for (int64_t v = 1; v < VECTORS; ++v) {
              sum += left[v] * load(row + v * L);
              prefetch_vector<A>(ahead, v);
            }
            product[i * Y::GROUP + b] = sum;
          }
        } else {
          for (int64_t b = 0; b < Y::GROUP; ++b) {
            const T *row = rows[part * L + b] + row_at[head];
            const T *ahead = next[part * L + b] + row_at[head];
            Vec<A> sum = {};
            int64_t d = 0;
            for (; d + L <= dim; d += L) {
              sum += load(mine + d) * load(row + d);
              prefetch_vector<A>(ahead, d / L);
            }
            if (d < dim) {
              sum += load(mine + d) * load_first(row + d, dim - d);
              __builtin_prefetch(ahead + d);
            }
            product[i * Y::GROUP + b] = sum;
          }
        }
      }
      store(to + h * EDGES + part * L, sum_each<A>(product));
    }
  }
}

template <int64_t EDGES, class A, class T>
INLINE void dots(const A* own, const int64_t* own_at, const T* const* rows, const T* const* next,
                 const int64_t* row_at, int64_t heads, int64_t dim, A* to) {
  constexpr int64_t L = Vectors<A>::LANES;
  if (dim == L)
    dot_heads<EDGES, 1>(own, own_at, rows, next, row_at, heads, dim, to);
  else if (dim == 2 * L)
    dot_heads<EDGES, 2>(own, own_at, rows, next, row_at, heads, dim, to);
  else if (dim == 4 * L)
    dot_heads<EDGES, 4>(own, own_at, rows, next, row_at, heads, dim, to);
  else
    dot_heads<EDGES, 0>(own, own_at, rows, next, row_at, heads, dim, to);
}

// For each of COUNT sets of weights, sums = sums * factor + sum_b weight[b] * rows[b], VECTORS
// vectors of it. Factor 0: sums is not read.
template <int64_t COUNT, int64_t VECTORS, bool NEXT, class A, class T>
INLINE void add_columns(A factor, const A* const* weight, const T* const* rows,
                        const T* const* next, int64_t offset, int64_t n, A* const* sums,
                        int64_t at) {
  constexpr int64_t L = Vectors<A>::LANES;
  Vec<A> sum[COUNT][VECTORS] = {};
  if (factor != 0)
    for (int64_t i = 0; i < COUNT; ++i)
      for (int64_t v = 0; v < VECTORS; ++v) sum[i][v] = load(sums[i] + at + v * L) * factor;
#pragma GCC unroll 4
  for (int64_t b = 0; b < n; ++b) {
    const T* row = rows[b] + offset + at;
    for (int64_t v = 0; v < VECTORS; ++v) {
      Vec<A> x = load(row + v * L);
      for (int64_t i = 0; i < COUNT; ++i) sum[i][v] += weight[i][b] * x;
      if (NEXT) prefetch_vector<A>(next[b] + offset + at, v);
    }
  }
  for (int64_t i = 0; i < COUNT; ++i)
    for (int64_t v = 0; v < VECTORS; ++v) store(sums[i] + at + v * L, sum[i][v]);
}

template <int64_t COUNT, bool NEXT, class A, class T>
INLINE void add_rows(A factor, const A* const* weight, const T* const* rows, const T* const* next,
                     int64_t offset, int64_t n, int64_t dim, A* const* sums) {
  constexpr int64_t L = Vectors<A>::LANES;
  int64_t d = 0;
  for (; d + 4 * L <= dim; d += 4 * L)
    add_columns<COUNT, 4, NEXT>(factor, weight, rows, next, offset, n, sums, d);
  for (; d + 2 * L <= dim; d += 2 * L)
    add_columns<COUNT, 2, NEXT>(factor, weight, rows, next, offset, n, sums, d);
  for (; d + L <= dim; d += L)
    add_columns<COUNT, 1, NEXT>(factor, weight, rows, next, offset, n, sums, d);
  if (d == dim) return;
  for (int64_t i = 0; i < COUNT; ++i) {
    Vec<A> sum = {};
    if (factor != 0) sum = load(sums[i] + d) * factor;
    for (int64_t b = 0; b < n; ++b) {
      sum += weight[i][b] * load_first(rows[b] + offset + d, dim - d);
      if (NEXT) __builtin_prefetch(next[b] + offset + d);
    }
    store(sums[i] + d, sum);
  }
}

template <class A, class T>
INLINE void add_rows(A factor, const A* weight, const T* const* rows, int64_t offset, int64_t n,
                     int64_t dim, A* sums) {
  add_rows<1, false, A, T>(factor, &weight, rows, nullptr, offset, n, dim, &sums);
}

// Lanes whose edge, counted from the first of their part, is one of the first n.
template <class A, int64_t EDGES>
INLINE typename Vectors<A>::Integer among_first(int64_t n) {
  typedef typename Vectors<A>::Integer Integer;
  Integer lane;
  for (int64_t i = 0; i < Vectors<A>::LANES; ++i) lane[i] = i % EDGES;
  return lane < (Integer{} + static_cast<decltype(lane[0] + 0)>(n));
}

// One number for each head, repeated for the edges of its group.
template <class A, int64_t EDGES>
INLINE Vec<A> spread(const A* by_head) {
  typedef Layout<A, EDGES> Y;
  if constexpr (Y::HEADS == 1) {
    return broadcast(by_head[0]);
  } else {
    Vec<A> x;
    for (int64_t i = 0; i < Y::LANES; ++i) x[i] = by_head[i / EDGES];
    return x;
  }
}

template <class A, int64_t EDGES>
INLINE void collect(Vec<A> x, A* by_head) {
  typedef Layout<A, EDGES> Y;
  for (int64_t i = 0; i < Y::HEADS; ++i) by_head[i] = x[i * Y::GROUP];
}

// Dropout ##########################################################################################

// Philox-4x32-7 as in graphattn/dropout.py: counter (edge, group of four heads, batch), key the seed.
// keep[h, b]: 1 / (1 - p) where the weight is kept, else zero.
template <int64_t EDGES, class A>
void draw(const Attention& call, const int64_t* edges, int64_t batch, A* keep) {
  const uint64_t threshold = static_cast<uint64_t>(std::nearbyint(call.dropout * 4294967296.0));
  const A kept = call.dropout < 1.0 ? static_cast<A>(1.0 / (1.0 - call.dropout)) : A(0);
  const uint64_t seed = static_cast<uint64_t>(call.seed);
  for (int64_t group = 0; group * 4 < call.heads; ++group) {
    for (int64_t first = 0; first < EDGES; first += WIDTH) {
      Long c[4] = {};
      for (int64_t b = 0; b < std::min<int64_t>(WIDTH, EDGES); ++b) {
        c[0][b] = static_cast<uint64_t>(edges[first + b]) & 0xffffffff;
        c[1][b] = static_cast<uint64_t>(edges[first + b]) >> 32;
      }
      c[2] += static_cast<uint64_t>(group);
      c[3] += static_cast<uint64_t>(batch);
      uint64_t k0 = seed & 0xffffffff, k1 = seed >> 32;
      for (int round = 0; round < 7; ++round) {
        Long product0 = c[0] * 0xD2511F53u, product1 = c[2] * 0xCD9E8D57u;
        c[0] = (product1 >> 32) ^ c[1] ^ k0;
        c[1] = product1 & 0xffffffff;
        c[2] = (product0 >> 32) ^ c[3] ^ k1;
        c[3] = product0 & 0xffffffff;
        k0 = (k0 + 0x9E3779B9u) & 0xffffffff;
        k1 = (k1 + 0xBB67AE85u) & 0xffffffff;
      }
      for (int64_t h = group * 4, i = 0; i < 4 && h < call.heads; ++h, ++i)
        for (int64_t b = 0; b < std::min<int64_t>(WIDTH, EDGES); ++b)
          keep[h * EDGES + first + b] = c[i][b] >= threshold ? kept : A(0);
    }
  }
}

template <class A>
INLINE A dot(const A* x, const A* y, int64_t n) {
  constexpr int64_t L = Vectors<A>::LANES;
  Vec<A> sum = {};
  int64_t i = 0;
  for (; i + L <= n; i += L) sum += load(x + i) * load(y + i);
  if (i < n) sum += load_first(x + i, n - i) * load_first(y + i, n - i);
  return group_sum<A, L>(sum)[0];
}

// Passes ###########################################################################################

template <class T>
INLINE void prefetch(const T* row, int64_t n) {
  const char *p = reinterpret_cast<const char*>(row), *end = reinterpret_cast<const char*>(row + n);
  for (; end - p >= 256; p += 256) {
    __builtin_prefetch(p);
    __builtin_prefetch(p + 64);
    __builtin_prefetch(p + 128);
    __builtin_prefetch(p + 192);
  }
  for (; p < end; p += 64) __builtin_prefetch(p);
}

template <class T>
INLINE const T* row_of(const Rows& rows, int64_t batch, int64_t index) {
  return reinterpret_cast<const T*>(rows.data) + batch * rows.batch_stride +
         index * rows.row_stride;
}

// The edges of a block and the rows at their far ends; what is beyond the first n repeats the first.
// The next rows are those of the edges AHEAD of these.
template <class T, int64_t EDGES>
struct Block {
  static constexpr int64_t SIZE = EDGES;
  int64_t n, index[EDGES], edge[EDGES];
  const T *x[EDGES], *y[EDGES], *next_x[EDGES], *next_y[EDGES];
};

template <class T>
struct Pass {
  typedef typename AccumulateOf<T>::type A;
  static constexpr int64_t L = Vectors<A>::LANES;

  const Attention& call;
  const int64_t H, G;         // heads, heads of the query that share one of the key
  const int64_t D, DV, C;     // dims of key, value and edge features
  const int64_t DP, DVP, CP;  // the same in whole vectors
  const int64_t HP;           // heads, with room for the last vector of them

  explicit Pass(const Attention& call)
      : call(call),
        H(call.heads),
        G(call.heads / call.key_heads),
        D(call.head_dim),
        DV(call.value_dim),
        C(call.edge_dim),
        DP(round_up(D, L)),
        DVP(round_up(DV, L)),
        CP(round_up(C, L)),
        HP(round_up(H + 4, 16)) {}

  // What a thread works in. The near end of an edge is the row whose result is made, the far end is
  // gathered: target and source in passes over targets, the other way round in those over sources.
  struct Scratch {
    A *score, *slope, *bias, *keep;                // [heads, EDGES]
    A *top, *inverse, *delta;                      // of the far ends, [heads, EDGES]
    A *near, *near_value;                          // [heads, padded dim]
    A *near_edge, *near_mixed;                     // [heads, padded edge_dim]
    A *by_head, *near_top, *near_inverse, *factor;  // [padded heads]
    A* attr;                                       // [EDGES, padded edge_dim]
    A* result;
    int64_t *near_at, *near_value_at, *far_at, *far_value_at;  // offset of each head in its row
  };

  int64_t scratch_bytes(int64_t result) const {
    int64_t wide = result + H * (DP + DVP + 2 * CP) + 7 * HP * BLOCK + 4 * HP + BLOCK * CP;
    return round_up(wide * int64_t(sizeof(A)) + 4 * HP * int64_t(sizeof(int64_t)), 64);
  }

  Scratch cut(void* memory, int64_t result, bool over_sources) const {
    A* next = static_cast<A*>(memory);
    auto take = [&next](int64_t n) { return std::exchange(next, next + n); };
    Scratch s;
    s.score = take(HP * BLOCK);
    s.slope = take(HP * BLOCK);
    s.bias = take(HP * BLOCK);
    s.keep = take(HP * BLOCK);
    s.top = take(HP * BLOCK);
    s.inverse = take(HP * BLOCK);
    s.delta = take(HP * BLOCK);
    s.near = take(H * DP);
    s.near_value = take(H * DVP);
    s.near_edge = take(H * CP);
    s.near_mixed = take(H * CP);
    s.by_head = take(HP);
    s.near_top = take(HP);
    s.near_inverse = take(HP);
    s.factor = take(HP);
    s.attr = take(BLOCK * CP);
    s.result = take(result);
    int64_t* at = reinterpret_cast<int64_t*>(next);
    s.near_at = at;
    s.near_value_at = at + HP;
    s.far_at = at + 2 * HP;
    s.far_value_at = at + 3 * HP;
    for (int64_t h = 0; h < H; ++h) {
      int64_t near = over_sources ? h / G : h, far = over_sources ? h : h / G;
      s.near_at[h] = near * DP;
      s.near_value_at[h] = near * DVP;
      s.far_at[h] = far * D;
      s.far_value_at[h] = far * DV;
    }
    return s;
  }

  // Runs a pass over targets or sources. piece(scratch, batch, row, begin, end) leaves `size` numbers
  // in scratch.result, merge(into, from) joins those of two pieces, and finish(batch, row, result)
  // writes a row.
  template <class Piece, class Merge, class Finish>
  int run(bool over_sources, int64_t size, Piece piece, Merge merge, Finish finish) const {
    const int64_t* ptr = over_sources ? call.src_ptr : call.dst_ptr;
    const int64_t rows = over_sources ? call.num_src : call.num_dst;
    const int64_t units = count_units(rows, call.num_edges);
    size = round_up(size, 16);
    // Reserved, but not backed by memory where no row is cut.
    std::unique_ptr<A, Free> partials(
        static_cast<A*>(std::malloc(call.batch * 2 * units * size * sizeof(A) + 1)));
    if (partials == nullptr) return OUT_OF_MEMORY;
    auto partial = [&](int64_t batch, int64_t slot) {
      return partials.get() + (batch * 2 * units + slot) * size;
    };
    const int64_t work = call.batch * (rows + call.num_edges) * H * (D + DV + C + 1);
    const int64_t threads = std::min(call.threads, work / WORK_OF_A_THREAD + 1);
    std::atomic<bool> failed{false}, any_cut{false};

    for_each_unit(units, threads, [&](int64_t unit) {
      std::unique_ptr<void, Free> memory(std::aligned_alloc(64, scratch_bytes(size)));
      if (memory == nullptr) {
        failed = true;
        return;
      }
      Scratch s = cut(memory.get(), size, over_sources);
      for (int64_t batch = 0; batch < call.batch; ++batch)
        visit_unit(
            ptr, rows, unit,
            [&](int64_t row) {
              if (ptr[row] < ptr[row + 1]) piece(s, batch, row, ptr[row], ptr[row + 1]);
              finish(batch, row, ptr[row] < ptr[row + 1] ? s.result : nullptr);
            },
            [&](int64_t row, int64_t begin, int64_t end, int64_t slot) {
              any_cut = true;
              Scratch t = s;
              t.result = partial(batch, slot);
              piece(t, batch, row, begin, end);
            });
    });
    if (failed) return OUT_OF_MEMORY;
    if (!any_cut) return DONE;
    for_each_unit(units, threads, [&](int64_t unit) {
      int64_t row = cut_row(ptr, rows, unit);
      if (row < 0) return;
      int64_t pieces = (ptr[row + 1] - ptr[row] + UNIT - 1) / UNIT;
      for (int64_t batch = 0; batch < call.batch; ++batch) {
        A* result = partial(batch, 2 * unit + 1);
        for (int64_t k = 1; k < pieces; ++k) merge(result, partial(batch, 2 * (unit + k)));
        finish(batch, row, result);
      }
    });
    return DONE;
  }

  // Calls body(block, first) for the edges of a piece. With `stats`, the stats of the next far ends
  // are asked for as well.
  template <bool OVER_SOURCES, class Body>
  INLINE void visit_blocks(int64_t batch, int64_t begin, int64_t end, const A* stats,
                           Body body) const {
    for (int64_t e = begin; e < end; e += BLOCK) {
      int64_t n = std::min(BLOCK, end - e);
      if (n > 8)
        body(gather<OVER_SOURCES, 16>(batch, e, n, stats), e == begin);
      else if (n > 4)
        body(gather<OVER_SOURCES, 8>(batch, e, n, stats), e == begin);
      else
        body(gather<OVER_SOURCES, 4>(batch, e, n, stats), e == begin);
    }
  }

  template <bool OVER_SOURCES, int64_t EDGES>
  INLINE Block<T, EDGES> gather(int64_t batch, int64_t e, int64_t n, const A* stats) const {
    const Rows &far = OVER_SOURCES ? call.query : call.key;
    const Rows &far_value = OVER_SOURCES ? call.grad_out : call.value;
    const T *x = row_of<T>(far, batch, 0), *y = row_of<T>(far_value, batch, 0);
    const int64_t* index = OVER_SOURCES ? call.dst_index : call.src_index;
    const int64_t* edge_id = OVER_SOURCES ? call.edge_id_by_src : call.edge_id;
    Block<T, EDGES> block;
    block.n = n;
#pragma GCC unroll 4
    for (int64_t b = 0; b < EDGES; ++b) {
      const int64_t at = e + (b < n ? b : 0), next = index[std::min(at + AHEAD, call.num_edges - 1)];
      block.index[b] = index[at];
      block.edge[b] = edge_id == nullptr ? at : edge_id[at];
      block.x[b] = x + block.index[b] * far.row_stride;
      block.y[b] = y + block.index[b] * far_value.row_stride;
      block.next_x[b] = x + next * far.row_stride;
      block.next_y[b] = y + next * far_value.row_stride;
      if (OVER_SOURCES) prefetch(stats + next * 3 * H, 3 * H);
    }
    return block;
  }

  const A* edge_row(const char* tensor, int64_t batch, int64_t target, int64_t h) const {
    return reinterpret_cast<const A*>(tensor) + ((batch * call.num_dst + target) * H + h) * C;
  }

  // Scores of a block but for scale and bias, and what of edges goes with them.
  template <bool OVER_SOURCES, int64_t EDGES>
  INLINE void score(const Scratch& s, const Block<T, EDGES>& block, int64_t batch) const {
    dots<EDGES>(s.near, s.near_at, block.x, block.next_x, s.far_at, H, D, s.score);
    for (int64_t b = 0; b < (C > 0 ? block.n : 0); ++b) {
      A* attr = s.attr + b * CP;
      widen_any(call.edge_attr, call.edge_attr_dtype, block.edge[b] * C, C, attr);
      for (int64_t h = 0; h < H; ++h)
        s.score[h * EDGES + b] += dot(OVER_SOURCES
                                          ? edge_row(call.query_edge, batch, block.index[b], h)
                                          : s.near_edge + h * CP,
                                      attr, C);
    }
    for (int64_t b = 0; b < (call.bias != nullptr ? block.n : 0); ++b) {
      int64_t at = batch * call.bias_batch_stride + block.edge[b] * H;
      widen_any(call.bias, call.bias_dtype, at, H, s.by_head);
      for (int64_t h = 0; h < H; ++h) s.bias[h * EDGES + b] = s.by_head[h];
    }
    if (call.dropout > 0) draw<EDGES>(call, block.edge, batch, s.keep);
  }

  // A vector of scores, -inf beyond the edges that there are.
  template <int64_t EDGES>
  INLINE Vec<A> scaled_score(const Scratch& s, int64_t h, int64_t part, int64_t n) const {
    int64_t at = h * EDGES + part * L;
    Vec<A> x = load(s.score + at) * static_cast<A>(call.scale);
    if (call.bias != nullptr) x += load(s.bias + at);
    return among_first<A, EDGES>(n - part * L) ? x : broadcast(A(-INFINITY));
  }

  // Forward ########################################################################################

  // Result of a piece: maximum and sum of exponentials of each head, and the two weighted sums.
  struct Sums {
    A *top, *total, *out, *mixed;
  };

  Sums sums_of(A* result) const {
    return {result, result + HP, result + 2 * HP, result + 2 * HP + H * DVP};
  }

  template <int64_t EDGES>
  INLINE void forward_block(const Scratch& s, const Block<T, EDGES>& block, int64_t batch,
                            bool first) const {
    typedef Layout<A, EDGES> Y;
    Sums sums = sums_of(s.result);
    score<false, EDGES>(s, block, batch);
    for (int64_t h = 0; h < H; h += Y::HEADS) {
      Vec<A> x[Y::PARTS], top;
      for (int64_t part = 0; part < Y::PARTS; ++part) {
        x[part] = scaled_score<EDGES>(s, h, part, block.n);
        top = part == 0 ? x[0] : x[part] > top ? x[part] : top;
      }
      top = group_max<A, EDGES>(top);
      Vec<A> before = {};
      if (!first) {
        before = spread<A, EDGES>(sums.top + h);
        top = top > before ? top : before;
      }
      // Where nothing is allowed the maximum is -inf, and all exponentials zero.
      Vec<A> base = top == -INFINITY ? Vec<A>{} : top, total = {}, factor = {};
      for (int64_t part = 0; part < Y::PARTS; ++part) {
        int64_t at = h * EDGES + part * L;
        x[part] = exponential(x[part] - base);
        total += x[part];
        store(s.score + at, call.dropout > 0 ? x[part] * load(s.keep + at) : x[part]);
      }
      total = group_sum<A, EDGES>(total);
      if (!first) {
        factor = exponential(before - base);
        total += factor * spread<A, EDGES>(sums.total + h);
      }
      collect<A, EDGES>(top, sums.top + h);
      collect<A, EDGES>(total, sums.total + h);
      collect<A, EDGES>(factor, s.factor + h);
    }
    const A* attr[EDGES];
    for (int64_t b = 0; b < EDGES; ++b) attr[b] = s.attr + b * CP;
    for (int64_t h = 0; h < H; ++h) {
      const A* weight = s.score + h * EDGES;
      A* out = sums.out + h * DVP;
      add_rows<1, true>(s.factor[h], &weight, block.y, block.next_y, s.far_value_at[h], block.n,
                        DV, &out);
      add_rows(s.factor[h], weight, attr, 0, block.n, C, sums.mixed + h * CP);
    }
  }

  // The row at the near end that comes after the next one.
  static void prefetch_next(const Rows& rows, int64_t batch, int64_t row, int64_t count,
                            int64_t size) {
    if (row + 2 < count) prefetch(row_of<T>(rows, batch, row + 2), size);
  }

  void load_target(const Scratch& s, int64_t batch, int64_t i) const {
    const T* q = row_of<T>(call.query, batch, i);
    prefetch_next(call.query, batch, i, call.num_dst, H * D);
    for (int64_t h = 0; h < H; ++h) widen_row(q + h * D, D, s.near + h * DP);
    for (int64_t h = 0; h < (C > 0 ? H : 0); ++h)
      widen_row(edge_row(call.query_edge, batch, i, h), C, s.near_edge + h * CP);
  }

  void forward_piece(const Scratch& s, int64_t batch, int64_t i, int64_t begin,
                     int64_t end) const {
    load_target(s, batch, i);
    visit_blocks<false>(batch, begin, end, nullptr, [&](const auto& block, bool first) {
      forward_block<std::decay_t<decltype(block)>::SIZE>(s, block, batch, first);
    });
  }

  void forward_merge(A* into, A* from) const {
    Sums a = sums_of(into), b = sums_of(from);
    for (int64_t h = 0; h < H; ++h) {
      A top = b.top[h] > a.top[h] ? b.top[h] : a.top[h], base = top == -INFINITY ? A(0) : top;
      A x = exponential(broadcast(a.top[h] - base))[0], y = exponential(broadcast(b.top[h] - base))[0];
      a.top[h] = top;
      a.total[h] = a.total[h] * x + b.total[h] * y;
      for (int64_t d = h * DVP; d < (h + 1) * DVP; ++d) a.out[d] = a.out[d] * x + b.out[d] * y;
      for (int64_t c = h * CP; c < (h + 1) * CP; ++c) a.mixed[c] = a.mixed[c] * x + b.mixed[c] * y;
    }
  }

  void forward_finish(int64_t batch, int64_t i, A* result) const {
    const int64_t place = (batch * call.num_dst + i) * H;
    T* out = reinterpret_cast<T*>(call.out) + place * DV;
    A* mixed = reinterpret_cast<A*>(call.mixed) + place * C;
    A *top = reinterpret_cast<A*>(call.softmax) + 2 * place, *inverse = top + H;
    if (result == nullptr) {
      std::memset(static_cast<void*>(out), 0, H * DV * sizeof(T));
      std::fill_n(mixed, H * C, A(0));
      std::fill_n(top, 2 * H, A(0));
      return;
    }
    Sums sums = sums_of(result);
    for (int64_t h = 0; h < H; ++h) {
      top[h] = sums.top[h] == -INFINITY ? A(0) : sums.top[h];
      inverse[h] = sums.total[h] == 0 ? A(0) : 1 / sums.total[h];
      narrow_row(sums.out + h * DVP, DV, inverse[h], out + h * DV);
      for (int64_t c = 0; c < C; ++c) mixed[h * C + c] = sums.mixed[h * CP + c] * inverse[h];
    }
  }

  int forward() const {
    ask_for_huge_pages(call.out, call.batch * call.num_dst * H * DV * int64_t(sizeof(T)));
    int status = run(
        false, 2 * HP + H * (DVP + CP),
        [&](const Scratch& s, int64_t batch, int64_t i, int64_t begin, int64_t end) {
          forward_piece(s, batch, i, begin, end);
        },
        [&](A* into, A* from) { forward_merge(into, from); },
        [&](int64_t batch, int64_t i, A* result) { forward_finish(batch, i, result); });
    if (status != DONE || call.weights == nullptr) return status;
    return run(
        false, 0,
        [&](const Scratch& s, int64_t batch, int64_t i, int64_t begin, int64_t end) {
          weights_piece(s, batch, i, begin, end);
        },
        [](A*, A*) {}, [](int64_t, int64_t, A*) {});
  }

  // Weights of edges, once the softmax of their targets is known.
  void weights_piece(const Scratch& s, int64_t batch, int64_t i, int64_t begin,
                     int64_t end) const {
    load_target(s, batch, i);
    load_softmax(s, batch, i);
    visit_blocks<false>(batch, begin, end, nullptr, [&](const auto& block, bool) {
      constexpr int64_t EDGES = std::decay_t<decltype(block)>::SIZE;
      typedef Layout<A, EDGES> Y;
      score<false, EDGES>(s, block, batch);
      for (int64_t h = 0; h < H; h += Y::HEADS)
        for (int64_t part = 0; part < Y::PARTS; ++part)
          store(s.score + h * EDGES + part * L,
                near_weight<EDGES>(s, h, part, block.n));
      for (int64_t b = 0; b < block.n; ++b) {
        T* to = reinterpret_cast<T*>(call.weights) + (batch * call.num_edges + block.edge[b]) * H;
        for (int64_t h = 0; h < H; ++h) narrow(s.score[h * EDGES + b], to + h);
      }
    });
  }

  void load_softmax(const Scratch& s, int64_t batch, int64_t i) const {
    const A* softmax = reinterpret_cast<const A*>(call.softmax) + 2 * (batch * call.num_dst + i) * H;
    std::copy_n(softmax, H, s.near_top);
    std::copy_n(softmax + H, H, s.near_inverse);
  }

  template <int64_t EDGES>
  INLINE Vec<A> near_weight(const Scratch& s, int64_t h, int64_t part, int64_t n) const {
    return exponential(scaled_score<EDGES>(s, h, part, n) - spread<A, EDGES>(s.near_top + h)) *
           spread<A, EDGES>(s.near_inverse + h);
  }

  // Backward #######################################################################################
  //
  // With weight P and its gradient G = <grad_out, value> + <grad_mixed, edge features>, the gradient
  // of a score is P (G - delta), where delta, the sum of P G over the edges of a target, is found on
  // the way. It needs no output, which low precision would have rounded: the gradient of the query is
  // sum P G K - delta sum P K.

  // G of a block, without dropout.
  template <bool OVER_SOURCES, int64_t EDGES>
  INLINE void slope(const Scratch& s, const Block<T, EDGES>& block, int64_t batch) const {
    dots<EDGES>(s.near_value, s.near_value_at, block.y, block.next_y, s.far_value_at, H, DV,
                s.slope);
    for (int64_t b = 0; b < (call.grad_mixed != nullptr ? block.n : 0); ++b)
      for (int64_t h = 0; h < H; ++h)
        s.slope[h * EDGES + b] += dot(OVER_SOURCES
                                          ? edge_row(call.grad_mixed, batch, block.index[b], h)
                                          : s.near_mixed + h * CP,
                                      s.attr + b * CP, C);
    for (int64_t b = 0; b < (call.grad_weights != nullptr ? block.n : 0); ++b) {
      const T* grad = reinterpret_cast<const T*>(call.grad_weights) +
                      (batch * call.num_edges + block.edge[b]) * H;
      for (int64_t h = 0; h < H; ++h) s.slope[h * EDGES + b] += widen(grad[h]);
    }
  }

  // Result of a piece of a target: delta, sum P G and sum P of the keys, and of the edge features.
  struct TargetSums {
    A *delta, *slope_key, *key, *slope_edge, *edge;
  };

  TargetSums target_sums_of(A* result) const {
    A* key = result + HP;
    return {result, key, key + H * DP, key + 2 * H * DP, key + 2 * H * DP + H * CP};
  }

  int64_t target_size() const { return HP + 2 * H * (DP + CP); }

  void target_piece(const Scratch& s, int64_t batch, int64_t i, int64_t begin, int64_t end) const {
    load_target(s, batch, i);
    load_softmax(s, batch, i);
    const T* grad = row_of<T>(call.grad_out, batch, i);
    prefetch_next(call.grad_out, batch, i, call.num_dst, H * DV);
    for (int64_t h = 0; h < H; ++h) widen_row(grad + h * DV, DV, s.near_value + h * DVP);
    for (int64_t h = 0; h < (call.grad_mixed != nullptr ? H : 0); ++h)
      widen_row(edge_row(call.grad_mixed, batch, i, h), C, s.near_mixed + h * CP);
    TargetSums sums = target_sums_of(s.result);
    std::fill_n(sums.delta, HP, A(0));
    visit_blocks<false>(batch, begin, end, nullptr, [&](const auto& block, bool first) {
      constexpr int64_t EDGES = std::decay_t<decltype(block)>::SIZE;
      typedef Layout<A, EDGES> Y;
      score<false, EDGES>(s, block, batch);
      slope<false, EDGES>(s, block, batch);
      for (int64_t h = 0; h < H; h += Y::HEADS) {
        Vec<A> delta = {};
        for (int64_t part = 0; part < Y::PARTS; ++part) {
          int64_t at = h * EDGES + part * L;
          Vec<A> weight = near_weight<EDGES>(s, h, part, block.n);
          Vec<A> product = weight * load(s.slope + at);
          if (call.dropout > 0) product *= load(s.keep + at);
          product = among_first<A, EDGES>(block.n - part * L) ? product : Vec<A>{};
          delta += product;
          store(s.score + at, weight);
          store(s.slope + at, product);
        }
        delta = group_sum<A, EDGES>(delta) + spread<A, EDGES>(sums.delta + h);
        collect<A, EDGES>(delta, sums.delta + h);
      }
      const A* attr[EDGES];
      for (int64_t b = 0; b < EDGES; ++b) attr[b] = s.attr + b * CP;
      const A factor = first ? 0 : 1;
      for (int64_t h = 0; h < H; ++h) {
        const A* const weights[2] = {s.slope + h * EDGES, s.score + h * EDGES};
        A* const of_key[2] = {sums.slope_key + h * DP, sums.key + h * DP};
        A* const of_edge[2] = {sums.slope_edge + h * CP, sums.edge + h * CP};
        add_rows<2, false>(factor, weights, block.x, block.x, s.far_at[h], block.n, D, of_key);
        add_rows<2, false>(factor, weights, attr, attr, 0, block.n, C, of_edge);
      }
    });
  }

  void target_finish(int64_t batch, int64_t i, A* result, A* stats) const {
    const int64_t place = (batch * call.num_dst + i) * H;
    T* grad_query = reinterpret_cast<T*>(call.grad_query);
    A* grad_edge = reinterpret_cast<A*>(call.grad_query_edge);
    if (result == nullptr) {
      if (grad_query != nullptr)
        std::memset(static_cast<void*>(grad_query + place * D), 0, H * D * sizeof(T));
      if (grad_edge != nullptr) std::fill_n(grad_edge + place * C, H * C, A(0));
      return;
    }
    TargetSums sums = target_sums_of(result);
    std::copy_n(reinterpret_cast<const A*>(call.softmax) + 2 * place, 2 * H, stats + 3 * place);
    std::copy_n(sums.delta, H, stats + 3 * place + 2 * H);
    for (int64_t h = 0; h < H; ++h) {
      const A delta = sums.delta[h], scale = static_cast<A>(call.scale);
      A *slope_key = sums.slope_key + h * DP, *key = sums.key + h * DP;
      for (int64_t d = 0; d < (grad_query != nullptr ? DP : 0); ++d)
        slope_key[d] -= delta * key[d];
      if (grad_query != nullptr) narrow_row(slope_key, D, scale, grad_query + (place + h) * D);
      for (int64_t c = 0; c < (grad_edge != nullptr ? C : 0); ++c)
        grad_edge[(place + h) * C + c] =
            scale * (sums.slope_edge[h * CP + c] - delta * sums.edge[h * CP + c]);
    }
  }

  void source_piece(const Scratch& s, int64_t batch, int64_t j, int64_t begin, int64_t end,
                    const A* stats) const {
    const int64_t key_heads = call.key_heads;
    const T *k = row_of<T>(call.key, batch, j), *v = row_of<T>(call.value, batch, j);
    prefetch_next(call.key, batch, j, call.num_src, key_heads * D);
    prefetch_next(call.value, batch, j, call.num_src, key_heads * DV);
    for (int64_t h = 0; h < key_heads; ++h) {
      widen_row(k + h * D, D, s.near + h * DP);
      widen_row(v + h * DV, DV, s.near_value + h * DVP);
    }
    A *grad_key = s.result, *grad_value = s.result + key_heads * DP;
    stats += 3 * batch * call.num_dst * H;
    visit_blocks<true>(batch, begin, end, stats, [&](const auto& block, bool first) {
      constexpr int64_t EDGES = std::decay_t<decltype(block)>::SIZE;
      typedef Layout<A, EDGES> Y;
      for (int64_t b = 0; b < EDGES; ++b) {
        const A* of_target = stats + 3 * block.index[b] * H;
        for (int64_t h = 0; h < H; ++h) {
          s.top[h * EDGES + b] = of_target[h];
          s.inverse[h * EDGES + b] = of_target[H + h];
          s.delta[h * EDGES + b] = of_target[2 * H + h];
        }
      }
      score<true, EDGES>(s, block, batch);
      slope<true, EDGES>(s, block, batch);
      for (int64_t h = 0; h < H; h += Y::HEADS)
        for (int64_t part = 0; part < Y::PARTS; ++part) {
          int64_t at = h * EDGES + part * L;
          Vec<A> weight = exponential(scaled_score<EDGES>(s, h, part, block.n) - load(s.top + at)) *
                          load(s.inverse + at);
          Vec<A> grad = load(s.slope + at), used = weight;
          if (call.dropout > 0) {
            grad *= load(s.keep + at);
            used *= load(s.keep + at);
          }
          store(s.slope + at, weight * (grad - load(s.delta + at)));
          store(s.score + at, used);
        }
      for (int64_t h = 0; h < H; ++h) {
        const A factor = first && h % G == 0 ? 0 : 1;
        add_rows(factor, s.slope + h * EDGES, block.x, s.far_at[h], block.n, D,
                 grad_key + s.near_at[h]);
        add_rows(factor, s.score + h * EDGES, block.y, s.far_value_at[h], block.n, DV,
                 grad_value + s.near_value_at[h]);
      }
      if (call.grad_bias != nullptr || call.grad_edge_attr != nullptr)
        write_edges<EDGES>(s, block, batch);
    });
  }

  // Gradients of what belongs to edges; one thread has all of the batch of an edge.
  template <int64_t EDGES>
  void write_edges(const Scratch& s, const Block<T, EDGES>& block, int64_t batch) const {
    A* grad_bias = reinterpret_cast<A*>(call.grad_bias);
    A* grad_attr = reinterpret_cast<A*>(call.grad_edge_attr);
    const bool add_bias = batch > 0 && call.bias_batch_stride == 0;
    for (int64_t b = 0; b < block.n; ++b) {
      int64_t at = batch * call.bias_batch_stride + block.edge[b] * H;
      for (int64_t h = 0; h < (grad_bias != nullptr ? H : 0); ++h)
        grad_bias[at + h] = s.slope[h * EDGES + b] + (add_bias ? grad_bias[at + h] : 0);
      if (grad_attr == nullptr) continue;
      A* to = grad_attr + block.edge[b] * C;
      if (batch == 0) std::fill_n(to, C, A(0));
      for (int64_t h = 0; h < H; ++h) {
        const A* q = edge_row(call.query_edge, batch, block.index[b], h);
        const A slope = s.slope[h * EDGES + b] * static_cast<A>(call.scale);
        for (int64_t c = 0; c < C; ++c) to[c] += slope * q[c];
        if (call.grad_mixed == nullptr) continue;
        const A* m = edge_row(call.grad_mixed, batch, block.index[b], h);
        const A weight = s.score[h * EDGES + b];
        for (int64_t c = 0; c < C; ++c) to[c] += weight * m[c];
      }
    }
  }

  void source_finish(int64_t batch, int64_t j, A* result) const {
    const int64_t key_heads = call.key_heads, place = (batch * call.num_src + j) * key_heads;
    T* grad_key = reinterpret_cast<T*>(call.grad_key);
    T* grad_value = reinterpret_cast<T*>(call.grad_value);
    for (int64_t h = 0; h < key_heads; ++h) {
      if (grad_key != nullptr && result != nullptr)
        narrow_row(result + h * DP, D, static_cast<A>(call.scale), grad_key + (place + h) * D);
      else if (grad_key != nullptr)
        std::memset(static_cast<void*>(grad_key + (place + h) * D), 0, D * sizeof(T));
      if (grad_value != nullptr && result != nullptr)
        narrow_row(result + key_heads * DP + h * DVP, DV, A(1), grad_value + (place + h) * DV);
      else if (grad_value != nullptr)
        std::memset(static_cast<void*>(grad_value + (place + h) * DV), 0, DV * sizeof(T));
    }
  }

  static void add(A* into, const A* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) into[i] += from[i];
  }

  int backward() const {
    const int64_t rows = call.batch * call.num_dst * H, size = call.key_heads * (DP + DVP);
    ask_for_huge_pages(call.grad_query, rows * D * int64_t(sizeof(T)));
    const int64_t key_rows = call.batch * call.num_src * call.key_heads;
    ask_for_huge_pages(call.grad_key, key_rows * D * int64_t(sizeof(T)));
    ask_for_huge_pages(call.grad_value, key_rows * DV * int64_t(sizeof(T)));
    // [batch, num_dst, 3, heads]: softmax and delta, side by side for the pass over sources.
    std::unique_ptr<A, Free> memory(static_cast<A*>(std::malloc(3 * rows * sizeof(A) + 1)));
    A* stats = memory.get();
    if (stats == nullptr) return OUT_OF_MEMORY;
    int status = run(
        false, target_size(),
        [&](const Scratch& s, int64_t batch, int64_t i, int64_t begin, int64_t end) {
          target_piece(s, batch, i, begin, end);
        },
        [&](A* into, A* from) { add(into, from, target_size()); },
        [&](int64_t batch, int64_t i, A* result) { target_finish(batch, i, result, stats); });
    if (status != DONE || call.src_ptr == nullptr) return status;
    return run(
        true, size,
        [&](const Scratch& s, int64_t batch, int64_t j, int64_t begin, int64_t end) {
          source_piece(s, batch, j, begin, end, stats);
        },
        [&](A* into, A* from) { add(into, from, size); },
        [&](int64_t batch, int64_t j, A* result) { source_finish(batch, j, result); });
  }
};

template <class T>
int forward(const Attention& call) {
  return Pass<T>(call).forward();
}

template <class T>
int backward(const Attention& call) {
  return Pass<T>(call).backward();
}

const Kernels kernels = {
    {forward<float>, forward<double>, forward<Bfloat16>, forward<Float16>},
    {backward<float>, backward<double>, backward<Bfloat16>, backward<Float16>}};

}  // namespace GRAPHATTN_ISA
}  // namespace

#endif
