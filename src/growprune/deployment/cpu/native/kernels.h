// Which inner loop serves which blocks, lanes and number of vectors.
#pragma once

#include "gemv.h"
#include "pack.h"

namespace gp {

constexpr int MOST_VECTORS = 8, MOST_VECTORS_OF_EIGHT = 3;

// How many vectors of so many lanes a panel may have; 0 if there is no such kernel. Short vectors are for few columns.
inline int most_vectors(int lanes, int height) {
    if (lanes == GP_LANES) return height == 8 ? MOST_VECTORS_OF_EIGHT : MOST_VECTORS;
    return lanes == 1 || (lanes < GP_LANES && (lanes == 4 || lanes == 8)) ? 1 : 0;
}

template <int width> const Kernel *row_kernels() {
    constexpr int n = GP_LANES;
    static const Kernel kernels[] = {nullptr,
                                     rows_times<n, 1, width>,
                                     rows_times<n, 2, width>,
                                     rows_times<n, 3, width>,
                                     rows_times<n, 4, width>,
                                     rows_times<n, 5, width>,
                                     rows_times<n, 6, width>,
                                     rows_times<n, 7, width>,
                                     rows_times<n, 8, width>};
    return kernels;
}

inline const Kernel *long_kernels(int height, int width) {
    constexpr int n = GP_LANES;
    static const Kernel of_eight[] = {nullptr, eight_rows_times<n, 1>, eight_rows_times<n, 2>, eight_rows_times<n, 3>};
    if (height == 8) return of_eight;
    return width == 8 ? row_kernels<8>() : row_kernels<1>();
}

template <int lanes> const Kernel *short_kernels(int height, int width) {
    static const Kernel of_eight[] = {nullptr, eight_rows_times<lanes, 1>};
    static const Kernel wide[] = {nullptr, rows_times<lanes, 1, 8>}, single[] = {nullptr, rows_times<lanes, 1, 1>};
    return height == 8 ? of_eight : width == 8 ? wide : single;
}

inline const Kernel *single_kernels(int height, int width) {
    static const Kernel of_eight[] = {nullptr, eight_rows_times_one};
    static const Kernel wide[] = {nullptr, wide_rows_times_one}, single[] = {nullptr, rows_times_one};
    return height == 8 ? of_eight : width == 8 ? wide : single;
}

// By the number of vectors in a panel.
inline const Kernel *find_kernels(const Matrix &matrix, int lanes) {
    if (lanes == 1) return single_kernels(matrix.height, matrix.width);
    if (lanes == GP_LANES) return long_kernels(matrix.height, matrix.width);
    return lanes == 4 ? short_kernels<4>(matrix.height, matrix.width) : short_kernels<8>(matrix.height, matrix.width);
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
