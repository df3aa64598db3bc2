// Quantised blocks as operands of the tensor cores: a lane's codes as bytes, and the scales of its two rows.
//
// A unit is 16 rows of a matrix times UK columns. Lane 4 g + t of a warp works on rows g and g + 8. Of each 32 columns a
// lane takes eight, in two words: 8 t .. 8 t + 7, or, where scales change every 16 columns, 4 t .. 4 t + 3 of either half.

#pragma once
#include "lanes.cuh"

enum Kind : int {  // as in GGUF
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39
};

constexpr u32 NIBBLES = 0x0F0F0F0F;
constexpr u32 BASE = 0x43004300;  // 128.0 twice, in bf16

DEVICE constexpr bool is_float(int kind) { return kind == F32 || kind == F16 || kind == BF16; }

// Byte `i` of a word, unsigned or signed.
DEVICE i32 byte_of(u32 word, int i) { return static_cast<i32>(prmt(word, 0, 0x4440 + i)); }
DEVICE i32 signed_byte_of(u32 word, int i) { return static_cast<i32>(prmt(word, 0, 0x8880 + 0x1111 * i)); }
DEVICE u32 four_of_byte(u32 word, int i) { return prmt(word, 0, 0x1111 * i); }
// Bit s of each byte as bit `to`; others are anything.
DEVICE u32 bits_as(u32 bits, u32 s, u32 to) { return funnel_r(bits, bits, (s - to) & 31); }
// Bytes 0 and 2 of a word of signed ones as bf16: 128 + (low seven bits), minus 128 or, where the sign is set, 256.
DEVICE u32 signed_pair(u32 word) {
    return sub_bf16(and_or(word, in_register(0x007F007F), BASE), and_or(word, in_register(0x00800080), BASE));
}

// Columns 32 s .. 32 s + 31 of a lane's row, as `codes` sees them.
//   open(row, t): from a copy of the row's bytes in shared memory, of floats from global memory
//   BY_EIGHT: words are read by eights of bytes, else by fours or less
//   HALVES: the lane's columns are 4 t .. 4 t + 3 of either half: codes[0] of the first, codes[1] of the second
//   BY_16: a scale for each half
//   scale(s, half): what the codes' products are multiplied by: IN_INTEGERS an integer, and then block_scale(), else all of it
//   beside(s): with HAS_MINIMA the unsigned minima that times block_min() are taken away, with BIAS the signed scales of
//     what is: the bytes of either half, four times, so that they are multiplied as the codes are
//   HAS_SHIFT: shift(s) is added to each weight
template <int KIND>
struct Block;

// Scales and minima of a Q4_K or Q5_K block: eight of 6 bits each, in 12 bytes, over two halves.
struct SuperBlock {
    static constexpr bool HALVES = false, BY_EIGHT = true, BY_16 = false, HAS_MINIMA = true;
    static constexpr bool SIGNED = false, IN_INTEGERS = true;
    static constexpr int COLUMNS = 256, BIAS = 0;
    const u8* words;  // the lane's
    u32 both, scales[2], minima[2];

    DEVICE void open_head(const u8* row) {
        const uint4 head = *reinterpret_cast<const uint4*>(row);
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
    DEVICE i32 scale(u32 s, int) const { return byte_of(scales[s / 4], s % 4); }
    DEVICE void beside(u32 s, u32 (&out)[2]) const { out[0] = out[1] = four_of_byte(minima[s / 4], s % 4); }
    DEVICE static uint2 eight_bytes(const u8* at) { return *reinterpret_cast<const uint2*>(at); }
    DEVICE uint2 nibbles(u32 s) const {
        const uint2 both_of = eight_bytes(words + 32 * (s / 2));
        return {(both_of.x >> (4 * (s % 2))) & NIBBLES, (both_of.y >> (4 * (s % 2))) & NIBBLES};
    }
};

template <>
struct Block<Q4_K> : SuperBlock {
    static constexpr int BYTES = 144;

    DEVICE void open(const u8* row, int t) {
        open_head(row);
        words = row + 16 + 8 * t;
    }
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
        const uint2 low = nibbles(s);
        out[0] = low.x;
        out[1] = low.y;
    }
};

template <>
struct Block<Q5_K> : SuperBlock {
    static constexpr int BYTES = 176;
    uint2 fifth;

    DEVICE void open(const u8* row, int t) {
        open_head(row);
        fifth = eight_bytes(row + 16 + 8 * t);
        words = row + 48 + 8 * t;
    }
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
        const uint2 low = nibbles(s);
        out[0] = and_or(bits_as(fifth.x, s, 4), 0x10101010, low.x);
        out[1] = and_or(bits_as(fifth.y, s, 4), 0x10101010, low.y);
    }
};

// A word at an even address of shared memory.
DEVICE u32 shared_word(const u8* at) {
    return prmt(*reinterpret_cast<const u16*>(at), *reinterpret_cast<const u16*>(at + 2), 0x5410);
}

// A row whose fields are read as they are needed.
struct SharedRow {
    static constexpr bool BY_EIGHT = false;
    const u8* row;
    int t;

    DEVICE void open(const u8* shared_row, int lane_t) {
        row = shared_row;
        t = lane_t;
    }
    DEVICE void prepare() {}
    DEVICE float half_at(int at) const { return half_to_float(*reinterpret_cast<const u16*>(row + at)); }
};

// A block whose 16 scales are signed bytes, and whose codes are all too large by the same number.
struct SignedScales : SharedRow {
    u32 scales[4];

    DEVICE i32 scale(u32 s, int half) const { return signed_byte_of(scales[s / 2], 2 * (s % 2) + half); }
    DEVICE void beside(u32 s, u32 (&out)[2]) const {
        out[0] = four_of_byte(scales[s / 2], 2 * (s % 2));
        out[1] = four_of_byte(scales[s / 2], 2 * (s % 2) + 1);
    }
};

template <>
struct Block<Q6_K> : SignedScales {
    static constexpr bool HALVES = true, BY_16 = true, HAS_MINIMA = false, SIGNED = false;
    static constexpr bool IN_INTEGERS = true;
    static constexpr int COLUMNS = 256, BYTES = 210, BIAS = 32;
    DEVICE void prepare() {
#pragma unroll
        for (int i = 0; i < 4; i++) scales[i] = shared_word(row + 192 + 4 * i);
    }
    DEVICE float block_scale() const { return half_at(208); }
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
        const u32 half = s / 4, quarter = s % 4;
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
struct Block<Q2_K> : SharedRow {
    static constexpr bool HALVES = true, BY_16 = true, HAS_MINIMA = true, SIGNED = false;
    static constexpr bool IN_INTEGERS = true;
    static constexpr int COLUMNS = 256, BYTES = 84, BIAS = 0;
    u32 both[4];  // a scale in each low nibble, a minimum in the high one

    DEVICE void prepare() {
#pragma unroll
        for (int i = 0; i < 4; i++) both[i] = *reinterpret_cast<const u32*>(row + 4 * i);
    }
    DEVICE float block_scale() const { return half_at(80); }
    DEVICE float block_min() const { return half_at(82); }
    DEVICE i32 scale(u32 s, int half) const { return byte_of(both[s / 2] & NIBBLES, 2 * (s % 2) + half); }
    DEVICE void beside(u32 s, u32 (&out)[2]) const {
        const u32 minima = (both[s / 2] >> 4) & NIBBLES;
        out[0] = four_of_byte(minima, 2 * (s % 2));
        out[1] = four_of_byte(minima, 2 * (s % 2) + 1);
    }
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            out[i] = (*reinterpret_cast<const u32*>(row + 16 + 32 * (s / 4) + 16 * i + 4 * t) >> (2 * (s % 4))) & 0x03030303;
    }
};

template <>
struct Block<Q3_K> : SignedScales {
    static constexpr bool HALVES = true, BY_16 = true, HAS_MINIMA = false, SIGNED = false;
    static constexpr bool IN_INTEGERS = true;
    static constexpr int COLUMNS = 256, BYTES = 110, BIAS = 4;
    DEVICE void prepare() {
        const u32 low = shared_word(row + 96), high = shared_word(row + 100), top = shared_word(row + 104);
        scales[0] = and_or(top << 4, 0x30303030, low & NIBBLES);
        scales[1] = and_or(top << 2, 0x30303030, high & NIBBLES);
        scales[2] = and_or(top, 0x30303030, (low >> 4) & NIBBLES);
        scales[3] = and_or(top >> 2, 0x30303030, (high >> 4) & NIBBLES);
#pragma unroll
        for (int i = 0; i < 4; i++) scales[i] = (scales[i] + 0x60606060) ^ 0x80808080;  // less 32, no borrow between bytes
    }
    DEVICE float block_scale() const { return half_at(108); }
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 two = shared_word(row + 32 + 32 * (s / 4) + 16 * i + 4 * t) >> (2 * (s % 4));
            const u32 mask = shared_word(row + 16 * i + 4 * t);
            out[i] = and_or(bits_as(mask, s, 2), 0x04040404, two & 0x03030303);
        }
    }
};

// A type whose four bits stand for one of 16 signed bytes (facts of the format: quants/codebook4.py).
struct Table {
    u32 words[4];

    // The values of four codes, one in each byte.
    DEVICE u32 of(u32 codes) const {
        const u32 selector = prmt(codes | (codes >> 4), 0, 0x4420) & 0x7777;
        const u32 low = prmt(words[0], words[1], selector), high = prmt(words[2], words[3], selector);
        const u32 is_high = prmt(codes << 4, 0, 0xBA98);  // bit 3 of a code, in all bits of its byte
        return (low & ~is_high) | (high & is_high);
    }
    // Nibbles of 32 columns as in NibbleBlock.
    DEVICE void of_nibbles(u32 word, u32 (&out)[2]) const {
        out[0] = of(word & NIBBLES);
        out[1] = of((word >> 4) & NIBBLES);
    }
};
DEVICE Table iq4() { return {{0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u}}; }

template <>
struct Block<IQ4_XS> : SharedRow {
    static constexpr bool HALVES = true, BY_16 = false, SIGNED = true, IN_INTEGERS = true;
    static constexpr bool HAS_MINIMA = false;
    static constexpr int COLUMNS = 256, BYTES = 136, BIAS = 0;
    u32 head, low_scales;

    DEVICE void prepare() {
        head = *reinterpret_cast<const u32*>(row);
        low_scales = *reinterpret_cast<const u32*>(row + 4);
    }
    DEVICE float block_scale() const { return half_to_float(head & 0xFFFF); }
    DEVICE i32 scale(u32 s, int) const {
        return static_cast<i32>(((low_scales >> (4 * s)) & 15) | (((head >> (16 + 2 * s)) & 3) << 4)) - 32;
    }
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
        iq4().of_nibbles(*reinterpret_cast<const u32*>(row + 8 + 16 * s + 4 * t), out);
    }
};
