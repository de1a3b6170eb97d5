// Largest or mean value of windows, for activations [channels][batch * height * width].
//
// A row of outputs is made in two steps: the rows of its windows are joined into one row, whose columns lie next to one
// another and so take whole vectors; then each output joins the few columns of its window.
#pragma once

#include <limits>
#include <vector>

#include "pack.h"
#include "threads.h"

namespace gp {

template <bool is_max> GP_INLINE float join(float so_far, float value) {
    if constexpr (is_max) return (value > so_far) | (value != value) ? value : so_far;  // NaN stays, as in torch
    return so_far + value;
}

template <bool is_max> void join_rows(const Geometry &g, const float *image, Index top, float *joined) {
    std::fill_n(joined, g.width, is_max ? -std::numeric_limits<float>::infinity() : 0.0f);
    for (Index r = 0; r < g.kernel_height; ++r) {
        const Index row = top + r * g.dilation_height;
        if (row < 0 || row >= g.height) continue;
        const float *from = image + row * g.width;
        for (Index i = 0; i < g.width; ++i) joined[i] = join<is_max>(joined[i], from[i]);
    }
}

// Each output joins the columns of its window, a column at a time, which vectors can take for steps that are fixed.
template <bool is_max, int fixed>
void join_windows(const Geometry &g, const float *__restrict joined, float *__restrict y) {
    const Index step = fixed ? fixed : g.stride_width;
    std::fill_n(y, g.out_width, is_max ? -std::numeric_limits<float>::infinity() : 0.0f);
    for (Index s = 0; s < g.kernel_width; ++s) {
        const Index offset = s * g.dilation_width - g.padding_left;
        const Index first = offset < 0 ? (-offset + step - 1) / step : 0;
        const Index last = g.width > offset ? std::min<Index>(g.out_width, (g.width - offset + step - 1) / step) : 0;
        for (Index i = first; i < last; ++i) y[i] = join<is_max>(y[i], joined[i * step + offset]);
    }
}

// How many places of a window count: those inside of the image, or inside of its padding as well.
inline Index window_length(Index start, Index kernel, Index size, Index padding, bool counts_padding) {
    const Index end = std::min(start + kernel, size + padding);
    return counts_padding ? end - start : std::min(end, size) - std::max<Index>(start, 0);
}

template <bool is_max>
void pool_row(const Geometry &g, const float *image, Index row, bool counts_padding, float *joined, float *y) {
    const Index top = row * g.stride_height - g.padding_top;
    join_rows<is_max>(g, image, top, joined);
    if (g.stride_width == 1)
        join_windows<is_max, 1>(g, joined, y);
    else if (g.stride_width == 2)
        join_windows<is_max, 2>(g, joined, y);
    else
        join_windows<is_max, 0>(g, joined, y);
    if (is_max) return;
    const Index tall = window_length(top, g.kernel_height, g.height, g.padding_top, counts_padding);
    for (Index i = 0; i < g.out_width; ++i) {
        const Index left = i * g.stride_width - g.padding_left;
        const Index wide = window_length(left, g.kernel_width, g.width, g.padding_left, counts_padding);
        y[i] /= static_cast<float>(tall * wide);
    }
}

// One window over a whole image, whose numbers lie next to one another.
inline float mean_of(const float *image, Index size) {
    typename Vec<GP_LANES>::type sums{};
    Index i = 0;
    for (; i + GP_LANES <= size; i += GP_LANES) sums += load<GP_LANES>(image + i);
    if (i < size) sums += load_some<GP_LANES>(image + i, static_cast<int>(size - i));
    float sum = 0;
    for (int lane = 0; lane < GP_LANES; ++lane) sum += sums[lane];
    return sum / static_cast<float>(size);
}

template <bool is_max> void pool(const Geometry &g, const float *x, Index x_stride, float *y, Index y_stride,
                                 bool counts_padding, int threads) {
    const Index images = Index(g.channels) * g.batch, in_size = Index(g.height) * g.width;
    const bool is_whole = !is_max && g.kernel_height == g.height && g.kernel_width == g.width && g.out_height == 1 &&
                          g.out_width == 1 && g.padding_top == 0 && g.padding_left == 0;
    share_images(images, threads, [&](Index i) {
        static thread_local std::vector<float> joined;  // kept, so that only the first call allocates
        if (joined.size() < static_cast<std::size_t>(g.width)) joined.resize(g.width);
        const float *from = x + i / g.batch * x_stride + i % g.batch * in_size;
        float *to = y + i / g.batch * y_stride + i % g.batch * g.out_height * g.out_width;
        if (is_whole)
            *to = mean_of(from, in_size);
        else
            for (Index row = 0; row < g.out_height; ++row)
                pool_row<is_max>(g, from, row, counts_padding, joined.data(), to + row * g.out_width);
    });
}

}  // namespace gp
