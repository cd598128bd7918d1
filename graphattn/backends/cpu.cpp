// Attention along the edges of a graph on CPU: forward, backward, and the sorting of edges.
//
// A plain C interface that Python calls through ctypes. It includes no header of torch, so one
// binary serves every version. `Attention` below is the one argument; cpu.py mirrors it field by
// field.
//
// Every row of a result has one owner, so there are no atomic additions: a pass over targets gives
// the output and the gradient of the query, a pass over sources gives the gradients of key, value
// and what belongs to edges. Scores are computed again in each pass; nothing of the size of edges
// times heads is kept. Rows of more than UNIT edges are cut into pieces, whose results are merged
// in a fixed order. How a row is cut depends on that row alone, and so do its results, bit by bit,
// for any number of threads and whatever else is in the graph.
//
// The kernels are written in vectors of WIDTH floats and compiled once for each instruction set,
// into a namespace of its own. The processor decides when the library is loaded.

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
// Rows of memory are asked for so many bytes of rows before they are used.
constexpr int64_t BYTES_AHEAD = 1 << 15;
// Bytes of a result that no cache holds until it is read: its rows are written past the caches,
// which need not fetch first what is overwritten.
constexpr int64_t CACHES = int64_t(1) << 26;
// Multiplications that are worth a thread of their own.
constexpr int64_t WORK_OF_A_THREAD = 1 << 16;

enum Status { DONE = 0, OUT_OF_MEMORY = 1 };
enum Dtype : int64_t { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

int64_t bytes_of(int64_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// A tensor [batch, nodes, heads, dim]: heads and dim are contiguous, the rest has strides, counted
// in elements.
struct Rows {
  char* data;
  int64_t batch_stride;
  int64_t row_stride;
};

// One call. Tensors along nodes are [batch, nodes, heads, dim], along edges [batch, num_edges,
// heads] in the caller's order. "Wide" is float32, or float64 for float64 inputs; what is not said
// to have another dtype is wide. What is not Rows is contiguous. Null: not given, or not asked for.
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
  // Inputs along edges, each in its own dtype: bias, and edge_attr [num_edges, edge_dim]. A bias
  // that all of the batch shares has batch stride 0.
  const char *bias, *edge_attr;
  int64_t bias_dtype, bias_batch_stride, edge_attr_dtype;
  // [batch, num_dst, heads, edge_dim]: what each target multiplies edge_attr with.
  const char* query_edge;
  // Results: out and weights in `dtype`; mixed, the weighted sum of edge_attr, shaped as
  // query_edge; softmax [batch, num_dst, 2, heads], the largest score and the reciprocal of the sum
  // of exponentials. Their one logarithm could not tell scores of 1e5 apart.
  char *out, *weights, *mixed, *softmax;
  // Backward: gradients of the results, the first two in `dtype`.
  Rows grad_out;
  const char *grad_weights, *grad_mixed;
  // Backward: gradients of the inputs, the first three in `dtype`. grad_bias has one batch where
  // the bias has.
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
#pragma omp parallel for schedule(dynamic, 1) \
    num_threads(static_cast<int>(std::min(threads, units)))
    for (int64_t unit = 0; unit < units; ++unit) body(unit);
    return;
  }
#endif
  (void)threads;
  for (int64_t unit = 0; unit < units; ++unit) body(unit);
}

// Units of work over rows and their edges. Row r takes the positions from ptr[r] + r to
// ptr[r + 1] + r, and unit u the rows that start at the positions from u * UNIT on. Of a row that
// is cut, piece k goes to the k-th unit after its own, where the row itself takes the positions.
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

// The kernel of this system may back them by pages of 2 MiB: fresh pages of 4 KiB cost more than
// what is written to them.
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

// Sorting

// Stable counting sort of `count` edges by key(e) < rows. Fills ptr [rows + 1]; put =
// put_from(first) is told the place of each edge from `first` on, put(e, place).
template <class Key, class PutFrom>
int counting_sort(int64_t count, int64_t rows, int64_t threads, int64_t* ptr, Key key,
                  PutFrom put_from) {
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
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#include "cpu_vectors.hpp"
#include "cpu_passes.hpp"
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
#include "cpu_vectors.hpp"
#include "cpu_passes.hpp"
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
#include "cpu_vectors.hpp"
#include "cpu_passes.hpp"
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

EXPORT int graphattn_forward(const Attention* call) {
  return kernels().forward[call->dtype](*call);
}

EXPORT int graphattn_backward(const Attention* call) {
  return kernels().backward[call->dtype](*call);
}

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

// From by-target arrays to by-source ones. A null edge_id says that the caller's order is by
// target.
EXPORT int graphattn_sort_by_source(int64_t num_edges, int64_t num_dst, int64_t num_src,
                                    int64_t threads, const int64_t* dst_ptr,
                                    const int64_t* src_index, const int64_t* edge_id,
                                    int64_t* src_ptr, int64_t* dst_index, int64_t* edge_id_by_src) {
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
