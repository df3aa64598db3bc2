// The product that all decode kernels share: a unit (16 rows of a matrix, UK columns) times up to eight activations.
//
// One warp does it, in integers. Of a unit's columns an activation has one scale, a power of two, and 23-bit integers, which
// stand as three signed bytes; each of the three is a column of the product of its own. Eight columns are a set: one for
// up to two activations, two for up to five, three for eight. Products and sums of codes, bytes and integer scales are
// exact in s32; what is rounded is the activation, to 2^-22 of the largest of its unit, and the f32 sum of units.
// What stands beside the code in a weight (a minimum, the 32 of Q6_K) is the same for 16 or 32 columns: it is multiplied by
// the same bytes, an integer as the codes are, a float by the sum that a product with ones gives.

#pragma once
#include "codes_32.cuh"

constexpr int LANES = 32;
constexpr int ROWS = 16;        // of a unit
constexpr int PLANES = 3;       // bytes of an activation
constexpr int RED_COLUMN = 20;  // floats from one column's sums of a unit to the next: no bank twice
constexpr int RED = 8 * RED_COLUMN;
constexpr int MOST_COLUMNS = 24;
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: added to a small number, leaves an integer in the low bits
constexpr u32 MAGIC_BITS = 0x4B400000;

DEVICE float sigmoid_of(float x) { return reciprocal_of(1.0f + exp_of(fminf(-x, 88.0f))); }

DEVICE void load_four(const float* from, float* v) {
    const uint4 four = load16(from);
    v[0] = as_float(four.x);
    v[1] = as_float(four.y);
    v[2] = as_float(four.z);
    v[3] = as_float(four.w);
}

// Where a warp's activations lie, of UK columns each:
//   factors f32 [24]: what a column's sums are multiplied by
//   values s8 [3 n][UK]
template <int UK>
struct Layout {
    static constexpr int FACTORS = 4 * MOST_COLUMNS;
    static constexpr int STRIDE = UK / 32 % 2 == 1 ? UK : UK + 32;  // columns side by side share no bank
    DEVICE static constexpr int bytes(int n) { return FACTORS + PLANES * n * STRIDE; }
};

template <int UK>
struct Activations {
    using L = Layout<UK>;
    static constexpr int WIDTH = UK % (8 * LANES) == 0 ? 8 : 4;  // columns of a lane at a time
    static constexpr int PIECES = UK / WIDTH, TURNS = (PIECES + LANES - 1) / LANES;
    u8* at;
    int n;

    DEVICE float* factors() const { return reinterpret_cast<float*>(at); }
    DEVICE u8* values(int column) const { return at + L::FACTORS + column * L::STRIDE; }

    // Every `step`-th row from `first` on; `row_of(i)` gives a function (column, float* four) for row i. All lanes of the
    // warp. AHEAD: a row is on its way while the one before is made, for which there must be registers.
    template <bool AHEAD, class RowOf>
    DEVICE void put(int lane, RowOf row_of, int first = 0, int step = 1) const {
        const float byte = lane == 0 ? 1.0f : lane == 1 ? 256.0f : 65536.0f;
        float next[TURNS][WIDTH];
        if (AHEAD && first < n) read(next, lane, row_of(first));
#pragma unroll 1
        for (int row = first; row < n; row += step) {
            float v[TURNS][WIDTH];
            u32 most = 0;
            if constexpr (AHEAD) {
#pragma unroll
                for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
                    for (int i = 0; i < WIDTH; i++) v[turn][i] = next[turn][i];
                }
                if (row + step < n) read(next, lane, row_of(row + step));
            } else {
                read(v, lane, row_of(row));
            }
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
                for (int i = 0; i < WIDTH; i++) most = max(most, as_u32(v[turn][i]) & 0x7FFFFFFFu);
            }
            const u32 exponent = max(max_of_warp(most) >> 23, 30u);  // of what is smaller nothing is left
            const float one = as_float((275 - exponent) << 23), scale = as_float((exponent - 21) << 23);
            if (lane < PLANES) factors()[PLANES * row + lane] = exponent == 255 ? as_float(0x7FC00000u) : scale * byte;
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                const int piece = lane + turn * LANES;
                if (PIECES % LANES == 0 || piece < PIECES) put_piece(v[turn], one, row, WIDTH * piece);
            }
        }
        sync_warp();
    }

    // A lane's columns of a row; behind its end the last ones again, so that no load waits behind a branch.
    template <class Fetch>
    DEVICE static void read(float (&v)[TURNS][WIDTH], int lane, Fetch fetch) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int piece = lane + turn * LANES, inside = PIECES % LANES == 0 ? piece : min(piece, PIECES - 1);
#pragma unroll
            for (int i = 0; i < WIDTH; i += 4) fetch(WIDTH * inside + i, v[turn] + i);
        }
    }

    // WIDTH columns of a row from `column` on; `one`: what makes integers of them.
    DEVICE void put_piece(const float (&v)[WIDTH], float one, int row, int column) const {
        u32 bytes[PLANES][WIDTH / 4];
#pragma unroll
        for (int part = 0; part < WIDTH / 4; part++) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = as_u32(fmaf(v[4 * part + i], one, MAGIC)) + (0x808080u - MAGIC_BITS);
            const u32 low = prmt(w[0], w[1], 0x5140), high = prmt(w[2], w[3], 0x5140);
            bytes[0][part] = prmt(low, high, 0x5410) ^ 0x80808080u;
            bytes[1][part] = prmt(low, high, 0x7632) ^ 0x80808080u;
            bytes[2][part] = prmt(prmt(w[0], w[1], 0x0062), prmt(w[2], w[3], 0x0062), 0x5410) ^ 0x80808080u;
        }
#pragma unroll
        for (int plane = 0; plane < PLANES; plane++) {
            u8* to = values(PLANES * row + plane) + column;
            if constexpr (WIDTH == 8) *reinterpret_cast<uint2*>(to) = {bytes[plane][0], bytes[plane][1]};
            else *reinterpret_cast<u32*>(to) = bytes[plane][0];
        }
    }
};

// How a lane reads one set of columns: bytes of its column g, and what belongs to its two columns of the result.
struct Columns {
    const u8* values;
    const float* factors;
    // The lane's eight columns of the 32 from 32 s on, 8 t .. or 4 t .. and 16 + 4 t ..
    template <bool HALVES>
    DEVICE uint2 eight(u32 s) const {
        if constexpr (HALVES) {
            const u32* at = reinterpret_cast<const u32*>(values + 32 * s);
            return {at[0], at[4]};
        } else {
            return *reinterpret_cast<const uint2*>(values + 32 * s);
        }
    }
    DEVICE float2 factor() const { return *reinterpret_cast<const float2*>(factors); }
};

template <int KIND, int UK, int SETS>
DEVICE void lane_view(Columns (&x)[SETS], const Activations<UK>& activations, int g, int t) {
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const int place = 8 * set + g, column = place < PLANES * activations.n ? place : 0;  // others are nobody's
        x[set] = {activations.values(column) + (Block<KIND>::HALVES ? 4 : 8) * t,
                  activations.factors() + 8 * set + 2 * t};
    }
}

DEVICE void add_scaled(float (&total)[4], const float (&acc)[4], float low, float high) {
    total[0] = fmaf(acc[0], low, total[0]);
    total[1] = fmaf(acc[1], low, total[1]);
    total[2] = fmaf(acc[2], high, total[2]);
    total[3] = fmaf(acc[3], high, total[3]);
}
DEVICE void add_scaled(i32 (&total)[4], const i32 (&acc)[4], i32 low, i32 high) {
    total[0] += acc[0] * low;
    total[1] += acc[1] * low;
    total[2] += acc[2] * high;
    total[3] += acc[3] * high;
}

// What the 32 columns from 32 s on add to a unit. total += integer scale * (codes times columns), `beside` likewise what
// stands beside codes; sums of all columns are exact (below 2^29).
template <int KIND, int SETS>
DEVICE void add_integers(i32 (&total)[SETS][4], i32 (&beside)[SETS][4], const Block<KIND>& low, const Block<KIND>& high,
                         const Columns (&x)[SETS], u32 s) {
    using B = Block<KIND>;
    u32 a[2], b[2];
    low.codes(s, a);
    high.codes(s, b);
    const i32 low0 = low.scale(s, 0), high0 = high.scale(s, 0);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const uint2 columns = x[set].template eight<B::HALVES>(s);
        i32 acc[4] = {};
        if constexpr (B::BY_16) {
            i32 other[4] = {};
            mma_bytes_16(acc, a[0], b[0], columns.x);
            mma_bytes_16(other, a[1], b[1], columns.y);
            add_scaled(total[set], acc, low0, high0);
            add_scaled(total[set], other, low.scale(s, 1), high.scale(s, 1));
        } else {
            mma_bytes<B::SIGNED>(acc, {a[0], b[0], a[1], b[1]}, columns.x, columns.y);
            add_scaled(total[set], acc, low0, high0);
        }
        if constexpr (B::HAS_MINIMA || B::BIAS != 0) {
            u32 p[2], q[2];
            low.beside(s, p);
            high.beside(s, q);
            mma_bytes<B::BIAS != 0>(beside[set], {p[0], q[0], p[1], q[1]}, columns.x, columns.y);
        }
    }
}

// The same for blocks whose scales are f16; a shift is multiplied by the columns' sums, the same for all rows.
template <int KIND, int SETS>
DEVICE void add_blocks(float (&total)[SETS][4], const Block<KIND>& low, const Block<KIND>& high, const Columns (&x)[SETS],
                       u32 s) {
    using B = Block<KIND>;
    u32 a[2], b[2];
    low.codes(s, a);
    high.codes(s, b);
    const float low0 = low.scale(s, 0), high0 = high.scale(s, 0);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const uint2 columns = x[set].template eight<B::HALVES>(s);
        const i32 magic = static_cast<i32>(MAGIC_BITS);
        i32 acc[4] = {magic, magic, magic, magic};  // sums below 2^22 come out as floats above MAGIC
        mma_bytes<B::SIGNED>(acc, {a[0], b[0], a[1], b[1]}, columns.x, columns.y);
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = as_float(static_cast<u32>(acc[i])) - MAGIC;
        add_scaled(total[set], sums, low0, high0);
        if constexpr (B::HAS_SHIFT) {
            const u32 ones = in_register(0x01010101);
            i32 of_ones[4] = {magic, magic, magic, magic};
            mma_bytes<false>(of_ones, {ones, ones, ones, ones}, columns.x, columns.y);
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] = as_float(static_cast<u32>(of_ones[i % 2])) - MAGIC;
            add_scaled(total[set], sums, low.shift(s), high.shift(s));
        }
    }
}

template <int KIND, int SETS>
DEVICE void add_floats(float (&total)[SETS][4], const Block<KIND>& low, const Block<KIND>& high, const Columns (&x)[SETS],
                       u32 s) {
    u32 a[4], b[4], a_rest[4], b_rest[4];
    low.codes(s, a, a_rest);
    high.codes(s, b, b_rest);
    const u32 first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const uint2 columns = x[set].template eight<false>(s);
        const u32 p[4] = {signed_pair(columns.x), signed_pair(columns.x >> 8), signed_pair(columns.y),
                          signed_pair(columns.y >> 8)};
        mma_bf16(total[set], first, p[0], p[1]);
        mma_bf16(total[set], second, p[2], p[3]);
        if constexpr (Block<KIND>::TERMS == 2) {
            const u32 first_rest[4] = {a_rest[0], b_rest[0], a_rest[1], b_rest[1]};
            const u32 second_rest[4] = {a_rest[2], b_rest[2], a_rest[3], b_rest[3]};
            mma_bf16(total[set], first_rest, p[0], p[1]);
            mma_bf16(total[set], second_rest, p[2], p[3]);
        }
    }
}

// step(s) for each 32 columns: straight lines, for a loop took longer although its code is shorter.
template <int UK, class Step>
DEVICE void each_step(Step step) {
#pragma unroll
    for (u32 s = 0; s < UK / 32; s++) step(s);
}

// total += the unit's rows (`low` is row g's block, `high` row g + 8's) times the columns that `x` reads.
template <int KIND, int UK, int SETS>
DEVICE void multiply(float (&total)[SETS][4], Block<KIND>& low, Block<KIND>& high, const Columns (&x)[SETS]) {
    using B = Block<KIND>;
    low.prepare();
    high.prepare();
    float unit[SETS][4] = {};
    if constexpr (is_float(KIND)) {
        each_step<UK>([&](u32 s) { add_floats<KIND>(unit, low, high, x, s); });
    } else if constexpr (!B::IN_INTEGERS) {
        each_step<UK>([&](u32 s) { add_blocks<KIND>(unit, low, high, x, s); });
    } else {
        i32 integers[SETS][4] = {}, beside[SETS][4] = {};
        each_step<UK>([&](u32 s) { add_integers<KIND>(integers, beside, low, high, x, s); });
        const float d = low.block_scale(), e = high.block_scale();
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float sums[4], besides[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[i] = static_cast<float>(integers[set][i] - B::BIAS * beside[set][i]);
                besides[i] = static_cast<float>(beside[set][i]);
            }
            add_scaled(unit[set], sums, d, e);
            if constexpr (B::HAS_MINIMA) add_scaled(unit[set], besides, -low.block_min(), -high.block_min());
        }
    }
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const float2 factor = x[set].factor();
#pragma unroll
        for (int i = 0; i < 4; i++) total[set][i] = fmaf(unit[set][i], i % 2 == 0 ? factor.x : factor.y, total[set][i]);
    }
}

// Where a unit's rows lie in global memory; a row behind the last is the last.
struct UnitRows {
    const u8* begin;  // of the unit's columns in row 0 of the matrix
    u32 row_bytes;
    int first, last;
    DEVICE const u8* row(int i) const { return begin + static_cast<u64>(static_cast<u32>(min(first + i, last))) * row_bytes; }
};

// A warp's copy of a unit in shared memory, in whole aligned pieces of 16 bytes. A matrix begins at a multiple of 16, and
// so do all units of rows where a unit's bytes are one.
template <int KIND, int UK>
struct Copy {
    static constexpr int BYTES = UK / Block<KIND>::COLUMNS * Block<KIND>::BYTES;
    static constexpr bool IS_ALIGNED = BYTES % 16 == 0;
    static constexpr int PIECES = IS_ALIGNED ? BYTES / 16 : (BYTES + 15 + 15) / 16;  // wherever the row begins
    static constexpr int STRIDE = (Block<KIND>::BY_EIGHT ? (PIECES + 1) / 4 * 4 + 2 : PIECES | 1) * 16;  // rows share no bank
    static constexpr int SIZE = ROWS * STRIDE;

    DEVICE static int shift(const u8* row) {
        return IS_ALIGNED ? 0 : static_cast<int>(reinterpret_cast<u64>(row) & 15);
    }

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
#pragma unroll
        for (int i = 0; i < 2; i++) {
            blocks[i].open(at + (g + 8 * i) * STRIDE + shift(rows.row(g + 8 * i)), t);
        }
    }
};

// A warp's unit of one matrix. Bytes of quantised types come into the warp's shared memory behind its back, so that those of
// several units are on their way at once and take no registers; others come into the second-level cache, and are read as
// they are multiplied.
template <int KIND, int UK>
struct Unit {
    static constexpr int COPY = is_float(KIND) ? 0 : Copy<KIND, UK>::SIZE;
    const u8* begin;  // of the unit's columns in row 0 of the matrix
    u32 row_bytes;
    int n_rows;
    u8* copy;

    DEVICE UnitRows rows(int tile) const { return {begin, row_bytes, tile * ROWS, n_rows - 1}; }
    DEVICE void fetch(int tile, int lane) const {
        if constexpr (COPY > 0) {
            Copy<KIND, UK>::begin(copy, rows(tile), lane);
        } else {
            constexpr int HALF = UK / Block<KIND>::COLUMNS * Block<KIND>::BYTES / 2;
            const u8* half = rows(tile).row(lane / 2) + lane % 2 * HALF;
#pragma unroll
            for (int at = 0; at < HALF; at += 32) prefetch32(half + at);
            commit_async();
        }
    }
    // Waits for the fetch, of which there may have been LATER ones since; afterwards the copy may be overwritten.
    template <int LATER, int SETS>
    DEVICE void multiply_into(float (&total)[SETS][4], const Columns (&x)[SETS], int tile, int lane) const {
        Block<KIND> blocks[2];
        if constexpr (COPY > 0) {
            wait_async<LATER>();
            sync_warp();
            Copy<KIND, UK>::open(blocks, copy, rows(tile), lane / 4, lane % 4);
        } else {
            blocks[0].open(rows(tile).row(lane / 4), lane % 4);
            blocks[1].open(rows(tile).row(lane / 4 + 8), lane % 4);
        }
        multiply<KIND, UK, SETS>(total, blocks[0], blocks[1], x);
        sync_warp();
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
// The same for sums of more columns of the matrix.
template <int SETS>
DEVICE void add_sums(float* red, const float (&total)[SETS][4], int g, int t) {
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        float* of = red + set * RED + 2 * t * RED_COLUMN + g;
        of[0] += total[set][0];
        of[RED_COLUMN] += total[set][1];
        of[8] += total[set][2];
        of[RED_COLUMN + 8] += total[set][3];
    }
}
// An activation's sum in one warp's part of them: of its three columns.
DEVICE float sum_at(const float* red, int activation, int row) {
    const float* of = red + PLANES * activation * RED_COLUMN + row;
    return (of[2 * RED_COLUMN] + of[RED_COLUMN]) + of[0];
}
// Those of COUNT parts, STRIDE floats apart: each column's in order.
template <int COUNT, int STRIDE>
DEVICE float sum_of_parts(const float* red, int activation, int row) {
    const float* of = red + PLANES * activation * RED_COLUMN + row;
    float sums[PLANES];
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++) {
        sums[plane] = of[plane * RED_COLUMN];
#pragma unroll
        for (int i = 1; i < COUNT; i++) sums[plane] += of[i * STRIDE + plane * RED_COLUMN];
    }
    return (sums[2] + sums[1]) + sums[0];
}
