// Packs a block of X for the kernels: rows k of the block with U vectors of columns each, aligned.
//
// A convolution is the same product with another packing. X is [channels][batch * height * width], and row k of the
// product is (tap, channel) = (k / channels, k % channels): the channel as this tap of the kernel sees it. The inputs
// of a tap for each vector of output columns are found when the plan is made, so X is never unfolded. For strides, X is
// first divided into *phases*, such as the odd columns of even rows, in which neighbours are read together.
#pragma once

#include <vector>

#include "threads.h"
#include "weights.h"

namespace gp {

struct Geometry {
    std::int32_t channels, batch, height, width, kernel_height, kernel_width, stride_height, stride_width, padding_top,
        padding_left, dilation_height, dilation_width, out_height, out_width;

    Index columns() const { return Index(batch) * out_height * out_width; }
    Index in_columns() const { return Index(batch) * height * width; }
    int taps() const { return kernel_height * kernel_width; }
    // Returns the input column that a tap reads for an output column, or -1 in the padding.
    Index source(int tap, Index column) const {
        const Index image = column / (Index(out_height) * out_width), place = column % (Index(out_height) * out_width);
        const Index row = place / out_width * stride_height - padding_top + tap / kernel_width * dilation_height;
        const Index at = place % out_width * stride_width - padding_left + tap % kernel_width * dilation_width;
        if (row < 0 || row >= height || at < 0 || at >= width) return -1;
        return (image * height + row) * width + at;
    }
};

// How one tap reads the inputs of one vector of outputs: as neighbours, or from several windows.
struct Load {
    std::int32_t start;         // input column of lane 0, even if it is masked; with windows, of the first lane kept
    std::uint16_t keep;         // a bit for each lane that is not padding
    std::uint16_t num_windows;  // 0 if the lanes read neighbours
    std::uint32_t first_window;
};

// Inputs within two consecutive vectors: where the vectors begin, and which of their numbers each output lane takes.
struct Window {
    std::int32_t offset;  // from the start of the load
    std::uint16_t keep, low, high;  // lanes of the output, and lanes that are read of the two vectors
    std::int32_t at[16];

    bool operator==(const Window &other) const {
        return offset == other.offset && keep == other.keep && std::equal(at, at + 16, other.at);
    }
};

// A row of the product: the tap that reads it, and the row of X, or of its phases, that it is read from.
struct Source {
    std::int32_t tap, row;
};

// X or its phases, the distance between its rows, and where it ends.
struct Input {
    const float *x;
    Index stride;
    const float *end;
};

class Packing {
  public:
    Packing(const Geometry &given, int lanes) : geometry(given), num_lanes(lanes) {
        num_vectors = (geometry.columns() + lanes - 1) / lanes;
        const Index num_phases = Index(geometry.stride_height) * geometry.stride_width;
        if (num_phases > 1 && geometry.taps() > num_phases) {  // otherwise, few numbers are read twice
            Geometry cut{geometry.channels, geometry.batch, geometry.height, geometry.width, geometry.stride_height,
                         geometry.stride_width, geometry.stride_height, geometry.stride_width, 0, 0, 1, 1,
                         (geometry.height + geometry.stride_height - 1) / geometry.stride_height,
                         (geometry.width + geometry.stride_width - 1) / geometry.stride_width};
            phases = std::make_unique<Packing>(cut, GP_LANES);
            for (Index row = 0; row < geometry.channels * num_phases; ++row)
                rows_of_phases.push_back({std::int32_t(row % num_phases), std::int32_t(row / num_phases)});
        }
        for (int tap = 0; tap < geometry.taps(); ++tap)
            for (Index v = 0; v < num_vectors; ++v) loads.push_back(describe(tap, v * lanes));
        loads.resize(loads.size() + num_vectors);  // one more tap, which reads nothing
    }

    // Returns the row of X, or of its phases, that a tap reads for a channel.
    std::int32_t row_of(Index tap, Index channel) const {
        if (!phases) return static_cast<std::int32_t>(channel);
        const Index high = geometry.stride_height, wide = geometry.stride_width;
        const Index down = (tap / geometry.kernel_width * geometry.dilation_height - geometry.padding_top) % high;
        const Index across = (tap % geometry.kernel_width * geometry.dilation_width - geometry.padding_left) % wide;
        return static_cast<std::int32_t>((channel * high + (down + high) % high) * wide + (across + wide) % wide);
    }

    // Returns what taps read: X itself, or its phases, which are valid until the calling thread next asks for phases.
    Input input(const float *x, Index x_stride, int threads) const {
        if (!phases) return {x, x_stride, x + (geometry.channels - 1) * x_stride + geometry.in_columns()};
        const Index count = phases->geometry.taps(), stride = phases->num_vectors * GP_LANES;
        float *cut = scratch_of_thread<struct Phases>(geometry.channels * count * stride);
        const Input whole = phases->input(x, x_stride, 1);
        share(geometry.channels, threads, [&](Index channel) {
            const Source *from = rows_of_phases.data() + channel * count;
            phases->pack<GP_LANES>(whole, from, from + count, 0, static_cast<int>(phases->num_vectors),
                                   cut + channel * count * stride, stride);
        });
        return {cut, stride, cut + geometry.channels * count * stride};
    }

    // Packs rows [from, end) of the product for vectors [v, v + count). Rows of `to` are `stride` floats apart.
    template <int lanes> void pack(const Input &input, const Source *from, const Source *end, Index v, int count,
                                   float *to, Index stride) const {
        if (windows.empty())
            pack_rows<lanes, false>(input, from, end, v, count, to, stride);
        else
            pack_rows<lanes, true>(input, from, end, v, count, to, stride);
    }

    // Returns the inputs of one load from a row of X, with zeros in the padding. Masked lanes may be in another row,
    // but no vector is read that reaches outside of X. A loop of loads without windows is twice as fast.
    template <int lanes, bool has_windows>
    static GP_INLINE typename Vec<lanes>::type read(const Load &load, const float *row, const Window *table,
                                                    const Input &input) {
        const float *from = row + load.start;
#if defined(GP_HAS_MASKED_LOADS)
        if (!has_windows || load.num_windows == 0) return load_masked<lanes>(from, load.keep);
        if constexpr (lanes == 16) {
            __m512 found = _mm512_setzero_ps();
            const Window *window = table + load.first_window;
            for (const Window *end = window + load.num_windows; window < end; ++window) {
                const __m512 low = _mm512_maskz_loadu_ps(window->low, from + window->offset);
                const __m512 high = _mm512_maskz_loadu_ps(window->high, from + window->offset + 16);
                const __m512 both = _mm512_permutex2var_ps(low, _mm512_loadu_si512(window->at), high);
                found = _mm512_mask_mov_ps(found, window->keep, both);
            }
            return (typename Vec<16>::type)found;
        }
#endif
        const bool is_together = !has_windows || load.num_windows == 0;
        if (is_together && from >= input.x && from + lanes <= input.end)
            return keep_lanes<lanes>(gp::load<lanes>(from), load.keep);
        float found[lanes];
        for (int i = 0; i < lanes; ++i)
            found[i] = load.keep >> i & 1 ? from[is_together ? i : table[load.first_window].at[i]] : 0.0f;
        return gp::load<lanes>(found);
    }

    // True if any of the taps up to `last` reads more than padding.
    bool is_read(Index tap, Index last) const {
        const auto is_kept = [](const Load &load) { return load.keep != 0; };
        return std::any_of(loads.begin() + tap * num_vectors, loads.begin() + (last + 1) * num_vectors, is_kept);
    }

    // True if one tap reads the whole input unchanged, and all others read only padding.
    bool is_copied() const {
        Index tap = -1;
        for (Index i = 0; i < geometry.taps() * num_vectors; ++i) {
            const Load &load = loads[i];
            if (load.keep && tap < 0) tap = i / num_vectors;
            const bool is_same = load.num_windows == 0 && load.start == i % num_vectors * num_lanes;
            if (i / num_vectors == tap ? !load.keep || !is_same : load.keep != 0) return false;
        }
        return !phases && geometry.columns() == geometry.in_columns();
    }

    Geometry geometry;
    Index num_vectors;
    std::vector<Load> loads;  // tap by tap
    std::vector<Window> windows;

  private:
    template <int lanes, bool has_windows>
    __attribute__((noinline)) void pack_rows(Input input, const Source *from, const Source *end, Index v, int count,
                                             float *to, Index stride) const {
        const Load *loads_of_panel = loads.data() + v;
        const Window *table = windows.data();
        const Index per_tap = num_vectors;
        for (; from < end; ++from, to += stride) {
            const float *row = input.x + from->row * input.stride;
            const Load *load = loads_of_panel + from->tap * per_tap;
            for (int u = 0; u < count; ++u)
                store<lanes>(to + u * lanes, read<lanes, has_windows>(load[u], row, table, input));
        }
    }

    // Returns the place in its row of the number that a tap reads for an output column, or -1 in the padding.
    Index source(int tap, Index column) const {
        const Index at = geometry.source(tap, column);
        if (at < 0 || !phases) return at;
        const Geometry &cut = phases->geometry;
        const Index line = at / geometry.width, image = line / geometry.height, row = line % geometry.height;
        const Index line_of_phase = image * cut.out_height + row / cut.stride_height;
        return line_of_phase * cut.out_width + at % geometry.width / cut.stride_width;
    }

    Load describe(int tap, Index column) {
        Index sources[16], start = 0;
        unsigned keep = 0;
        bool is_together = true;
        for (int i = 0; i < num_lanes; ++i) {
            sources[i] = column + i < geometry.columns() ? source(tap, column + i) : -1;
            if (sources[i] < 0) continue;
            if (!keep) start = sources[i] - i;
            keep |= 1u << i;
            is_together &= sources[i] - i == start;
        }
        const auto kept = static_cast<std::uint16_t>(keep);
        if (is_together) return {static_cast<std::int32_t>(start), kept, 0, 0};
        const Index reach = num_lanes == 16 ? 32 : geometry.in_columns(), first = sources[__builtin_ctz(keep)];
        std::vector<Window> found;
        while (keep) {
            const Index begin = sources[__builtin_ctz(keep)];
            Window window{};
            window.offset = static_cast<std::int32_t>(begin - first);
            for (int i = 0; i < num_lanes; ++i) {
                const Index at = sources[i] - begin;
                if (!(keep >> i & 1) || at < 0 || at >= reach) continue;
                window.at[i] = static_cast<std::int32_t>(at);
                window.keep |= 1u << i;
                (at < 16 ? window.low : window.high) |= 1u << at % 16;
            }
            keep &= ~window.keep;
            found.push_back(window);
        }
        const auto place = std::search(windows.begin(), windows.end(), found.begin(), found.end());  // most are equal
        const auto first_window = static_cast<std::uint32_t>(place - windows.begin());
        if (place == windows.end()) windows.insert(place, found.begin(), found.end());
        return {static_cast<std::int32_t>(first), kept, static_cast<std::uint16_t>(found.size()), first_window};
    }

    int num_lanes;
    std::unique_ptr<Packing> phases;
    std::vector<Source> rows_of_phases;
};

}  // namespace gp
