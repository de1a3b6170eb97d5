// The beginning and the end of a row of sums: bias, residual, activation, store.
#pragma once

#include "vec.h"

namespace gp {

enum Activation { NONE = 0, RELU = 1, GELU = 2, RELU6 = 3 };

// The inputs and outputs of one panel of columns, besides weights and X.
struct Ends {
    bool is_first, is_last;  // K block: its sums begin with the bias, or are finished
    const float *bias;       // one for each row, zeros where the layer has none
    const float *residual;   // the panel's first column, or null
    Index residual_stride;
    float *y;  // the panel's first column
    Index y_stride;
    float *sums;   // [rows][stride], private to a thread
    Index stride;  // floats in a row of a panel, and in a row of the packed X
    int activation;
    int tail;  // number of lanes of the last vector that are columns
};

// For |x| < 4, erf(x) is x times a quotient of two polynomials of x * x, up to 4e-7. Beyond, it is 1 or -1 in float32.
constexpr float ABOVE[] = {-2.72614225801306e-10f, 2.77068142495902e-08f,  -2.10102402082508e-06f,
                           -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                           -1.60960333262415e-02f};
constexpr float BELOW[] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                           -7.37332916720468e-03f, -1.42647390514189e-02f};

template <int lanes> GP_INLINE typename Vec<lanes>::type erf_of(typename Vec<lanes>::type x) {
    using V = typename Vec<lanes>::type;
    const V four = broadcast<lanes>(4.0f);
    V z = x > four ? four : x;
    z = z < -four ? -four : z;
    const V s = z * z;
    V p = broadcast<lanes>(ABOVE[0]), q = broadcast<lanes>(BELOW[0]);
    for (int i = 1; i < 7; ++i) p = p * s + ABOVE[i];
    for (int i = 1; i < 5; ++i) q = q * s + BELOW[i];
    const V one = broadcast<lanes>(1.0f);
    const V found = z * p / q;
    return x >= four ? one : (x <= -four ? -one : found);
}

// Not inline, because it is long and every kernel would have its own copy.
template <int lanes> __attribute__((noinline)) void gelu(float *values, int vectors) {
    for (int u = 0; u < vectors; ++u) {
        const typename Vec<lanes>::type x = load<lanes>(values + u * lanes);
        store<lanes>(values + u * lanes, 0.5f * x * (1.0f + erf_of<lanes>(x * 0.70710678118654752f)));
    }
}

template <int lanes, int U> GP_INLINE void activate(typename Vec<lanes>::type (&sums)[U], int activation) {
    using V = typename Vec<lanes>::type;
    if (activation == RELU) {
        for (int u = 0; u < U; ++u) sums[u] = sums[u] < V{} ? V{} : sums[u];  // NaN stays, as in torch
    } else if (activation == RELU6) {
        const V six = broadcast<lanes>(6.0f);
        for (int u = 0; u < U; ++u) {
            const V above = sums[u] < V{} ? V{} : sums[u];
            sums[u] = above > six ? six : above;
        }
    } else if (activation == GELU) {
        float values[U * lanes];
        for (int u = 0; u < U; ++u) store<lanes>(values + u * lanes, sums[u]);
        gelu<lanes>(values, U);
        for (int u = 0; u < U; ++u) sums[u] = load<lanes>(values + u * lanes);
    }
}

template <int lanes, int U>
GP_INLINE void begin_row(const Ends &ends, Index row, typename Vec<lanes>::type (&sums)[U]) {
    if (ends.is_first) {
        for (int u = 0; u < U; ++u) sums[u] = broadcast<lanes>(ends.bias[row]);
    } else {
        for (int u = 0; u < U; ++u) sums[u] = load<lanes>(ends.sums + row * ends.stride + u * lanes);
    }
}

template <int lanes, int U> GP_INLINE void end_row(const Ends &ends, Index row, typename Vec<lanes>::type (&sums)[U]) {
    if (!ends.is_last) {
        for (int u = 0; u < U; ++u) store<lanes>(ends.sums + row * ends.stride + u * lanes, sums[u]);
        return;
    }
    if (ends.residual) {
        const float *from = ends.residual + row * ends.residual_stride;
        for (int u = 0; u + 1 < U; ++u) sums[u] += load<lanes>(from + u * lanes);
        sums[U - 1] += load_some<lanes>(from + (U - 1) * lanes, ends.tail);
    }
    activate<lanes, U>(sums, ends.activation);
    float *to = ends.y + row * ends.y_stride;
    for (int u = 0; u + 1 < U; ++u) store<lanes>(to + u * lanes, sums[u]);
    store_some<lanes>(to + (U - 1) * lanes, sums[U - 1], ends.tail);
}

}  // namespace gp
