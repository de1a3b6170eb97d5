// Depthwise convolutions whose outputs are as large as their inputs, for AVX-512.
//
// Output i of an image, counted over all its rows, needs input i + shift of each tap, and a shift is the same everywhere.
// So a vector of outputs is a sum of vectors of inputs, read where they lie: nothing is copied, however small an image
// is. Lanes in which a tap meets the padding are masked, and a masked load reads nothing there.
#pragma once

#include "epilogue.h"
#include "operands.h"
#include "pack.h"
#include "threads.h"

#if defined(__AVX512F__)

namespace gp {

class SameSizeDepthwise : public Layer {
  public:
    static bool fits(const Geometry &g) {
        return g.stride_height == 1 && g.stride_width == 1 && g.out_height == g.height && g.out_width == g.width;
    }

    // Weights are [channels][taps].
    SameSizeDepthwise(const Geometry &geometry, const float *weights, const float *bias, int activation, int threads)
        : g(geometry), size(Index(g.height) * g.width), activation(activation), threads(threads) {
        taps = make_buffer<float>(Index(g.channels) * g.taps());
        std::copy_n(weights, Index(g.channels) * g.taps(), taps.get());
        bias_of_rows = make_buffer<float>(g.channels);
        if (bias) std::copy_n(bias, g.channels, bias_of_rows.get());
        for (Index r = 0; r < g.kernel_height; ++r)
            for (Index s = 0; s < g.kernel_width; ++s)
                shifts.push_back((r * g.dilation_height - g.padding_top) * g.width + s * g.dilation_width -
                                 g.padding_left);
        for (Index first = 0; first < size; first += 16)
            for (int tap = 0; tap < g.taps(); ++tap) masks.push_back(mask_of(tap, first));
    }

    void run(const Operands &operands) const override {
        const Index images = Index(g.channels) * g.batch, items = std::min(images, 2 * ITEMS_OF_THREAD * threads);
        share(items, threads, [&](Index item) {
            for (Index i = item * images / items; i < (item + 1) * images / items; ++i)
                run_image(operands, i / g.batch, i % g.batch * size);
        });
    }

  private:
    static constexpr int U = 4;
    using V = Vec<16>::type;

    struct Image {  // of one channel
        const float *x, *weights, *residual;
        float bias, *y;
    };

    std::uint16_t mask_of(int tap, Index first) const {
        unsigned mask = 0;
        for (int i = 0; i < 16 && first + i < size; ++i) mask |= unsigned(g.source(tap, first + i) >= 0) << i;
        return static_cast<std::uint16_t>(mask);
    }

    void run_image(const Operands &operands, Index channel, Index place) const {
        const float *residual = operands.residual;
        const Image image{operands.x + channel * operands.x_stride + place, taps.get() + channel * g.taps(),
                          residual ? residual + channel * operands.residual_stride + place : nullptr,
                          bias_of_rows[channel], operands.y + channel * operands.y_stride + place};
        if (g.taps() == 9)
            run_vectors<9>(image);
        else if (g.taps() == 25)
            run_vectors<25>(image);
        else
            run_vectors<0>(image);
    }

    template <int fixed> void run_vectors(const Image &image) const {
        Index i = 0;
        for (; i + (U - 1) * 16 < size; i += U * 16) add_up<fixed, U>(image, i);
        for (; i < size; i += 16) add_up<fixed, 1>(image, i);
    }

    template <int fixed, int vectors> GP_INLINE void add_up(const Image &image, Index first) const {
        const int num_taps = fixed ? fixed : g.taps();
        const std::uint16_t *mask = masks.data() + first / 16 * num_taps;
        V sums[vectors];
        for (int u = 0; u < vectors; ++u) sums[u] = broadcast<16>(image.bias);
        for (int tap = 0; tap < num_taps; ++tap, ++mask) {
            const V weight = broadcast<16>(image.weights[tap]);
            const float *from = image.x + first + shifts[tap];
            for (int u = 0; u < vectors; ++u)
                sums[u] += weight * (V)_mm512_maskz_loadu_ps(mask[u * num_taps], from + u * 16);
        }
        finish<vectors>(image, first, sums);
    }

    template <int vectors> GP_INLINE void finish(const Image &image, Index first, V (&sums)[vectors]) const {
        const Index last = first + (vectors - 1) * 16;
        const int tail = static_cast<int>(std::min<Index>(16, size - last));
        if (image.residual) {
            for (int u = 0; u + 1 < vectors; ++u) sums[u] += load<16>(image.residual + first + u * 16);
            sums[vectors - 1] += load_some<16>(image.residual + last, tail);
        }
        activate<16, vectors>(sums, activation);
        for (int u = 0; u + 1 < vectors; ++u) store<16>(image.y + first + u * 16, sums[u]);
        store_some<16>(image.y + last, sums[vectors - 1], tail);
    }

    Geometry g;
    Index size;  // of an image
    int activation, threads;
    Buffer<float> taps, bias_of_rows;
    std::vector<Index> shifts;
    std::vector<std::uint16_t> masks;  // [vectors of an image][taps]
};

}  // namespace gp

#endif
