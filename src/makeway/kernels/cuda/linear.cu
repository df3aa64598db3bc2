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
    int column;  // where the unit begins

    DEVICE void operator()(int row, int at, float (&v)[4]) const {
        const uint4 four = load16(x + row * x_stride + column + at);
        const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = as_float(words[i]);
        if constexpr (PROLOGUE == SILU) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] *= scale;
                v[i] *= sigmoid_of(v[i]);
            }
        }
        if constexpr (PROLOGUE == SWIGLU) {
            const float factor = gate == nullptr ? 1.0f : sigmoid_of(gate[row]);
            const uint4 other = load16(up + row * up_stride + column + at);
            const u32 ups[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = v[i] * sigmoid_of(v[i]) * as_float(ups[i]) * factor;
        }
    }
};

// What a block's warps have in common.
struct Split {
    int n;             // activations
    int n_units;       // of the columns
    int group_units;   // units of a group
    int groups;        // of this block
    float* parts;      // [tile][group][8][16]
    i32* counters;     // by tile
};

DEVICE int groups_of(const Split& split) { return (split.n_units + split.group_units - 1) / split.group_units; }

// The sums of one tile, from `red` [warp][SETS RED], to the matrix's output, or to the parts that the last block adds.
template <int SETS>
DEVICE void finish_tile(const float* red, const Matrix& m, const Split& split, int tile, int place) {
    const int first_group = block_y() * split.groups, n_groups = groups_of(split);
    const bool is_whole = split.groups >= n_groups;
    for (int i = thread_x(); i < split.n * ROWS; i += n_threads()) {
        const int of = i / ROWS, row = i % ROWS;
        float all = 0.0f;
        for (int j = 0; j < split.groups && first_group + j < n_groups; j++) {
            const int low = j * split.group_units;
            const int count = min(split.group_units, split.n_units - first_group * split.group_units - low);
            float sum = sum_at<SETS>(red + low * SETS * RED, of, row);
#pragma unroll 8
            for (int k = 1; k < count; k++) sum += sum_at<SETS>(red + (low + k) * SETS * RED, of, row);
            if (!is_whole) split.parts[((place + tile) * n_groups + first_group + j) * 128 + i] = sum;
            all = j == 0 ? sum : all + sum;
        }
        if (is_whole && tile * ROWS + row < m.n_rows) m.out[static_cast<i64>(of) * m.n_rows + tile * ROWS + row] = all;
    }
    if (is_whole) return;
    if (arrived_last(split.counters + place + tile, (n_groups + split.groups - 1) / split.groups)) {
        for (int i = thread_x(); i < split.n * ROWS; i += n_threads()) {
            const float* part = split.parts + (place + tile) * n_groups * 128 + i;
            float all = load4f_cg(part);
            for (int j = 1; j < n_groups; j++) all += load4f_cg(part + j * 128);
            if (tile * ROWS + i % ROWS < m.n_rows)
                m.out[static_cast<i64>(i / ROWS) * m.n_rows + tile * ROWS + i % ROWS] = all;
        }
    }
}

// Every `step`-th tile from `tile` on; the next one is fetched while the sums of the last are added.
template <int KIND, int UK, int SETS, bool LOOPS, class V>
DEVICE void run_tiles(const Matrix& m, const Split& split, V values, int tile, int step, int place) {
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
        values.column = unit * UK;
        activations.put(lane, values);
    }
    FromShared x[SETS];
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

template <u32 KINDS, int UK, int SETS, bool LOOPS, class V>
DEVICE void run_kind(const Matrix& m, const Split& split, V values, int tile, int step, int place) {
#define MAKEWAY_RUN(KIND)                                                           \
    if constexpr ((KINDS >> KIND) & 1)                                              \
        if (m.kind == KIND) run_tiles<KIND, UK, SETS, LOOPS>(m, split, values, tile, step, place)
    MAKEWAY_RUN(F32);
    MAKEWAY_RUN(F16);
    MAKEWAY_RUN(BF16);
    MAKEWAY_RUN(Q8_0);
    MAKEWAY_RUN(Q5_1);
    MAKEWAY_RUN(Q4_K);
    MAKEWAY_RUN(Q5_K);
    MAKEWAY_RUN(Q6_K);
#undef MAKEWAY_RUN
}

// KINDS: a bit for each type among the matrices. SETS: 1 for up to four activations, else 2. WARPS, BLOCKS: of a block, and
// the fewest blocks that registers leave room for. A missing matrix has no rows. Grid: blocks of all matrices, each of `turns`
// tiles (LOOPS: more than one), x blocks that share a tile's columns; a warp for each unit of a block.
template <u32 KINDS, int UK, int PROLOGUE, int SETS, bool LOOPS, int WARPS, int BLOCKS>
KERNEL(WARPS * 32, BLOCKS)
linears_kernel(const float* x, const float* up, const float* gate, i32 x_stride, i32 up_stride, float scale,
               const u8* raw0, const u8* raw1, const u8* raw2, const u8* raw3, float* out0, float* out1, float* out2,
               float* out3, i32 rows0, i32 rows1, i32 rows2, i32 rows3, i32 kind0, i32 kind1, i32 kind2, i32 kind3,
               i32 bytes0, i32 bytes1, i32 bytes2, i32 bytes3, i32 n, i32 n_units, i32 group_units, i32 groups,
               i32 turns, float* parts, i32* counters) {
    const Split split{n, n_units, group_units, groups, parts, counters};
    const Values<PROLOGUE> values{x, up, gate, x_stride, up_stride, scale, 0};
    Matrix m{raw0, out0, bytes0, rows0, kind0};
    int block = block_x(), place = 0;
    const auto blocks = [&] { return ((m.n_rows + ROWS - 1) / ROWS + turns - 1) / turns; };
    const auto next = [&](const Matrix& other) {
        block -= blocks();
        place += (m.n_rows + ROWS - 1) / ROWS;
        m = other;
    };
    if (block >= blocks()) {
        next({raw1, out1, bytes1, rows1, kind1});
        if (block >= blocks()) {
            next({raw2, out2, bytes2, rows2, kind2});
            if (block >= blocks()) next({raw3, out3, bytes3, rows3, kind3});
        }
    }
    run_kind<KINDS, UK, SETS, LOOPS>(m, split, values, block, blocks(), place);
}
