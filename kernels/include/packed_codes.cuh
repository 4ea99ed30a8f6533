// The bytes of a packed layer as they are on disk, and the codes in them. Compiles for the host too,
// where tests hold it to the packers and to bytes typed by hand.
#pragma once

#ifdef __CUDACC__
#define EVERYWHERE __host__ __device__ __forceinline__
#else
#define EVERYWHERE inline
#endif

// Two's complement of 4 and of 3 bits.
EVERYWHERE int signed_w4(unsigned bits) { return static_cast<int>(bits ^ 8u) - 8; }
EVERYWHERE int signed_w3(unsigned bits) { return static_cast<int>(bits ^ 4u) - 4; }

// One byte is two codes, the even column in its low half.
EVERYWHERE void unpack_w4(unsigned byte, int* code) {
    code[0] = signed_w4(byte & 15u);
    code[1] = signed_w4(byte >> 4 & 15u);
}

// Three bytes are eight codes, a little-endian bit stream.
EVERYWHERE void unpack_w3(unsigned b0, unsigned b1, unsigned b2, int* code) {
    code[0] = signed_w3(b0 & 7u);
    code[1] = signed_w3(b0 >> 3 & 7u);
    code[2] = signed_w3((b0 >> 6 & 3u) | (b1 & 1u) << 2);
    code[3] = signed_w3(b1 >> 1 & 7u);
    code[4] = signed_w3(b1 >> 4 & 7u);
    code[5] = signed_w3((b1 >> 7 & 1u) | (b2 & 3u) << 1);
    code[6] = signed_w3(b2 >> 2 & 7u);
    code[7] = signed_w3(b2 >> 5 & 7u);
}

// Bytes of a row of `columns` codes of `bits` bits.
template <int bits>
EVERYWHERE int row_bytes(int columns) { return (columns * bits + 7) / 8; }

// The codes of columns k .. k + 7 of a row, k a multiple of 8; columns past the end give whatever
// the padding bits hold, or 0 where there is no byte. whole: no row has such columns and every row
// starts at a multiple of 4 bytes (4 bits), so that no byte needs a check.
template <int bits, bool whole>
EVERYWHERE void eight_codes(const unsigned char* row, int k, int bytes, int* code) {
    const int at = k / 8 * bits;
    if constexpr (bits == 4) {
        unsigned word = 0;
        if constexpr (whole) {
            word = *reinterpret_cast<const unsigned*>(row + at);
        } else {
            for (int i = 0; i < 4; ++i)
                if (at + i < bytes) word |= static_cast<unsigned>(row[at + i]) << 8 * i;
        }
        for (int i = 0; i < 4; ++i) unpack_w4(word >> 8 * i & 255u, code + 2 * i);
    } else if constexpr (bits == 8) {
        for (int i = 0; i < 8; ++i)
            code[i] = whole || at + i < bytes ? static_cast<signed char>(row[at + i]) : 0;
    } else {
        unsigned b[3];
        for (int i = 0; i < 3; ++i) b[i] = whole || at + i < bytes ? row[at + i] : 0u;
        unpack_w3(b[0], b[1], b[2], code);
    }
}
