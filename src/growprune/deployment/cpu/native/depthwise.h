// Convolutions in which each channel is filtered by itself, [channels][batch * height * width] to the same.
//
// A band of rows is copied with its padding, and, if there is a stride, sorted by the rest of row and column divided by
// the stride (a phase). There each tap is a shift: outputs of all rows, and a few columns between them that are thrown
// away, are sums of whole vectors, however small an image is.
#pragma once

#include "epilogue.h"
#include "operands.h"
#include "pack.h"
#include "threads.h"

namespace gp {

constexpr Index BAND_FLOATS = 6144;  // of bands with their padding that are done together: they fit the first cache
constexpr Index MOST_TOGETHER = 8;

class Depthwise : public Layer {
  public:
    // Weights are [channels][taps].
    Depthwise(const Geometry &geometry, const float *weights, const float *bias, int activation, int threads)
        : g(geometry), activation(activation), threads(threads) {
        taps = make_buffer<float>(Index(g.channels) * g.taps());
        std::copy_n(weights, Index(g.channels) * g.taps(), taps.get());
        bias_of_rows = make_buffer<float>(g.channels);
        if (bias) std::copy_n(bias, g.channels, bias_of_rows.get());
        reach = Index(g.kernel_height - 1) * g.dilation_height / g.stride_height;
        width = g.out_width + Index(g.kernel_width - 1) * g.dilation_width / g.stride_width;
        const Index phases = Index(g.stride_height) * g.stride_width;
        band = std::min<Index>(g.out_height, std::max<Index>(1, BAND_FLOATS / (width * phases) - reach));
        num_bands = (g.out_height + band - 1) / band;
        phase_floats = (band + reach) * width + GP_LANES;  // rows are written in whole vectors, and so is the last
        band_floats = (phases * phase_floats + U * GP_LANES) / 16 * 16;
        sums_floats = (band * width + U * GP_LANES) / 16 * 16;
        together = std::min(MOST_TOGETHER, std::max<Index>(1, BAND_FLOATS / band_floats));
        for (Index r = 0; r < g.kernel_height; ++r)
            for (Index s = 0; s < g.kernel_width; ++s)
                shifts.push_back(shift(r * g.dilation_height, s * g.dilation_width));
    }

    void run(const Operands &operands) const override {
        const Index units = Index(g.channels) * g.batch * num_bands;
        const Index items = std::min(units, 2 * ITEMS_OF_THREAD * threads);
        share(items, threads, [&](Index item) {
            float *scratch = scratch_of_thread(together * (band_floats + sums_floats) + U * GP_LANES);
            std::fill_n(scratch, together * band_floats, 0.0f);  // padding at the sides stays so
            const Index end = (item + 1) * units / items;
            for (Index unit = item * units / items; unit < end; unit += together)
                run_units(operands, unit, std::min(end, unit + together), scratch);
        });
    }

  private:
    static constexpr int U = 4;
    using V = Vec<GP_LANES>::type;

    struct Unit {  // some rows of a channel of an image
        Index channel, image, first, rows;
    };

    Unit unit_of(Index number) const {
        const Index image = number / num_bands, first = (number - image * num_bands) * band;
        const Index channel = image / g.batch;
        return {channel, image - channel * g.batch, first, std::min<Index>(band, g.out_height - first)};
    }

    Index shift(Index row, Index column) const {
        const Index phase = row % g.stride_height * g.stride_width + column % g.stride_width;
        return phase * phase_floats + row / g.stride_height * width + column / g.stride_width;
    }

    // Several at a time, since a vector that was just written in pieces cannot be read at once.
    void run_units(const Operands &operands, Index begin, Index end, float *scratch) const {
        Unit units[MOST_TOGETHER];
        const Index count = end - begin;
        for (Index i = 0; i < count; ++i) units[i] = unit_of(begin + i);
        float *sums = scratch + together * band_floats;
        for (Index i = 0; i < count; ++i) copy_in(operands, units[i], scratch + i * band_floats);
        for (Index i = 0; i < count; ++i)
            add_up(scratch + i * band_floats, units[i], !operands.residual, sums + i * sums_floats);
        for (Index i = 0; i < count; ++i) copy_out(operands, units[i], sums + i * sums_floats);
    }

    // Rows of an image, and those above and below it, each to its phases. Sizes are copied, here and below, since for
    // the compiler a vector that is written may be one of them.
    void copy_in(const Operands &operands, const Unit &unit, float *to) const {
        const Geometry size = g;
        const float *image = operands.x + unit.channel * operands.x_stride + unit.image * size.height * size.width;
        const Index step = size.stride_width * phase_floats, pitch = width;
        Index row = unit.first * size.stride_height - size.padding_top;
        if (size.stride_height == 1 && size.stride_width == 1 && num_bands == 1) {  // most are so
            copy_rows(image, to + size.padding_top * pitch + size.padding_left);
            return;
        }
        for (Index i = 0; i < unit.rows + reach; ++i, to += pitch)
            for (Index j = 0; j < size.stride_height; ++j, ++row) {
                if (row >= 0 && row < size.height)
                    copy_row(image + row * size.width, to + j * step);
                else if (num_bands > 1)  // or it is zeros still
                    for (Index phase = 0; phase < size.stride_width; ++phase)
                        std::fill_n(to + j * step + phase * phase_floats, pitch, 0.0f);
            }
    }

    // Behind a row come zeros, over what is padding or will be written later.
    void copy_rows(const float *from, float *to) const {
        const Index pitch = width, length = g.width, count = std::min<Index>(length, pitch - g.padding_left);
        const Index rows = std::min<Index>(g.height, band + reach - g.padding_top);
        if (count <= GP_LANES) {
            for (Index row = 0; row < rows; ++row, from += length, to += pitch)
                store<GP_LANES>(to, load_some<GP_LANES>(from, static_cast<int>(count)));
            return;
        }
        for (Index row = 0; row < rows; ++row, from += length, to += pitch)
            for (Index i = 0; i < count; i += GP_LANES) store<GP_LANES>(to + i, load_up_to(from + i, count - i));
    }

    void copy_row(const float *from, float *to) const {
        const Index pitch = width, length = g.width, left = g.padding_left, step = g.stride_width;
        if (step == 1) {
            const Index count = std::min<Index>(length, pitch - left);
            for (Index i = 0; i < count; i += GP_LANES) store<GP_LANES>(to + left + i, load_up_to(from + i, count - i));
        } else if (HAS_HALVES && step == 2) {
            copy_halves(from - left, to);
        } else {
            for (Index phase = 0; phase < step; ++phase, to += phase_floats)
                for (Index i = 0, at = phase - left; i < pitch; ++i, at += step)
                    to[i] = at >= 0 && at < length ? from[at] : 0.0f;
        }
    }

    // Even columns, and odd ones; `from` is where the padding begins.
    void copy_halves(const float *from, float *to) const {
        const Index left = g.padding_left, first = std::min<Index>(width, (left + 1) / 2);
        const Index end = std::min<Index>(left + g.width, 2 * width);
        float *odd = to + phase_floats;
        if (left % 2 && first) odd[first - 1] = from[left];
        for (Index i = first; 2 * i < end; i += GP_LANES) {
            const V low = load_up_to(from + 2 * i, end - 2 * i);
            const V high = load_up_to(from + 2 * i + GP_LANES, end - 2 * i - GP_LANES);
            store<GP_LANES>(to + i, half_of<0>(low, high));
            store<GP_LANES>(odd + i, half_of<1>(low, high));
        }
    }

    static GP_INLINE V load_up_to(const float *from, Index count) {
        if (count >= GP_LANES) return load<GP_LANES>(from);
        return count > 0 ? load_some<GP_LANES>(from, static_cast<int>(count)) : V{};
    }

    void add_up(const float *x, const Unit &unit, bool is_activated, float *sums) const {
        const int with = is_activated ? activation : NONE;
        if (g.taps() == 9)
            add_taps<9>(x, unit, with, sums);
        else if (g.taps() == 25)
            add_taps<25>(x, unit, with, sums);
        else
            add_taps<0>(x, unit, with, sums);
    }

    // Behind the sums of a unit there is room for a whole vector.
    template <int fixed> void add_taps(const float *x, const Unit &unit, int with, float *sums) const {
        const float *weights = taps.get() + unit.channel * g.taps();
        const float bias = bias_of_rows[unit.channel];
        const Index count = (unit.rows - 1) * width + g.out_width;
        Index i = 0;
        for (; i + (U - 1) * GP_LANES < count; i += U * GP_LANES) add_vectors<fixed, U>(x + i, weights, bias, with, sums + i);
        for (; i < count; i += GP_LANES) add_vectors<fixed, 1>(x + i, weights, bias, with, sums + i);
    }

    template <int fixed, int vectors>
    GP_INLINE void add_vectors(const float *x, const float *weights, float bias, int with, float *sums) const {
        const int num_taps = fixed ? fixed : g.taps();
        const Index *shift = shifts.data();
        V found[vectors];
        for (int u = 0; u < vectors; ++u) found[u] = broadcast<GP_LANES>(bias);
        for (int tap = 0; tap < num_taps; ++tap) {
            const V weight = broadcast<GP_LANES>(weights[tap]);
            const float *from = x + shift[tap];
            for (int u = 0; u < vectors; ++u) found[u] += weight * load<GP_LANES>(from + u * GP_LANES);
        }
        activate<GP_LANES, vectors>(found, with);
        for (int u = 0; u < vectors; ++u) store<GP_LANES>(sums + u * GP_LANES, found[u]);
    }

    // Without a residual, whole vectors are written where what lies behind a row comes later.
    void copy_out(const Operands &operands, const Unit &unit, const float *sums) const {
        const Index length = g.out_width, pitch = width, place = (unit.image * g.out_height + unit.first) * length;
        float *to = operands.y + unit.channel * operands.y_stride + place;
        const float *end = to + unit.rows * length;
        if (operands.residual) {
            const float *residual = operands.residual + unit.channel * operands.residual_stride + place;
            for (; to != end; sums += pitch, to += length, residual += length) add_row(sums, residual, to);
            return;
        }
        for (; to != end; sums += pitch, to += length)
            for (Index i = 0; i < length; i += GP_LANES) {
                const V found = load<GP_LANES>(sums + i);
                if (to + i + GP_LANES <= end)
                    store<GP_LANES>(to + i, found);
                else
                    store_some<GP_LANES>(to + i, found, static_cast<int>(std::min<Index>(GP_LANES, length - i)));
            }
    }

    void add_row(const float *sums, const float *residual, float *to) const {
        for (Index i = 0; i < g.out_width; i += GP_LANES) {
            const int count = static_cast<int>(std::min<Index>(GP_LANES, g.out_width - i));
            V found[1] = {load<GP_LANES>(sums + i) + load_some<GP_LANES>(residual + i, count)};
            activate<GP_LANES, 1>(found, activation);
            store_some<GP_LANES>(to + i, found[0], count);
        }
    }

    Geometry g;
    int activation, threads;
    Index reach;  // rows that a kernel spans, less one
    Index width, band, num_bands, phase_floats, band_floats, sums_floats, together;
    Buffer<float> taps, bias_of_rows;
    std::vector<Index> shifts;
};

template <int wide> void repeat_row(const float *__restrict from, Index count, float *__restrict to) {
    for (Index i = 0; i < count; ++i)
        for (int j = 0; j < wide; ++j) to[wide * i + j] = from[i];
}

inline void repeat_row(const float *from, Index count, Index wide, float *to) {
    if (wide == 1)
        std::copy_n(from, count, to);
    else if (wide == 2)
        repeat_row<2>(from, count, to);
    else
        for (Index i = 0; i < count; ++i, to += wide) std::fill_n(to, wide, from[i]);
}

// Each number repeated in a block of height x width, as nearest neighbours are; 1 x 1 copies.
inline void repeat(const Geometry &g, const float *x, Index x_stride, float *y, Index y_stride, int threads) {
    const Index images = Index(g.channels) * g.batch, high = g.stride_height, wide = g.stride_width;
    const Index items = std::min(images, ITEMS_OF_THREAD * threads);
    share(items, threads, [&](Index item) {
        for (Index i = item * images / items; i < (item + 1) * images / items; ++i) {
            const float *from = x + i / g.batch * x_stride + i % g.batch * g.height * g.width;
            float *to = y + i / g.batch * y_stride + i % g.batch * g.height * g.width * high * wide;
            for (Index row = 0; row < g.height; ++row, from += g.width, to += g.width * wide * high) {
                repeat_row(from, g.width, wide, to);
                for (Index k = 1; k < high; ++k) std::copy_n(to, g.width * wide, to + k * g.width * wide);
            }
        }
    });
}

}  // namespace gp
