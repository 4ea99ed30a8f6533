// Blocks of the KV cache between the device and page-locked memory of the host, which the kernel
// reads and writes in place: one launch for all blocks and all arrays, no buffer on the device.
//
// A piece is one array's part of one block. Few thread blocks take the pieces in turns: the bus is
// the limit, and what decodes beside them keeps its multiprocessors.
//
// grid (thread blocks), block THREADS.

constexpr int AT_ONCE = 4;

// moves i32[count, 2]: block, slot. arrays i64[n_arrays]: addresses of the cache's arrays.
// offsets i64[n_arrays + 1]: where each array's part begins in a slot, multiples of 16; the last is
// the bytes of a slot. host: the slots. to_host: 1 from the cache to them, 0 from them to it. moves,
// arrays, offsets may lie in the host's memory.
extern "C" __global__ void __launch_bounds__(THREADS)
copy_blocks(const int* moves, const long long* arrays, const long long* offsets,
            unsigned char* host, int count, int n_arrays, int to_host) {
    const long long slot_bytes = offsets[n_arrays];
    for (int piece = blockIdx.x; piece < count * n_arrays; piece += gridDim.x) {
        const int move = piece / n_arrays, array = piece % n_arrays;
        const long long begin = offsets[array], size = offsets[array + 1] - begin;
        uint4* const cache = reinterpret_cast<uint4*>(arrays[array] + moves[2 * move] * size);
        uint4* const kept = reinterpret_cast<uint4*>(host + moves[2 * move + 1] * slot_bytes + begin);
        const uint4* const from = to_host ? cache : kept;
        uint4* const to = to_host ? kept : cache;
        const int words = int(size / 16);
        // Several loads before the first store: a read over the bus takes a microsecond.
        for (int first = threadIdx.x; first < words; first += AT_ONCE * THREADS) {
            uint4 held[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i * THREADS < words) held[i] = __ldcs(from + first + i * THREADS);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i * THREADS < words) __stcs(to + first + i * THREADS, held[i]);
            }
        }
    }
}
