// Rows of a quantised table by token id: what an embedding lookup reads is only its own row.
// The arithmetic and its order are dequantise()'s: fp32, code - zero, times scale, plus offset.
//
// grid (ceil(columns / 8 / block), ids). -DBITS=4|8, -DBF16.
#include "element.cuh"

constexpr int VECTOR = 8;

__device__ __forceinline__ int code_at(const unsigned char* row, int column) {
#if BITS == 8
    return static_cast<signed char>(row[column]);
#else
    const int nibble = row[column / 2] >> (column % 2 * 4) & 0xf;
    return (nibble ^ 8) - 8;
#endif
}

// table u8[rows, row_bytes]; scales f16[rows, groups]; offsets f16 or zeros i8[rows, groups] or
// null; ids i64; out [ids, columns]. Columns need not be a multiple of anything.
extern "C" __global__ void gather_rows(const unsigned char* table, const __half* scales,
                                       const __half* offsets, const signed char* zeros,
                                       const long long* ids, element* out, int columns,
                                       int row_bytes, int group, int groups) {
    allow_next();
    const int first = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    wait_for_previous();
    if (first >= columns) return;
    const size_t id = ids[blockIdx.y];
    const unsigned char* row = table + id * row_bytes;
    element* to = out + size_t(blockIdx.y) * columns;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const int column = first + i;
        if (column >= columns) break;
        const size_t at = id * groups + column / group;
        float value = code_at(row, column);
        if (zeros != nullptr) value -= zeros[at];
        value = __fmul_rn(value, __half2float(scales[at]));
        if (offsets != nullptr) value = __fadd_rn(value, __half2float(offsets[at]));
        to[column] = to_element(value);
    }
}
