// Convolutions in which each channel is filtered by itself, [channels][batch * height * width] to the same.
//
// An image of one channel is copied to where it has its padding around it, so that taps need no check of bounds.
#pragma once

#include "plan.h"

namespace gp {

class Depthwise : public Layer {
  public:
    // Weights are [channels][taps].
    Depthwise(const Geometry &geometry, const float *weights, const float *bias, int activation, int threads)
        : g(geometry), activation(activation), threads(threads) {
        taps = make_buffer<float>(Index(g.channels) * g.taps());
        std::copy_n(weights, Index(g.channels) * g.taps(), taps.get());
        bias_of_rows = make_buffer<float>(g.channels);
        if (bias) std::copy_n(bias, g.channels, bias_of_rows.get());
        rows = std::max<Index>(g.padding_top + g.height,
                               Index(g.out_height - 1) * g.stride_height + (g.kernel_height - 1) * g.dilation_height + 1);
        pitch = std::max<Index>(g.padding_left + whole(g.width),
                                whole(g.out_width) * g.stride_width + (g.kernel_width - 1) * g.dilation_width + GP_LANES);
    }

    void run(const Operands &operands) const override {
        const Index images = Index(g.channels) * g.batch, items = std::min(images, 2 * ITEMS_OF_THREAD * threads);
        share(items, threads, [&](Index item) {
            float *padded = scratch_of_thread<Depthwise>(rows * pitch);
            std::fill_n(padded, rows * pitch, 0.0f);
            for (Index i = item * images / items; i < (item + 1) * images / items; ++i)
                run_image(operands, i / g.batch, i % g.batch, padded);
        });
    }

  private:
    static Index whole(Index count) { return (count + GP_LANES - 1) / GP_LANES * GP_LANES; }

    void run_image(const Operands &operands, Index channel, Index image, float *padded) const {
        const float *from = operands.x + channel * operands.x_stride + image * g.height * g.width;
        float *into = padded + g.padding_top * pitch + g.padding_left;
        for (Index row = 0, length = g.width, step = pitch; row < g.height; ++row, from += length, into += step)
            for (Index i = 0; i < length; i += GP_LANES)  // behind a row come zeros
                store<GP_LANES>(into + i, load_some<GP_LANES>(from + i, std::min<Index>(GP_LANES, length - i)));
        const Index place = image * g.out_height * g.out_width;
        const float *residual = operands.residual;
        if (residual) residual += channel * operands.residual_stride + place;
        float *to = operands.y + channel * operands.y_stride + place;
        const bool is_three = g.kernel_height == 3 && g.kernel_width == 3;  // most are
        if (g.stride_width == 1)
            is_three ? filter<1, 3>(padded, channel, residual, to) : filter<1, 0>(padded, channel, residual, to);
        else if (g.stride_width == 2 && HAS_HALVES)
            is_three ? filter<2, 3>(padded, channel, residual, to) : filter<2, 0>(padded, channel, residual, to);
        else
            filter<0, 0>(padded, channel, residual, to);
    }

    template <int step, int side>
    void filter(const float *padded, Index channel, const float *residual, float *to) const {
        Geometry size = g;  // copied, since for the compiler a vector that is written may be one of its fields
        if (side) size.kernel_height = side, size.kernel_width = side;
        const Index pitch = this->pitch;
        const float *weights = taps.get() + channel * size.taps();
        const float bias = bias_of_rows[channel];
        for (Index row = 0; row < size.out_height; ++row, padded += size.stride_height * pitch)
            for (Index i = 0; i < size.out_width; i += GP_LANES) {
                const int count = static_cast<int>(std::min<Index>(GP_LANES, size.out_width - i));
                typename Vec<GP_LANES>::type sums[1] = {broadcast<GP_LANES>(bias)};
                const float *weight = weights, *line = padded + i * size.stride_width;
                for (int r = 0; r < size.kernel_height; ++r, line += size.dilation_height * pitch)
                    for (int s = 0; s < size.kernel_width; ++s)
                        sums[0] += *weight++ * spaced<step>(line + s * size.dilation_width, size.stride_width);
                const Index at = row * size.out_width + i;
                if (residual) sums[0] += load_some<GP_LANES>(residual + at, count);
                activate<GP_LANES, 1>(sums, activation);
                store_some<GP_LANES>(to + at, sums[0], count);
            }
    }

    // A vector of numbers that are some steps apart.
    template <int step> static GP_INLINE typename Vec<GP_LANES>::type spaced(const float *from, Index stride) {
        if constexpr (step == 1) return load<GP_LANES>(from);
        if constexpr (step == 2) return half_of(load<GP_LANES>(from), load<GP_LANES>(from + GP_LANES));
        typename Vec<GP_LANES>::type found{};
        for (int lane = 0; lane < GP_LANES; ++lane) found[lane] = from[lane * stride];
        return found;
    }

    Geometry g;
    int activation, threads;
    Index rows, pitch;  // of an image with its padding
    Buffer<float> taps, bias_of_rows;
};

}  // namespace gp
