// Reads `vectors` 16-byte vectors once and keeps nothing: the rate at which weights can arrive.
extern "C" __global__ void __launch_bounds__(512)
read_all(const uint4* from, int vectors, unsigned* out) {
    unsigned seen = 0;
    const int stride = gridDim.x * blockDim.x;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < vectors; i += 4 * stride) {
        const uint4 a = __ldcs(from + i), b = __ldcs(from + i + stride);
        const uint4 c = __ldcs(from + i + 2 * stride), d = __ldcs(from + i + 3 * stride);
        seen ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        seen ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < vectors; i += stride) seen ^= from[i].x;
    if (seen == 0x5eed5eed) *out = seen;  // never true in practice, and the compiler cannot know
}
