// Quantised blocks as operands of the tensor cores: a lane's codes as bytes, and the scales of its two rows.
//
// A unit is 16 rows of a matrix times UK columns. Lane 4 g + t of a warp works on rows g and g + 8. Of each 32 columns a
// lane takes eight, in two words: 8 t .. 8 t + 7, or, where scales change every 16 columns, 4 t .. 4 t + 3 of either half.

#pragma once
#include "lanes.cuh"

enum Kind : int {  // as in GGUF
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30
};

// How the sums of activations come in, for what is added to a code (see product.cuh).
enum Sums : int { NO_SUMS = 0, SUMS_BY_BLOCK = 1, SUMS_BY_PRODUCT = 2 };

constexpr u32 NIBBLES = 0x0F0F0F0F;
constexpr u32 BASE = 0x43004300;  // 128.0 twice, in bf16
constexpr float TWO_23 = 8388608.0f;

DEVICE constexpr bool is_float(int kind) { return kind == F32 || kind == F16 || kind == BF16; }

// Byte `i` of a word, unsigned or signed.
template <int i>
DEVICE i32 byte_of(u32 word) {
    return static_cast<i32>(prmt(word, 0, 0x4440 + i));
}
template <int i>
DEVICE i32 signed_byte_of(u32 word) {
    return static_cast<i32>(prmt(word, 0, 0x8880 + 0x1111 * i));
}
// A small integer in the lowest byte of a word as bf16, twice; `less` takes away 2^23 and what it stands above zero.
DEVICE u32 twice_bf16(u32 byte, float less = TWO_23) {
    const u32 bits = as_u32(as_float(byte | 0x4B000000u) - less);
    return prmt(bits, bits, 0x3232);
}
// Bytes 0 and 2 of a word of signed ones as bf16: 128 + (low seven bits), minus 128 or, where the sign is set, 256.
DEVICE u32 signed_pair(u32 word) {
    return sub_bf16(and_or(word, in_register(0x007F007F), BASE), and_or(word, in_register(0x00800080), BASE));
}

// Columns 32 s .. 32 s + 31 of a lane's row, as `codes` sees them.
//   IS_SHARED: fields are read from a copy of the row's bytes in shared memory, else from global memory into registers
//   HALVES: the lane's columns are 4 t .. 4 t + 3 of either half: codes[0] of the first, codes[1] of the second
//   BY_16: a scale for each half
//   scale<s, half>(): what the codes' products are multiplied by: an integer, and then block_scale(), or all of it
template <int KIND>
struct Block;

// Scales and minima of a Q4_K or Q5_K block: eight of 6 bits each, in 12 bytes, over two halves.
struct SuperBlock {
    static constexpr bool IS_SHARED = false, HALVES = false, BY_16 = false, HAS_MINIMA = true;
    static constexpr bool SIGNED = false;
    static constexpr int COLUMNS = 256, SUMS = SUMS_BY_PRODUCT, BIAS = 0;
    u32 both, scales[2], minima[2];

    DEVICE void load_head(const u8* row) {
        const uint4 head = load16(row);
        both = head.x;
        scales[0] = head.y;
        minima[0] = head.z;
        minima[1] = head.w;
    }
    DEVICE void prepare() {
        const u32 low = scales[0], middle = minima[0], high = minima[1];
        scales[0] = low & 0x3F3F3F3F;
        minima[0] = middle & 0x3F3F3F3F;
        scales[1] = (high & 0x0F0F0F0F) | ((low >> 2) & 0x30303030);
        minima[1] = ((high >> 4) & 0x0F0F0F0F) | ((middle >> 2) & 0x30303030);
    }
    DEVICE float block_scale() const { return half_to_float(both & 0xFFFF); }
    DEVICE float block_min() const { return half_to_float(both >> 16); }
    template <int s, int half>
    DEVICE i32 scale() const {
        return byte_of<s % 4>(scales[s / 4]);
    }
    // Of columns' blocks t and t + 4, each twice, for the product with sums of 16.
    DEVICE void scale_pairs(int t, u32& first, u32& second) const {
        first = twice_bf16((scales[0] >> (8 * t)) & 0xFF);
        second = twice_bf16((scales[1] >> (8 * t)) & 0xFF);
    }
    DEVICE void min_pairs(int t, u32& first, u32& second) const {
        first = twice_bf16((minima[0] >> (8 * t)) & 0xFF);
        second = twice_bf16((minima[1] >> (8 * t)) & 0xFF);
    }
};

template <>
struct Block<Q4_K> : SuperBlock {
    static constexpr int BYTES = 144;
    uint2 words[4];

    DEVICE void load(const u8* row, int t) {
        load_head(row);
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = load8(row + 16 + 32 * j + 8 * t);
    }
    template <int s>
    DEVICE void codes(u32 (&out)[2]) const {
        out[0] = (words[s / 2].x >> (4 * (s % 2))) & NIBBLES;
        out[1] = (words[s / 2].y >> (4 * (s % 2))) & NIBBLES;
    }
};

template <>
struct Block<Q5_K> : SuperBlock {
    static constexpr int BYTES = 176;
    uint2 fifth, words[4];

    DEVICE void load(const u8* row, int t) {
        load_head(row);
        fifth = load8(row + 16 + 8 * t);
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = load8(row + 48 + 32 * j + 8 * t);
    }
    template <int s>
    DEVICE static u32 top(u32 bits) {  // bit s of each byte, as bit 4
        return s < 4 ? bits << (4 - s) : bits >> (s - 4);
    }
    template <int s>
    DEVICE void codes(u32 (&out)[2]) const {
        out[0] = and_or(top<s>(fifth.x), 0x10101010, (words[s / 2].x >> (4 * (s % 2))) & NIBBLES);
        out[1] = and_or(top<s>(fifth.y), 0x10101010, (words[s / 2].y >> (4 * (s % 2))) & NIBBLES);
    }
};

// A word at an even address of shared memory.
DEVICE u32 shared_word(const u8* at) {
    return prmt(*reinterpret_cast<const u16*>(at), *reinterpret_cast<const u16*>(at + 2), 0x5410);
}

template <>
struct Block<Q6_K> {
    static constexpr bool IS_SHARED = true, HALVES = true, BY_16 = true, HAS_MINIMA = false, SIGNED = false;
    static constexpr int COLUMNS = 256, BYTES = 210, SUMS = SUMS_BY_PRODUCT, BIAS = 32;
    const u8* row;
    u32 scales[4];
    int t;

    DEVICE void open(const u8* shared_row, int lane_t) {
        row = shared_row;
        t = lane_t;
    }
    DEVICE void prepare() {
#pragma unroll
        for (int i = 0; i < 4; i++) scales[i] = shared_word(row + 192 + 4 * i);
    }
    DEVICE float block_scale() const { return half_to_float(*reinterpret_cast<const u16*>(row + 208)); }
    template <int s, int half>
    DEVICE i32 scale() const {
        return signed_byte_of<2 * (s % 2) + half>(scales[s / 2]);
    }
    DEVICE void scale_pairs(int, u32& first, u32& second) const {
        first = pair(row + 192 + 2 * t);
        second = pair(row + 200 + 2 * t);
    }
    DEVICE static u32 pair(const u8* at) {
        const u32 two = *reinterpret_cast<const u16*>(at) ^ 0x8080u;
        return prmt(twice_bf16(two & 0xFF, TWO_23 + 128.0f), twice_bf16(two >> 8, TWO_23 + 128.0f), 0x5410);
    }
    template <int s>
    DEVICE void codes(u32 (&out)[2]) const {
        constexpr int half = s / 4, quarter = s % 4;
        const u8* low = row + 64 * half + 32 * (quarter % 2) + 4 * t;
        const u8* top = row + 128 + 32 * half + 4 * t;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 upper = shared_word(top + 16 * i);
            const u32 two = quarter < 2 ? upper << (4 - 2 * quarter) : upper >> (2 * quarter - 4);
            out[i] = and_or(two, 0x30303030, (shared_word(low + 16 * i) >> (4 * (quarter / 2))) & NIBBLES);
        }
    }
};

template <>
struct Block<Q8_0> {
    static constexpr bool IS_SHARED = true, HALVES = false, BY_16 = false, SIGNED = true;
    static constexpr int COLUMNS = 32, BYTES = 34, SUMS = NO_SUMS;
    const u8* row;
    int t;

    DEVICE void open(const u8* shared_row, int lane_t) {
        row = shared_row;
        t = lane_t;
    }
    DEVICE void prepare() {}
    template <int s>
    DEVICE void codes(u32 (&out)[2]) const {
        const u8* at = row + BYTES * s + 2 + 8 * t;
        out[0] = shared_word(at);
        out[1] = shared_word(at + 4);
    }
    template <int s, int half>
    DEVICE float scale() const {
        return half_to_float(*reinterpret_cast<const u16*>(row + BYTES * s));
    }
};

// Blocks of 32 whose low nibbles are the first 16 columns and whose high ones the others; QS: where they begin; QH: where the fifth
// bits do, if there are any. They begin at even addresses.
template <int SIZE, int QS, int QH = -1>
struct NibbleBlock {
    static constexpr bool IS_SHARED = true, HALVES = true, BY_16 = false, SIGNED = false;
    static constexpr int COLUMNS = 32, BYTES = SIZE, SUMS = SUMS_BY_BLOCK;
    const u8* row;
    int t;

    DEVICE void open(const u8* shared_row, int lane_t) {
        row = shared_row;
        t = lane_t;
    }
    DEVICE void prepare() {}
    DEVICE static u32 word(const u8* at) {
        return SIZE % 4 == 0 && QS % 4 == 0 ? *reinterpret_cast<const u32*>(at) : shared_word(at);
    }
    DEVICE static u32 spread(u32 bits) {  // four bits, each to bit 4 of its byte
        return (bits & 0xF) * 0x02040810u & 0x10101010u;
    }
    template <int s>
    DEVICE void codes(u32 (&out)[2]) const {
        const u8* at = row + BYTES * s;
        const u32 nibbles = word(at + QS + 4 * t);
        out[0] = nibbles & NIBBLES;
        out[1] = (nibbles >> 4) & NIBBLES;
        if constexpr (QH >= 0) {
            const u32 fifth = word(at + QH) >> (4 * t);
            out[0] |= spread(fifth);
            out[1] |= spread(fifth >> 16);
        }
    }
    template <int s, int half>
    DEVICE float scale() const {
        return half_to_float(*reinterpret_cast<const u16*>(row + BYTES * s));
    }
    template <int s>
    DEVICE float minimum() const {
        return half_to_float(*reinterpret_cast<const u16*>(row + BYTES * s + 2));
    }
};

template <>
struct Block<Q4_0> : NibbleBlock<18, 2> {
    template <int s>
    DEVICE float shift() const {
        return -8.0f * scale<s, 0>();
    }
};
template <>
struct Block<Q4_1> : NibbleBlock<20, 4> {
    template <int s>
    DEVICE float shift() const {
        return minimum<s>();
    }
};
template <>
struct Block<Q5_0> : NibbleBlock<22, 6, 2> {
    template <int s>
    DEVICE float shift() const {
        return -16.0f * scale<s, 0>();
    }
};
template <>
struct Block<Q5_1> : NibbleBlock<24, 8, 4> {
    template <int s>
    DEVICE float shift() const {
        return minimum<s>();
    }
};

// Matrices that are not quantised: a bf16 and, but for BF16, the rest of each value in another, read as they are needed; in
// pairs (0, 2), (1, 3) of four columns, because that is how a word of an activation's bytes falls apart.
template <int KIND>
struct Floats {
    static constexpr bool IS_SHARED = false, HALVES = false;
    static constexpr int COLUMNS = 32, BYTES = KIND == F32 ? 128 : 64, TERMS = KIND == BF16 ? 1 : 2;
    const u8* row;

    DEVICE void load(const u8* at, int t) { row = at + BYTES / 4 * t; }
    DEVICE void prepare() {}
    DEVICE static void in_two(const float (&v)[4], u32* out, u32* rest) {
        out[0] = pack_bf16(v[0], v[2]);
        out[1] = pack_bf16(v[1], v[3]);
        rest[0] = pack_bf16(v[0] - bf16_to_float(out[0] & 0xFFFF), v[2] - bf16_to_float(out[0] >> 16));
        rest[1] = pack_bf16(v[1] - bf16_to_float(out[1] & 0xFFFF), v[3] - bf16_to_float(out[1] >> 16));
    }
    template <int s>
    DEVICE void codes(u32 (&out)[4], u32 (&rest)[4]) const {
        if constexpr (KIND == F32) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint4 w = load16(row + BYTES * s + 16 * i);
                in_two({as_float(w.x), as_float(w.y), as_float(w.z), as_float(w.w)}, out + 2 * i, rest + 2 * i);
            }
        } else {
            const uint4 w = load16(row + BYTES * s);
            const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 a = words[2 * i], b = words[2 * i + 1];
                if constexpr (KIND == BF16) {
                    out[2 * i] = prmt(a, b, 0x5410);
                    out[2 * i + 1] = prmt(a, b, 0x7632);
                } else {
                    in_two({half_to_float(a & 0xFFFF), half_to_float(a >> 16), half_to_float(b & 0xFFFF),
                            half_to_float(b >> 16)},
                           out + 2 * i, rest + 2 * i);
                }
            }
        }
    }
};
template <>
struct Block<F32> : Floats<F32> {};
template <>
struct Block<F16> : Floats<F16> {};
template <>
struct Block<BF16> : Floats<BF16> {};
