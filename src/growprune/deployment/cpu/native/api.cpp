// The functions that Python calls through ctypes. Structures match growprune/deployment/cpu/library.py field by field.
#include "windows.h"

using namespace gp;

namespace {

bool is_valid(const Matrix &matrix, const Geometry &geometry, const Tile &tile) {
    const Index last_offset = Index(tile.k_block - 1) * tile.vectors * tile.lanes;
    return tile.vectors >= 1 && tile.vectors <= most_vectors(tile.lanes, matrix.height) && tile.k_block >= 1 &&
           tile.k_block % matrix.width == 0 && last_offset <= 65535 && tile.row_chunks >= 1 &&
           tile.threads >= tile.row_chunks && matrix.columns == Index(geometry.channels) * geometry.taps();
}

template <class Kind, class... Arguments> Layer *made(const Arguments &...arguments) {
    try {
        return new Kind(arguments...);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

}  // namespace

#define GP_API __attribute__((visibility("default")))  // all else is hidden, so that two libraries do not clash

extern "C" {

GP_API int gp_lanes() { return GP_LANES; }

// Prepares a product. Returns null if the tile is not possible, or memory runs out.
GP_API Layer *gp_prepare(const Matrix *matrix, const Geometry *geometry, const Tile *tile, const float *bias,
                         int activation) {
    if (!is_valid(*matrix, *geometry, *tile)) return nullptr;
    return made<Plan>(*matrix, *geometry, *tile, bias, activation);
}

// Prepares a pool or a depthwise convolution. Returns null if memory runs out.
GP_API Layer *gp_prepare_windows(const Geometry *geometry, const float *weights, const float *bias, int activation,
                                 int is_mean, int threads) {
    return made<Windows>(*geometry, weights, bias, activation, is_mean != 0, threads);
}

GP_API void gp_run(const BoundLayer *layers, int count) {
    for (int i = 0; i < count; ++i) layers[i].layer->run(layers[i].operands);
}

GP_API void gp_free(Layer *layer) { delete layer; }

// Makes jobs of the calling thread run on our own threads, and torch use one thread. To undo it, pass the result to
// gp_end_alone.
GP_API int gp_begin_alone() {
    uses_crew() = true;
    const int before = omp_get_max_threads();
    omp_set_num_threads(1);
    return before;
}

GP_API void gp_end_alone(int threads) {
    uses_crew() = false;
    omp_set_num_threads(threads);
}

}
