// Where the sampling of a batch says what it has found, on the device and in the host's memory.
#pragma once

struct Told {
    long long* tokens;      // [rows]
    unsigned char* finite;  // [rows], whether the row has a distribution
    // The same in page-locked memory of the host, or null: the host sees it behind the kernel's end,
    // without a copy of its own in the stream.
    long long* host_tokens;
    unsigned char* host_finite;
    long long* by_slot;  // [..], or null: the row's token also goes to its slot
    const long long* slots;  // [rows]

    __device__ __forceinline__ void token(int row, long long token) const {
        tokens[row] = token;
        if (host_tokens) host_tokens[row] = token;
        if (by_slot) by_slot[slots[row]] = token;
    }
    __device__ __forceinline__ void is_finite(int row, bool finite_row) const {
        finite[row] = finite_row;
        if (host_finite) host_finite[row] = finite_row;
    }
};
