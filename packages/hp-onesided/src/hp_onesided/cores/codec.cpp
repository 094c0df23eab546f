// int8 and e4m3 of a wire, encoded and decoded: the layout and the bits are those of torch/wire.py.
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr float SLACK = 1 + 0x1p-22f, LEAST = 0x1p-126f;
constexpr uint32_t INFINITE = 0x7f800000, SIGN = 0x80000000;

uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

float whole_below(float value) {
    const int32_t whole = int32_t(value);
    return float(whole - (value < float(whole)));
}

struct Chance {
    uint32_t before, between;
    float of(uint32_t index) const {  // in [0, 1)
        uint32_t bits = index * uint32_t(-0x61C88647) + before;
        bits = ((bits ^ bits >> 16) * 0x21F0AAAD) ^ between;
        bits = (bits ^ bits >> 15) * uint32_t(-0x2CA5D269);
        return (bits >> 8) * 0x1p-24f;
    }
};

struct Int8 {
    static constexpr float TOP = 127, BELOW = 126;  // the largest code, and the one beside infinities
    static constexpr uint8_t NOT_A_NUMBER = 0x80;  // beside a negative scale; else a negative zero

    static uint8_t nearest(float scaled) {
        const uint32_t zero = -uint32_t(bits_of(scaled) == SIGN);  // without branches, for the sake of vectors
        return ((bits_of(scaled + 0x1.8p23f) - bits_of(0x1.8p23f)) & ~zero) | (NOT_A_NUMBER & zero);
    }
    static float by_chance(float scaled, float chance, float limit) {
        const uint32_t zero = -uint32_t(bits_of(scaled) == SIGN);
        const float whole = whole_below(scaled + chance), low = whole < -limit ? -limit : whole;
        const float rounded = (low > limit ? limit : low) + 0.0f;
        return float_of((bits_of(rounded) & ~zero) | (SIGN & zero));
    }
    static float value(uint8_t code) { return int8_t(code); }
    static float decode(uint8_t code, float scale) {
        const uint32_t zero = -uint32_t(code == NOT_A_NUMBER);
        return float_of((bits_of(value(code) * scale) & ~zero) | (SIGN & zero));
    }
};

struct E4m3 {  // 4 bits of exponent from -6 on, 3 of mantissa; the subnormal step is 2^-9
    static constexpr float TOP = 448, BELOW = 416;
    static constexpr uint8_t NOT_A_NUMBER = 0x7f;

    static uint8_t nearest(float scaled) {
        const uint32_t bits = bits_of(scaled), magnitude = bits & ~SIGN;
        const uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) >> 20) - (120 << 3);
        const uint32_t small = bits_of(float_of(magnitude) + 0x1.8p14f) - bits_of(0x1.8p14f);
        const uint32_t is_small = -uint32_t(magnitude < bits_of(0x1p-6f));
        return (small & is_small) | (normal & ~is_small) | bits >> 24 & 0x80;
    }
    static float by_chance(float scaled, float chance, float limit) {
        const int32_t magnitude = bits_of(scaled) & ~SIGN, exponent = magnitude & INFINITE, least = bits_of(0x1p-6f);
        const float step = float_of(exponent > least ? exponent : least) * 0x1p-3f;
        const float size = whole_below(float_of(magnitude) / step + chance) * step;
        return float_of(bits_of(size > limit ? limit : size) | (bits_of(scaled) & SIGN));
    }
    static float value(uint8_t code) {
        const uint32_t magnitude = code & 0x7f, sign = uint32_t(code & 0x80) << 24;
        const uint32_t is_small = -uint32_t(magnitude < 8);
        const uint32_t normal = (magnitude << 20) + (120u << 23), small = bits_of(int32_t(magnitude) * 0x1p-9f);
        return float_of((small & is_small) | (normal & ~is_small) | sign);
    }
    static float decode(uint8_t code, float scale) { return value(code) * scale; }
};

template <class Format>
float encode_block(const float* values, uint8_t* codes, uint64_t count, const Chance* chance, uint32_t index) {
    int32_t largest = 0, any = 0;
    for (uint64_t i = 0; i < count; i++) {
        const int32_t magnitude = bits_of(values[i]) & ~SIGN;
        any = std::max(any, magnitude);
        largest = std::max(largest, magnitude < int32_t(INFINITE) ? magnitude : 0);
    }
    const bool special = any >= int32_t(INFINITE);
    const float limit = special ? Format::BELOW : Format::TOP;
    const float scale = std::max(float_of(largest) / (limit * SLACK), LEAST);
    if (!special && !chance)
        for (uint64_t i = 0; i < count; i++) codes[i] = Format::nearest(values[i] / scale);
    else if (!special)
        for (uint64_t i = 0; i < count; i++)
            codes[i] = Format::nearest(Format::by_chance(values[i] / scale, chance->of(index + i), limit));
    else
        for (uint64_t i = 0; i < count; i++) {
            const uint32_t magnitude = bits_of(values[i]) & ~SIGN;
            float scaled = values[i] / scale;
            if (chance) scaled = Format::by_chance(scaled, chance->of(index + i), limit);
            if (magnitude == INFINITE) scaled = values[i] > 0 ? Format::TOP : -Format::TOP;
            // A negative zero of int8 has the code of NaN: beside one it becomes a zero.
            else if (Format::nearest(scaled) == Format::NOT_A_NUMBER) scaled = 0;
            codes[i] = magnitude > INFINITE ? Format::NOT_A_NUMBER : Format::nearest(scaled);
        }
    return special ? -scale : scale;
}

template <class Format> void decode_block(const uint8_t* codes, float* values, uint64_t count, float scale) {
    const float size = float_of(bits_of(scale) & ~SIGN);
    for (uint64_t i = 0; i < count; i++) values[i] = Format::decode(codes[i], size);
    if (size == scale) return;
    for (uint64_t i = 0; i < count; i++) {
        const float code = Format::value(codes[i]);
        if (codes[i] == Format::NOT_A_NUMBER) values[i] = float_of(0x7fc00000);
        else if (code == Format::TOP || code == -Format::TOP) values[i] = float_of(INFINITE | (bits_of(code) & SIGN));
    }
}

template <class Format>
void encode(const float* values, char* sent, uint64_t rows, uint64_t count, uint64_t block, uint64_t stride,
            const uint32_t* keys) {
    const uint64_t blocks = (count + block - 1) / block;
    const Chance chance{keys ? keys[0] : 0, keys ? keys[1] : 0};
    for (uint64_t row = 0; row < rows; row++, sent += stride) {
        uint8_t* codes = reinterpret_cast<uint8_t*>(sent) + 4 * blocks;
        for (uint64_t number = 0; number < blocks; number++) {
            const uint64_t at = number * block, index = row * count + at;
            const float scale = encode_block<Format>(values + index, codes + at, std::min(block, count - at),
                                                     keys ? &chance : nullptr, uint32_t(index));
            memcpy(sent + 4 * number, &scale, 4);
        }
        memset(codes + count, 0, stride - 4 * blocks - count);
    }
}

template <class Format>
void decode(const char* sent, float* values, uint64_t rows, uint64_t count, uint64_t block, uint64_t stride) {
    const uint64_t blocks = (count + block - 1) / block;
    for (uint64_t row = 0; row < rows; row++, sent += stride) {
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(sent) + 4 * blocks;
        for (uint64_t number = 0; number < blocks; number++) {
            const uint64_t at = number * block;
            float scale;
            memcpy(&scale, sent + 4 * number, 4);
            decode_block<Format>(codes + at, values + row * count + at, std::min(block, count - at), scale);
        }
    }
}

}  // namespace

extern "C" {

// Encodes rows of float32, as int8 or as e4m3; `stride` are the bytes of an encoded one. Stochastic if `keys` are given.
void hp_encode(int e4m3, const float* values, char* sent, uint64_t rows, uint64_t count, uint64_t block, uint64_t stride,
               const uint32_t* keys) {
    (e4m3 ? encode<E4m3> : encode<Int8>)(values, sent, rows, count, block, stride, keys);
}

void hp_decode(int e4m3, const char* sent, float* values, uint64_t rows, uint64_t count, uint64_t block,
               uint64_t stride) {
    (e4m3 ? decode<E4m3> : decode<Int8>)(sent, values, rows, count, block, stride);
}
}
