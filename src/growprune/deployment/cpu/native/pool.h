// Largest or mean value of windows, for activations [channels][batch * height * width].
#pragma once

#include <limits>

#include "plan.h"

namespace gp {

class Pool : public Layer {
  public:
    Pool(const Geometry &geometry, bool is_mean, bool counts_padding, int threads)
        : packing(geometry, GP_LANES), is_mean(is_mean), threads(threads) {
        const Geometry &g = geometry;
        counts = make_buffer<float>(packing.num_vectors * GP_LANES);
        std::fill_n(counts.get(), packing.num_vectors * GP_LANES, 1.0f);
        for (Index column = 0; column < g.columns(); ++column) {
            const Index top = column / g.out_width % g.out_height * g.stride_height - g.padding_top;
            const Index left = column % g.out_width * g.stride_width - g.padding_left;
            counts[column] = static_cast<float>(length(top, g.kernel_height, g.height, g.padding_top, counts_padding) *
                                                length(left, g.kernel_width, g.width, g.padding_left, counts_padding));
        }
        is_whole = is_mean && g.taps() > 1 && g.columns() == g.batch && g.taps() == Index(g.height) * g.width &&
                   g.kernel_height == g.height && g.padding_top == 0 && g.padding_left == 0;
    }

    void run(const Operands &operands) const override {
        const Index channels = packing.geometry.channels, items = std::min<Index>(channels, ITEMS_OF_THREAD * threads);
        const Input input = is_whole ? Input{} : packing.input(operands.x, operands.x_stride, threads);
        share(items, threads, [&](Index item) {
            for (Index i = item * channels / items; i < (item + 1) * channels / items; ++i) {
                float *to = operands.y + i * operands.y_stride;
                is_whole ? mean_of_images(operands.x + i * operands.x_stride, to) : run_channel(input, i, to);
            }
        });
    }

  private:
    using V = Vec<GP_LANES>::type;

    // How many places of a window count: those inside of the image, or inside of its padding as well.
    static Index length(Index start, Index kernel, Index size, Index padding, bool counts_padding) {
        const Index end = std::min(start + kernel, size + padding);
        return counts_padding ? end - start : std::min(end, size) - std::max<Index>(start, 0);
    }

    void run_channel(const Input &input, Index channel, float *to) const {
        const Index num_vectors = packing.num_vectors, taps = packing.geometry.taps();
        const V none = broadcast<GP_LANES>(is_mean ? 0.0f : -std::numeric_limits<float>::infinity());
        float *joined = scratch_of_thread<Pool>(num_vectors * GP_LANES);
        for (Index v = 0; v < num_vectors; ++v) store<GP_LANES>(joined + v * GP_LANES, none);
        for (Index tap = 0; tap < taps; ++tap) {
            const float *row = input.x + packing.row_of(tap, channel) * input.stride;
            for (Index v = 0; v < num_vectors; ++v) {
                const Load &load = packing.loads[tap * num_vectors + v];
                const V found = Packing::read<GP_LANES>(load, row, packing.windows.data(), input);
                const V value = keep_lanes<GP_LANES>(found, load.keep, none);
                V so_far = gp::load<GP_LANES>(joined + v * GP_LANES);
                if (is_mean)
                    so_far += value;
                else
                    so_far = (value > so_far) | (value != value) ? value : so_far;  // NaN stays, as in torch
                store<GP_LANES>(joined + v * GP_LANES, so_far);
            }
        }
        for (Index v = 0; v < num_vectors; ++v) {
            V found = gp::load<GP_LANES>(joined + v * GP_LANES);
            if (is_mean) found /= gp::load<GP_LANES>(counts.get() + v * GP_LANES);
            const Index left = packing.geometry.columns() - v * GP_LANES;
            store_some<GP_LANES>(to + v * GP_LANES, found, static_cast<int>(std::min<Index>(GP_LANES, left)));
        }
    }

    // One window over each image, whose numbers lie next to one another.
    void mean_of_images(const float *row, float *to) const {
        const Index size = packing.geometry.taps();
        for (Index image = 0; image < packing.geometry.batch; ++image, row += size) {
            V sums{};
            for (Index i = 0; i < size; i += GP_LANES)
                sums += load_some<GP_LANES>(row + i, static_cast<int>(std::min<Index>(GP_LANES, size - i)));
            float sum = 0;
            for (int lane = 0; lane < GP_LANES; ++lane) sum += sums[lane];
            to[image] = sum / static_cast<float>(size);
        }
    }

    Packing packing;
    bool is_mean, is_whole;
    int threads;
    Buffer<float> counts;
};

}  // namespace gp
