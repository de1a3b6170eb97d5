// What Python calls, through ctypes. Structures are those of growprune/inference/library.py, field by field.
#include "plan.h"
#include "pool.h"

using namespace gp;

namespace {

bool is_valid(const Matrix &matrix, const Geometry &geometry, const Tile &tile) {
    const Index last_offset = Index(tile.k_block - 1) * tile.vectors * tile.lanes;
    return tile.vectors >= 1 && tile.vectors <= most_vectors(tile.lanes, matrix.height) && tile.k_block >= 1 &&
           tile.k_block % matrix.width == 0 && last_offset <= 65535 && tile.row_chunks >= 1 &&
           tile.threads >= tile.row_chunks && matrix.columns == Index(geometry.channels) * geometry.taps();
}

}  // namespace

#define GP_API __attribute__((visibility("default")))  // all else is hidden, so that two libraries do not mix

extern "C" {

GP_API int gp_lanes() { return GP_LANES; }

GP_API int gp_most_vectors(int lanes, int height) { return most_vectors(lanes, height); }

GP_API int gp_has_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// Null if the tile is not possible, or memory runs out.
GP_API void *gp_prepare(const Matrix *matrix, const Geometry *geometry, const Tile *tile, const float *bias,
                        int activation) {
    if (!is_valid(*matrix, *geometry, *tile)) return nullptr;
    try {
        return new Plan(*matrix, *geometry, *tile, bias, activation);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

GP_API void gp_run(const void *plan, const float *x, Index x_stride, float *y, Index y_stride, const float *residual,
                   Index residual_stride) {
    static_cast<const Plan *>(plan)->run({x, x_stride, y, y_stride, residual, residual_stride});
}

GP_API void gp_free(void *plan) { delete static_cast<Plan *>(plan); }

GP_API void gp_max_pool(const Geometry *geometry, const float *x, Index x_stride, float *y, Index y_stride,
                        int threads) {
    pool<true>(*geometry, x, x_stride, y, y_stride, false, threads);
}

GP_API void gp_mean_pool(const Geometry *geometry, const float *x, Index x_stride, float *y, Index y_stride,
                         int counts_padding, int threads) {
    pool<false>(*geometry, x, x_stride, y, y_stride, counts_padding != 0, threads);
}
}
