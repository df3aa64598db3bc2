// The experts of a layer's step: gate, up and SwiGLU of each entry, then down and the weighted sum over entries.
//
// An entry is one expert for all rows that chose it; where its bytes are and who chose it was planned before
// (kernels/triton/step_plan.py). Between the two kernels lie the hidden values, f32 [entry][row][width], of the rows that chose
// the entry.

#include "product.cuh"

constexpr int PASS = 2;  // rows of an entry that are multiplied together: one set of columns

// The i-th row that chose an entry.
DEVICE int chosen(u32 mask, int i) {
    for (; i > 0; i--) mask &= mask - 1;
    return lowest_one(mask);
}

template <int KIND>
DEVICE constexpr bool needs(Sums sums) {
    if constexpr (is_float(KIND)) return false;
    else return Block<KIND>::SUMS == sums;
}

// A warp's unit of one matrix: what it fetches and multiplies.
template <int KIND, int UK>
struct Unit {
    static constexpr int COPY = Block<KIND>::IS_SHARED ? Copy<KIND, UK>::SIZE : 0;
    const u8* begin;
    u32 row_bytes;
    int n_rows;
    u8* copy;
    Block<KIND> blocks[2];

    DEVICE void fetch(int tile, int lane) {
        const UnitRows rows{begin, row_bytes, tile * ROWS, n_rows - 1};
        if constexpr (Block<KIND>::IS_SHARED) {
            Copy<KIND, UK>::begin(copy, rows, lane);
            Copy<KIND, UK>::open(blocks, copy, rows, lane / 4, lane % 4);
        } else {
            blocks[0].load(rows.row(lane / 4), lane % 4);
            blocks[1].load(rows.row(lane / 4 + 8), lane % 4);
        }
    }
    // Waits for the fetch; afterwards the unit may fetch again.
    DEVICE void multiply_into(float (&total)[1][4], const Columns (&x)[1], int lane) {
        if constexpr (COPY > 0) {
            wait_async<0>();
            sync_warp();
        }
        multiply<KIND, UK, 1>(total, blocks[0], blocks[1], x, lane % 4);
        if constexpr (COPY > 0) sync_warp();
    }
};

// Rows of a pass into a warp's columns: `count` of those that chose an entry, from the `first` on; `x` f32, `stride` apart.
template <bool BY_PRODUCT, bool BY_BLOCK, int UK>
DEVICE void put_chosen(const Activations<UK>& activations, const float* x, int stride, u32 mask, int first, int lane) {
    activations.template put<BY_PRODUCT, BY_BLOCK>(lane, [&](int i) {
        const float* row = x + chosen(mask, first + i) * stride;
        return [row](int column, float* v) { load_four(row + column, v); };
    });
}

// Tiles of 16 rows of an entry's gate and up products, every n_blocks_x()-th, and SwiGLU. Grid: blocks x entries; a warp for
// each unit of the columns. Without LOOPS a block has one tile.
template <int GATE, int UP, int UK, bool LOOPS, int UNITS, int BLOCKS>
KERNEL(UNITS * 32, BLOCKS)
gate_up_kernel(const float* x, i32 x_stride, const u8* arena, const i32* experts, const i64* offsets,
               const i32* chosen_by, i32 gate_bytes, i32 up_bytes, i64 up_at, float* hidden, i32 n, i32 width) {
    const int lane = thread_x() % LANES, warp = thread_x() / LANES, n_tiles = width / ROWS, entry = block_y();

    wait_for_previous();
    let_next_start();
    if (experts[entry] < 0) return;
    const u32 mask = static_cast<u32>(chosen_by[entry]);
    const int n_chosen = count_ones(mask), of_warp = Layout<UK>::bytes(min(n, PASS));
    float* red = reinterpret_cast<float*>(shared_bytes() + UNITS * of_warp);  // [2][warp][gate, up]
    u8* copy = reinterpret_cast<u8*>(red + 4 * UNITS * RED) + warp * (Unit<GATE, UK>::COPY + Unit<UP, UK>::COPY);
    const u8* expert = arena + offsets[entry];
    Unit<GATE, UK> gate{expert + warp * (UK / Block<GATE>::COLUMNS * Block<GATE>::BYTES), static_cast<u32>(gate_bytes),
                        width, copy};
    Unit<UP, UK> up{expert + up_at + warp * (UK / Block<UP>::COLUMNS * Block<UP>::BYTES), static_cast<u32>(up_bytes),
                    width, copy + Unit<GATE, UK>::COPY};

    int turn = 0;
    for (int first = 0; first < n_chosen; first += PASS) {
        const int count = min(n_chosen - first, PASS);
        const Activations<UK> activations{shared_bytes() + warp * of_warp, count};
        gate.fetch(block_x(), lane);
        constexpr bool BY_PRODUCT = needs<GATE>(SUMS_BY_PRODUCT) || needs<UP>(SUMS_BY_PRODUCT);
        constexpr bool BY_BLOCK = needs<GATE>(SUMS_BY_BLOCK) || needs<UP>(SUMS_BY_BLOCK);
        put_chosen<BY_PRODUCT, BY_BLOCK>(activations, x + warp * UK, x_stride, mask, first, lane);
        Columns gate_view[1], up_view[1];
        lane_view<GATE, UK, 1>(gate_view, activations, lane / 4, lane % 4);
        lane_view<UP, UK, 1>(up_view, activations, lane / 4, lane % 4);
        for (int tile = block_x(); tile < n_tiles; tile = LOOPS ? tile + n_blocks_x() : n_tiles, turn ^= 1) {
            float* all = red + turn * UNITS * 2 * RED;
            float total[1][4] = {}, other[1][4] = {};
            gate.multiply_into(total, gate_view, lane);
            up.fetch(tile, lane);
            put_sums<1>(all + warp * 2 * RED, total, lane / 4, lane % 4);
            up.multiply_into(other, up_view, lane);
            if (LOOPS && tile + n_blocks_x() < n_tiles) gate.fetch(tile + n_blocks_x(), lane);
            put_sums<1>(all + warp * 2 * RED + RED, other, lane / 4, lane % 4);
            sync_block();
            for (int i = thread_x(); i < count * ROWS; i += UNITS * LANES) {
                float a = 0.0f, b = 0.0f;
#pragma unroll 4
                for (int w = 0; w < UNITS; w++) {
                    a += sum_at(all + w * 2 * RED, i / ROWS, i % ROWS);
                    b += sum_at(all + w * 2 * RED + RED, i / ROWS, i % ROWS);
                }
                hidden[(entry * n + chosen(mask, first + i / ROWS)) * width + tile * ROWS + i % ROWS] =
                    a / (1.0f + exp_of(-a)) * b;
            }
        }
        sync_warp();  // the next pass overwrites the warp's columns
    }
}

// One tile of 16 rows of the outputs of all entries, added in ascending order to acc f32 [n, hidden]. Grid: tiles. The warps
// take as many entries at a time as there are warps for; `per_entry` warps share the units of an entry's columns.
template <int KIND, int UK, int WARPS, int BLOCKS>
KERNEL(WARPS * 32, BLOCKS)
down_kernel(const float* hidden, const u8* arena, const i64* offsets, const i32* chosen_by, const float* weights,
            const i32* n_entries, i32 row_bytes, i64 down_at, float* acc, i32 n, i32 n_rows, i32 width, i32 per_entry) {
    constexpr int UNIT_BYTES = UK / Block<KIND>::COLUMNS * Block<KIND>::BYTES;
    const int lane = thread_x() % LANES, warp = thread_x() / LANES;
    const int g = lane / 4, t = lane % 4;
    const int tile = block_x(), at_once = WARPS / per_entry, n_units = width / UK;
    const int of_warp = Layout<UK>::bytes(min(n, PASS)), n_passes = (n + PASS - 1) / PASS;
    float* red = reinterpret_cast<float*>(shared_bytes() + WARPS * of_warp);  // [warp][pass]
    u8* copy = reinterpret_cast<u8*>(red + WARPS * n_passes * RED) + warp * Unit<KIND, UK>::COPY;

    wait_for_previous();
    let_next_start();
    const int count = *n_entries;
    const int row = thread_x() % ROWS, of = thread_x() / ROWS;
    const bool adds = of < n && tile * ROWS + row < n_rows;
    float* target = acc + of * n_rows + tile * ROWS + row;
    float sum = adds ? *target : 0.0f;

    for (int begin = 0; begin < count; begin += at_once) {
        const int entry = begin + warp / per_entry;
        if (warp / per_entry < at_once && entry < count) {
            const u32 mask = static_cast<u32>(chosen_by[entry]);
            const int n_chosen = count_ones(mask);
            Unit<KIND, UK> down{arena + offsets[entry] + down_at, static_cast<u32>(row_bytes), n_rows, copy};
            const u8* expert = down.begin;
            for (int first = 0, pass = 0; first < n_chosen; first += PASS, pass++) {
                const Activations<UK> activations{shared_bytes() + warp * of_warp, min(n_chosen - first, PASS)};
                float total[1][4] = {};
                for (int unit = warp % per_entry; unit < n_units; unit += per_entry) {
                    down.begin = expert + unit * UNIT_BYTES;
                    down.fetch(tile, lane);
                    put_chosen<needs<KIND>(SUMS_BY_PRODUCT), needs<KIND>(SUMS_BY_BLOCK)>(
                        activations, hidden + entry * n * width + unit * UK, width, mask, first, lane);
                    Columns x[1];
                    lane_view<KIND, UK, 1>(x, activations, g, t);
                    down.multiply_into(total, x, lane);
                    sync_warp();  // the next unit overwrites the warp's columns
                }
                put_sums<1>(red + (warp * n_passes + pass) * RED, total, g, t);
            }
        }
        sync_block();
        if (adds) {
            for (int j = 0; j < at_once && begin + j < count; j++) {
                const u32 mask = static_cast<u32>(chosen_by[begin + j]);
                if ((mask >> of) & 1) {
                    const int index = count_ones(mask & ((1u << of) - 1));
                    const float* part = red + (j * per_entry * n_passes + index / PASS) * RED;
                    float output = sum_at(part, index % PASS, row);
                    for (int k = 1; k < per_entry; k++) output += sum_at(part + k * n_passes * RED, index % PASS, row);
                    sum = fmaf(weights[(begin + j) * 8 + of], output, sum);
                }
            }
        }
        if (begin + at_once < count) sync_block();
    }
    if (adds) *target = sum;
}
