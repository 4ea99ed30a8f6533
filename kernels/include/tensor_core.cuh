// mma.m16n8k16 and what turns one product's result into the next one's operand.
// Lane l holds, with row = l / 4 and pair = l % 4: of A rows row and row + 8, of B column row, of C
// rows row and row + 8 at columns 2 * pair and 2 * pair + 1 (PTX ISA, "Matrix fragments").
#pragma once
#include "element.cuh"

// c += a b, fp16 operands, fp32 sums.
__device__ __forceinline__ void mma_half(float (&c)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a b in the element's type.
__device__ __forceinline__ void mma_element(float (&c)[4], const unsigned (&a)[4],
                                            const unsigned (&b)[2]) {
#if BF16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    mma_half(c, a, b);
#endif
}

// An 8 x 8 tile of 16-bit values, transposed across the warp: C of one product as B of the next.
__device__ __forceinline__ unsigned transpose_tile(unsigned tile) {
    unsigned turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(tile));
    return turned;
}

// Four signed bytes to four halves, exactly. 0x64bb is 1024 + bb, so flipping the sign bit first
// and subtracting 1152 afterwards leaves the code.
__device__ __forceinline__ unsigned unbias(unsigned pair) {
    constexpr unsigned bias = 0x64806480;  // 1152, twice
    const __half2 got = __hsub2(*reinterpret_cast<const __half2*>(&pair),
                                *reinterpret_cast<const __half2*>(&bias));
    return *reinterpret_cast<const unsigned*>(&got);
}

__device__ __forceinline__ void codes_to_halves(unsigned codes, unsigned& low, unsigned& high) {
    const unsigned flipped = codes ^ 0x80808080;
    low = unbias(__byte_perm(flipped, 0x64646464, 0x4140));
    high = unbias(__byte_perm(flipped, 0x64646464, 0x4342));
}
