// The activations' type, chosen by -DBF16=0 or 1, and what every kernel does with pairs of it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef BF16
#define BF16 0
#endif

#if BF16
using element = __nv_bfloat16;
using element2 = __nv_bfloat162;
#else
using element = __half;
using element2 = __half2;
#endif

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ element to_element(float x) {
#if BF16
    return __float2bfloat16_rn(x);
#else
    return __float2half_rn(x);
#endif
}

__device__ __forceinline__ unsigned half_pair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Two values in one register, the first in the low half.
__device__ __forceinline__ unsigned element_pair(float low, float high) {
#if BF16
    const element2 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
#else
    return half_pair(low, high);
#endif
}

__device__ __forceinline__ float2 pair_to_float2(unsigned pair) {
#if BF16
    return __bfloat1622float2(*reinterpret_cast<const element2*>(&pair));
#else
    return __half22float2(*reinterpret_cast<const element2*>(&pair));
#endif
}

// BYTES bytes of consecutive memory in registers, moved by the widest load that divides them.
template <int BYTES>
struct Words {
    unsigned word[BYTES / 4];
};

template <int BYTES>
constexpr int load_width = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : 4;

// One load of ACCESS bytes that stays out of L1: each byte of a cache is read once.
template <int ACCESS>
__device__ __forceinline__ void load_once(const void* from, unsigned* to) {
    if constexpr (ACCESS == 16) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    } else if constexpr (ACCESS == 8) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                     : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    } else {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
    }
}

template <int BYTES>
__device__ __forceinline__ Words<BYTES> load_words(const void* from) {
    Words<BYTES> got;
    constexpr int step = load_width<BYTES>;
#pragma unroll
    for (int i = 0; i < BYTES / step; ++i) {
        const char* at = static_cast<const char*>(from) + i * step;
        if constexpr (step == 16) {
            const uint4 v = *reinterpret_cast<const uint4*>(at);
            got.word[4 * i] = v.x, got.word[4 * i + 1] = v.y;
            got.word[4 * i + 2] = v.z, got.word[4 * i + 3] = v.w;
        } else if constexpr (step == 8) {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            got.word[2 * i] = v.x, got.word[2 * i + 1] = v.y;
        } else {
            got.word[i] = *reinterpret_cast<const unsigned*>(at);
        }
    }
    return got;
}

template <int BYTES>
__device__ __forceinline__ void store_words(void* to, const Words<BYTES>& from) {
    constexpr int step = load_width<BYTES>;
#pragma unroll
    for (int i = 0; i < BYTES / step; ++i) {
        char* at = static_cast<char*>(to) + i * step;
        if constexpr (step == 16) {
            *reinterpret_cast<uint4*>(at) = make_uint4(from.word[4 * i], from.word[4 * i + 1],
                                                       from.word[4 * i + 2], from.word[4 * i + 3]);
        } else if constexpr (step == 8) {
            *reinterpret_cast<uint2*>(at) = make_uint2(from.word[2 * i], from.word[2 * i + 1]);
        } else {
            *reinterpret_cast<unsigned*>(at) = from.word[i];
        }
    }
}

// Programmatic dependent launch: before wait_for_previous() nothing that an earlier kernel wrote
// may be read; allow_next() lets the next kernel start its own preamble. No-ops below sm_90.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Ask for `bytes` (a multiple of 16, as the address is) to be in L2 when they are read. A hint: what
// lies there may still change. A no-op below sm_90, where nothing runs ahead of wait_for_previous().
__device__ __forceinline__ void prefetch(const void* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// The same for the 32 bytes around an address.
__device__ __forceinline__ void prefetch_sector(const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}
