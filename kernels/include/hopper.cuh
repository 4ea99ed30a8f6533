// Hopper's own instructions (sm_90a): wgmma with A in registers, the tensor memory accelerator,
// mbarriers. PTX ISA, "Asynchronous Warpgroup Level Matrix" and "Tensor Memory Access".
#pragma once

// ---- mbarriers: arrivals and bytes that must come before a phase ends ----

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// ---- tensor memory accelerator ----

struct __align__(64) TensorMap { char opaque[128]; };

// The box at (column, row) of the tensor; outside of it zeros come. `barrier` counts the bytes.
__device__ __forceinline__ void load_box(unsigned to, const TensorMap* map, int column, int row,
                                         unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// `bytes` in a row, a multiple of 16 as both addresses are. `barrier` counts them.
__device__ __forceinline__ void copy_bulk(unsigned to, const void* from, int bytes,
                                          unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// ---- wgmma: four warps, 64 rows of A, 16 columns of K ----

// K-major rows of 128 bytes in 128-byte swizzle, as the accelerator writes them: eights of rows lie
// 1024 bytes apart. Sixteen columns further is 32 bytes further, inside the same swizzled row.
__device__ __forceinline__ unsigned long long tile_descriptor(unsigned shared) {
    constexpr unsigned long long swizzle_128 = 1ull << 62, stride_1024 = 64ull << 32;
    return swizzle_128 | stride_1024 | 1ull << 16 | (shared & 0x3ffff) >> 4;
}

__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most NEWER groups of products still run.
template <int NEWER>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWER) : "memory");
}

#define SUMS_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SUMS_1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS_2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define SUMS_3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define SUMS_5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define SUMS_6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define SUMS_7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define SUMS_8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define SUMS_9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define SUMS_10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define SUMS_11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define SUMS_12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define SUMS_13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define SUMS_14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define SUMS_15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_OF(c, r) \
    "+f"(c[r][0]), "+f"(c[r][1]), "+f"(c[r][2]), "+f"(c[r][3]), "+f"(c[r + 1][0]), \
        "+f"(c[r + 1][1]), "+f"(c[r + 1][2]), "+f"(c[r + 1][3])
#define PRODUCT(shape, sums, a0, a1, a2, a3, b) \
    "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n" \
    "wgmma.mma_async.sync.aligned." shape ".f32.f16.f16 {" sums "}, {" a0 "," a1 "," a2 "," a3 \
    "}, " b ", add, 1, 1, 0;\n}"
#define OPERANDS(a, b) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

// sums += a b for 8 * EIGHTS columns of b.
template <int EIGHTS>
__device__ __forceinline__ void product(float (&c)[EIGHTS][4], const unsigned (&a)[4],
                                        unsigned long long b) {
    if constexpr (EIGHTS == 4) {
        asm volatile(PRODUCT("m64n32k16", SUMS_0 "," SUMS_1, "%16", "%17", "%18", "%19", "%20")
                     : SUMS_OF(c, 0), SUMS_OF(c, 2)
                     : OPERANDS(a, b));
    } else if constexpr (EIGHTS == 8) {
        asm volatile(PRODUCT("m64n64k16",
                             SUMS_0 "," SUMS_1 "," SUMS_2 "," SUMS_3,
                             "%32", "%33", "%34", "%35", "%36")
                     : SUMS_OF(c, 0), SUMS_OF(c, 2), SUMS_OF(c, 4), SUMS_OF(c, 6)
                     : OPERANDS(a, b));
    } else if constexpr (EIGHTS == 16) {
        asm volatile(PRODUCT("m64n128k16",
                             SUMS_0 "," SUMS_1 "," SUMS_2 "," SUMS_3 "," SUMS_4 "," SUMS_5 ","
                             SUMS_6 "," SUMS_7,
                             "%64", "%65", "%66", "%67", "%68")
                     : SUMS_OF(c, 0), SUMS_OF(c, 2), SUMS_OF(c, 4), SUMS_OF(c, 6), SUMS_OF(c, 8),
                       SUMS_OF(c, 10), SUMS_OF(c, 12), SUMS_OF(c, 14)
                     : OPERANDS(a, b));
    } else if constexpr (EIGHTS == 24) {
        asm volatile(PRODUCT("m64n192k16",
                             SUMS_0 "," SUMS_1 "," SUMS_2 "," SUMS_3 "," SUMS_4 "," SUMS_5 ","
                             SUMS_6 "," SUMS_7 "," SUMS_8 "," SUMS_9 "," SUMS_10 "," SUMS_11,
                             "%96", "%97", "%98", "%99", "%100")
                     : SUMS_OF(c, 0), SUMS_OF(c, 2), SUMS_OF(c, 4), SUMS_OF(c, 6), SUMS_OF(c, 8),
                       SUMS_OF(c, 10), SUMS_OF(c, 12), SUMS_OF(c, 14), SUMS_OF(c, 16),
                       SUMS_OF(c, 18), SUMS_OF(c, 20), SUMS_OF(c, 22)
                     : OPERANDS(a, b));
    } else if constexpr (EIGHTS == 32) {
        asm volatile(PRODUCT("m64n256k16",
                             SUMS_0 "," SUMS_1 "," SUMS_2 "," SUMS_3 "," SUMS_4 "," SUMS_5 ","
                             SUMS_6 "," SUMS_7 "," SUMS_8 "," SUMS_9 "," SUMS_10 "," SUMS_11 ","
                             SUMS_12 "," SUMS_13 "," SUMS_14 "," SUMS_15,
                             "%128", "%129", "%130", "%131", "%132")
                     : SUMS_OF(c, 0), SUMS_OF(c, 2), SUMS_OF(c, 4), SUMS_OF(c, 6), SUMS_OF(c, 8),
                       SUMS_OF(c, 10), SUMS_OF(c, 12), SUMS_OF(c, 14), SUMS_OF(c, 16),
                       SUMS_OF(c, 18), SUMS_OF(c, 20), SUMS_OF(c, 22), SUMS_OF(c, 24),
                       SUMS_OF(c, 26), SUMS_OF(c, 28), SUMS_OF(c, 30)
                     : OPERANDS(a, b));
    } else {
        static_assert(EIGHTS == 8, "tiles of 32, 64, 128, 192 or 256 rows");
    }
}
