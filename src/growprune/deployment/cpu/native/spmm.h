// The inner loops: some rows of W times a packed block of X, which is [rows of X][U vectors], aligned.
#pragma once

#include "epilogue.h"
#include "weights.h"

namespace gp {

using Kernel = void (*)(const Piece &, const float *x, const Ends &, Index num_rows);

// One row at a time: U sums in registers, and for each weight a broadcast and U multiply-adds with X from memory. With
// few vectors there are several sets of sums, because otherwise each multiply-add would wait for the one before it. The
// sets depend only on the kernel, so the order of additions, and every bit of the result, is the same for any number of
// threads.
template <int lanes, int U> struct Sums {
    static constexpr int sets = lanes == 4 ? 4 : U <= 4 ? 2 : 1;
    typename Vec<lanes>::type of[sets][U];

    GP_INLINE void add(int set, float value, const float *x) {
        const typename Vec<lanes>::type wide = broadcast<lanes>(value);
        for (int u = 0; u < U; ++u) of[set % sets][u] += wide * load<lanes>(x + u * lanes);
    }
    GP_INLINE void unite() {
        for (int size = sets / 2; size; size /= 2)
            for (int set = 0; set < size; ++set)
                for (int u = 0; u < U; ++u) of[set][u] += of[set + size][u];
    }
};

template <int lanes, int U> GP_INLINE void add_singles(Sums<lanes, U> &sums, const float *values,
                                                       const std::uint16_t *offsets, std::uint32_t count,
                                                       const float *x) {
    constexpr std::uint32_t step = lanes == 4 ? 4 : 2;
    std::uint32_t i = 0;
    for (; i + step <= count; i += step)
        for (std::uint32_t j = 0; j < step; ++j) sums.add(j, values[i + j], x + offsets[i + j]);
    for (; i < count; ++i) sums.add(0, values[i], x + offsets[i]);
}

template <int lanes, int U> GP_INLINE void add_eights(Sums<lanes, U> &sums, const float *values,
                                                      const std::uint16_t *offsets, std::uint32_t count, const float *x,
                                                      Index stride) {
    for (std::uint32_t i = 0; i < count; ++i, values += 8) {
        const float *from = x + offsets[i];
        for (int j = 0; j < 8; ++j, from += stride) sums.add(j, values[j], from);
    }
}

// Multiplies unstructured weights (width 1) or blocks along the inputs (width 8).
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

// Multiplies eight rows at a time, which share their inputs: each vector of X is loaded once for eight multiply-adds.
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

// Kernels for one column: x is a plain vector, and registers hold only the sums of a row.

// Returns eight numbers of x from eight places. Gather instructions are not faster, and on many machines slower.
GP_INLINE Vec<8>::type look_up(const float *x, const std::uint16_t *at) {
    return Vec<8>::type{x[at[0]], x[at[1]], x[at[2]], x[at[3]], x[at[4]], x[at[5]], x[at[6]], x[at[7]]};
}

GP_INLINE float add_up(Vec<8>::type s) { return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7])); }

// Multiplies unstructured weights with a look-up for each weight, eight in one vector.
inline void rows_times_one(const Piece &piece, const float *x, const Ends &ends, Index) {
    const float *values = piece.values;
    const std::uint16_t *offsets = piece.offsets;
    const std::uint32_t *rows = piece.rows;
    for (const Run *run = piece.runs; run != piece.runs_end; ++run)
        for (std::uint32_t r = 0; r < run->rows; ++r, values += run->count, offsets += run->count) {
            Vec<8>::type sums[2] = {};
            float total[1], rest = 0.0f;
            std::uint32_t i = 0;
            for (; i + 16 <= run->count; i += 16)
                for (int j = 0; j < 2; ++j) sums[j] += load<8>(values + i + 8 * j) * look_up(x, offsets + i + 8 * j);
            for (; i + 8 <= run->count; i += 8) sums[0] += load<8>(values + i) * look_up(x, offsets + i);
            for (; i < run->count; ++i) rest += values[i] * x[offsets[i]];
            begin_row<1, 1>(ends, *rows, total);
            total[0] += add_up(sums[0] + sums[1]) + rest;
            end_row<1, 1>(ends, *rows++, total);
        }
}

// Multiplies blocks of 1x8, each with a dot product of eight numbers.
inline void wide_rows_times_one(const Piece &piece, const float *x, const Ends &ends, Index) {
    const float *values = piece.values;
    const std::uint16_t *offsets = piece.offsets;
    const std::uint32_t *rows = piece.rows;
    for (const Run *run = piece.runs; run != piece.runs_end; ++run)
        for (std::uint32_t r = 0; r < run->rows; ++r, values += run->count * 8, offsets += run->count) {
            Vec<8>::type sums[2] = {};
            float total[1];
            std::uint32_t i = 0;
            for (; i + 2 <= run->count; i += 2)
                for (int j = 0; j < 2; ++j) sums[j] += load<8>(values + 8 * (i + j)) * load<8>(x + offsets[i + j]);
            if (i < run->count) sums[0] += load<8>(values + 8 * i) * load<8>(x + offsets[i]);
            begin_row<1, 1>(ends, *rows, total);
            total[0] += add_up(sums[0] + sums[1]);
            end_row<1, 1>(ends, *rows++, total);
        }
}

// Multiplies blocks of 8x1, with eight sums side by side in one vector.
inline void eight_rows_times_one(const Piece &piece, const float *x, const Ends &ends, Index num_rows) {
    const float *values = piece.values;
    const std::uint16_t *offsets = piece.offsets;
    const std::uint32_t *rows = piece.rows;
    for (const Run *run = piece.runs; run != piece.runs_end; ++run)
        for (std::uint32_t r = 0; r < run->rows; ++r, values += Index(run->count) * 8, offsets += run->count) {
            const Index first = Index(*rows++) * 8;
            Vec<8>::type sums[4] = {};
            std::uint32_t i = 0;
            for (; i + 4 <= run->count; i += 4)
                for (int j = 0; j < 4; ++j) sums[j] += load<8>(values + 8 * (i + j)) * x[offsets[i + j]];
            for (; i < run->count; ++i) sums[0] += load<8>(values + 8 * i) * x[offsets[i]];
            const Vec<8>::type all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            for (int j = 0; j < 8 && first + j < num_rows; ++j) {
                float total[1];
                begin_row<1, 1>(ends, first + j, total);
                total[0] += all[j];
                end_row<1, 1>(ends, first + j, total);
            }
        }
}

}  // namespace gp
