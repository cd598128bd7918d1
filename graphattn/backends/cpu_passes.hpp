// The kernels of one instruction set: cpu.cpp includes this file once for each, after
// cpu_vectors.hpp.

namespace {
namespace GRAPHATTN_ISA {

// Blocks of edges
//
// Numbers of a block are laid out [edges, heads], the heads filled up to a power of two, or to
// whole vectors. So a vector holds all heads of some edges, or LANES heads of one edge, and the
// rows of edges are read from one end to the other. GROUP: the heads of a vector.

#define NOINLINE __attribute__((noinline))

// Asks for a row that is needed soon. It goes to the second cache, which waits for more lines at a
// time than the first, and comes after the loads of what is at hand, which would wait behind it.
// A function that only prefetches has to be inline: its calls have no effect that the compiler
// knows of, and are left out.
template <class T>
INLINE void prefetch(const T* row, int64_t n) {
  const char *p = reinterpret_cast<const char*>(row), *end = reinterpret_cast<const char*>(row + n);
  for (; p < end; p += 64) __builtin_prefetch(p, 0, 2);
  if (n * sizeof(T) % 64 != 0) __builtin_prefetch(end - 1, 0, 2);
}

// Loads that come before it in the code come before it in the program.
INLINE void loads_done() { asm volatile("" ::: "memory"); }

// The edges of a block, from `begin` on in the order of the pass: the nodes at their far ends, and
// those of edges that come some edges later.
struct Block {
  int64_t begin, n;
  const int64_t *index, *next;
  const int64_t* edge_id;

  // The place of an edge in the caller's order.
  INLINE int64_t edge(int64_t b) const {
    return edge_id == nullptr ? begin + b : edge_id[begin + b];
  }
};

// Rows at the far ends of edges, and the place of each head in a row. No places: the heads follow
// each other.
template <class T>
struct FarRows {
  const T* base;
  int64_t stride, size;  // of a row in memory, and of what it holds
  const int64_t *index, *next;
  const int64_t* places;

  INLINE const T* row(int64_t b) const { return base + index[b] * stride; }
  INLINE const T* next_row(int64_t b) const { return base + next[b] * stride; }

  INLINE FarRows from(int64_t h, int64_t dim) const {
    FarRows rest = *this;
    if (places == nullptr)
      rest.base += h * dim;
    else
      rest.places += h;
    return rest;
  }

  // One head only, without its first d elements.
  INLINE FarRows one(int64_t h, int64_t dim, int64_t d = 0) const {
    return {
        base + (places == nullptr ? h * dim : places[h]) + d, stride, dim, index, next, nullptr};
  }
};

// Edges and heads that there are in a block, and heads as they are laid out.
struct Extent {
  int64_t edges, heads, stride;
};

// Whether blocks are filled up with edges to whole vectors: where that is one edge at most, it is
// worth no branch.
template <class A, int64_t GROUP>
constexpr bool FILLED = 2 * GROUP >= Vectors<A>::LANES;

// <own[h], row of edge b at h> in the lanes that number [b, h] of the block has; beyond the edges
// that there are, of the first edge. VECTORS: the dim in vectors, 0 when it is another.
template <int64_t GROUP, int64_t VECTORS, bool PLACES, class A, class T>
NOINLINE void dot_heads(const A* own, FarRows<T> far, Extent extent, int64_t dim, A* to) {
  constexpr int64_t L = Vectors<A>::LANES;
  const int64_t DIM = VECTORS > 0 ? VECTORS * L : dim, padded = round_up(DIM, L);
  for (int64_t b = 0; b < extent.edges; b += L / GROUP) {
    for (int64_t h = 0; h < extent.stride; h += GROUP) {
      Vec<A> product[L];
#pragma GCC unroll 16
      for (int64_t i = 0; i < L; ++i) {
        const int64_t head = (GROUP < L ? 0 : h) + i % GROUP;
        const bool there = b + i / GROUP < extent.edges;
        Vec<A> sum = {};
        if ((!FILLED<A, GROUP> && !there) || (PLACES && head >= extent.heads)) {
          product[i] = sum;
          continue;
        }
        const int64_t edge = there ? b + i / GROUP : 0;
        const T* row = far.row(edge) + (PLACES ? far.places[head] : head * DIM);
        const A* mine = own + head * padded;
        if constexpr (VECTORS > 0) {
          for (int64_t v = 0; v < VECTORS; ++v) sum += load(mine + v * L) * load(row + v * L);
        } else {
          int64_t d = 0;
          for (; d + L <= dim; d += L) sum += load(mine + d) * load(row + d);
          if (d < dim) sum += load(mine + d) * load_first(row + d, dim - d);
        }
        product[i] = sum;
      }
      store(to + b * extent.stride + h, sum_each<A>(product));
      loads_done();
      for (int64_t i = 0; i < L / GROUP; ++i) {
        if (b + i >= extent.edges) break;
        const T* row = far.next_row(b + i);
        if (!PLACES)
          prefetch(row + h * DIM, GROUP * DIM);
        else if (h == 0)
          prefetch(row, far.size);
      }
    }
  }
}

template <int64_t GROUP, int64_t VECTORS, class A, class T>
INLINE void dot_dims(const A* own, const FarRows<T>& far, const Extent& extent, int64_t dim,
                     A* to) {
  if (far.places == nullptr)
    dot_heads<GROUP, VECTORS, false>(own, far, extent, dim, to);
  else
    dot_heads<GROUP, VECTORS, true>(own, far, extent, dim, to);
}

template <int64_t GROUP, class A, class T>
INLINE void dots(const A* own, const FarRows<T>& far, const Extent& extent, int64_t dim, A* to) {
  constexpr int64_t L = Vectors<A>::LANES;
  if (dim == L)
    dot_dims<GROUP, 1>(own, far, extent, dim, to);
  else if (dim == 2 * L)
    dot_dims<GROUP, 2>(own, far, extent, dim, to);
  else if (dim == 4 * L)
    dot_dims<GROUP, 4>(own, far, extent, dim, to);
  else
    dot_dims<GROUP, 0>(own, far, extent, dim, to);
}

// What weighted rows of the n edges of a block are added to: for COUNT sets of weights [edges,
// heads], whose edges lie `stride` apart, sums[h] = sums[h] * factor[h] + sum_b weight[b, h] *
// row[b, h]. The first time, there is nothing in the sums yet. No factor: 1.
template <int64_t COUNT, class A>
struct Weighted {
  bool first;
  const A* factor;
  const A* weights[COUNT];
  int64_t stride, n;
  A* sums[COUNT];  // [heads, padded dim]
  int64_t padded;

  // From head h on.
  INLINE Weighted from(int64_t h) const {
    Weighted rest = *this;
    if (factor != nullptr) rest.factor += h;
    for (int64_t i = 0; i < COUNT; ++i) {
      rest.weights[i] += h;
      rest.sums[i] += h * padded;
    }
    return rest;
  }

  // Without the first d elements.
  INLINE Weighted past(int64_t d) const {
    Weighted rest = *this;
    for (int64_t i = 0; i < COUNT; ++i) rest.sums[i] += d;
    return rest;
  }
};

// HEADS heads, VECTORS vectors of each: as much as there are registers for.
template <int64_t VECTORS, int64_t HEADS, bool NEXT, bool PLACES, int64_t COUNT, class A, class T>
NOINLINE void add_tile(Weighted<COUNT, A> to, FarRows<T> far) {
  constexpr int64_t L = Vectors<A>::LANES, DIM = VECTORS * L;
  Vec<A> sum[COUNT][HEADS][VECTORS] = {};
  if (!to.first)
    for (int64_t i = 0; i < COUNT; ++i)
      for (int64_t h = 0; h < HEADS; ++h)
        for (int64_t v = 0; v < VECTORS; ++v) {
          sum[i][h][v] = load(to.sums[i] + h * DIM + v * L);
          if (to.factor != nullptr) sum[i][h][v] *= to.factor[h];
        }
  for (int64_t b = 0; b < to.n; ++b) {
    const T* row = far.row(b);
#pragma GCC unroll 16
    for (int64_t h = 0; h < HEADS; ++h) {
      const int64_t head_at = PLACES ? far.places[h] : h * DIM;
      for (int64_t v = 0; v < VECTORS; ++v) {
        Vec<A> x = load(row + head_at + v * L);
        for (int64_t i = 0; i < COUNT; ++i) sum[i][h][v] += to.weights[i][b * to.stride + h] * x;
      }
    }
    if (!NEXT) continue;
    loads_done();
    if (!PLACES) prefetch(far.next_row(b), HEADS * DIM);
    for (int64_t h = 0; h < (PLACES ? HEADS : 0); ++h)
      prefetch(far.next_row(b) + far.places[h], DIM);
  }
  for (int64_t i = 0; i < COUNT; ++i)
    for (int64_t h = 0; h < HEADS; ++h)
      for (int64_t v = 0; v < VECTORS; ++v) store(to.sums[i] + h * DIM + v * L, sum[i][h][v]);
}

template <int64_t VECTORS, int64_t HEADS, bool NEXT, int64_t COUNT, class A, class T>
INLINE void add_heads(const Weighted<COUNT, A>& to, const FarRows<T>& far, int64_t h,
                      int64_t heads) {
  const int64_t dim = VECTORS * Vectors<A>::LANES;
  for (; h + HEADS <= heads; h += HEADS)
    if (HEADS > 1 && far.places != nullptr)
      add_tile<VECTORS, HEADS, NEXT, true>(to.from(h), far.from(h, dim));
    else
      add_tile<VECTORS, HEADS, NEXT, false>(to.from(h), far.one(h, dim));
  if constexpr (HEADS > 1)
    if (h < heads) add_heads<VECTORS, HEADS / 2, NEXT>(to, far, h, heads);
}

template <bool NEXT, int64_t COUNT, class A, class T>
INLINE void add_rows(const Weighted<COUNT, A>& to, const FarRows<T>& far, int64_t heads,
                     int64_t dim) {
  constexpr int64_t L = Vectors<A>::LANES, REGISTERS = (WIDTH == 16 ? 16 : 8) / COUNT;
  if (dim == L) return add_heads<1, REGISTERS, NEXT>(to, far, 0, heads);
  if (dim == 2 * L) return add_heads<2, REGISTERS / 2, NEXT>(to, far, 0, heads);
  if (dim == 4 * L) return add_heads<4, REGISTERS / 4, NEXT>(to, far, 0, heads);
  for (int64_t h = 0; h < heads; ++h) {
    const Weighted<COUNT, A> of_head = to.from(h);
    int64_t d = 0;
    for (; d + 4 * L <= dim; d += 4 * L)
      add_tile<4, 1, NEXT, false>(of_head.past(d), far.one(h, dim, d));
    for (; d + L <= dim; d += L) add_tile<1, 1, NEXT, false>(of_head.past(d), far.one(h, dim, d));
    const FarRows<T> rest = far.one(h, dim, d);
    for (int64_t i = 0; i < (d < dim ? COUNT : 0); ++i) {
      Vec<A> sum = {};
      if (!to.first) sum = load(of_head.sums[i] + d) * (to.factor == nullptr ? A(1) : to.factor[h]);
      for (int64_t b = 0; b < to.n; ++b) {
        sum += of_head.weights[i][b * to.stride] * load_first(rest.row(b), dim - d);
        if (NEXT) prefetch(rest.next_row(b), dim - d);
      }
      store(of_head.sums[i] + d, sum);
    }
  }
}

// Lanes whose edge is one of the first n of their vector.
template <class A, int64_t GROUP>
INLINE typename Vectors<A>::Integer among_first(int64_t n) {
  typedef typename Vectors<A>::Integer Integer;
  Integer edge;
  for (int64_t i = 0; i < Vectors<A>::LANES; ++i) edge[i] = i / GROUP;
  return edge < (Integer{} + static_cast<decltype(edge[0] + 0)>(n));
}

// Dropout

// Philox-4x32-7 as in graphattn/dropout.py: counter (edge, group of four heads, batch), key the
// seed. keep[b, h]: 1 / (1 - p) where the weight is kept, else zero.
template <class A>
void draw(const Attention& call, const Block& block, int64_t batch, int64_t stride, A* keep) {
  const uint64_t threshold = static_cast<uint64_t>(std::nearbyint(call.dropout * 4294967296.0));
  const A kept = call.dropout < 1.0 ? static_cast<A>(1.0 / (1.0 - call.dropout)) : A(0);
  const uint64_t seed = static_cast<uint64_t>(call.seed);
  for (int64_t group = 0; group * 4 < call.heads; ++group) {
    for (int64_t first = 0; first < block.n; first += WIDTH) {
      const int64_t count = std::min<int64_t>(WIDTH, block.n - first);
      Long c[4] = {};
      for (int64_t b = 0; b < count; ++b) {
        const uint64_t edge = static_cast<uint64_t>(block.edge(first + b));
        c[0][b] = edge & 0xffffffff;
        c[1][b] = edge >> 32;
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
        for (int64_t b = 0; b < count; ++b)
          keep[(first + b) * stride + h] = c[i][b] >= threshold ? kept : A(0);
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
  return fold_sum<A, 1>(sum)[0];
}

// Passes

template <class T>
INLINE const T* row_of(const Rows& rows, int64_t batch, int64_t index) {
  return reinterpret_cast<const T*>(rows.data) + batch * rows.batch_stride +
         index * rows.row_stride;
}

template <class T>
struct Pass {
  typedef typename AccumulateOf<T>::type A;
  static constexpr int64_t L = Vectors<A>::LANES;

  const Attention& call;
  const int64_t H, G;         // heads, heads of the query that share one of the key
  const int64_t D, DV, C;     // dims of key, value and edge features
  const int64_t DP, DVP, CP;  // the same in whole vectors
  const int64_t S;            // heads as laid out in blocks: a power of two, or whole vectors
  const int64_t HP;           // the same in whole vectors
  const int64_t ahead;        // how many edges before its use a row is asked for

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
        S(H < L ? power_of_two(H) : round_up(H, L)),
        HP(round_up(S, L)),
        ahead(std::clamp<int64_t>(BYTES_AHEAD / std::max<int64_t>(H * (D + DV) * sizeof(T), 1), 8,
                                  64)) {}

  static int64_t power_of_two(int64_t n) {
    int64_t power = 1;
    while (power < n) power *= 2;
    return power;
  }

  // Calls body with how many heads a vector holds, known to the compiler.
  template <int64_t GROUP = L, class Body>
  INLINE void with_group(Body body) const {
    if constexpr (GROUP > 1)
      if (S < GROUP) return with_group<GROUP / 2>(body);
    body(std::integral_constant<int64_t, GROUP>());
  }

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
    A *score, *slope, *bias, *keep;       // [EDGES, S]
    A* far;                               // softmax and delta there, [3, EDGES, S]
    A *near, *near_value;                 // [heads, padded dim]
    A *near_edge, *near_mixed;            // [heads, padded edge_dim]
    A *near_top, *near_inverse, *factor;  // [HP]
    A* attr;                              // [EDGES, padded edge_dim]
    A* result;
    int64_t *near_at, *near_value_at, *far_at, *far_value_at, *zero;  // of each head in its row
    int64_t* count;                                                   // 0, 1, ... BLOCK - 1
  };

  int64_t scratch_bytes(int64_t result) const {
    int64_t wide = result + H * (DP + DVP + 2 * CP) + 7 * S * BLOCK + 3 * HP + BLOCK * CP;
    return round_up(
        (wide + 16 * 16) * int64_t(sizeof(A)) + (5 * HP + BLOCK) * int64_t(sizeof(int64_t)), 64);
  }

  Scratch cut(void* memory, int64_t result, bool over_sources) const {
    A* next = static_cast<A*>(memory);
    auto take = [&next](int64_t n) { return std::exchange(next, next + round_up(n, 16)); };
    Scratch s;
    s.score = take(S * BLOCK);
    s.slope = take(S * BLOCK);
    s.bias = take(S * BLOCK);
    s.keep = take(S * BLOCK);
    s.far = take(3 * S * BLOCK);
    s.near = take(H * DP);
    s.near_value = take(H * DVP);
    s.near_edge = take(H * CP);
    s.near_mixed = take(H * CP);
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
    s.zero = at + 4 * HP;
    s.count = at + 5 * HP;
    std::fill_n(at, 5 * HP, 0);
    for (int64_t b = 0; b < BLOCK; ++b) s.count[b] = b;
    for (int64_t h = 0; h < H; ++h) {
      int64_t near = over_sources ? h / G : h, far = over_sources ? h : h / G;
      s.near_at[h] = near * DP;
      s.near_value_at[h] = near * DVP;
      s.far_at[h] = far * D;
      s.far_value_at[h] = far * DV;
    }
    if (H == S && (over_sources || G == 1)) s.far_at = s.far_value_at = nullptr;
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

  // Calls body(group, block, first) for the edges of a piece.
  template <bool OVER_SOURCES, class Body>
  INLINE void visit_blocks(int64_t batch, int64_t begin, int64_t end, Body body) const {
    const int64_t* index = OVER_SOURCES ? call.dst_index : call.src_index;
    const int64_t* edge_id = OVER_SOURCES ? call.edge_id_by_src : call.edge_id;
    with_group([&](auto group) {
      for (int64_t e = begin; e < end; e += BLOCK) {
        const int64_t n = std::min(BLOCK, end - e);
        const int64_t next = e + n + ahead <= call.num_edges ? e + ahead : e;
        if (call.bias != nullptr || C > 0)
          for (int64_t b = 0; b < n; ++b) prefetch_edge<OVER_SOURCES>(batch, next + b);
        body(group, Block{e, n, index + e, index + next, edge_id}, e == begin);
      }
    });
  }

  // What scores are made of at the far ends, and what weights are multiplied with there.
  template <bool OVER_SOURCES>
  FarRows<T> far_rows(const Scratch& s, const Block& block, int64_t batch) const {
    const Rows& rows = OVER_SOURCES ? call.query : call.key;
    const int64_t size = (OVER_SOURCES ? H : call.key_heads) * D;
    return {row_of<T>(rows, batch, 0), rows.row_stride, size, block.index, block.next, s.far_at};
  }

  template <bool OVER_SOURCES>
  FarRows<T> far_values(const Scratch& s, const Block& block, int64_t batch) const {
    const Rows& rows = OVER_SOURCES ? call.grad_out : call.value;
    const int64_t size = (OVER_SOURCES ? H : call.key_heads) * DV;
    return {
        row_of<T>(rows, batch, 0), rows.row_stride, size, block.index, block.next, s.far_value_at};
  }

  // What belongs to an edge lies anywhere, in the caller's order.
  template <bool OVER_SOURCES>
  INLINE void prefetch_edge(int64_t batch, int64_t at) const {
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

  int64_t vectors_of(const Block& block) const { return (block.n * S + L - 1) / L; }

  // Scores of a block but for scale and bias, and what of edges goes with them.
  template <bool OVER_SOURCES, int64_t GROUP>
  INLINE void score(const Scratch& s, const Block& block, int64_t batch) const {
    dots<GROUP>(s.near, far_rows<OVER_SOURCES>(s, block, batch), {block.n, H, S}, D, s.score);
    for (int64_t b = 0; b < (C > 0 ? block.n : 0); ++b) {
      A* attr = s.attr + b * CP;
      widen_any(call.edge_attr, call.edge_attr_dtype, block.edge(b) * C, C, attr);
      for (int64_t h = 0; h < H; ++h)
        s.score[b * S + h] += dot(OVER_SOURCES ? edge_row(call.query_edge, batch, block.index[b], h)
                                               : s.near_edge + h * CP,
                                  attr, C);
    }
    for (int64_t b = 0; b < (call.bias != nullptr ? block.n : 0); ++b)
      widen_any(call.bias, call.bias_dtype, batch * call.bias_batch_stride + block.edge(b) * H, H,
                s.bias + b * S);
    if (call.dropout > 0) draw(call, block, batch, S, s.keep);
  }

  // Vector w of the scores, -inf beyond the edges that there are.
  template <int64_t GROUP>
  INLINE Vec<A> scaled_score(const Scratch& s, int64_t w, int64_t n) const {
    Vec<A> x = load(s.score + w * L) * static_cast<A>(call.scale);
    if (call.bias != nullptr) x += load(s.bias + w * L);
    return there<GROUP>(w, n) ? x : broadcast(A(-INFINITY));
  }

  // Lanes of vector w that belong to one of the first n edges.
  template <int64_t GROUP>
  INLINE typename Vectors<A>::Integer there(int64_t w, int64_t n) const {
    return among_first<A, GROUP>(GROUP == L ? 1 : n - w * (L / GROUP));
  }

  // Forward

  // Result of a piece: maximum and sum of exponentials of each head, and the two weighted sums.
  struct Sums {
    A *top, *total, *out, *mixed;
  };

  Sums sums_of(A* result) const {
    return {result, result + HP, result + 2 * HP, result + 2 * HP + H * DVP};
  }

  template <int64_t GROUP>
  INLINE void forward_block(const Scratch& s, const Block& block, int64_t batch, bool first) const {
    const int64_t vectors = vectors_of(block);
    Sums sums = sums_of(s.result);
    score<false, GROUP>(s, block, batch);
    for (int64_t h = 0; h < HP; h += L) {
      Vec<A> before = broadcast(A(-INFINITY));
      if (!first) before = load(sums.top + h);
      Vec<A> top = before;
      for (int64_t w = h / L; w < vectors; w += HP / L) {
        Vec<A> x = scaled_score<GROUP>(s, w, block.n);
        store(s.score + w * L, x);
        top = x > top ? x : top;
      }
      top = fold_max<A, GROUP>(top);
      // Where nothing is allowed the maximum is -inf, and all exponentials zero.
      Vec<A> base = top == -INFINITY ? Vec<A>{} : top, total = {};
      for (int64_t w = h / L; w < vectors; w += HP / L) {
        Vec<A> x = exponential(load(s.score + w * L) - base);
        total += x;
        store(s.score + w * L, call.dropout > 0 ? x * load(s.keep + w * L) : x);
      }
      total = fold_sum<A, GROUP>(total);
      if (!first) {
        Vec<A> factor = exponential(before - base);
        total += factor * load(sums.total + h);
        store(s.factor + h, factor);
      }
      store(sums.top + h, top);
      store(sums.total + h, total);
    }
    const Weighted<1, A> out{first, s.factor, {s.score}, S, block.n, {sums.out}, DVP};
    add_rows<true>(out, far_values<false>(s, block, batch), H, DV);
    if (C == 0) return;
    const Weighted<1, A> mixed{first, s.factor, {s.score}, S, block.n, {sums.mixed}, CP};
    add_rows<false>(mixed, edge_rows(s), H, C);
  }

  // Edge features, which all heads share.
  FarRows<A> edge_rows(const Scratch& s) const { return {s.attr, CP, C, s.count, s.count, s.zero}; }

  // The row at the near end that comes after the next one.
  static INLINE void prefetch_next(const Rows& rows, int64_t batch, int64_t row, int64_t count,
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
    visit_blocks<false>(batch, begin, end, [&](auto group, const Block& block, bool first) {
      forward_block<group>(s, block, batch, first);
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
    visit_blocks<false>(batch, begin, end, [&](auto group, const Block& block, bool) {
      score<false, group>(s, block, batch);
      for (int64_t h = 0; h < HP; h += L)
        for (int64_t w = h / L; w < vectors_of(block); w += HP / L)
          store(s.score + w * L, near_weight<group>(s, w, h, block.n));
      for (int64_t b = 0; b < block.n; ++b) {
        T* to = reinterpret_cast<T*>(call.weights) + (batch * call.num_edges + block.edge(b)) * H;
        for (int64_t h = 0; h < H; ++h) narrow(s.score[b * S + h], to + h);
      }
    });
  }

  void load_softmax(const Scratch& s, int64_t batch, int64_t i) const {
    const A* softmax =
        reinterpret_cast<const A*>(call.softmax) + 2 * (batch * call.num_dst + i) * H;
    for (int64_t first = 0; first < HP; first += S) {
      std::copy_n(softmax, H, s.near_top + first);
      std::copy_n(softmax + H, H, s.near_inverse + first);
    }
  }

  template <int64_t GROUP>
  INLINE Vec<A> near_weight(const Scratch& s, int64_t w, int64_t h, int64_t n) const {
    return exponential(scaled_score<GROUP>(s, w, n) - load(s.near_top + h)) *
           load(s.near_inverse + h);
  }

  // Backward
  //
  // With weight P and its gradient G = <grad_out, value> + <grad_mixed, edge features>, the
  // gradient of a score is P (G - delta), where delta, the sum of P G over the edges of a target,
  // is found on the way. It needs no output, which low precision would have rounded: the gradient
  // of the query is sum P G K - delta sum P K.

  // G of a block, without dropout.
  template <bool OVER_SOURCES, int64_t GROUP>
  INLINE void slope(const Scratch& s, const Block& block, int64_t batch) const {
    dots<GROUP>(s.near_value, far_values<OVER_SOURCES>(s, block, batch), {block.n, H, S}, DV,
                s.slope);
    for (int64_t b = 0; b < (call.grad_mixed != nullptr ? block.n : 0); ++b)
      for (int64_t h = 0; h < H; ++h)
        s.slope[b * S + h] += dot(OVER_SOURCES ? edge_row(call.grad_mixed, batch, block.index[b], h)
                                               : s.near_mixed + h * CP,
                                  s.attr + b * CP, C);
    for (int64_t b = 0; b < (call.grad_weights != nullptr ? block.n : 0); ++b) {
      const T* grad = reinterpret_cast<const T*>(call.grad_weights) +
                      (batch * call.num_edges + block.edge(b)) * H;
      for (int64_t h = 0; h < H; ++h) s.slope[b * S + h] += widen(grad[h]);
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
    visit_blocks<false>(batch, begin, end, [&](auto group, const Block& block, bool first) {
      score<false, group>(s, block, batch);
      slope<false, group>(s, block, batch);
      const int64_t vectors = vectors_of(block);
      for (int64_t h = 0; h < HP; h += L) {
        Vec<A> delta = {};
        for (int64_t w = h / L; w < vectors; w += HP / L) {
          Vec<A> weight = near_weight<group>(s, w, h, block.n);
          Vec<A> product = weight * load(s.slope + w * L);
          if (call.dropout > 0) product *= load(s.keep + w * L);
          product = there<group>(w, block.n) ? product : Vec<A>{};
          delta += product;
          store(s.score + w * L, weight);
          store(s.slope + w * L, product);
        }
        store(sums.delta + h, fold_sum<A, group>(delta) + load(sums.delta + h));
      }
      add_rows<false>(
          Weighted<2, A>{
              first, nullptr, {s.slope, s.score}, S, block.n, {sums.slope_key, sums.key}, DP},
          far_rows<false>(s, block, batch), H, D);
      if (C == 0) return;
      add_rows<false>(
          Weighted<2, A>{
              first, nullptr, {s.slope, s.score}, S, block.n, {sums.slope_edge, sums.edge}, CP},
          edge_rows(s), H, C);
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
    const A* softmax = reinterpret_cast<const A*>(call.softmax) + 2 * place;
    stats += 3 * (batch * call.num_dst + i) * S;
    std::copy_n(softmax, H, stats);
    std::copy_n(softmax + H, H, stats + S);
    std::copy_n(sums.delta, H, stats + 2 * S);
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
    for (int64_t h = 0; h < H; ++h) {
      widen_row(k + h / G * D, D, s.near + h * DP);
      widen_row(v + h / G * DV, DV, s.near_value + h * DVP);
    }
    A *grad_key = s.result, *grad_value = s.result + key_heads * DP;
    stats += 3 * batch * call.num_dst * S;
    visit_blocks<true>(batch, begin, end, [&](auto group, const Block& block, bool first) {
      A *top = s.far, *inverse = top + BLOCK * S, *delta = inverse + BLOCK * S;
      for (int64_t b = 0; b < block.n; ++b) {
        const A* of_target = stats + 3 * S * block.index[b];
        prefetch(stats + 3 * S * block.next[b], 3 * S);
        for (int64_t h = 0; h < S; h += group) {
          std::copy_n(of_target + h, +group, top + b * S + h);
          std::copy_n(of_target + S + h, +group, inverse + b * S + h);
          std::copy_n(of_target + 2 * S + h, +group, delta + b * S + h);
        }
      }
      score<true, group>(s, block, batch);
      slope<true, group>(s, block, batch);
      for (int64_t w = 0; w < vectors_of(block); ++w) {
        const int64_t at = w * L;
        Vec<A> weight =
            exponential(scaled_score<group>(s, w, block.n) - load(top + at)) * load(inverse + at);
        Vec<A> grad = load(s.slope + at), used = weight;
        if (call.dropout > 0) {
          grad *= load(s.keep + at);
          used *= load(s.keep + at);
        }
        store(s.slope + at, weight * (grad - load(delta + at)));
        store(s.score + at, used);
      }
      // Heads that share one of the key add to the same sums, one after the other.
      const int64_t together = G == 1 ? H : 1;
      for (int64_t h = 0; h < H; h += together) {
        const bool start = first && h % G == 0;
        add_rows<false>(
            Weighted<1, A>{
                start, nullptr, {s.slope + h}, S, block.n, {grad_key + s.near_at[h]}, DP},
            far_rows<true>(s, block, batch).from(h, D), together, D);
        add_rows<false>(
            Weighted<1, A>{
                start, nullptr, {s.score + h}, S, block.n, {grad_value + s.near_value_at[h]}, DVP},
            far_values<true>(s, block, batch).from(h, DV), together, DV);
      }
      if (call.grad_bias != nullptr || call.grad_edge_attr != nullptr) write_edges(s, block, batch);
    });
  }

  // Gradients of what belongs to edges; one thread has all of the batch of an edge.
  void write_edges(const Scratch& s, const Block& block, int64_t batch) const {
    A* grad_bias = reinterpret_cast<A*>(call.grad_bias);
    A* grad_attr = reinterpret_cast<A*>(call.grad_edge_attr);
    const bool add_bias = batch > 0 && call.bias_batch_stride == 0;
    for (int64_t b = 0; b < block.n; ++b) {
      int64_t at = batch * call.bias_batch_stride + block.edge(b) * H;
      for (int64_t h = 0; h < (grad_bias != nullptr ? H : 0); ++h)
        grad_bias[at + h] = s.slope[b * S + h] + (add_bias ? grad_bias[at + h] : 0);
      if (grad_attr == nullptr) continue;
      A* to = grad_attr + block.edge(b) * C;
      if (batch == 0) std::fill_n(to, C, A(0));
      for (int64_t h = 0; h < H; ++h) {
        const A* q = edge_row(call.query_edge, batch, block.index[b], h);
        const A slope = s.slope[b * S + h] * static_cast<A>(call.scale);
        for (int64_t c = 0; c < C; ++c) to[c] += slope * q[c];
        if (call.grad_mixed == nullptr) continue;
        const A* m = edge_row(call.grad_mixed, batch, block.index[b], h);
        const A weight = s.score[b * S + h];
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
    const int64_t size = call.key_heads * (DP + DVP);
    ask_for_huge_pages(call.grad_query, query_bytes());
    ask_for_huge_pages(call.grad_key, key_bytes());
    ask_for_huge_pages(call.grad_value, value_bytes());
    // [batch, num_dst, 3, S]: softmax and delta, side by side for the pass over sources.
    std::unique_ptr<A, Free> memory(
        static_cast<A*>(std::malloc(3 * call.batch * call.num_dst * S * sizeof(A) + 1)));
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
