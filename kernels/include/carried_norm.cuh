// An RMS norm between two products without a launch of its own.
//
// norm(r) = r w / sqrt(mean r^2 + eps) has one factor a row, which the product behind it can apply to
// its sums. So whoever adds to the residual stream r leaves r w for it, and the sums of squares of
// every 16 values of r, which that product adds up, in one order, while it multiplies.
//
// r w must fit fp16 before its size is known. It is left multiplied by `lift`, a power of two that
// made the stream small at its last norm: 2^-4 to 2^-5 of its rms then. It overflows where one layer
// raises the stream's largest value to more than a million times its rms before, and values below a
// 250th of the rms lose bits, less than the others' rounding.
#pragma once
#include <cuda_fp16.h>

constexpr int SQUARES_OF = 16;  // values that share a sum

// x of a product, as it was left.
struct Normed {
    const float* squares;  // [rows, width / SQUARES_OF]
    const float* lift;     // [rows], in x
    float* next_lift;      // [rows], for what is left next
    int width;             // a multiple of 4 * SQUARES_OF
    float eps;

    // Four sums from `first` on, zero beyond the row's.
    __device__ __forceinline__ float4 squares_of(int row, int first) const {
        const int count = width / SQUARES_OF;
        if (first >= count) return make_float4(0.f, 0.f, 0.f, 0.f);
        return *reinterpret_cast<const float4*>(squares + size_t(row) * count + first);
    }

    // What the row's sums are to be multiplied by. By a whole warp; early: squares_of(row, 4 * lane).
    __device__ __forceinline__ float scale(int row, float4 early, int lane, bool sets_lift) const {
        float sum = early.x + early.y + early.z + early.w;
        for (int first = 4 * (lane + 32); first < width / SQUARES_OF; first += 4 * 32) {
            const float4 more = squares_of(row, first);
            sum += more.x + more.y + more.z + more.w;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const float of_norm = rsqrtf(sum / width + eps);
        if (sets_lift && lane == 0) next_lift[row] = lift_of(of_norm);
        return of_norm / lift[row];
    }

    // A power of two, 2^-5 to 2^-4 of a norm's factor.
    static __device__ __forceinline__ float lift_of(float of_norm) {
        return __int_as_float(__float_as_int(of_norm * 0.0625f) & 0x7f800000);
    }
};

// y of a product, as it is left.
struct Carried {
    void* residual;       // [rows, width] fp16, or fp32 (IS_WIDE)
    const float* weight;  // f32[width], of the next norm
    const float* lift;    // [rows]
    float* squares;       // [rows, width / SQUARES_OF]

    // By SQUARES_OF neighbouring lanes with neighbouring columns.
    template <bool IS_WIDE>
    __device__ __forceinline__ void store(__half* x, int row, int column, int width,
                                          float value) const {
        const size_t at = size_t(row) * width + column;
        float sum;
        if constexpr (IS_WIDE) {
            float* stream = static_cast<float*>(residual);
            sum = stream[at] + value;
            stream[at] = sum;
        } else {
            __half* stream = static_cast<__half*>(residual);
            const __half rounded = __float2half_rn(__half2float(stream[at]) + value);
            stream[at] = rounded;
            sum = __half2float(rounded);
        }
        x[at] = __float2half_rn(sum * weight[column] * lift[row]);
        float square = sum * sum;
        const unsigned lanes = 0xffffu << (threadIdx.x & SQUARES_OF);
#pragma unroll
        for (int step = SQUARES_OF / 2; step > 0; step /= 2) {
            square += __shfl_xor_sync(lanes, square, step);
        }
        if (column % SQUARES_OF == 0) {
            squares[size_t(row) * (width / SQUARES_OF) + column / SQUARES_OF] = square;
        }
    }
};
