// Runs the integer half of kernels/include/strip.cuh on the host: words of blocks in, codes out.
// Arguments: bits, input file of little-endian words, output file of one signed byte a code.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "strip.cuh"

// A positive fp16 number.
static double half_value(unsigned bits) {
    const int exponent = static_cast<int>(bits >> 10 & 0x1f);
    if (exponent == 0) return std::ldexp(bits & 0x3ff, -24);
    return std::ldexp(1024 + (bits & 0x3ff), exponent - 25);
}

template <int WIDTH>
static int convert(std::FILE* in, std::FILE* out) {
    unsigned words[strip::Layout<WIDTH>::WORDS];
    while (std::fread(words, sizeof words, 1, in) == 1) {
        unsigned pairs[strip::PAIRS], bare[strip::PAIRS];
        strip::place_pairs<true>(words, pairs);
        strip::place_pairs<false>(words, bare);
        for (int p = 0; p < strip::PAIRS; ++p) {
            for (int element = 0; element < 2; ++element) {
                const unsigned biased = pairs[p] >> (16 * element) & 0xffff;
                const unsigned bias = strip::bias_of<WIDTH>(p) >> (16 * element) & 0xffff;
                const double code = half_value(biased) - half_value(bias);
                if (code != std::floor(code)) return 3;
                const double unit = std::ldexp(1, strip::place_of<WIDTH>(p) - 24);
                const double above = half_value(bare[p] >> (16 * element) & 0xffff) / unit;
                if (above - strip::MIDDLE<WIDTH> != code) return 4;
                std::fputc(static_cast<int>(code) & 0xff, out);
            }
        }
    }
    return 0;
}

int main(int count, char** arguments) {
    if (count != 4) return 2;
    std::FILE* in = std::fopen(arguments[2], "rb");
    std::FILE* out = std::fopen(arguments[3], "wb");
    if (in == nullptr || out == nullptr) return 2;
    const int status = std::atoi(arguments[1]) == 4 ? convert<4>(in, out) : convert<3>(in, out);
    return std::fclose(out) == 0 ? status : 2;
}
