// The kernels of one instruction set: cpu.cpp includes this file once for each, after
// cpu_vectors.hpp.

namespace {
namespace GRAPHATTN_ISA {

// Blocks of edges
//
// Numbers of a block are laid out [heads, EDGES] with EDGES 4, 8 or 16, so that a vector holds the
// edges of one head, or of several heads where edges are few.

// Asks for the rows that come next, one row after the other and line by line, a few lines along
// with each load of what is at hand: spread out like this they never keep those loads waiting.
template <class T, int64_t EDGES>
class Ahead {
 public:
  // EDGES rows of `length` numbers.
  INLINE Ahead(const T* const* rows, int64_t length)
      : first(rows), row(rows), length(length), at(*rows), end(*rows + length) {}

  INLINE void ask(int64_t n) {
    for (int64_t byte = 0; byte < n * int64_t(sizeof(T)); byte += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(at) + byte);
    at += n;
    if (at < end) return;
    if (++row == first + EDGES) row = first;
    at = *row;
    end = at + length;
  }

 private:
  const T *const *first, *const *row;
  const int64_t length;
  const T *at, *end;
};

struct NothingAhead {
  INLINE void ask(int64_t) {}
};

template <class A, int64_t EDGES>
struct Layout {
  static constexpr int64_t LANES = Vectors<A>::LANES;
  static constexpr int64_t HEADS = LANES > EDGES ? LANES / EDGES : 1;  // of a vector
  static constexpr int64_t PARTS = EDGES > LANES ? EDGES / LANES : 1;  // vectors of a head
  static constexpr int64_t GROUP = EDGES > LANES ? LANES : EDGES;
};

// to[h, b] = <own[h], rows[b][h]>. VECTORS: the dim in vectors, 0 when it is another.
template <int64_t EDGES, int64_t VECTORS, class A, class T>
INLINE void dot_heads(const A* own, const int64_t* own_at, const T* const* rows,
                      Ahead<T, EDGES> next, const int64_t* row_at, int64_t heads, int64_t dim,
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
            const T* row = rows[part * L + b] + row_at[head];
            Vec<A> sum = left[0] * load(row);
            for (int64_t v = 1; v < VECTORS; ++v) sum += left[v] * load(row + v * L);
            next.ask(VECTORS * L);
            product[i * Y::GROUP + b] = sum;
          }
        } else {
          for (int64_t b = 0; b < Y::GROUP; ++b) {
            const T* row = rows[part * L + b] + row_at[head];
            Vec<A> sum = {};
            int64_t d = 0;
            for (; d + L <= dim; d += L) sum += load(mine + d) * load(row + d);
            if (d < dim) sum += load(mine + d) * load_first(row + d, dim - d);
            next.ask(dim);
            product[i * Y::GROUP + b] = sum;
          }
        }
      }
      store(to + h * EDGES + part * L, sum_each<A>(product));
    }
  }
}

template <int64_t EDGES, class A, class T>
INLINE void dots(const A* own, const int64_t* own_at, const T* const* rows, Ahead<T, EDGES> next,
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
// vectors of it. The first time, there is nothing in sums yet.
template <int64_t COUNT, int64_t VECTORS, class A, class T, class Next>
INLINE void add_columns(bool first, A factor, const A* const* weight, const T* const* rows,
                        Next& next, int64_t offset, int64_t n, A* const* sums, int64_t at) {
  constexpr int64_t L = Vectors<A>::LANES;
  Vec<A> sum[COUNT][VECTORS] = {};
  if (!first)
    for (int64_t i = 0; i < COUNT; ++i)
      for (int64_t v = 0; v < VECTORS; ++v) sum[i][v] = load(sums[i] + at + v * L) * factor;
#pragma GCC unroll 4
  for (int64_t b = 0; b < n; ++b) {
    const T* row = rows[b] + offset + at;
    for (int64_t v = 0; v < VECTORS; ++v) {
      Vec<A> x = load(row + v * L);
      for (int64_t i = 0; i < COUNT; ++i) sum[i][v] += weight[i][b] * x;
    }
    next.ask(VECTORS * L);
  }
  for (int64_t i = 0; i < COUNT; ++i)
    for (int64_t v = 0; v < VECTORS; ++v) store(sums[i] + at + v * L, sum[i][v]);
}

template <int64_t COUNT, class A, class T, class Next>
INLINE void add_rows(bool first, A factor, const A* const* weight, const T* const* rows, Next& next,
                     int64_t offset, int64_t n, int64_t dim, A* const* sums) {
  constexpr int64_t L = Vectors<A>::LANES;
  int64_t d = 0;
  for (; d + 4 * L <= dim; d += 4 * L)
    add_columns<COUNT, 4>(first, factor, weight, rows, next, offset, n, sums, d);
  for (; d + 2 * L <= dim; d += 2 * L)
    add_columns<COUNT, 2>(first, factor, weight, rows, next, offset, n, sums, d);
  for (; d + L <= dim; d += L)
    add_columns<COUNT, 1>(first, factor, weight, rows, next, offset, n, sums, d);
  if (d == dim) return;
  for (int64_t i = 0; i < COUNT; ++i) {
    Vec<A> sum = {};
    if (!first) sum = load(sums[i] + d) * factor;
    for (int64_t b = 0; b < n; ++b) {
      sum += weight[i][b] * load_first(rows[b] + offset + d, dim - d);
      next.ask(dim - d);
    }
    store(sums[i] + d, sum);
  }
}

template <class A, class T>
INLINE void add_rows(bool first, A factor, const A* weight, const T* const* rows, int64_t offset,
                     int64_t n, int64_t dim, A* sums) {
  NothingAhead none;
  add_rows<1, A, T>(first, factor, &weight, rows, none, offset, n, dim, &sums);
}

// to[k, b] = from[b][k] for k < n. Goes on to a multiple of 4, in what it reads and writes.
template <int64_t EDGES, class A>
INLINE void transpose(const A* const* from, int64_t n, A* to) {
  for (int64_t k = 0; k < n; k += 4)
    for (int64_t b = 0; b < EDGES; b += 4)
      for (int64_t i = 0; i < 4; ++i)
        for (int64_t j = 0; j < 4; ++j) to[(k + i) * EDGES + b + j] = from[b + j][k + i];
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

// Dropout

// Philox-4x32-7 as in graphattn/dropout.py: counter (edge, group of four heads, batch), key the
// seed. keep[h, b]: 1 / (1 - p) where the weight is kept, else zero.
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

// Passes

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

// The edges of a block and the rows at their far ends; what is beyond the first n repeats the
// first. The next rows are those of the edges AHEAD of these.
template <class T, int64_t EDGES>
struct Block {
  static constexpr int64_t SIZE = EDGES;
  int64_t n;
  // Written as vectors and read one by one: where a vector crossed two lines of the cache, the
  // reads would wait until it has left the store buffer.
  alignas(64) int64_t index[EDGES];
  alignas(64) int64_t edge[EDGES];
  alignas(64) const T* x[EDGES];
  alignas(64) const T* y[EDGES];
  alignas(64) const T* next_x[EDGES];
  alignas(64) const T* next_y[EDGES];
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

  // Of whole results, the gradients being as large as what they are of.
  int64_t out_bytes() const { return call.batch * call.num_dst * H * DV * int64_t(sizeof(T)); }
  int64_t query_bytes() const { return call.batch * call.num_dst * H * D * int64_t(sizeof(T)); }
  int64_t key_bytes() const { return call.batch * call.num_src * (H / G) * D * int64_t(sizeof(T)); }
  int64_t value_bytes() const {
    return call.batch * call.num_src * (H / G) * DV * int64_t(sizeof(T));
  }

  // What a thread works in. The near end of an edge is the row whose result is made, the far end is
  // gathered: target and source in passes over targets, the other way round in those over sources.
  struct Scratch {
    A *score, *slope, *bias, *keep;                 // [heads, EDGES]
    A* far;                                         // softmax and delta there, [3, heads, EDGES]
    A *near, *near_value;                           // [heads, padded dim]
    A *near_edge, *near_mixed;                      // [heads, padded edge_dim]
    A *by_head, *near_top, *near_inverse, *factor;  // [padded heads]
    A* attr;                                        // [EDGES, padded edge_dim]
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
    s.far = take(3 * HP * BLOCK);
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

  // Runs a pass over targets or sources. piece(scratch, batch, row, begin, end) leaves `size`
  // numbers in scratch.result, merge(into, from) joins those of two pieces, and finish(batch, row,
  // result) writes a row.
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
      fence();
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
      fence();
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
    const Rows& far = OVER_SOURCES ? call.query : call.key;
    const Rows& far_value = OVER_SOURCES ? call.grad_out : call.value;
    const T *x = row_of<T>(far, batch, 0), *y = row_of<T>(far_value, batch, 0);
    const int64_t* index = OVER_SOURCES ? call.dst_index : call.src_index;
    const int64_t* edge_id = OVER_SOURCES ? call.edge_id_by_src : call.edge_id;
    Block<T, EDGES> block;
    block.n = n;
#pragma GCC unroll 4
    for (int64_t b = 0; b < EDGES; ++b) {
      const int64_t at = e + (b < n ? b : 0),
                    next = index[std::min(at + AHEAD, call.num_edges - 1)];
      block.index[b] = index[at];
      block.edge[b] = edge_id == nullptr ? at : edge_id[at];
      block.x[b] = x + block.index[b] * far.row_stride;
      block.y[b] = y + block.index[b] * far_value.row_stride;
      block.next_x[b] = x + next * far.row_stride;
      block.next_y[b] = y + next * far_value.row_stride;
      if (OVER_SOURCES) prefetch(stats + next * 3 * H, 3 * H);
    }
    if (call.bias != nullptr || C > 0)
      for (int64_t b = 0; b < n; ++b)
        prefetch_edge<OVER_SOURCES>(batch, std::min(e + b + AHEAD, call.num_edges - 1));
    return block;
  }

  // What belongs to an edge lies anywhere, in the caller's order.
  template <bool OVER_SOURCES>
  void prefetch_edge(int64_t batch, int64_t at) const {
    const int64_t* edge_id = OVER_SOURCES ? call.edge_id_by_src : call.edge_id;
    const int64_t edge = edge_id == nullptr ? at : edge_id[at];
    const int64_t bias_at = batch * call.bias_batch_stride + edge * H;
    if (call.bias != nullptr)
      prefetch(call.bias + bias_at * bytes_of(call.bias_dtype), H * bytes_of(call.bias_dtype));
    if (C > 0) {
      const int64_t bytes = C * bytes_of(call.edge_attr_dtype);
      prefetch(call.edge_attr + edge * bytes, bytes);
    }
    if (!OVER_SOURCES) return;
    if (call.grad_bias != nullptr) prefetch(reinterpret_cast<A*>(call.grad_bias) + bias_at, H);
    if (call.grad_edge_attr != nullptr)
      prefetch(reinterpret_cast<A*>(call.grad_edge_attr) + edge * C, C);
    if (C > 0) prefetch(edge_row(call.query_edge, batch, call.dst_index[at], 0), H * C);
    if (call.grad_mixed != nullptr)
      prefetch(edge_row(call.grad_mixed, batch, call.dst_index[at], 0), H * C);
  }

  const A* edge_row(const char* tensor, int64_t batch, int64_t target, int64_t h) const {
    return reinterpret_cast<const A*>(tensor) + ((batch * call.num_dst + target) * H + h) * C;
  }

  // Scores of a block but for scale and bias, and what of edges goes with them.
  template <bool OVER_SOURCES, int64_t EDGES>
  INLINE void score(const Scratch& s, const Block<T, EDGES>& block, int64_t batch) const {
    const int64_t far_heads = OVER_SOURCES ? H : call.key_heads;
    Ahead<T, EDGES> next(block.next_x, far_heads * D);
    dots<EDGES>(s.near, s.near_at, block.x, next, s.far_at, H, D, s.score);
    for (int64_t b = 0; b < (C > 0 ? block.n : 0); ++b) {
      A* attr = s.attr + b * CP;
      widen_any(call.edge_attr, call.edge_attr_dtype, block.edge[b] * C, C, attr);
      for (int64_t h = 0; h < H; ++h)
        s.score[h * EDGES + b] +=
            dot(OVER_SOURCES ? edge_row(call.query_edge, batch, block.index[b], h)
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

  // Forward

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
    Ahead<T, EDGES> next(block.next_y, call.key_heads * DV);
    for (int64_t h = 0; h < H; ++h) {
      const A* weight = s.score + h * EDGES;
      A* out = sums.out + h * DVP;
      add_rows<1>(first, s.factor[h], &weight, block.y, next, s.far_value_at[h], block.n, DV, &out);
      add_rows(first, s.factor[h], weight, attr, 0, block.n, C, sums.mixed + h * CP);
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

  void forward_piece(const Scratch& s, int64_t batch, int64_t i, int64_t begin, int64_t end) const {
    load_target(s, batch, i);
    visit_blocks<false>(batch, begin, end, nullptr, [&](const auto& block, bool first) {
      forward_block<std::decay_t<decltype(block)>::SIZE>(s, block, batch, first);
    });
  }

  void forward_merge(A* into, A* from) const {
    Sums a = sums_of(into), b = sums_of(from);
    for (int64_t h = 0; h < H; ++h) {
      A top = b.top[h] > a.top[h] ? b.top[h] : a.top[h], base = top == -INFINITY ? A(0) : top;
      A x = exponential(broadcast(a.top[h] - base))[0],
        y = exponential(broadcast(b.top[h] - base))[0];
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
      if (out != nullptr) std::memset(static_cast<void*>(out), 0, H * DV * sizeof(T));
      std::fill_n(mixed, H * C, A(0));
      std::fill_n(top, 2 * H, A(0));
      return;
    }
    Sums sums = sums_of(result);
    for (int64_t h = 0; h < H; ++h) {
      top[h] = sums.top[h] == -INFINITY ? A(0) : sums.top[h];
      inverse[h] = sums.total[h] == 0 ? A(0) : 1 / sums.total[h];
      narrow_row(sums.out + h * DVP, DV, inverse[h], out + h * DV, out_bytes() > CACHES);
      for (int64_t c = 0; c < C; ++c) mixed[h * C + c] = sums.mixed[h * CP + c] * inverse[h];
    }
  }

  int forward() const {
    ask_for_huge_pages(call.out, out_bytes());
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
  void weights_piece(const Scratch& s, int64_t batch, int64_t i, int64_t begin, int64_t end) const {
    load_target(s, batch, i);
    load_softmax(s, batch, i);
    visit_blocks<false>(batch, begin, end, nullptr, [&](const auto& block, bool) {
      constexpr int64_t EDGES = std::decay_t<decltype(block)>::SIZE;
      typedef Layout<A, EDGES> Y;
      score<false, EDGES>(s, block, batch);
      for (int64_t h = 0; h < H; h += Y::HEADS)
        for (int64_t part = 0; part < Y::PARTS; ++part)
          store(s.score + h * EDGES + part * L, near_weight<EDGES>(s, h, part, block.n));
      for (int64_t b = 0; b < block.n; ++b) {
        T* to = reinterpret_cast<T*>(call.weights) + (batch * call.num_edges + block.edge[b]) * H;
        for (int64_t h = 0; h < H; ++h) narrow(s.score[h * EDGES + b], to + h);
      }
    });
  }

  void load_softmax(const Scratch& s, int64_t batch, int64_t i) const {
    const A* softmax =
        reinterpret_cast<const A*>(call.softmax) + 2 * (batch * call.num_dst + i) * H;
    std::copy_n(softmax, H, s.near_top);
    std::copy_n(softmax + H, H, s.near_inverse);
  }

  template <int64_t EDGES>
  INLINE Vec<A> near_weight(const Scratch& s, int64_t h, int64_t part, int64_t n) const {
    return exponential(scaled_score<EDGES>(s, h, part, n) - spread<A, EDGES>(s.near_top + h)) *
           spread<A, EDGES>(s.near_inverse + h);
  }

  // Backward
  //
  // With weight P and its gradient G = <grad_out, value> + <grad_mixed, edge features>, the
  // gradient of a score is P (G - delta), where delta, the sum of P G over the edges of a target,
  // is found on the way. It needs no output, which low precision would have rounded: the gradient
  // of the query is sum P G K - delta sum P K.

  // G of a block, without dropout.
  template <bool OVER_SOURCES, int64_t EDGES>
  INLINE void slope(const Scratch& s, const Block<T, EDGES>& block, int64_t batch) const {
    const int64_t far_heads = OVER_SOURCES ? H : call.key_heads;
    Ahead<T, EDGES> next(block.next_y, far_heads * DV);
    dots<EDGES>(s.near_value, s.near_value_at, block.y, next, s.far_value_at, H, DV, s.slope);
    for (int64_t b = 0; b < (call.grad_mixed != nullptr ? block.n : 0); ++b)
      for (int64_t h = 0; h < H; ++h)
        s.slope[h * EDGES + b] +=
            dot(OVER_SOURCES ? edge_row(call.grad_mixed, batch, block.index[b], h)
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
      NothingAhead none;
      for (int64_t h = 0; h < H; ++h) {
        const A* const weights[2] = {s.slope + h * EDGES, s.score + h * EDGES};
        A* const of_key[2] = {sums.slope_key + h * DP, sums.key + h * DP};
        A* const of_edge[2] = {sums.slope_edge + h * CP, sums.edge + h * CP};
        add_rows<2>(first, A(1), weights, block.x, none, s.far_at[h], block.n, D, of_key);
        add_rows<2>(first, A(1), weights, attr, none, 0, block.n, C, of_edge);
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
      for (int64_t d = 0; d < (grad_query != nullptr ? DP : 0); ++d) slope_key[d] -= delta * key[d];
      if (grad_query != nullptr)
        narrow_row(slope_key, D, scale, grad_query + (place + h) * D, query_bytes() > CACHES);
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
      alignas(64) const A* of_target[EDGES];
      for (int64_t b = 0; b < EDGES; ++b) of_target[b] = stats + 3 * H * block.index[b];
      transpose<EDGES>(of_target, 3 * H, s.far);
      const A *top = s.far, *inverse = top + H * EDGES, *delta = inverse + H * EDGES;
      score<true, EDGES>(s, block, batch);
      slope<true, EDGES>(s, block, batch);
      for (int64_t h = 0; h < H; h += Y::HEADS)
        for (int64_t part = 0; part < Y::PARTS; ++part) {
          int64_t at = h * EDGES + part * L;
          Vec<A> weight = exponential(scaled_score<EDGES>(s, h, part, block.n) - load(top + at)) *
                          load(inverse + at);
          Vec<A> grad = load(s.slope + at), used = weight;
          if (call.dropout > 0) {
            grad *= load(s.keep + at);
            used *= load(s.keep + at);
          }
          store(s.slope + at, weight * (grad - load(delta + at)));
          store(s.score + at, used);
        }
      for (int64_t h = 0; h < H; ++h) {
        const bool start = first && h % G == 0;
        add_rows(start, A(1), s.slope + h * EDGES, block.x, s.far_at[h], block.n, D,
                 grad_key + s.near_at[h]);
        add_rows(start, A(1), s.score + h * EDGES, block.y, s.far_value_at[h], block.n, DV,
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
        narrow_row(result + h * DP, D, static_cast<A>(call.scale), grad_key + (place + h) * D,
                   key_bytes() > CACHES);
      else if (grad_key != nullptr)
        std::memset(static_cast<void*>(grad_key + (place + h) * D), 0, D * sizeof(T));
      if (grad_value != nullptr && result != nullptr)
        narrow_row(result + key_heads * DP + h * DVP, DV, A(1), grad_value + (place + h) * DV,
                   value_bytes() > CACHES);
      else if (grad_value != nullptr)
        std::memset(static_cast<void*>(grad_value + (place + h) * DV), 0, DV * sizeof(T));
    }
  }

  static void add(A* into, const A* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) into[i] += from[i];
  }

  int backward() const {
    const int64_t rows = call.batch * call.num_dst * H, size = call.key_heads * (DP + DVP);
    ask_for_huge_pages(call.grad_query, query_bytes());
    ask_for_huge_pages(call.grad_key, key_bytes());
    ask_for_huge_pages(call.grad_value, value_bytes());
    // [batch, num_dst, 3, heads]: softmax and delta, side by side for the pass over sources. Some
    // room, because `transpose` reads on.
    std::unique_ptr<A, Free> memory(static_cast<A*>(std::malloc((3 * rows + 4) * sizeof(A))));
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
