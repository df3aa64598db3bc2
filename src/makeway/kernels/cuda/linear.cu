// Up to five matrices times the same one to eight activations; at the end, the mixer of hyper-connections.
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

// How the columns of a tile are cut: UNITS of them in groups of OF_GROUP, GROUPS of those in a block.
template <int UNITS_, int OF_GROUP_, int GROUPS_>
struct Split {
    static constexpr int UNITS = UNITS_, OF_GROUP = OF_GROUP_, GROUPS = GROUPS_, WARPS = OF_GROUP * GROUPS;
    static constexpr int N_GROUPS = (UNITS + OF_GROUP - 1) / OF_GROUP, LAST = UNITS - (N_GROUPS - 1) * OF_GROUP;
    static constexpr int BLOCKS = (N_GROUPS + GROUPS - 1) / GROUPS;  // that share a tile
    float* parts;   // f32 [tile][group][8][16], where several blocks share a tile
    i32* counters;  // by tile
    int place;      // of the matrix's first tile in both

    // The sum of a group's units for one activation and row, from `red` [unit][SETS RED].
    template <int SETS>
    DEVICE static float of_group(const float* red, int group, int activation, int row) {
        if (LAST != OF_GROUP && group == N_GROUPS - 1) return sum_of_parts<LAST, SETS * RED>(red, activation, row);
        return sum_of_parts<OF_GROUP, SETS * RED>(red, activation, row);
    }
};

// The sums of one tile, from `red`, to the matrix's output, or to the parts that the last block adds.
template <int N, int SETS, class S>
DEVICE void finish_tile(const float* red, const Matrix& m, const S& split, int tile) {
    constexpr int OUTPUTS = N * ROWS, OF_GROUP = S::OF_GROUP * SETS * RED;
    const auto store = [&](int i, float sum) {
        if (tile * ROWS + i % ROWS < m.n_rows) m.out[i / ROWS * m.n_rows + tile * ROWS + i % ROWS] = sum;
    };
    if constexpr (S::BLOCKS == 1) {
        for (int i = thread_x(); i < OUTPUTS; i += S::WARPS * LANES) {
            float all = S::template of_group<SETS>(red, 0, i / ROWS, i % ROWS);
#pragma unroll
            for (int j = 1; j < S::N_GROUPS; j++) all += S::template of_group<SETS>(red + j * OF_GROUP, j, i / ROWS, i % ROWS);
            store(i, all);
        }
    } else {
        const int first = block_y() * S::GROUPS, groups = min(S::GROUPS, S::N_GROUPS - first);
        float* parts = split.parts + (split.place + tile) * S::N_GROUPS * 128;
        for (int i = thread_x(); i < OUTPUTS * groups; i += S::WARPS * LANES) {
            const int j = i / OUTPUTS, of = i % OUTPUTS;
            parts[(first + j) * 128 + of] = S::template of_group<SETS>(red + j * OF_GROUP, first + j, of / ROWS, of % ROWS);
        }
        if (arrived_last(split.counters + split.place + tile, S::BLOCKS)) {
            for (int i = thread_x(); i < OUTPUTS; i += S::WARPS * LANES) {
                float sums[S::N_GROUPS];
#pragma unroll
                for (int j = 0; j < S::N_GROUPS; j++) sums[j] = load4f_cg(parts + j * 128 + i);
                float all = sums[0];
#pragma unroll
                for (int j = 1; j < S::N_GROUPS; j++) all += sums[j];
                store(i, all);
            }
        }
    }
}

// Every `step`-th tile from `tile` on. COPIES of them are on their way at once: a tile's place is fetched into again as soon
// as it has been multiplied.
template <int KIND, int UK, int N, int LOOPS, int COPIES, class S, class V>
DEVICE void run_tiles(const Matrix& m, const S& split, const V& values, int tile, int step) {
    using B = Block<KIND>;
    constexpr int OF_WARP = Layout<UK>::bytes(N), SETS = (PLANES * N + 7) / 8, ALL_SUMS = S::WARPS * SETS * RED;
    const int lane = thread_x() % LANES, warp = thread_x() / LANES;
    const int n_tiles = (m.n_rows + ROWS - 1) / ROWS;
    const int unit = block_y() * S::WARPS + warp;
    const bool works = S::UNITS == S::WARPS || unit < S::UNITS;

    const Activations<UK> activations{shared_bytes() + warp * OF_WARP, N};
    float* red = reinterpret_cast<float*>(shared_bytes() + S::WARPS * OF_WARP);
    u8* copies = reinterpret_cast<u8*>(red + (LOOPS == 2 ? 2 : 1) * ALL_SUMS) + warp * COPIES * Unit<KIND, UK>::COPY;
    const auto weights = [&](int copy) {
        return Unit<KIND, UK>{m.raw + (works ? unit : 0) * (UK / B::COLUMNS * B::BYTES), static_cast<u32>(m.row_bytes),
                              m.n_rows, copies + copy * Unit<KIND, UK>::COPY};
    };
    const auto fetch = [&](int at, int copy) {
        if (at < n_tiles) weights(copy).fetch(at, lane);
        else if (COPIES > 1) commit_async();  // the wait counts fetches
    };
    if (works) {  // weights do not depend on the kernels before
        weights(0).fetch(tile, lane);
#pragma unroll
        for (int i = 1; i < COPIES; i++) fetch(tile + i * step, i);
    }
    wait_for_previous();
    let_next_start();
    if (works) activations.template put<(N > 2)>(lane, [&](int i) { return values.row(i, unit * UK); });
    Columns x[SETS];
    lane_view<KIND, UK, SETS>(x, activations, lane / 4, lane % 4);

    int turn = 0, copy = 0;
    while (true) {
        const int next = tile + step;
        float* sums = red + turn * ALL_SUMS;
        if (works) {
            float total[SETS][4] = {};
            weights(copy).template multiply_into<COPIES - 1>(total, x, tile, lane);
            if (LOOPS) fetch(tile + COPIES * step, copy);
            put_sums<SETS>(sums + warp * SETS * RED, total, lane / 4, lane % 4);
        }
        sync_block();
        finish_tile<N, SETS>(sums, m, split, tile);
        if (!LOOPS || next >= n_tiles) return;
        tile = next;
        copy = copy + 1 == COPIES ? 0 : copy + 1;
        if (LOOPS == 2) turn ^= 1;  // others may still read what was added last
        else sync_block();
    }
}

template <u64 KINDS, int UK, int N, int LOOPS, int COPIES, class S, class V>
DEVICE void run_kind(const Matrix& m, const S& split, const V& values, int tile, int step) {
#define MAKEWAY_RUN(KIND)           \
    if constexpr ((KINDS >> KIND) & 1) \
        if ((KINDS & (KINDS - 1)) == 0 || m.kind == KIND) run_tiles<KIND, UK, N, LOOPS, COPIES>(m, split, values, tile, step)
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

// KINDS: a bit for each type among the MATRICES. N: activations. UNITS, OF_GROUP, GROUPS: see Split. BLOCKS: the fewest that
// registers leave room for. Grid: blocks of all matrices, the i-th's up to end_i, of one tile each or, with LOOPS (the buffers
// for sums, 1 or 2), of several, of which COPIES are fetched at once; x blocks that share a tile's columns. A warp for each
// unit of a block.
template <u64 KINDS, int MATRICES, int UK, int PROLOGUE, int N, int LOOPS, int COPIES, int UNITS, int OF_GROUP, int GROUPS,
          int BLOCKS>
KERNEL(OF_GROUP * GROUPS * 32, BLOCKS)
linears_kernel(const float* x, const float* up, const float* gate, i32 x_stride, i32 up_stride, float scale,
               const u8* raw0, const u8* raw1, const u8* raw2, const u8* raw3, const u8* raw4, float* out0, float* out1,
               float* out2, float* out3, float* out4, i32 rows0, i32 rows1, i32 rows2, i32 rows3, i32 rows4, i32 kind0,
               i32 kind1, i32 kind2, i32 kind3, i32 kind4, i32 bytes0, i32 bytes1, i32 bytes2, i32 bytes3, i32 bytes4,
               i32 end0, i32 end1, i32 end2, i32 end3, float* parts, i32* counters) {
    const Values<PROLOGUE> values{x, up, gate, x_stride, up_stride, scale};
    const int block = block_x();
    Matrix m{raw0, out0, bytes0, rows0, kind0};
    int begin = 0, end = MATRICES > 1 ? end0 : n_blocks_x(), place = 0;
    if (MATRICES > 1 && block >= end0) {
        m = {raw1, out1, bytes1, rows1, kind1};
        begin = end0;
        end = MATRICES > 2 ? end1 : n_blocks_x();
        place = (rows0 + ROWS - 1) / ROWS;
    }
    if (MATRICES > 2 && block >= end1) {
        m = {raw2, out2, bytes2, rows2, kind2};
        begin = end1;
        end = MATRICES > 3 ? end2 : n_blocks_x();
        place += (rows1 + ROWS - 1) / ROWS;
    }
    if (MATRICES > 3 && block >= end2) {
        m = {raw3, out3, bytes3, rows3, kind3};
        begin = end2;
        end = MATRICES > 4 ? end3 : n_blocks_x();
        place += (rows2 + ROWS - 1) / ROWS;
    }
    if (MATRICES > 4 && block >= end3) {
        m = {raw4, out4, bytes4, rows4, kind4};
        begin = end3;
        end = n_blocks_x();
        place += (rows3 + ROWS - 1) / ROWS;
    }
    const Split<UNITS, OF_GROUP, GROUPS> split{parts, counters, place};
    run_kind<KINDS, UK, N, LOOPS, COPIES>(m, split, values, block - begin, end - begin);
}

// The end of a mixer of hyper-connections: x = mean over streams of sigmoid(up silu(low / STREAMS)) * normed, and the factors
// inject = 2 sigmoid(raw_inject / STREAMS) if there are any. low f32 [N, UK], normed f32 [N, STREAMS, hidden], up
// [STREAMS hidden, UK] -> x f32 [N, hidden]. A block has the same 16 columns of all streams, a warp those of one: its rows of
// `up`, whose columns are one unit. All warps read the same activations, so each makes every STREAMS-th of them.
template <int KIND, int UK, int N, int STREAMS>
KERNEL(STREAMS * LANES, 16 / STREAMS)
mix_kernel(const float* low, const u8* up, const float* normed, const float* raw_inject, float* x, float* inject,
           i32 low_stride, i32 inject_stride, i32 row_bytes, i32 hidden) {
    constexpr int SETS = (PLANES * N + 7) / 8, OUTPUTS = N * ROWS, OF_LANE = (OUTPUTS + LANES - 1) / LANES;
    const int lane = thread_x() % LANES, stream = thread_x() / LANES, tile = block_x();

    const Activations<UK> activations{shared_bytes(), N};
    float* reds = reinterpret_cast<float*>(shared_bytes() + Layout<UK>::bytes(N));
    float* gated = reds + STREAMS * SETS * RED;  // [STREAMS][N][16]
    u8* copies = reinterpret_cast<u8*>(gated + STREAMS * OUTPUTS);
    float* red = reds + stream * SETS * RED;
    const Unit<KIND, UK> weights{up + static_cast<u64>(stream * hidden) * static_cast<u32>(row_bytes),
                                 static_cast<u32>(row_bytes), hidden, copies + stream * Unit<KIND, UK>::COPY};
    weights.fetch(tile, lane);  // weights do not depend on the kernels before
    wait_for_previous();
    let_next_start();

    // What the end needs is on its way while the product is made.
    const int of_inject = tile == 0 && inject != nullptr ? thread_x() : N * STREAMS;  // there are more threads than factors
    float raw = 0.0f, values[OF_LANE];
    if (of_inject < N * STREAMS) {
        raw = as_float(load4(raw_inject + of_inject / STREAMS * inject_stride + of_inject % STREAMS));
    }
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        const int place = lane + i * LANES, column = min(tile * ROWS + place % ROWS, hidden - 1);
        const int row = min(place / ROWS, N - 1);  // with one activation half of the lanes have nothing to do
        values[i] = as_float(load4(normed + (row * STREAMS + stream) * hidden + column));
    }
    const Values<SILU> made_of{low, low, nullptr, low_stride, 0, 1.0f / STREAMS};
    activations.template put<(N > STREAMS)>(lane, [&](int i) { return made_of.row(i, 0); }, stream, STREAMS);
    sync_block();

    Columns columns[SETS];
    lane_view<KIND, UK, SETS>(columns, activations, lane / 4, lane % 4);
    float total[SETS][4] = {};
    weights.template multiply_into<0>(total, columns, tile, lane);
    put_sums<SETS>(red, total, lane / 4, lane % 4);
    sync_warp();
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        const int place = lane + i * LANES;
        if (OUTPUTS % LANES == 0 || place < OUTPUTS) {
            gated[stream * OUTPUTS + place] = sigmoid_of(sum_at(red, place / ROWS, place % ROWS)) * values[i];
        }
    }
    sync_block();
#pragma unroll
    for (int first = 0; first < OUTPUTS; first += STREAMS * LANES) {
        const int place = first + thread_x(), column = tile * ROWS + place % ROWS;
        if (place >= OUTPUTS || column >= hidden) break;
        float sum = gated[place];
#pragma unroll
        for (int s = 1; s < STREAMS; s++) sum += gated[s * OUTPUTS + place];
        x[place / ROWS * hidden + column] = sum / STREAMS;
    }
    if (of_inject < N * STREAMS) inject[of_inject] = 2.0f * sigmoid_of(raw / STREAMS);
}
