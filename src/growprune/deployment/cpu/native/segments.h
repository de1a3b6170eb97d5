// Vectors whose lanes lie in a few rows of an image, as those of strided convolutions do, and of such without padding.
//
// Within a row of outputs, inputs are 1 or 2 columns apart. So a vector is a few segments, each of which is loaded as a
// whole, where there is AVX-512: its masked loads read nothing of lanes that are masked. Elsewhere lanes are gathered.
#pragma once

#include <vector>

#include "vec.h"

namespace gp {

#if defined(__AVX512F__)
constexpr bool HAS_SEGMENTS = true;
#else
constexpr bool HAS_SEGMENTS = false;
#endif
constexpr int MOST_SEGMENTS = 4;  // more would take as long as lanes one by one

struct Segment {
    std::int32_t start;             // where lane 0 would lie; lane i lies at start + i * step
    std::uint16_t keep, low, high;  // lanes that are in it; of a step of 2, what is read of the first and second vector
};

// Bit i to bit 2 i.
inline std::uint16_t spread_bits(unsigned bits) {
    unsigned found = 0;
    for (int i = 0; i < 8; ++i) found |= (bits >> i & 1u) << 2 * i;
    return static_cast<std::uint16_t>(found);
}

// The segments of 16 lanes, whose sources are negative where there is padding; none if they are too many.
inline std::vector<Segment> find_segments(const Index *sources, int step) {
    std::vector<Segment> found;
    for (int i = 0; i < 16; ++i) {
        if (sources[i] < 0) continue;
        const auto start = static_cast<std::int32_t>(sources[i] - i * step);
        if (found.empty() || found.back().start != start) found.push_back({start, 0, 0, 0});
        found.back().keep = static_cast<std::uint16_t>(found.back().keep | 1u << i);
    }
    for (Segment &segment : found)
        segment.low = spread_bits(segment.keep & 0xffu), segment.high = spread_bits(segment.keep >> 8);
    if (found.size() > MOST_SEGMENTS) found.clear();
    return found;
}

#if defined(__AVX512F__)
GP_INLINE void load_segments(const float *row, const Segment *segment, int count, int step, float *to) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512 found = _mm512_setzero_ps();
    for (int i = 0; i < count; ++i, ++segment) {
        const float *from = row + segment->start;
        if (step == 1) {
            found = _mm512_mask_loadu_ps(found, segment->keep, from);
        } else {
            const __m512 low = _mm512_maskz_loadu_ps(segment->low, from);
            const __m512 high = _mm512_maskz_loadu_ps(segment->high, from + 16);
            found = _mm512_mask_mov_ps(found, segment->keep, _mm512_permutex2var_ps(low, even, high));
        }
    }
    _mm512_storeu_ps(to, found);
}
#else
GP_INLINE void load_segments(const float *, const Segment *, int, int, float *) {}
#endif

}  // namespace gp
