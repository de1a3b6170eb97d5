// Prepared layers: what they read and write, and the sparse product.
#pragma once

#include "kernels.h"
#include "pack.h"

namespace gp {

// X, Y and the residual: rows (features) are `stride` floats apart, columns are adjacent.
struct Operands {
    const float *x;
    Index x_stride;
    float *y;
    Index y_stride;
    const float *residual;  // or null
    Index residual_stride;
};

// A prepared layer. Several threads may run it.
class Layer {
  public:
    virtual ~Layer() = default;
    virtual void run(const Operands &operands) const = 0;
};

// A layer with what it reads and writes. It matches growprune/deployment/cpu/library.py field by field.
struct BoundLayer {
    const Layer *layer;
    Operands operands;
};

// Weights and packing for one matrix, one geometry and one number of threads.
class Plan : public Layer {
  public:
    Plan(const Matrix &matrix, const Geometry &geometry, const Tile &tile, const float *bias, int activation)
        : tile(tile), num_rows(matrix.rows), activation(activation), packing(geometry, tile.lanes) {
        num_panels = std::max<Index>(1, (packing.num_vectors + tile.vectors - 1) / tile.vectors);
        panel_groups = std::min(num_panels, std::max<Index>(1, tile.threads * ITEMS_OF_THREAD / tile.row_chunks));
        row_floats = Index(tile.vectors) * tile.lanes;
        const auto tap_of = [&](Index column) {  // columns of padding belong to the extra tap, which reads nothing
            return static_cast<std::int32_t>(std::min<Index>(column / geometry.channels, geometry.taps()));
        };
        is_in_place = row_floats == geometry.columns() && geometry.channels % matrix.width == 0 && packing.is_copied();
        const Packed packed(matrix, is_in_place, [&](Index place) {
            return packing.is_read(tap_of(place * matrix.width), tap_of((place + 1) * matrix.width - 1));
        });
        for (const Index column : packed.columns)
            sources.push_back({tap_of(column), packing.row_of(tap_of(column), column % geometry.channels)});
        weights = std::make_unique<Weights>(packed.matrix, tile);
        kernels = find_kernels(matrix, tile.lanes);
        const Index padded_rows = (num_rows + 7) / 8 * 8;
        bias_of_rows = make_buffer<float>(padded_rows);
        if (bias) std::copy_n(bias, num_rows, bias_of_rows.get());
        scratch_floats = (Index(tile.k_block) + (weights->num_k_blocks > 1 ? padded_rows : 0)) * row_floats;
    }

    // Neighbouring items have the same rows, so they go to the same thread, which keeps their weights in its cache.
    void run(const Operands &operands) const override {
        const Input input = packing.input(operands.x, operands.x_stride, tile.threads);
        share(tile.row_chunks * panel_groups, tile.threads, [&](Index item) { run_item(operands, input, item); });
    }

  private:
    // Panels differ by at most one vector, and their bounds do not depend on the number of threads.
    Index panel_start(Index panel) const { return panel * packing.num_vectors / num_panels; }

    void run_item(const Operands &operands, const Input &input, Index item) const {
        float *block = scratch_of_thread<Plan>(scratch_floats);
        const Index chunk = item / panel_groups, group = item % panel_groups;
        const Index end = (group + 1) * num_panels / panel_groups;
        for (Index panel = group * num_panels / panel_groups; panel < end; ++panel)
            run_panel(operands, input, chunk, panel_start(panel), panel_start(panel + 1), block);
    }

    void run_panel(const Operands &operands, const Input &input, Index chunk, Index v, Index v_end,
                   float *block) const {
        const Index column = v * tile.lanes, count = v_end - v;
        if (count <= 0) return;
        const Index tail = std::min<Index>(tile.lanes, packing.geometry.columns() - (v_end - 1) * tile.lanes);
        const float *residual = operands.residual ? operands.residual + column : nullptr;
        Ends ends{false,
                  false,
                  bias_of_rows.get(),
                  residual,
                  operands.residual_stride,
                  operands.y + column,
                  operands.y_stride,
                  block + Index(tile.k_block) * row_floats,
                  row_floats,
                  activation,
                  static_cast<int>(tail)};
        for (Index k = 0; k < weights->num_k_blocks; ++k) {
            ends.is_first = k == 0, ends.is_last = k == weights->num_k_blocks - 1;
            const float *x = packed(input, k * tile.k_block, v, static_cast<int>(count), block);
            kernels[count](weights->piece(k, chunk), x, ends, num_rows);
        }
    }

    // Returns the block of X that begins with row k: a packed copy, or X itself if it has the packed layout.
    const float *packed(const Input &input, Index k, Index v, int count, float *block) const {
        if (is_in_place && input.stride == row_floats) return input.x + k * row_floats;
        const Source *end = sources.data() + std::min<Index>(sources.size(), k + tile.k_block);
        pack_by(tile.lanes, packing, input, sources.data() + k, end, v, count, block, row_floats);
        return block;
    }

    Tile tile;
    Index num_rows, num_panels, panel_groups, row_floats, scratch_floats;
    int activation;
    bool is_in_place;  // true if the rows of the product are the rows of X
    Packing packing;
    std::vector<Source> sources;  // of each row of the product
    std::unique_ptr<Weights> weights;
    const Kernel *kernels;
    Buffer<float> bias_of_rows;
};

}  // namespace gp
