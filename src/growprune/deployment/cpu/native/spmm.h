// The inner loops: some rows of W times a packed block of X, which is [rows of X][U vectors], aligned.
#pragma once

#include "epilogue.h"
#include "weights.h"

namespace gp {

using Kernel = void (*)(const Piece &, const float *x, const Ends &, Index num_rows);

// A row at a time: U sums in registers; for each weight a broadcast and U multiply-adds with X straight from memory.
// With few vectors there are two sets of sums, or each multiply-add would wait for the one before it. The sets depend
// on U only: the order of additions, and so every bit of the result, is the same for any number of threads.
template <int lanes, int U> struct Sums {
    static constexpr int sets = U <= 4 ? 2 : 1;
    typename Vec<lanes>::type of[sets][U];

    GP_INLINE void add(int set, float value, const float *x) {
        const typename Vec<lanes>::type wide = broadcast<lanes>(value);
        for (int u = 0; u < U; ++u) of[set % sets][u] += wide * load<lanes>(x + u * lanes);
    }
    GP_INLINE void unite() {
        if constexpr (sets == 2)
            for (int u = 0; u < U; ++u) of[0][u] += of[1][u];
    }
};

template <int lanes, int U> GP_INLINE void add_singles(Sums<lanes, U> &sums, const float *values,
                                                       const std::uint16_t *offsets, std::uint32_t count,
                                                       const float *x) {
    std::uint32_t i = 0;
    for (; i + 2 <= count; i += 2) {
        sums.add(0, values[i], x + offsets[i]);
        sums.add(1, values[i + 1], x + offsets[i + 1]);
    }
    if (i < count) sums.add(0, values[i], x + offsets[i]);
}

template <int lanes, int U> GP_INLINE void add_eights(Sums<lanes, U> &sums, const float *values,
                                                      const std::uint16_t *offsets, std::uint32_t count, const float *x,
                                                      Index stride) {
    for (std::uint32_t i = 0; i < count; ++i, values += 8) {
        const float *from = x + offsets[i];
        for (int j = 0; j < 8; ++j, from += stride) sums.add(j, values[j], from);
    }
}

// Unstructured weights (width 1) and blocks along the inputs (width 8).
template <int lanes, int U, int width> void rows_times(const Piece &piece, const float *x, const Ends &ends, Index) {
    const float *values = piece.values;
    const std::uint16_t *offsets = piece.offsets;
    const std::uint32_t *rows = piece.rows;
    for (const Run *run = piece.runs; run != piece.runs_end; ++run)
        for (std::uint32_t r = 0; r < run->rows; ++r, values += run->count * width, offsets += run->count) {
            Sums<lanes, U> sums{};
            const Index row = *rows++;
            begin_row<lanes, U>(ends, row, sums.of[0]);
            if constexpr (width == 1)
                add_singles<lanes, U>(sums, values, offsets, run->count, x);
            else
                add_eights<lanes, U>(sums, values, offsets, run->count, x, ends.stride);
            sums.unite();
            end_row<lanes, U>(ends, row, sums.of[0]);
        }
}

// Eight rows at a time, which share their inputs: each vector of X is loaded once for eight multiply-adds.
template <int lanes, int U>
void eight_rows_times(const Piece &piece, const float *x, const Ends &ends, Index num_rows) {
    using V = typename Vec<lanes>::type;
    const float *values = piece.values;
    const std::uint16_t *offsets = piece.offsets;
    const std::uint32_t *rows = piece.rows;
    for (const Run *run = piece.runs; run != piece.runs_end; ++run)
        for (std::uint32_t r = 0; r < run->rows; ++r) {
            const Index first = Index(*rows++) * 8;
            V sums[8][U];
            for (int j = 0; j < 8; ++j) begin_row<lanes, U>(ends, first + j, sums[j]);
            for (std::uint32_t i = 0; i < run->count; ++i, values += 8) {
                V from[U];
                for (int u = 0; u < U; ++u) from[u] = load<lanes>(x + *offsets + u * lanes);
                ++offsets;
                for (int j = 0; j < 8; ++j)
                    for (int u = 0; u < U; ++u) sums[j][u] += values[j] * from[u];
            }
            const int alive = num_rows - first < 8 ? static_cast<int>(num_rows - first) : 8;
            for (int j = 0; j < alive; ++j) end_row<lanes, U>(ends, first + j, sums[j]);
        }
}

}  // namespace gp
