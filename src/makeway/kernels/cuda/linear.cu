// Up to four matrices times the same one to eight activations.
//
// A block has one tile of 16 rows at a time; each of its warps multiplies one unit of the columns. Sums of units are added
// in groups, in order, then the groups, in order: a row's bits depend neither on the number of activations nor on
// how many groups a block has. With more than one block to a tile the last one to arrive adds the groups.

#include "product.cuh"

enum Prologue : int { PLAIN = 0, SILU = 1, SWIGLU = 2 };

struct Matrix {
    const u8* raw;
    float* out;  // f32 [n, n_rows]
    int row_bytes, n_rows, kind;
};

// What the activations are made of: x, silu(scale x), or silu(x) times `up`, times sigmoid(gate of the row) if there is one.
template <int PROLOGUE>
struct Values {
    const float *x, *up, *gate;
    int x_stride, up_stride;
    float scale;

    struct Row {
        const float *x, *up;
        float factor;
        DEVICE void operator()(int column, float* v) const {
            load_four(x + column, v);
            if constexpr (PROLOGUE == SILU) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    v[i] *= factor;
                    v[i] *= sigmoid_of(v[i]);
                }
            }
            if constexpr (PROLOGUE == SWIGLU) {
                float ups[4];
                load_four(up + column, ups);
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] = v[i] * sigmoid_of(v[i]) * ups[i] * factor;
            }
        }
    };
    DEVICE Row row(int i, int column) const {
        float factor = scale;
        if constexpr (PROLOGUE == SWIGLU) factor = gate == nullptr ? 1.0f : sigmoid_of(gate[i]);
        return {x + i * x_stride + column, up + i * up_stride + column, factor};
    }
};

// What a block's warps have in common: n activations; n_units of the columns, in groups of group_units, `groups` of the
// n_groups in this block. parts f32 [tile][group][8][16] and counters by tile are for groups in several blocks.
struct Split {
    int n, n_units, group_units, groups, n_groups;
    float* parts;
    i32* counters;
};

// The sum of a group's units for one activation and row, from `red` [unit][SETS RED].
template <int SETS>
DEVICE float group_sum(const float* red, int count, int of, int row) {
    float sum = sum_at(red, of, row);
#pragma unroll 8
    for (int k = 1; k < count; k++) sum += sum_at(red + k * SETS * RED, of, row);
    return sum;
}

// The sums of one tile, from `red`, to the matrix's output, or to the parts that the last block adds.
template <int SETS>
DEVICE void finish_tile(const float* red, const Matrix& m, const Split& split, int tile, int place) {
    const int first_group = block_y() * split.groups, groups = min(split.groups, split.n_groups - first_group);
    const int last_count = min(split.group_units, split.n_units - (first_group + groups - 1) * split.group_units);
    const bool is_whole = groups == split.n_groups;
    float* parts = split.parts + ((place + tile) * split.n_groups + first_group) * 128;
    for (int i = thread_x(); i < split.n * ROWS; i += n_threads()) {
        const int of = i / ROWS, row = i % ROWS;
        float all = 0.0f;
        for (int j = 0; j < groups; j++) {
            const int count = j == groups - 1 ? last_count : split.group_units;
            const float sum = group_sum<SETS>(red + j * split.group_units * SETS * RED, count, of, row);
            if (!is_whole) parts[j * 128 + i] = sum;
            all = j == 0 ? sum : all + sum;
        }
        if (is_whole && tile * ROWS + row < m.n_rows) m.out[of * m.n_rows + tile * ROWS + row] = all;
    }
    if (is_whole) return;
    if (arrived_last(split.counters + place + tile, (split.n_groups + split.groups - 1) / split.groups)) {
        for (int i = thread_x(); i < split.n * ROWS; i += n_threads()) {
            const float* part = split.parts + (place + tile) * split.n_groups * 128 + i;
            float all = load4f_cg(part);
            for (int j = 1; j < split.n_groups; j++) all += load4f_cg(part + j * 128);
            if (tile * ROWS + i % ROWS < m.n_rows) m.out[i / ROWS * m.n_rows + tile * ROWS + i % ROWS] = all;
        }
    }
}

// Every `step`-th tile from `tile` on; the next one is fetched while the sums of the last are added.
template <u64 KINDS, int KIND, int UK, int SETS, bool LOOPS, class V>
DEVICE void run_tiles(const Matrix& m, const Split& split, const V& values, int tile, int step, int place) {
    using B = Block<KIND>;
    constexpr int COPY = B::IS_SHARED ? Copy<KIND, UK>::SIZE : 0;
    const int lane = thread_x() % LANES, warp = thread_x() / LANES, n_warps = n_threads() / LANES;
    const int g = lane / 4, t = lane % 4;
    const int n_tiles = (m.n_rows + ROWS - 1) / ROWS;
    const int unit = block_y() * split.groups * split.group_units + warp;
    const bool works = unit < split.n_units;

    const int of_warp = Layout<UK>::bytes(split.n);
    const Activations<UK> activations{shared_bytes() + warp * of_warp, split.n};
    float* red = reinterpret_cast<float*>(shared_bytes() + n_warps * of_warp);
    u8* copy = reinterpret_cast<u8*>(red + (LOOPS ? 2 : 1) * n_warps * SETS * RED) + warp * COPY;
    const u8* begin = m.raw + static_cast<i64>(works ? unit : 0) * (UK / B::COLUMNS) * B::BYTES;

    B blocks[2];
    const auto fetch = [&](int of_tile) {
        const UnitRows rows{begin, static_cast<u32>(m.row_bytes), of_tile * ROWS, m.n_rows - 1};
        if constexpr (B::IS_SHARED) {
            Copy<KIND, UK>::begin(copy, rows, lane);
            Copy<KIND, UK>::open(blocks, copy, rows, g, t);
        } else {
            blocks[0].load(rows.row(g), t);
            blocks[1].load(rows.row(g + 8), t);
        }
    };
    if (works) fetch(tile);  // weights do not depend on the kernels before
    wait_for_previous();
    let_next_start();
    if (works) {
        constexpr u64 of_product = 1u << Q2_K | 1u << Q3_K | 1u << Q4_K | 1u << Q5_K | 1u << Q6_K;
        constexpr u64 of_block = 1u << Q4_0 | 1u << Q4_1 | 1u << Q5_0 | 1u << Q5_1;
        constexpr bool BY_PRODUCT = (KINDS & of_product) != 0, BY_BLOCK = (KINDS & of_block) != 0;
        activations.template put<BY_PRODUCT, BY_BLOCK>(lane, [&](int i) { return values.row(i, unit * UK); });
    }
    Columns x[SETS];
    lane_view<KIND, UK, SETS>(x, activations, g, t);

    float* sums = red;
    while (true) {
        const int next = tile + step;
        if (works) {
            if constexpr (B::IS_SHARED) {
                wait_async<0>();
                sync_warp();
            }
            float total[SETS][4] = {};
            multiply<KIND, UK, SETS>(total, blocks[0], blocks[1], x, t);
            if constexpr (LOOPS) {
                if constexpr (B::IS_SHARED) sync_warp();
                if (next < n_tiles) fetch(next);
            }
            put_sums<SETS>(sums + warp * SETS * RED, total, g, t);
        }
        sync_block();
        finish_tile<SETS>(sums, m, split, tile, place);
        if (!LOOPS || next >= n_tiles) return;
        tile = next;
        sums = sums == red ? red + n_warps * SETS * RED : red;  // others may still read what was added last
    }
}

template <u64 KINDS, int UK, int SETS, bool LOOPS, class V>
DEVICE void run_kind(const Matrix& m, const Split& split, const V& values, int tile, int step, int place) {
#define MAKEWAY_RUN(KIND)                                                           \
    if constexpr ((KINDS >> KIND) & 1)                                              \
        if (m.kind == KIND) run_tiles<KINDS, KIND, UK, SETS, LOOPS>(m, split, values, tile, step, place)
    MAKEWAY_RUN(F32);
    MAKEWAY_RUN(F16);
    MAKEWAY_RUN(BF16);
    MAKEWAY_RUN(Q8_0);
    MAKEWAY_RUN(Q2_K);
    MAKEWAY_RUN(Q3_K);
    MAKEWAY_RUN(IQ4_NL);
    MAKEWAY_RUN(MXFP4);
    MAKEWAY_RUN(IQ4_XS);
    MAKEWAY_RUN(Q4_0);
    MAKEWAY_RUN(Q4_1);
    MAKEWAY_RUN(Q5_0);
    MAKEWAY_RUN(Q5_1);
    MAKEWAY_RUN(Q4_K);
    MAKEWAY_RUN(Q5_K);
    MAKEWAY_RUN(Q6_K);
#undef MAKEWAY_RUN
}

// KINDS: a bit for each type among the matrices. SETS: of columns. WARPS, BLOCKS: of a block, and
// the fewest blocks that registers leave room for. A missing matrix has no rows. Grid: blocks of all matrices, the i-th's up to
// end_i, of one tile each or, with LOOPS, of several; x blocks that share a tile's columns. A warp for each unit of a block.
template <u64 KINDS, int UK, int PROLOGUE, int SETS, bool LOOPS, int WARPS, int BLOCKS>
KERNEL(WARPS * 32, BLOCKS)
linears_kernel(const float* x, const float* up, const float* gate, i32 x_stride, i32 up_stride, float scale,
               const u8* raw0, const u8* raw1, const u8* raw2, const u8* raw3, float* out0, float* out1, float* out2,
               float* out3, i32 rows0, i32 rows1, i32 rows2, i32 rows3, i32 kind0, i32 kind1, i32 kind2, i32 kind3,
               i32 bytes0, i32 bytes1, i32 bytes2, i32 bytes3, i32 end0, i32 end1, i32 end2, i32 n, i32 n_units,
               i32 group_units, i32 groups, i32 n_groups, float* parts, i32* counters) {
    const Split split{n, n_units, group_units, groups, n_groups, parts, counters};
    const Values<PROLOGUE> values{x, up, gate, x_stride, up_stride, scale};
    const int block = block_x(), tiles0 = (rows0 + ROWS - 1) / ROWS, tiles1 = tiles0 + (rows1 + ROWS - 1) / ROWS;
    Matrix m{raw0, out0, bytes0, rows0, kind0};
    int begin = 0, end = end0, place = 0;
    if (block >= end2) {
        m = {raw3, out3, bytes3, rows3, kind3};
        begin = end2;
        end = n_blocks_x();
        place = tiles1 + (rows2 + ROWS - 1) / ROWS;
    } else if (block >= end1) {
        m = {raw2, out2, bytes2, rows2, kind2};
        begin = end1;
        end = end2;
        place = tiles1;
    } else if (block >= end0) {
        m = {raw1, out1, bytes1, rows1, kind1};
        begin = end0;
        end = end1;
        place = tiles0;
    }
    run_kind<KINDS, UK, SETS, LOOPS>(m, split, values, block - begin, end - begin, place);
}
