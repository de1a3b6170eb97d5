// Vectors of floats with GCC's and Clang's vector extensions: one source for AVX-512, AVX2, NEON and anything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#define GP_LANES 16
#elif defined(__AVX__)
#define GP_LANES 8
#else
#define GP_LANES 4
#endif

#define GP_INLINE inline __attribute__((always_inline))

namespace gp {

using Index = std::int64_t;

// `type` lives in registers; `memory` is the same at any address; `bits` holds masks, all ones where true.
template <int lanes> struct Vec;
#define GP_VEC(lanes)                                                                                                  \
    template <> struct Vec<lanes> {                                                                                    \
        typedef float type __attribute__((vector_size(lanes * 4)));                                                    \
        typedef float memory __attribute__((vector_size(lanes * 4), aligned(4), may_alias));                           \
        typedef std::int32_t bits __attribute__((vector_size(lanes * 4)));                                             \
    };
GP_VEC(4)
GP_VEC(8)
GP_VEC(16)
#undef GP_VEC
template <> struct Vec<1> {
    typedef float type;
};

template <int lanes> GP_INLINE typename Vec<lanes>::type load(const float *from) {
    if constexpr (lanes == 1)
        return *from;
    else
        return *reinterpret_cast<const typename Vec<lanes>::memory *>(from);
}

template <int lanes> GP_INLINE void store(float *to, typename Vec<lanes>::type vector) {
    if constexpr (lanes == 1)
        *to = vector;
    else
        *reinterpret_cast<typename Vec<lanes>::memory *>(to) = vector;
}

template <int lanes> GP_INLINE typename Vec<lanes>::type broadcast(float value) {
    return value - typename Vec<lanes>::type{};  // not "+": -0.0f + 0.0f would be 0.0f
}

// Loads the first `count` floats, followed by zeros. Nothing after these floats is read.
template <int lanes> GP_INLINE typename Vec<lanes>::type load_some(const float *from, int count) {
#if defined(__AVX512F__)
    if constexpr (lanes == 16)
        return (typename Vec<16>::type)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#endif
    if (count == lanes) return load<lanes>(from);
    float some[lanes] = {};
    for (int i = 0; i < count; ++i) some[i] = from[i];
    return load<lanes>(some);
}

#if defined(__AVX512VL__)
#define GP_HAS_MASKED_LOADS  // masked lanes are not read
template <int lanes> GP_INLINE typename Vec<lanes>::type load_masked(const float *from, unsigned keep) {
    if constexpr (lanes == 16) return (Vec<16>::type)_mm512_maskz_loadu_ps(static_cast<__mmask16>(keep), from);
    if constexpr (lanes == 8) return (Vec<8>::type)_mm256_maskz_loadu_ps(static_cast<__mmask8>(keep), from);
    if constexpr (lanes == 4) return (Vec<4>::type)_mm_maskz_loadu_ps(static_cast<__mmask8>(keep), from);
    if constexpr (lanes == 1) return keep & 1u ? *from : 0.0f;
}
#endif

// Writes the first `count` floats, and nothing after them.
template <int lanes> GP_INLINE void store_some(float *to, typename Vec<lanes>::type vector, int count) {
#if defined(__AVX512F__)
    if constexpr (lanes == 16) {
        _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)vector);
        return;
    }
#endif
    if (count == lanes) return store<lanes>(to, vector);
    float some[lanes];
    store<lanes>(some, vector);
    for (int i = 0; i < count; ++i) to[i] = some[i];
}

// Returns the lanes whose bit is set in `keep`, and `others` in the other lanes, whose numbers (also NaN) are dropped.
template <int lanes>
GP_INLINE typename Vec<lanes>::type keep_lanes(typename Vec<lanes>::type vector, unsigned keep,
                                               typename Vec<lanes>::type others = broadcast<lanes>(0)) {
#if defined(__AVX512F__)
    if constexpr (lanes == 16)
        return (Vec<16>::type)_mm512_mask_mov_ps((__m512)others, static_cast<__mmask16>(keep), (__m512)vector);
#endif
    if constexpr (lanes == 1) {
        return keep & 1u ? vector : others;
    } else {
        using Bits = typename Vec<lanes>::bits;
        Bits of_lane;
        for (int i = 0; i < lanes; ++i) of_lane[i] = 1 << i;
        return (of_lane & static_cast<std::int32_t>(keep)) != 0 ? vector : others;
    }
}

}  // namespace gp
