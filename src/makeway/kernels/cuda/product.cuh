// The product that all decode kernels share: a unit (16 rows of a matrix, UK columns) times up to eight activations.
//
// One warp does it. An activation comes as two bf16 whose sum is good to 2^-17, and each of the two is a column of the
// product of its own: with up to four activations all fit the eight columns of the tensor cores' product (SETS = 1), else
// the product is made twice (SETS = 2). Either way a column's sums depend on nothing but that column.
// What stands beside the code in a weight (128, a minimum) needs sums of activations: of 16 columns each, exact in three
// bf16 and multiplied by the integer scales on the tensor cores, or of 32 each in f32.

#pragma once
#include "codes.cuh"

constexpr int LANES = 32;
constexpr int ROWS = 16;        // of a unit
constexpr int RED_COLUMN = 20;  // floats from one column's sums of a unit to the next: no bank twice
constexpr int RED = 8 * RED_COLUMN;

DEVICE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(fminf(-x, 88.0f))); }

// Columns of the product as they are stored: part 0 of all rows, then part 1.
DEVICE int column_of(int part, int row, int n) { return part * n + row; }

DEVICE void load_four(const float* from, float (&v)[4]) {
    const uint4 four = load16(from);
    v[0] = as_float(four.x);
    v[1] = as_float(four.y);
    v[2] = as_float(four.z);
    v[3] = as_float(four.w);
}

// Four values as bf16 (0, 2), (1, 3), and what is left of them.
DEVICE uint2 pack_four(float (&v)[4]) {
    const uint2 packed = {pack_bf16(v[0], v[2]), pack_bf16(v[1], v[3])};
    v[0] -= bf16_to_float(packed.x & 0xFFFF);
    v[1] -= bf16_to_float(packed.y & 0xFFFF);
    v[2] -= bf16_to_float(packed.x >> 16);
    v[3] -= bf16_to_float(packed.y >> 16);
    return packed;
}
DEVICE float sum_of(const uint2& four) {
    return (bf16_to_float(four.x & 0xFFFF) + bf16_to_float(four.y & 0xFFFF)) +
           (bf16_to_float(four.x >> 16) + bf16_to_float(four.y >> 16));
}

// Where a warp's columns lie, of UK values each: first the sums, then the values.
//   products [column][term 3][t 4]: uint2, bf16 pairs of the sums of 16, (2 t, 2 t + 1) and (2 t + 8, 2 t + 9)
//   blocks [UK / 32][16]: f32 sums of 32, by the place a column has in the product (8 set + place)
template <int UK>
struct Layout {
    static constexpr int PRODUCTS = 96, BLOCKS = UK / 32 * 64;
    static constexpr int STRIDE = 2 * UK + (UK % 64 == 0 ? 64 : 0);  // columns side by side share no bank
    DEVICE static constexpr int bytes(int n) { return BLOCKS + 2 * n * (PRODUCTS + STRIDE); }
};

template <int UK>
struct Activations {
    using L = Layout<UK>;
    u8* at;
    int n;

    DEVICE float* blocks() const { return reinterpret_cast<float*>(at); }
    DEVICE u8* products(int column) const { return at + L::BLOCKS + column * L::PRODUCTS; }
    DEVICE u8* values(int column) const { return at + L::BLOCKS + 2 * n * L::PRODUCTS + column * L::STRIDE; }

    // Rows 0 .. n - 1; `row_of(i)` gives a function (column, float (&v)[4]) for row i. All lanes of the warp, eight columns each.
    // BY_PRODUCT, BY_BLOCK: which sums somebody needs.
    template <bool BY_PRODUCT, bool BY_BLOCK, class RowOf>
    DEVICE void put(int lane, RowOf row_of) const {
        for (int row = 0; row < n; row++) {
            const auto fetch = row_of(row);
#pragma unroll
            for (int eight = lane; eight - lane < UK / 8; eight += LANES) {
                const bool live = UK / 8 % LANES == 0 || eight < UK / 8;
                float v[2][4] = {};
                if (live) {
                    fetch(8 * eight, v[0]);
                    fetch(8 * eight + 4, v[1]);
                }
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const uint2 a = pack_four(v[0]), b = pack_four(v[1]);
                    const int column = column_of(part, row, n);
                    if (live) *reinterpret_cast<uint4*>(values(column) + 16 * eight) = {a.x, a.y, b.x, b.y};
                    if constexpr (BY_PRODUCT || BY_BLOCK) {
                        float sum = sum_of(a) + sum_of(b);
                        sum += shfl_xor(sum, 1);  // of 16
                        const float other = shfl_xor(sum, 2);
                        if (live && eight % 4 == 0) {
                            if constexpr (BY_PRODUCT) put_products(products(column), eight / 4, sum, other);
                            if constexpr (BY_BLOCK) {
                                const int place = n > 4 ? 8 * part + row : 4 * part + row;
                                blocks()[eight / 4 * 16 + place] = sum + other;
                            }
                        }
                    }
                }
            }
        }
        sync_warp();
    }

    // The pair of sums of 16 with this number, in three terms.
    DEVICE static void put_products(u8* products, int pair, float first, float second) {
        if (UK != 256) return;  // types that need them have blocks of 256
#pragma unroll
        for (int term = 0; term < 3; term++) {
            const u32 packed = pack_bf16(first, second);
            *reinterpret_cast<u32*>(products + 32 * term + 8 * (pair % 4) + 4 * (pair / 4)) = packed;
            first -= bf16_to_float(packed & 0xFFFF);
            second -= bf16_to_float(packed >> 16);
        }
    }
};

// How a lane reads one set of columns: from its column on, and f32 sums of its two columns of the result.
struct FromShared {
    const u8 *values, *products;
    const float* blocks;
    DEVICE uint4 load_16(int at) const { return *reinterpret_cast<const uint4*>(values + at); }
    DEVICE uint2 load_8(int at) const { return *reinterpret_cast<const uint2*>(values + at); }
    DEVICE uint2 product(int at) const { return *reinterpret_cast<const uint2*>(products + at); }
    DEVICE float2 block(int i) const { return *reinterpret_cast<const float2*>(blocks + 16 * i); }
};
// The column that lane g of a set reads: of the parts and rows there are, the one in its place, or any.
template <int SETS>
DEVICE int lane_column(int set, int g, int n) {
    const int row = SETS == 1 ? g % 4 : g, part = SETS == 1 ? g / 4 : set;
    return column_of(part, row < n ? row : n - 1, n);
}

template <int KIND, int UK, int SETS>
DEVICE void lane_view(FromShared (&x)[SETS], const Activations<UK>& activations, int g, int t) {
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const int column = lane_column<SETS>(set, g, activations.n);
        x[set] = {activations.values(column) + (Block<KIND>::HALVES ? 8 : 16) * t, activations.products(column) + 8 * t,
                  activations.blocks() + 8 * set + 2 * t};
    }
}

DEVICE void add_scaled(float (&total)[4], const float (&acc)[4], float low, float high) {
    total[0] = fmaf(acc[0], low, total[0]);
    total[1] = fmaf(acc[1], low, total[1]);
    total[2] = fmaf(acc[2], high, total[2]);
    total[3] = fmaf(acc[3], high, total[3]);
}

// total += sum over the unit of scale * (codes times columns), with what SUMS_BY_BLOCK adds; S: the next 32 columns.
template <int KIND, int UK, int SETS, class X, int S = 0>
DEVICE void add_codes(float (&total)[SETS][4], const Block<KIND>& low, const Block<KIND>& high, const X (&x)[SETS]) {
    if constexpr (S < UK / 32) {
        using B = Block<KIND>;
        u32 a[4], b[4];
        low.template codes<S>(a);
        high.template codes<S>(b);
        const u32 first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
        const float low0 = low.template scale<S, 0>(), high0 = high.template scale<S, 0>();
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            uint4 p;
            if constexpr (B::HALVES) {
                const uint2 u = x[set].load_8(64 * S), v = x[set].load_8(64 * S + 32);
                p = {u.x, u.y, v.x, v.y};
            } else {
                p = x[set].load_16(64 * S);
            }
            float acc[4] = {};
            mma_bf16(acc, first, p.x, p.y);
            if constexpr (B::BY_16) {
                float other[4] = {};
                mma_bf16(other, second, p.z, p.w);
                add_scaled(total[set], acc, low0, high0);
                add_scaled(total[set], other, low.template scale<S, 1>(), high.template scale<S, 1>());
            } else {
                mma_bf16(acc, second, p.z, p.w);
                add_scaled(total[set], acc, low0, high0);
            }
            if constexpr (B::SUMS == SUMS_BY_BLOCK) {
                const float2 sum = x[set].block(S);
                add_scaled(total[set], {sum.x, sum.y, sum.x, sum.y}, low.template shift<S>(), high.template shift<S>());
            }
        }
        add_codes<KIND, UK, SETS, X, S + 1>(total, low, high, x);
    }
}

template <int KIND, int UK, int SETS, class X, int S = 0>
DEVICE void add_floats(float (&total)[SETS][4], const Block<KIND>& low, const Block<KIND>& high, const X (&x)[SETS]) {
    if constexpr (S < UK / 32) {
        u32 a[4], b[4], a_rest[4], b_rest[4];
        low.template codes<S>(a, a_rest);
        high.template codes<S>(b, b_rest);
        const u32 first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const uint4 p = x[set].load_16(64 * S);
            mma_bf16(total[set], first, p.x, p.y);
            mma_bf16(total[set], second, p.z, p.w);
            if constexpr (Block<KIND>::TERMS == 2) {
                const u32 first_rest[4] = {a_rest[0], b_rest[0], a_rest[1], b_rest[1]};
                const u32 second_rest[4] = {a_rest[2], b_rest[2], a_rest[3], b_rest[3]};
                mma_bf16(total[set], first_rest, p.x, p.y);
                mma_bf16(total[set], second_rest, p.z, p.w);
            }
        }
        add_floats<KIND, UK, SETS, X, S + 1>(total, low, high, x);
    }
}

// Integers of both rows times the sums of 16.
template <class X>
DEVICE void sums_product(float (&acc)[4], const u32 (&a)[4], const X& x) {
#pragma unroll
    for (int term = 0; term < 3; term++) {
        const uint2 b = x.product(32 * term);
        mma_bf16(acc, a, b.x, b.y);
    }
}

// total += the unit's rows (`low` is row g's block, `high` row g + 8's) times the columns that `x` reads.
template <int KIND, int UK, int SETS, class X>
DEVICE void multiply(float (&total)[SETS][4], Block<KIND>& low, Block<KIND>& high, const X (&x)[SETS], int t) {
    low.prepare();
    high.prepare();
    if constexpr (is_float(KIND)) {
        add_floats<KIND, UK, SETS>(total, low, high, x);
    } else if constexpr (Block<KIND>::SUMS != SUMS_BY_PRODUCT) {
        add_codes<KIND, UK, SETS>(total, low, high, x);
    } else {
        float unscaled[SETS][4] = {};
        add_codes<KIND, UK, SETS>(unscaled, low, high, x);
        u32 a[4], b[4];
        low.scale_pairs(t, a[0], a[2]);
        high.scale_pairs(t, a[1], a[3]);
        const float d = low.block_scale(), e = high.block_scale();
        float min = 0.0f, high_min = 0.0f;
        if constexpr (Block<KIND>::HAS_MINIMA) {
            low.min_pairs(t, b[0], b[2]);
            high.min_pairs(t, b[1], b[3]);
            min = -low.block_min();
            high_min = -high.block_min();
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float of_scales[4] = {};
            sums_product(of_scales, a, x[set]);
#pragma unroll
            for (int i = 0; i < 4; i++) unscaled[set][i] = fmaf(-Block<KIND>::BIAS, of_scales[i], unscaled[set][i]);
            add_scaled(total[set], unscaled[set], d, e);
            if constexpr (Block<KIND>::HAS_MINIMA) {
                float of_minima[4] = {};
                sums_product(of_minima, b, x[set]);
                add_scaled(total[set], of_minima, min, high_min);
            }
        }
    }
}

// Where a unit's rows lie in global memory; a row behind the last is the last.
struct UnitRows {
    const u8* begin;  // of the unit's columns in row 0 of the matrix
    u32 row_bytes;
    int first, last;
    DEVICE const u8* row(int i) const { return begin + static_cast<u64>(static_cast<u32>(min(first + i, last))) * row_bytes; }
};

// A warp's copy of a unit in shared memory, in whole aligned pieces of 16 bytes, for types with IS_SHARED.
template <int KIND, int UK>
struct Copy {
    static constexpr int BYTES = UK / Block<KIND>::COLUMNS * Block<KIND>::BYTES;
    static constexpr int PIECES = (BYTES + 15 + 15) / 16;  // wherever the row begins
    static constexpr int STRIDE = (PIECES | 1) * 16;        // odd: rows share no bank
    static constexpr int SIZE = ROWS * STRIDE;

    DEVICE static int shift(const u8* row) { return static_cast<int>(reinterpret_cast<u64>(row) & 15); }

    // Two lanes copy a row, every other piece each.
    DEVICE static void begin(u8* at, const UnitRows& rows, int lane) {
        const u8* row = rows.row(lane / 2);
        const int skipped = shift(row), wanted = skipped + BYTES;
        const u8* from = row - skipped + 16 * (lane % 2);
        u8* to = at + lane / 2 * STRIDE + 16 * (lane % 2);
#pragma unroll
        for (int piece = 0; piece < PIECES; piece += 2)
            if (16 * (piece + lane % 2) < wanted) copy16_async(to + 16 * piece, from + 16 * piece);
        commit_async();
    }
    DEVICE static void open(Block<KIND> (&blocks)[2], const u8* at, const UnitRows& rows, int g, int t) {
        blocks[0].open(at + g * STRIDE + shift(rows.row(g)), t);
        blocks[1].open(at + (g + 8) * STRIDE + shift(rows.row(g + 8)), t);
    }
};

// A lane's sums to where threads of the block add them: [set][place][row].
template <int SETS>
DEVICE void put_sums(float* red, const float (&total)[SETS][4], int g, int t) {
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        float* of = red + set * RED + 2 * t * RED_COLUMN + g;
        of[0] = total[set][0];
        of[RED_COLUMN] = total[set][1];
        of[8] = total[set][2];
        of[RED_COLUMN + 8] = total[set][3];
    }
}
// An activation's sum in one warp's part of them: of its two columns.
template <int SETS>
DEVICE float sum_at(const float* red, int activation, int row) {
    const float* of = red + activation * RED_COLUMN + row;
    return of[0] + of[SETS == 1 ? 4 * RED_COLUMN : RED];
}
