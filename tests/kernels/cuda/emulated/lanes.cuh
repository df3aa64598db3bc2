// What src/makeway/kernels/cuda/lanes.cuh offers, for the CPU: the same names, with the meaning that is written there.
// Never schedules (emulate.h does). Hazard: it is stricter than a GPU: lanes that part ways, or end early, are errors.
#pragma once
#include <cmath>

#include "emulate.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }

#define __device__
#define __constant__ static
#define __forceinline__ inline
#define KERNEL(...) void
#define DEVICE inline

DEVICE int thread_x() { return emulated::block.current; }
DEVICE int n_threads() { return emulated::block.n_threads; }
DEVICE int block_x() { return emulated::block.index[0]; }
DEVICE int block_y() { return emulated::block.index[1]; }
DEVICE int n_blocks_x() { return emulated::block.n_blocks[0]; }
DEVICE u8* shared_bytes() { return emulated::block.shared; }

DEVICE void sync_block() {
    emulated::meet_block("sync_block", [] {});
}
DEVICE void sync_warp() {
    emulated::meet_warp("sync_warp", [](emulated::Warp&) {});
}

DEVICE float as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
DEVICE u32 as_u32(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

template <class T> T shuffled(const char* what, T value, int lane) {
    static_assert(sizeof(T) == 4);
    int self = emulated::block.current % 32;
    emulated::Warp& warp = emulated::block.warps[emulated::block.current / 32];
    memcpy(&warp.in[self][0], &value, 4);
    warp.in[self][1] = lane & 31;
    emulated::meet_warp(what, [](emulated::Warp& w) {
        for (int i = 0; i < 32; i++) w.out[i][0] = w.in[w.in[i][1]][0];
    });
    memcpy(&value, &warp.out[self][0], 4);
    return value;
}
template <class T> DEVICE T shfl(T value, int lane) { return shuffled("shfl", value, lane); }
template <class T> DEVICE T shfl_xor(T value, int mask) {
    return shuffled("shfl_xor", value, emulated::block.current % 32 ^ mask);
}

DEVICE u32 max_of_warp(u32 value) {
    emulated::Warp& warp = emulated::block.warps[emulated::block.current / 32];
    warp.in[emulated::block.current % 32][0] = value;
    emulated::meet_warp("max_of_warp", [](emulated::Warp& w) {
        u32 most = 0;
        for (int i = 0; i < 32; i++) most = max(most, w.in[i][0]);
        for (int i = 0; i < 32; i++) w.out[i][0] = most;
    });
    return warp.out[emulated::block.current % 32][0];
}

DEVICE float bf16_to_float(u32 low16) { return as_float(low16 << 16); }

DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    int self = emulated::block.current % 32;
    emulated::Warp& warp = emulated::block.warps[emulated::block.current / 32];
    memcpy(&warp.in[self][0], a, 16);
    warp.in[self][4] = b0;
    warp.in[self][5] = b1;
    memcpy(&warp.in[self][6], c, 16);
    emulated::meet_warp("mma_bf16", [](emulated::Warp& w) {
        typedef double Eight __attribute__((vector_size(64)));  // one for each column
        double left[16][16];                                    // [row][k]
        Eight right[16], sums[16];                              // [k], [row]
        for (int lane = 0; lane < 32; lane++) {
            int g = lane / 4, t = lane % 4;
            for (int half = 0; half < 2; half++) {
                for (int i = 0; i < 4; i++)
                    left[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = bf16_to_float(w.in[lane][i] >> (16 * half) & 0xffff);
                for (int i = 0; i < 2; i++)
                    right[2 * t + i * 8 + half][g] = bf16_to_float(w.in[lane][4 + i] >> (16 * half) & 0xffff);
            }
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = as_float(w.in[lane][6 + i]);
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++) sums[row] += left[row][k] * right[k];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                w.out[lane][i] = as_u32(static_cast<float>(sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]));
    });
    memcpy(c, &warp.out[self][0], 16);
}

// Columns a[r][k], b[g][k] of bytes; `words` of a row and of a column in a lane's registers, 16 columns apart.
template <bool SIGNED, int WORDS> void bytes_product(const char* what, i32 (&c)[4], const u32* a, const u32* b) {
    int self = emulated::block.current % 32;
    emulated::Warp& warp = emulated::block.warps[emulated::block.current / 32];
    memcpy(&warp.in[self][0], a, 8 * WORDS);
    memcpy(&warp.in[self][4], b, 4 * WORDS);
    memcpy(&warp.in[self][6], c, 16);
    emulated::meet_warp(what, [](emulated::Warp& w) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                i64 sum = static_cast<i32>(w.in[lane][6 + i]);
                for (int word = 0; word < WORDS; word++)
                    for (int t = 0; t < 4; t++) {
                        u32 left = w.in[row % 8 * 4 + t][2 * word + row / 8], right = w.in[column * 4 + t][4 + word];
                        for (int k = 0; k < 4; k++) {
                            u8 byte = left >> (8 * k) & 255;
                            sum += (SIGNED ? static_cast<i8>(byte) : byte) * static_cast<i8>(right >> (8 * k) & 255);
                        }
                    }
                w.out[lane][i] = static_cast<u32>(sum);
            }
    });
    memcpy(c, &warp.out[self][0], 16);
}
template <bool SIGNED> DEVICE void mma_bytes(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    bytes_product<SIGNED, 2>("mma_bytes", c, a, b);
}
DEVICE void mma_bytes_16(i32 (&c)[4], u32 low, u32 high, u32 b) {
    const u32 a[2] = {low, high};
    bytes_product<false, 1>("mma_bytes_16", c, a, &b);
}

template <class T> T loaded(const void* from, const char* what) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) emulated::fail("%s from %p, which is not aligned", what, from);
    T value;
    memcpy(&value, from, sizeof(T));
    return value;
}
DEVICE uint4 load16(const void* from) { return loaded<uint4>(from, "load16"); }
DEVICE uint2 load8(const void* from) { return loaded<uint2>(from, "load8"); }
DEVICE u32 load4(const void* from) { return loaded<u32>(from, "load4"); }
DEVICE u32 load2(const void* from) { return loaded<u16>(from, "load2"); }
DEVICE float load4f_cg(const float* from) { return loaded<float>(from, "load4f_cg"); }
DEVICE i32 load4_cg(const i32* from) { return loaded<i32>(from, "load4_cg"); }
DEVICE i64 load8_cg(const i64* from) { return loaded<i64>(from, "load8_cg"); }

DEVICE void copy16_async(void* shared, const void* from) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
        emulated::fail("copy16_async from %p to %p, which are not aligned", from, shared);
    emulated::block.copies[emulated::block.current].current.push_back({shared, from, 16});
}
DEVICE void prefetch32(const void*) {}
DEVICE void commit_async() {
    emulated::Copies& copies = emulated::block.copies[emulated::block.current];
    copies.groups.push_back(std::move(copies.current));
    copies.current.clear();
}
template <int N> DEVICE void wait_async() {  // until then nothing is copied, so that a wait that is missing shows
    auto& groups = emulated::block.copies[emulated::block.current].groups;
    for (; groups.size() > N; groups.pop_front())
        for (const emulated::Copy& copy : groups.front()) memcpy(copy.to, copy.from, copy.n_bytes);
}

DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        u32 nibble = selector >> (4 * i) & 15, byte = bytes >> (8 * (nibble & 7)) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
DEVICE u32 funnel_r(u32 low, u32 high, int bits) {
    return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (bits & 31));
}

DEVICE float half_to_float(u32 low16) {
    u32 exponent = low16 >> 10 & 31, fraction = low16 & 1023, sign = (low16 & 0x8000) << 16;
    if (exponent == 31) return as_float(sign | 0x7f800000 | fraction << 13);
    float size = exponent ? as_float((exponent + 112) << 23 | fraction << 13) : ldexpf(static_cast<float>(fraction), -24);
    return as_float(sign | as_u32(size));
}
DEVICE u32 to_bf16(float value) {
    u32 bits = as_u32(value);
    if (std::isnan(value)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf16(float low, float high) { return to_bf16(high) << 16 | to_bf16(low); }
DEVICE u32 sub_bf16(u32 a, u32 b) {
    return pack_bf16(bf16_to_float(a & 0xffff) - bf16_to_float(b & 0xffff), bf16_to_float(a >> 16) - bf16_to_float(b >> 16));
}
DEVICE u32 and_or(u32 a, u32 mask, u32 base) { return (a & mask) | base; }
DEVICE u32 in_register(u32 constant) { return constant; }
DEVICE int count_ones(u32 bits) { return __builtin_popcount(bits); }
DEVICE int lowest_one(u32 bits) { return __builtin_ffs(static_cast<int>(bits)) - 1; }
DEVICE float exp_of(float x) { return expf(x); }
DEVICE float rsqrt_of(float x) { return 1.0f / sqrtf(x); }
DEVICE float reciprocal_of(float x) { return fabsf(x) > 0x1p126f ? 0.0f : 1.0f / x; }

DEVICE bool arrived_last(i32* counter, i32 n) {
    emulated::meet_block("arrived_last", [&] {
        emulated::block.flag = ++*counter == n;
        if (emulated::block.flag) *counter = 0;
    });
    return emulated::block.flag;
}

DEVICE void wait_for_previous() { emulated::block.n_waited++; }
DEVICE void let_next_start() {}
