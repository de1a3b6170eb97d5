// A sparse matrix in the order in which the kernels read it.
//
// It is divided into K blocks of columns and, for threads, into chunks of rows. A piece is the part in one K block and
// one chunk: three streams of values, offsets and row numbers. Rows of a piece are sorted by their number of blocks, so
// that the trip count of the inner loop repeats (a run) and the CPU predicts its end. An offset says where a weight's
// row of X begins in the packed input, in floats; it fits in 16 bits.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "vec.h"

namespace gp {

// Block sparse rows from Python, with blocks of height x width: (1,1), (1,8) or (8,1).
struct Matrix {
    Index rows, columns;
    std::int32_t height, width;
    const Index *starts;         // where each row of blocks begins, and the end of the last
    const std::int32_t *places;  // the first column of each block divided by the width
    const float *values;         // height * width values of each block
};

// A matrix without the columns of blocks that have no weights or unwanted inputs, so that X is packed without them.
class Packed {
  public:
    template <class Wanted> Packed(const Matrix &given, bool keeps_all, const Wanted &is_wanted) : matrix(given) {
        const Index num_rows = (given.rows + given.height - 1) / given.height, size = Index(given.height) * given.width;
        std::vector<std::int32_t> ranks((given.columns + given.width - 1) / given.width, keeps_all ? 0 : -1);
        for (Index i = 0; i < given.starts[num_rows]; ++i) ranks[given.places[i]] = 0;
        for (std::size_t place = 0; place < ranks.size(); ++place) {
            if (ranks[place] < 0 || !is_wanted(place)) {
                ranks[place] = -1;
                continue;
            }
            ranks[place] = static_cast<std::int32_t>(columns.size() / given.width);
            for (Index j = 0; j < given.width; ++j) columns.push_back(place * given.width + j);
        }
        starts.push_back(0);
        for (Index row = 0; row < num_rows; ++row) {
            for (Index i = given.starts[row]; i < given.starts[row + 1]; ++i) {
                if (ranks[given.places[i]] < 0) continue;
                places.push_back(ranks[given.places[i]]);
                values.insert(values.end(), given.values + i * size, given.values + (i + 1) * size);
            }
            starts.push_back(static_cast<Index>(places.size()));
        }
        matrix.columns = static_cast<Index>(columns.size());
        matrix.starts = starts.data(), matrix.places = places.data(), matrix.values = values.data();
    }

    Matrix matrix;
    std::vector<Index> columns;  // old numbers of the columns that are left, in whole blocks

  private:
    std::vector<Index> starts;
    std::vector<std::int32_t> places;
    std::vector<float> values;
};

struct Tile {
    std::int32_t lanes, vectors, k_block, row_chunks, threads;
};

struct Run {
    std::uint32_t count, rows;
};

struct Piece {
    const Run *runs, *runs_end;
    const std::uint32_t *rows;
    const float *values;
    const std::uint16_t *offsets;
};

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};
template <class T> using Buffer = std::unique_ptr<T[], Free>;

// Allocates zeros, aligned to cache lines, and a spare line at the end, because kernels may read ahead.
template <class T> Buffer<T> make_buffer(std::size_t count) {
    const std::size_t bytes = (count * sizeof(T) + 127) / 64 * 64;
    void *memory = std::aligned_alloc(64, bytes);
    if (!memory) throw std::bad_alloc();
    std::memset(memory, 0, bytes);
    return Buffer<T>(static_cast<T *>(memory));
}

// Returns memory for temporary numbers. Each thread has its own for each purpose, which stays in its cache. It grows
// when more is first needed, so later calls allocate nothing.
template <class Purpose> float *scratch_of_thread(Index floats) {
    static thread_local Buffer<float> room;
    static thread_local Index size = 0;
    if (size < floats) {
        room = make_buffer<float>(floats);
        size = floats;
    }
    return room.get();
}

class Weights {
  public:
    Weights(const Matrix &matrix, const Tile &tile) : matrix(matrix), tile(tile) {
        num_block_rows = (matrix.rows + matrix.height - 1) / matrix.height;
        num_k_blocks = std::max<Index>(1, (matrix.columns + tile.k_block - 1) / tile.k_block);
        const Index num_blocks = matrix.starts[num_block_rows];
        values = make_buffer<float>(num_blocks * matrix.height * matrix.width);
        offsets = make_buffer<std::uint16_t>(num_blocks);
        fill();
        this->matrix.starts = nullptr, this->matrix.places = nullptr, this->matrix.values = nullptr;  // only for `fill`
    }

    Piece piece(Index k_block, Index chunk) const {
        const Place &from = places[chunk * num_k_blocks + k_block], &to = places[chunk * num_k_blocks + k_block + 1];
        const Index size = matrix.height * matrix.width;
        return {runs.data() + from.run, runs.data() + to.run, rows.data() + from.row, values.get() + from.block * size,
                offsets.get() + from.block};
    }

    Index num_block_rows, num_k_blocks;

  private:
    struct Place {
        Index run, row, block;
    };

    // Chunks have about the same number of weights. Each row counts as a few more, for its beginning and its end.
    std::vector<Index> cut_rows() const {
        constexpr Index extra = 4;
        const Index total = matrix.starts[num_block_rows] + extra * num_block_rows;
        std::vector<Index> cuts{0};
        for (Index chunk = 1, row = 0; chunk < tile.row_chunks; ++chunk) {
            while (row < num_block_rows && (matrix.starts[row] + extra * row) * tile.row_chunks < total * chunk) ++row;
            cuts.push_back(row);
        }
        cuts.push_back(num_block_rows);
        return cuts;
    }

    void fill() {
        std::vector<Index> next(matrix.starts, matrix.starts + num_block_rows);  // first block to copy, by row
        const std::vector<Index> cuts = cut_rows();
        Place place{0, 0, 0};
        for (Index chunk = 0; chunk < tile.row_chunks; ++chunk)
            for (Index k = 0; k < num_k_blocks; ++k) {
                places.push_back(place);
                place = fill_piece(place, k, cuts[chunk], cuts[chunk + 1], next);
            }
        places.push_back(place);
    }

    Place fill_piece(Place place, Index k, Index first, Index last, std::vector<Index> &next) {
        const Index end = (k + 1) * tile.k_block / matrix.width;
        const bool is_every_row_due = k == 0 || k == num_k_blocks - 1;  // it reads the bias or writes the result
        std::vector<std::pair<std::uint32_t, std::uint32_t>> counted;
        for (Index row = first; row < last; ++row) {
            Index stop = next[row];
            while (stop < matrix.starts[row + 1] && matrix.places[stop] < end) ++stop;
            const auto count = static_cast<std::uint32_t>(stop - next[row]);
            if (count || is_every_row_due) counted.emplace_back(count, static_cast<std::uint32_t>(row));
        }
        std::sort(counted.begin(), counted.end());
        const Index old_runs = static_cast<Index>(runs.size());
        for (const auto &[count, row] : counted) {
            if (static_cast<Index>(runs.size()) == old_runs || runs.back().count != count) runs.push_back({count, 0});
            ++runs.back().rows;
            rows.push_back(row);
            place.block = copy_row(place.block, next[row], count, k);
            next[row] += count;
        }
        place.run = static_cast<Index>(runs.size()), place.row = static_cast<Index>(rows.size());
        return place;
    }

    Index copy_row(Index to, Index from, Index count, Index k) {
        const Index size = matrix.height * matrix.width, row_floats = Index(tile.vectors) * tile.lanes;
        std::copy_n(matrix.values + from * size, count * size, values.get() + to * size);
        for (Index i = 0; i < count; ++i) {
            const Index row_of_x = Index(matrix.places[from + i]) * matrix.width - k * tile.k_block;
            offsets[to + i] = static_cast<std::uint16_t>(row_of_x * row_floats);
        }
        return to + count;
    }

    Matrix matrix;
    Tile tile;
    std::vector<Run> runs;
    std::vector<std::uint32_t> rows;
    std::vector<Place> places;
    Buffer<float> values;
    Buffer<std::uint16_t> offsets;
};

}  // namespace gp
