// Finds the inner loop for a shape of blocks, a number of lanes and a number of vectors.
#pragma once

#include <utility>

#include "pack.h"
#include "spmm.h"

namespace gp {

constexpr int MOST_VECTORS = 8, MOST_VECTORS_OF_EIGHT = 3;

// Returns how many vectors of `lanes` floats a panel may have, or 0 without a kernel. Few columns have short vectors.
inline int most_vectors(int lanes, int height) {
    if (lanes == GP_LANES) return height == 8 ? MOST_VECTORS_OF_EIGHT : MOST_VECTORS;
    return lanes == 1 || (lanes < GP_LANES && (lanes == 4 || lanes == 8)) ? 1 : 0;
}

template <int lanes, int... U> const Kernel *row_kernels(int width, std::integer_sequence<int, U...>) {
    static const Kernel single[] = {nullptr, rows_times<lanes, U + 1, 1>...};
    static const Kernel wide[] = {nullptr, rows_times<lanes, U + 1, 8>...};
    return width == 8 ? wide : single;
}

template <int lanes, int... U> const Kernel *eight_row_kernels(std::integer_sequence<int, U...>) {
    static const Kernel kernels[] = {nullptr, eight_rows_times<lanes, U + 1>...};
    return kernels;
}

template <int lanes> const Kernel *kernels_of(int height, int width) {
    constexpr int most = lanes == GP_LANES ? MOST_VECTORS : 1;
    constexpr int most_of_eight = lanes == GP_LANES ? MOST_VECTORS_OF_EIGHT : 1;
    if (height == 8) return eight_row_kernels<lanes>(std::make_integer_sequence<int, most_of_eight>());
    return row_kernels<lanes>(width, std::make_integer_sequence<int, most>());
}

template <> inline const Kernel *kernels_of<1>(int height, int width) {
    static const Kernel of_eight[] = {nullptr, eight_rows_times_one};
    static const Kernel wide[] = {nullptr, wide_rows_times_one}, single[] = {nullptr, rows_times_one};
    return height == 8 ? of_eight : width == 8 ? wide : single;
}

// Returns the kernels for a matrix, indexed by the number of vectors in a panel.
inline const Kernel *find_kernels(const Matrix &matrix, int lanes) {
    if (lanes == GP_LANES) return kernels_of<GP_LANES>(matrix.height, matrix.width);
    if (lanes == 8) return kernels_of<8>(matrix.height, matrix.width);
    return lanes == 4 ? kernels_of<4>(matrix.height, matrix.width) : kernels_of<1>(matrix.height, matrix.width);
}

template <class... Arguments> void pack_by(int lanes, const Packing &packing, Arguments... arguments) {
    if (lanes == GP_LANES)
        packing.pack<GP_LANES>(arguments...);
    else if (lanes == 8)
        packing.pack<8>(arguments...);
    else if (lanes == 4)
        packing.pack<4>(arguments...);
    else
        packing.pack<1>(arguments...);
}

}  // namespace gp
