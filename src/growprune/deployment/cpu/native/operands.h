// What a layer reads and writes, and where a thread keeps what lies in between.
#pragma once

#include "weights.h"

namespace gp {

// X, Y and the residual: rows (features) `stride` floats apart, columns next to one another.
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

// A layer with what it reads and writes, as growprune/deployment/cpu/library.py has it, field by field.
struct BoundLayer {
    const Layer *layer;
    Operands operands;
};

// Room for a packed block and for sums. Each thread has one for all layers, which stays in its cache; it grows when a
// layer first needs more, so that later calls allocate nothing, and calls by several threads are apart.
inline float *scratch_of_thread(Index floats) {
    static thread_local Buffer<float> room;
    static thread_local Index size = 0;
    if (size < floats) {
        room = make_buffer<float>(floats);
        size = floats;
    }
    return room.get();
}

}  // namespace gp
