// See linear.h. With AVX2 the strips are multiplied by intrinsics; elsewhere by plain loops over
// the same layout, which compilers turn into vector code.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace native {
namespace {

constexpr float CODE_MAX = 32767.0f;
constexpr float SMALLEST = 1e-30f;  // below it a block counts as zero: its inverse would overflow
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits

// Bytes of weights that are on their way while others are multiplied. By measurement: at 1 KiB one
// core read 5 GB/s, at 2 to 4 KiB 9.
constexpr int FETCH_AHEAD = 3072;

struct Part {
    const int16_t *codes;
    const float *scales;
    const float *sums;
};

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

using Floats = __m256;

inline __m256i add_products(__m256i sum, __m256i weights, __m256i pair) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpwssd_epi32(sum, weights, pair);
#elif defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, weights, pair);
#else
    __m256i total = _mm256_add_epi32(sum, _mm256_madd_epi16(weights, pair));
    // Hides the sum from GCC, which else adds in a tree and spills every product for it.
    asm("" : "+x"(total));
    return total;
#endif
}

inline __m256i pair_of(const int16_t *codes) {
    int32_t both;
    std::memcpy(&both, codes, sizeof both);
    return _mm256_set1_epi32(both);
}

inline Floats halves(const uint8_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

// One block of one strip times R rows. Eight 32-bit sums a row.
template <int BITS, int R>
inline void block_products(const uint8_t *codes, const int16_t *const *x, __m256i *sums) {
    for (int r = 0; r < R; ++r) sums[r] = _mm256_setzero_si256();
    if constexpr (BITS == 4) {
        const __m256i low = _mm256_set1_epi16(15);
        for (int quad = 0; quad < 4; ++quad) {
            const __m256i four =
                _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + 32 * quad));
            const __m256i w[4] = {
                _mm256_and_si256(four, low),
                _mm256_and_si256(_mm256_srli_epi16(four, 4), low),
                _mm256_and_si256(_mm256_srli_epi16(four, 8), low),
                _mm256_srli_epi16(four, 12),
            };
            for (int r = 0; r < R; ++r) {
                const int16_t *from = x[r] + 8 * quad;
                for (int i = 0; i < 4; ++i) {
                    sums[r] = add_products(sums[r], w[i], pair_of(from + 2 * i));
                }
            }
        }
    } else {
        for (int pair = 0; pair < 16; ++pair) {
            const __m256i w = _mm256_cvtepi8_epi16(
                _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + 16 * pair)));
            for (int r = 0; r < R; ++r) {
                sums[r] = add_products(sums[r], w, pair_of(x[r] + 2 * pair));
            }
        }
    }
}

template <int BITS, int KIND, int R>
void strip_product(const Linear &layer, const uint8_t *at, const Part *parts, float *out) {
    constexpr int BYTES = BLOCK * LANES * BITS / 8;
    const int64_t blocks = layer.blocks();
    const Floats middle = _mm256_set1_ps(static_cast<float>(layer.middle));
    Floats totals[R];
    for (int r = 0; r < R; ++r) totals[r] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks;) {
        const Floats scale = halves(at);
        const Floats second = KIND == SYMMETRIC ? middle : halves(at + 16);
        at += KIND == SYMMETRIC ? 16 : 32;
        const int64_t end = std::min(blocks, block + layer.blocks_per_group);
        for (; block < end; ++block, at += BYTES) {
            const int16_t *x[R];
            for (int r = 0; r < R; ++r) x[r] = parts[r].codes + block * BLOCK;
            __m256i sums[R];
            block_products<BITS, R>(at, x, sums);
            for (int line = 0; line < BYTES; line += 64) {
                const uint8_t *later = at + FETCH_AHEAD + line;
                _mm_prefetch(reinterpret_cast<const char *>(later), _MM_HINT_T0);
            }
            for (int r = 0; r < R; ++r) {
                const Floats dot = _mm256_cvtepi32_ps(sums[r]);
                const Floats xs = _mm256_set1_ps(parts[r].scales[block]);
                const Floats xsum = _mm256_set1_ps(parts[r].sums[block]);
                if constexpr (KIND == OFFSETS) {
                    const Floats centred = _mm256_fnmadd_ps(middle, xsum, dot);
                    const Floats offset = _mm256_mul_ps(second, xsum);
                    totals[r] = _mm256_fmadd_ps(
                        xs, _mm256_fmadd_ps(scale, centred, offset), totals[r]);
                } else {
                    const Floats both = _mm256_fnmadd_ps(second, xsum, dot);
                    totals[r] = _mm256_fmadd_ps(_mm256_mul_ps(xs, scale), both, totals[r]);
                }
            }
        }
    }
    for (int r = 0; r < R; ++r) _mm256_storeu_ps(out + LANES * r, totals[r]);
}

#else

inline float half(const uint8_t *from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t rest = bits & 0x7FFF;
    float value;
    if (rest < 0x0400) {
        value = static_cast<float>(rest) * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t exponent = rest >= 0x7C00 ? 0x7F800000 - (0x7C00u << 13) : 112u << 23;
    const uint32_t wide = sign | ((rest << 13) + exponent);
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Sums of one block: lane l, pair p of columns at word [p][l] (8 bits) or nibble (4 bits).
template <int BITS>
inline void block_products(const uint8_t *codes, const int16_t *x, int32_t *sums) {
    for (int l = 0; l < LANES; ++l) sums[l] = 0;
    if constexpr (BITS == 4) {
        for (int quad = 0; quad < 4; ++quad) {
            for (int i = 0; i < 4; ++i) {
                const int32_t even = x[8 * quad + 2 * i], odd = x[8 * quad + 2 * i + 1];
                for (int l = 0; l < LANES; ++l) {
                    uint16_t words[2];
                    std::memcpy(words, codes + 32 * quad + 4 * l, sizeof words);
                    sums[l] += even * ((words[0] >> (4 * i)) & 15);
                    sums[l] += odd * ((words[1] >> (4 * i)) & 15);
                }
            }
        }
    } else {
        const int8_t *signed_codes = reinterpret_cast<const int8_t *>(codes);
        for (int pair = 0; pair < 16; ++pair) {
            for (int l = 0; l < LANES; ++l) {
                const int8_t *two = signed_codes + 16 * pair + 2 * l;
                sums[l] += x[2 * pair] * two[0] + x[2 * pair + 1] * two[1];
            }
        }
    }
}

template <int BITS, int KIND>
void row_product(const Linear &layer, const uint8_t *at, const Part &part, float *out) {
    constexpr int BYTES = BLOCK * LANES * BITS / 8;
    const int64_t blocks = layer.blocks();
    const float middle = static_cast<float>(layer.middle);
    float totals[LANES] = {};
    for (int64_t block = 0; block < blocks;) {
        float scale[LANES], second[LANES];
        for (int l = 0; l < LANES; ++l) {
            scale[l] = half(at + 2 * l);
            second[l] = KIND == SYMMETRIC ? middle : half(at + 16 + 2 * l);
        }
        at += KIND == SYMMETRIC ? 16 : 32;
        const int64_t end = std::min(blocks, block + layer.blocks_per_group);
        for (; block < end; ++block, at += BYTES) {
            int32_t sums[LANES];
            block_products<BITS>(at, part.codes + block * BLOCK, sums);
            const float xs = part.scales[block], xsum = part.sums[block];
            for (int l = 0; l < LANES; ++l) {
                const float dot = static_cast<float>(sums[l]);
                if constexpr (KIND == OFFSETS) {
                    totals[l] += xs * (scale[l] * (dot - middle * xsum) + second[l] * xsum);
                } else {
                    totals[l] += xs * scale[l] * (dot - second[l] * xsum);
                }
            }
        }
    }
    std::memcpy(out, totals, sizeof totals);
}

template <int BITS, int KIND, int R>
void strip_product(const Linear &layer, const uint8_t *at, const Part *parts, float *out) {
    for (int r = 0; r < R; ++r) row_product<BITS, KIND>(layer, at, parts[r], out + LANES * r);
}

#endif

void store(const Linear &layer, int64_t strip, int64_t row, const float *from, Target target) {
    const int64_t first = strip * LANES;
    const int64_t width = std::min<int64_t>(LANES, layer.n - first);
    float *to = target.y + row * target.stride + first;
    for (int64_t l = 0; l < width; ++l) {
        float value = from[l];
        if (layer.bias != nullptr) value += layer.bias[first + l];
        to[l] = target.add ? to[l] + value : value;
    }
}

template <int BITS, int KIND, int R>
void tile(const Linear &layer, int64_t strip, const Rows &rows, int64_t row, Target target) {
    Part parts[R];
    for (int r = 0; r < R; ++r) {
        parts[r] = {rows.codes(row + r), rows.scales(row + r), rows.sums(row + r)};
    }
    alignas(32) float out[R * LANES];
    strip_product<BITS, KIND, R>(layer, layer.weights + strip * layer.strip_bytes(), parts, out);
    for (int r = 0; r < R; ++r) store(layer, strip, row + r, out + LANES * r, target);
}

// Rows in tiles of four share one unpacking of the weights; what is left goes in twos and ones.
template <int BITS, int KIND>
void strip_rows(const Linear &layer, int64_t strip, const Rows &rows, int64_t count, Target to) {
    int64_t row = 0;
    for (; row + 4 <= count; row += 4) tile<BITS, KIND, 4>(layer, strip, rows, row, to);
    for (; row + 2 <= count; row += 2) tile<BITS, KIND, 2>(layer, strip, rows, row, to);
    for (; row < count; ++row) tile<BITS, KIND, 1>(layer, strip, rows, row, to);
}

using StripFn = void (*)(const Linear &, int64_t, const Rows &, int64_t, Target);

StripFn strip_function(const Linear &layer) {
    static constexpr StripFn four[] = {strip_rows<4, SYMMETRIC>, strip_rows<4, ZEROS>,
                                       strip_rows<4, OFFSETS>};
    static constexpr StripFn eight[] = {strip_rows<8, SYMMETRIC>, strip_rows<8, ZEROS>,
                                        strip_rows<8, OFFSETS>};
    return layer.bits == 4 ? four[layer.kind] : eight[layer.kind];
}

void quantise_block(const float *x, int16_t *codes, float *scale, float *sum) {
    float top = 0.0f, broken = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : broken)
    for (int i = 0; i < BLOCK; ++i) {
        const float size = std::fabs(x[i]);
        top = size > top ? size : top;
        broken += x[i] * 0.0f;  // NaN if x is NaN or infinite
    }
    const bool is_zero = !(top >= SMALLEST);
    const float inverse = is_zero ? 0.0f : CODE_MAX / top;
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < BLOCK; ++i) {
        const float shifted = x[i] * inverse + ROUNDER;
        int32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        const int16_t code = static_cast<int16_t>(bits);
        codes[i] = code;
        total += code;
    }
    *scale = (is_zero ? 0.0f : top / CODE_MAX) + broken;
    *sum = static_cast<float>(total);
}

}  // namespace

void quantise_row(const float *x, int64_t k, const int32_t *columns, const Rows &rows,
                  int64_t row) {
    int16_t *codes = rows.codes(row);
    float *scales = rows.scales(row), *sums = rows.sums(row);
    const int64_t whole = columns == nullptr ? k / BLOCK : 0;
    for (int64_t b = 0; b < whole; ++b) {
        quantise_block(x + b * BLOCK, codes + b * BLOCK, scales + b, sums + b);
    }
    for (int64_t b = whole; b < rows.blocks; ++b) {
        float padded[BLOCK] = {};
        for (int64_t i = b * BLOCK; i < std::min(k, (b + 1) * BLOCK); ++i) {
            padded[i - b * BLOCK] = x[columns == nullptr ? i : columns[i]];
        }
        quantise_block(padded, codes + b * BLOCK, scales + b, sums + b);
    }
}

void multiply(Team &team, const Linear &layer, const Rows &rows, int64_t count, Target target) {
    const StripFn run = strip_function(layer);
    const int64_t strips = layer.strips();
    // Small enough that a thread whose core is taken away holds up little, large enough to stream.
    const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(32, strips / (6 * team.size())));
    for (int64_t first = team.take(chunk); first < strips; first = team.take(chunk)) {
        const int64_t end = std::min(strips, first + chunk);
        for (int64_t strip = first; strip < end; ++strip) run(layer, strip, rows, count, target);
    }
}

}  // namespace native

extern "C" {

// Changed with every change of a function or struct that Python sees.
int native_version() { return 1; }

void native_set_pool(void *parallel, void *team_size) {
    native::pool_parallel = reinterpret_cast<native::ParallelFn>(parallel);
    native::pool_team_size = reinterpret_cast<native::TeamSizeFn>(team_size);
}

// x [rows, k] and y [rows, n], both fp32 and contiguous. 0, or 1 where memory is out.
int native_linear(const native::Linear *layer, const float *x, float *y, int64_t rows,
                  int threads) {
    thread_local native::RowMemory memory;
    try {
        memory.reserve(rows, layer->blocks());
    } catch (const std::bad_alloc &) {
        return 1;
    }
    const native::Rows shared = memory.rows(layer->blocks());
    native::run_team(threads, [&](native::Team &team, int number) {
        for (int64_t row = number; row < rows; row += team.size()) {
            native::quantise_row(x + row * layer->k, layer->k, layer->columns, shared, row);
        }
        team.barrier();
        native::multiply(team, *layer, shared, rows, {y, layer->n, false});
    });
    return 0;
}

}
