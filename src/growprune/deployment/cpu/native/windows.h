// The maximum, the mean, or the weighted sum (a depthwise convolution) of windows of each channel, for activations
// [channels][batch * height * width].
#pragma once

#include <limits>

#include "plan.h"

namespace gp {

enum Joined { LARGEST, MEAN, WEIGHTED };

class Windows : public Layer {
  public:
    // Weights are [channels][taps], or null. The windows of a mean have no padding.
    Windows(const Geometry &geometry, const float *weights, const float *bias, int activation, bool is_mean,
            int threads)
        : packing(geometry, GP_LANES), activation(activation), threads(threads) {
        const Geometry &g = geometry;
        kind = weights ? WEIGHTED : is_mean ? MEAN : LARGEST;
        const bool is_whole_image = g.taps() == Index(g.height) * g.width && g.kernel_height == g.height;
        is_whole = kind == MEAN && g.taps() > 1 && is_whole_image && g.columns() == g.batch;
        for (int tap = 0; tap < g.taps(); ++tap)
            rows_from_first.push_back(packing.row_of(tap, 0) - packing.row_of(0, 0));
        if (kind != WEIGHTED) return;
        weights_of_taps = make_buffer<float>(Index(g.channels) * g.taps());
        std::copy_n(weights, Index(g.channels) * g.taps(), weights_of_taps.get());
        bias_of_rows = make_buffer<float>(g.channels);
        if (bias) std::copy_n(bias, g.channels, bias_of_rows.get());
    }

    void run(const Operands &operands) const override {
        const Index channels = packing.geometry.channels, items = std::min<Index>(channels, ITEMS_OF_THREAD * threads);
        const Input input = is_whole ? Input{} : packing.input(operands.x, operands.x_stride, threads);
        share(items, threads, [&](Index item) {
            for (Index i = item * channels / items; i < (item + 1) * channels / items; ++i) {
                if (is_whole)
                    mean_of_images(operands, i);
                else if (kind == LARGEST)
                    run_channel<LARGEST>(operands, input, i);
                else
                    kind == MEAN ? run_channel<MEAN>(operands, input, i) : run_channel<WEIGHTED>(operands, input, i);
            }
        });
    }

  private:
    using V = Vec<GP_LANES>::type;

    template <Joined kind> void run_channel(const Operands &operands, const Input &input, Index channel) const {
        Index v = 0;
        if (packing.windows.empty())
            for (; v + 4 <= packing.num_vectors; v += 4) run_vectors<kind, 4, false>(operands, input, channel, v);
        for (; v < packing.num_vectors; ++v) run_vectors<kind, 1, true>(operands, input, channel, v);
    }

    // Computes several vectors at a time, because otherwise each sum would wait for the one before it.
    template <Joined kind, int U, bool has_windows>
    GP_INLINE void run_vectors(const Operands &operands, const Input &input, Index channel, Index v) const {
        const Index num_vectors = packing.num_vectors, taps = packing.geometry.taps(), at = v * GP_LANES;
        const float *first = input.x + packing.row_of(0, channel) * input.stride;
        const float *weights = weights_of_taps.get() + channel * taps;
        const Index *rows = rows_from_first.data();
        const Load *load = packing.loads.data() + v;
        const Window *windows = packing.windows.data();
        const Input given = input;
        const V none = broadcast<GP_LANES>(-std::numeric_limits<float>::infinity());
        V joined[U];
        for (int u = 0; u < U; ++u)
            joined[u] = kind == LARGEST ? none : broadcast<GP_LANES>(kind == WEIGHTED ? bias_of_rows[channel] : 0.0f);
        for (Index tap = 0; tap < taps; ++tap, load += num_vectors) {
            const float *row = first + rows[tap] * given.stride;
            for (int u = 0; u < U; ++u) {
                V value = Packing::read<GP_LANES, has_windows>(load[u], row, windows, given);
                if (kind == LARGEST) {
                    value = keep_lanes<GP_LANES>(value, load[u].keep, none);
                    joined[u] = (value > joined[u]) | (value != value) ? value : joined[u];  // NaN stays, as in torch
                } else {
                    joined[u] += kind == WEIGHTED ? weights[tap] * value : value;
                }
            }
        }
        const float *residual = operands.residual;
        if (residual) residual += channel * operands.residual_stride + at;
        float *to = operands.y + channel * operands.y_stride + at;
        for (int u = 0; u < U; ++u) {
            const Index left = packing.geometry.columns() - at - u * GP_LANES;
            const int count = static_cast<int>(std::min<Index>(GP_LANES, left));
            V found[1] = {kind == MEAN ? joined[u] / static_cast<float>(taps) : joined[u]};
            if (residual) found[0] += load_some<GP_LANES>(residual + u * GP_LANES, count);
            activate<GP_LANES, 1>(found, activation);
            store_some<GP_LANES>(to + u * GP_LANES, found[0], count);
        }
    }

    // Computes the means of whole images, whose numbers are adjacent.
    void mean_of_images(const Operands &operands, Index channel) const {
        const Index size = packing.geometry.taps();
        const float *row = operands.x + channel * operands.x_stride;
        for (Index image = 0; image < packing.geometry.batch; ++image, row += size) {
            V sums{};
            for (Index i = 0; i < size; i += GP_LANES)
                sums += load_some<GP_LANES>(row + i, static_cast<int>(std::min<Index>(GP_LANES, size - i)));
            float sum = 0;
            for (int lane = 0; lane < GP_LANES; ++lane) sum += sums[lane];
            operands.y[channel * operands.y_stride + image] = sum / static_cast<float>(size);
        }
    }

    Packing packing;
    std::vector<Index> rows_from_first;  // by tap: its row of X or its phases, relative to the first tap
    int activation, threads;
    Joined kind;
    bool is_whole;
    Buffer<float> weights_of_taps, bias_of_rows;
};

}  // namespace gp
