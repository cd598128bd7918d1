// Vectors of WIDTH floats for the kernels of one instruction set: cpu.cpp includes this file once
// for each, in namespace GRAPHATTN_ISA.

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

// Loading and storing

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
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif WIDTH == 8
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
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

// To an aligned place, past the caches where the instruction set can. Others see it after a fence.
template <class A, class T>
INLINE void stream(T* p, Vec<A> x) {
#if WIDTH == 16
  if constexpr (std::is_same_v<T, float>) return _mm512_stream_ps(p, (__m512)x);
#elif WIDTH == 8
  if constexpr (std::is_same_v<T, float>) return _mm256_stream_ps(p, (__m256)x);
#endif
  store(p, x);
}

INLINE void fence() {
#if WIDTH >= 8
  _mm_sfence();
#endif
}

template <class A, class T>
INLINE void narrow_row(const A* from, int64_t n, A factor, T* to, bool past_caches) {
  constexpr int64_t L = Vectors<A>::LANES;
  int64_t i = 0;
  if (past_caches && (n * sizeof(T) | reinterpret_cast<uintptr_t>(to)) % 64 == 0)
    for (; i < n; i += L) stream<A>(to + i, load(from + i) * factor);
  for (; i + L <= n; i += L) store(to + i, load(from + i) * factor);
  for (; i < n; ++i) narrow(from[i] * factor, to + i);
}

template <class T, class A>
void widen_elements(const char* from, int64_t offset, int64_t n, A* to) {
  const T* p = reinterpret_cast<const T*>(from) + offset;
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<A>(widen(p[i]));
}

// Elements of a tensor along edges, whatever its dtype.
template <class A>
void widen_any(const char* from, int64_t dtype, int64_t offset, int64_t n, A* to) {
  switch (dtype) {
    case FLOAT32:
      return widen_elements<float>(from, offset, n, to);
    case FLOAT64:
      return widen_elements<double>(from, offset, n, to);
    case BFLOAT16:
      return widen_elements<Bfloat16>(from, offset, n, to);
    default:
      return widen_elements<Float16>(from, offset, n, to);
  }
}

// Arithmetic

// exp of x <= 0 for each lane: 2^n e^r with |r| <= ln(2) / 2. What would be below the normal
// numbers is zero; NaN stays NaN.
INLINE Vec<float> exponential(Vec<float> x) {
  typedef Vectors<float>::Integer Integer;
  constexpr float LOWEST = -87.33654f;
  Vec<float> bounded = x < LOWEST ? broadcast(LOWEST) : x;
  Vec<float> shifted = bounded * 1.44269504f + 0x1.8p23f;  // n in its lowest bits
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
  Vec<float> power = (Vec<float>)(((Integer)shifted + 127) << 23);
  return x < LOWEST ? Vec<float>{} : p * power;
}

INLINE Vec<double> exponential(Vec<double> x) {
  typedef Vectors<double>::Integer Integer;
  constexpr double LOWEST = -708.396418532264;
  Vec<double> bounded = x < LOWEST ? broadcast(LOWEST) : x;
  Vec<double> shifted = bounded * 1.4426950408889634 + 0x1.8p52;
  Vec<double> n = shifted - 0x1.8p52;
  Vec<double> r = bounded - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  Vec<double> p = broadcast(1.0 / 6227020800.0);  // 1 / 13!
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
  Vec<double> power = (Vec<double>)(((Integer)shifted + 1023) << 52);
  return x < LOWEST ? Vec<double>{} : p * power;
}

// Sums over lanes go through shuffles that stay within 16 bytes or move 16 bytes as one, which all
// instruction sets have. Lane of (a, b) that lane `i` takes in a step, from the first or second
// half.
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

// Maximum or sum over the lanes that lie multiples of BY apart; each of them gets it.
template <class A, int64_t BY, size_t... I>
INLINE Vec<A> swap_lanes(Vec<A> x, std::index_sequence<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, x, (I ^ BY)...);
#else
  return __builtin_shuffle(x, typename Vectors<A>::Integer{(I ^ BY)...});
#endif
}

template <class A, int64_t BY>
INLINE Vec<A> fold_max(Vec<A> x) {
  if constexpr (BY < Vectors<A>::LANES) {
    Vec<A> y = swap_lanes<A, BY>(x, Lanes<A>{});
    return fold_max<A, 2 * BY>(x > y ? x : y);
  } else {
    return x;
  }
}

template <class A, int64_t BY>
INLINE Vec<A> fold_sum(Vec<A> x) {
  if constexpr (BY < Vectors<A>::LANES)
    return fold_sum<A, 2 * BY>(x + swap_lanes<A, BY>(x, Lanes<A>{}));
  else
    return x;
}

}  // namespace GRAPHATTN_ISA
}  // namespace
