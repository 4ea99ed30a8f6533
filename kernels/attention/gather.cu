// Keys and values of given slots out of a paged cache, one behind the other. The cache's size is not
// known here, so that a captured graph outlives its growth: slots are trusted.
//
// grid (ceil(count * vectors / blockDim.x)), any block: a thread copies 16 bytes.

// cache [slots, vectors]; slots i32[count]; out [count, vectors], vectors of 16 bytes.
extern "C" __global__ void gather_slots(const uint4* cache, const int* slots, uint4* out, int count,
                                        int vectors) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = at / vectors;
    if (row >= count) return;
    out[at] = cache[size_t(slots[row]) * vectors + at % vectors];
}
