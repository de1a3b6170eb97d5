// One column: x is a plain vector, and there is nothing to keep in registers but the sums of a row.
#pragma once

#include "spmm.h"

namespace gp {

// Eight numbers of x from eight places. Gather instructions are no faster, and on many machines slower.
GP_INLINE Vec<8>::type look_up(const float *x, const std::uint16_t *at) {
    return Vec<8>::type{x[at[0]], x[at[1]], x[at[2]], x[at[3]], x[at[4]], x[at[5]], x[at[6]], x[at[7]]};
}

GP_INLINE float add_up(Vec<8>::type s) { return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7])); }

// A look-up for each weight, eight at a time in one vector.
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

// 1x8: a dot product of eight at a time.
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

// 8x1: eight sums side by side in one vector.
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
