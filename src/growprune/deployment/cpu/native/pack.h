// Copying a block of X to where the kernels read it: rows k of the block, U vectors of columns each, aligned.
//
// A convolution is the same product, only packed otherwise. X is [channels][batch * height * width], and row k of the
// product is (tap, channel) = (k / channels, k % channels): the channel as this tap of the kernel sees it. For a vector
// of output columns, each tap is one of a few kinds of loads, found when the plan is made; X is never unfolded.
#pragma once

#include <vector>

#include "weights.h"

namespace gp {

struct Geometry {
    std::int32_t channels, batch, height, width, kernel_height, kernel_width, stride_height, stride_width, padding_top,
        padding_left, dilation_height, dilation_width, out_height, out_width;

    Index columns() const { return Index(batch) * out_height * out_width; }
    Index in_columns() const { return Index(batch) * height * width; }
    int taps() const { return kernel_height * kernel_width; }
    bool is_plain() const {  // each output column is the input column of its number
        return taps() == 1 && stride_height == 1 && stride_width == 1 && padding_top == 0 && padding_left == 0 &&
               out_height == height && out_width == width;
    }
    // The input column that a tap reads for an output column; -1 in the padding.
    Index source(int tap, Index column) const {
        const Index image = column / (Index(out_height) * out_width), place = column % (Index(out_height) * out_width);
        const Index row = place / out_width * stride_height - padding_top + tap / kernel_width * dilation_height;
        const Index at = place % out_width * stride_width - padding_left + tap % kernel_width * dilation_width;
        if (row < 0 || row >= height || at < 0 || at >= width) return -1;
        return (image * height + row) * width + at;
    }
};

// How one tap reads the vector of inputs that one vector of outputs needs.
enum Kind : std::uint16_t { TOGETHER, EVERY_SECOND, SCATTERED };

struct Load {
    std::int32_t start;  // the input column of lane 0, were it not masked; scattered: where in the table below
    std::uint16_t keep;  // a bit for each lane that is not padding
    Kind kind;
};

class Packing {
  public:
    Packing(const Geometry &geometry, int lanes) : geometry(geometry), num_lanes(lanes) {
        num_vectors = (geometry.columns() + lanes - 1) / lanes;
        if (geometry.is_plain()) return;
        for (int tap = 0; tap < geometry.taps(); ++tap)
            for (Index v = 0; v < num_vectors; ++v) loads.push_back(describe(tap, v * lanes));
    }

    // Rows [k, k_end) of the product, for vectors [v, v + count); rows of `to` are `stride` floats apart.
    template <int lanes>
    void pack(const float *x, Index x_stride, Index k, Index k_end, Index v, int count, float *to, Index stride) const {
        if (geometry.is_plain()) {
            const int tail = static_cast<int>(std::min<Index>(lanes, geometry.columns() - (v + count - 1) * lanes));
            for (; k < k_end; ++k, to += stride) copy_row<lanes>(x + k * x_stride + v * lanes, count, tail, to);
            return;
        }
        while (k < k_end) {
            const Index tap = k / geometry.channels, stop = std::min<Index>(k_end, (tap + 1) * geometry.channels);
            const Load *from = loads.data() + tap * num_vectors + v;
            for (; k < stop; ++k, to += stride)
                load_row<lanes>(x, x_stride, k - tap * geometry.channels, from, count, to);
        }
    }

    Geometry geometry;
    Index num_vectors;

  private:
    Load describe(int tap, Index column) {
        Index sources[16], start = 0, start_by_two = 0;
        unsigned keep = 0;
        bool is_together = true, is_every_second = HAS_HALVES && num_lanes == GP_LANES;
        for (int i = 0; i < num_lanes; ++i) {
            sources[i] = column + i < geometry.columns() ? geometry.source(tap, column + i) : -1;
            if (sources[i] < 0) continue;
            if (!keep) start = sources[i] - i, start_by_two = sources[i] - 2 * i;
            keep |= 1u << i;
            is_together &= sources[i] - i == start;
            is_every_second &= sources[i] - 2 * i == start_by_two;
        }
        const auto kept = static_cast<std::uint16_t>(keep);
        if (is_together) return {static_cast<std::int32_t>(start), kept, TOGETHER};
        if (is_every_second) return {static_cast<std::int32_t>(start_by_two), kept, EVERY_SECOND};
        const auto place = static_cast<std::int32_t>(scattered.size());
        for (int i = 0; i < num_lanes; ++i)
            scattered.push_back(static_cast<std::int32_t>(std::max<Index>(0, sources[i])));
        return {place, kept, SCATTERED};
    }

    template <int lanes> GP_INLINE void copy_row(const float *from, int count, int tail, float *to) const {
        for (int u = 0; u + 1 < count; ++u) store<lanes>(to + u * lanes, load<lanes>(from + u * lanes));
        store<lanes>(to + (count - 1) * lanes, load_some<lanes>(from + (count - 1) * lanes, tail));
    }

    template <int lanes> GP_INLINE void load_row(const float *x, Index x_stride, Index channel, const Load *from,
                                                 int count, float *to) const {
        const float *row = x + channel * x_stride;
        for (int u = 0; u < count; ++u, ++from, to += lanes) {
            if (from->kind == SCATTERED)
                gather<lanes>(row, scattered.data() + from->start, from->keep, to);
            else if (from->kind == EVERY_SECOND)
                load_every_second<lanes>(row + from->start, from->keep,
                                         is_inside(channel * x_stride + from->start, x_stride, 2 * lanes), to);
            else
                load_kept<lanes>(row + from->start, from->keep,
                                 is_inside(channel * x_stride + from->start, x_stride, lanes), to);
        }
    }

    // Whether a whole vector may be read there: what is masked away may lie in another row, but not outside of X.
    GP_INLINE bool is_inside(Index place, Index x_stride, int lanes) const {
        return place >= 0 && place + lanes <= (geometry.channels - 1) * x_stride + geometry.in_columns();
    }

    // Masked loads read nothing of lanes that are masked. Elsewhere, a whole vector is read where that is possible.
    template <int lanes>
    static GP_INLINE void load_kept(const float *from, unsigned keep, bool is_readable, float *to) {
#if defined(__AVX512F__)
        if constexpr (lanes == 16) {
            _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(static_cast<__mmask16>(keep), from));
            return;
        }
#endif
        if (is_readable)
            store<lanes>(to, keep_lanes<lanes>(load<lanes>(from), keep));
        else
            for (int i = 0; i < lanes; ++i) to[i] = keep >> i & 1 ? from[i] : 0.0f;
    }

    // Two vectors, of which the even numbers are kept.
    template <int lanes>
    static GP_INLINE void load_every_second(const float *from, unsigned keep, bool is_readable, float *to) {
        if constexpr (lanes == GP_LANES) {
            if (is_readable)
                return store<lanes>(
                    to, keep_lanes<lanes>(half_of(load<lanes>(from), load<lanes>(from + lanes)), keep));
        }
        for (int i = 0; i < lanes; ++i) to[i] = keep >> i & 1 ? from[2 * i] : 0.0f;
    }

    template <int lanes>
    static GP_INLINE void gather(const float *row, const std::int32_t *places, unsigned keep, float *to) {
#if defined(__AVX512F__)
        if constexpr (lanes == 16) {
            const __m512i index = _mm512_loadu_si512(places);
            const auto mask = static_cast<__mmask16>(keep);
            _mm512_storeu_ps(to, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, index, row, 4));
            return;
        }
#endif
        if (keep == (1u << lanes) - 1)
            for (int i = 0; i < lanes; ++i) to[i] = row[places[i]];
        else
            for (int i = 0; i < lanes; ++i) to[i] = keep >> i & 1 ? row[places[i]] : 0.0f;
    }

    int num_lanes;
    std::vector<Load> loads;
    std::vector<std::int32_t> scattered;
};

}  // namespace gp
