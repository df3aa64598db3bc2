// Blocks of 32 columns with a scale each, and matrices that are not quantised, as `codes.cuh` has blocks of 256.

#pragma once
#include "codes.cuh"

template <>
struct Block<Q8_0> : SharedRow {
    static constexpr bool HALVES = false, BY_16 = false, SIGNED = true, IN_INTEGERS = false;
    static constexpr bool HAS_SHIFT = false;
    static constexpr int COLUMNS = 32, BYTES = 34;
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
        const u8* at = row + BYTES * s + 2 + 8 * t;
        out[0] = shared_word(at);
        out[1] = shared_word(at + 4);
    }
    DEVICE float scale(u32 s, int) const {
        return half_at(BYTES * s);
    }
};

// Blocks of 32 whose low nibbles are the first 16 columns and whose high ones the others; QS: where they begin; QH: where the fifth
// bits do, if there are any. They begin at even addresses.
template <int SIZE, int QS, int QH = -1>
struct NibbleBlock : SharedRow {
    static constexpr bool HALVES = true, BY_16 = false, SIGNED = false, IN_INTEGERS = false;
    static constexpr bool HAS_SHIFT = true;
    static constexpr int COLUMNS = 32, BYTES = SIZE;
    DEVICE static u32 word(const u8* at) {
        return SIZE % 4 == 0 && QS % 4 == 0 ? *reinterpret_cast<const u32*>(at) : shared_word(at);
    }
    // Where a scale, a minimum and fifth bits are eight bytes at a multiple of eight: all of them.
    static constexpr bool HAS_HEAD = SIZE % 8 == 0;
    DEVICE uint2 head(u32 s) const {
        return *reinterpret_cast<const uint2*>(row + BYTES * s);
    }
    DEVICE static u32 spread(u32 bits) {  // four bits, each to bit 4 of its byte
        return (bits & 0xF) * 0x02040810u & 0x10101010u;
    }
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
        const u8* at = row + BYTES * s;
        const u32 nibbles = word(at + QS + 4 * t);
        out[0] = nibbles & NIBBLES;
        out[1] = (nibbles >> 4) & NIBBLES;
        if constexpr (QH >= 0) {
            u32 fifth;
            if constexpr (HAS_HEAD) fifth = head(s).y >> (4 * t);
            else fifth = word(at + QH) >> (4 * t);
            out[0] |= spread(fifth);
            out[1] |= spread(fifth >> 16);
        }
    }
    DEVICE float scale(u32 s, int) const {
        if constexpr (HAS_HEAD) return half_to_float(head(s).x & 0xFFFF);
        else return half_at(BYTES * s);
    }
    DEVICE float minimum(u32 s) const {
        if constexpr (HAS_HEAD) return half_to_float(head(s).x >> 16);
        else return half_at(BYTES * s + 2);
    }
};

template <>
struct Block<Q4_0> : NibbleBlock<18, 2> {
    DEVICE float shift(u32 s) const {
        return -8.0f * scale(s, 0);
    }
};
template <>
struct Block<Q4_1> : NibbleBlock<20, 4> {
    DEVICE float shift(u32 s) const {
        return minimum(s);
    }
};
template <>
struct Block<Q5_0> : NibbleBlock<22, 6, 2> {
    DEVICE float shift(u32 s) const {
        return -16.0f * scale(s, 0);
    }
};
template <>
struct Block<Q5_1> : NibbleBlock<24, 8, 4> {
    DEVICE float shift(u32 s) const {
        return minimum(s);
    }
};

DEVICE Table e2m1_doubled() { return {{0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu}}; }

template <>
struct Block<IQ4_NL> : SharedRow {
    static constexpr bool HALVES = true, BY_16 = false, SIGNED = true, IN_INTEGERS = false;
    static constexpr bool HAS_SHIFT = false;
    static constexpr int COLUMNS = 32, BYTES = 18;
    DEVICE void codes(u32 s, u32 (&out)[2]) const {
        iq4().of_nibbles(shared_word(row + BYTES * s + 2 + 4 * t), out);
    }
    DEVICE float scale(u32 s, int) const {
        return half_at(BYTES * s);
    }
};

template <>
struct Block<MXFP4> : SharedRow {
    static constexpr bool HALVES = true, BY_16 = false, SIGNED = true, IN_INTEGERS = false;
    static constexpr bool HAS_SHIFT = false;
    static constexpr int COLUMNS = 32, BYTES = 17;
    DEVICE void codes(u32 s, u32 (&out)[2]) const {  // a word at any address, from the two that it lies in
        const u8* at = row + BYTES * s + 1 + 4 * t;
        const int over = static_cast<int>(reinterpret_cast<u64>(at) & 3);
        const u32* words = reinterpret_cast<const u32*>(at - over);
        e2m1_doubled().of_nibbles(funnel_r(words[0], words[over == 0 ? 0 : 1], 8 * over), out);
    }
    DEVICE float scale(u32 s, int) const {  // half of 2^(e - 127); the two smallest are subnormal
        const u32 e = row[BYTES * s];
        return as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};

// Matrices that are not quantised: a bf16 and, but for BF16, the rest of each value in another, read as they are needed; in
// pairs (0, 2), (1, 3) of four columns, because that is how a word of an activation's bytes falls apart.
template <int KIND>
struct Floats {
    static constexpr bool HALVES = false, BY_EIGHT = false;
    static constexpr int COLUMNS = 32, BYTES = KIND == F32 ? 128 : 64, TERMS = KIND == BF16 ? 1 : 2;
    const u8* row;

    DEVICE void open(const u8* at, int t) { row = at + BYTES / 4 * t; }
    DEVICE void prepare() {}
    DEVICE static void in_two(const float (&v)[4], u32* out, u32* rest) {
        out[0] = pack_bf16(v[0], v[2]);
        out[1] = pack_bf16(v[1], v[3]);
        rest[0] = pack_bf16(v[0] - bf16_to_float(out[0] & 0xFFFF), v[2] - bf16_to_float(out[0] >> 16));
        rest[1] = pack_bf16(v[1] - bf16_to_float(out[1] & 0xFFFF), v[3] - bf16_to_float(out[1] >> 16));
    }
    DEVICE void codes(u32 s, u32 (&out)[4], u32 (&rest)[4]) const {
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
