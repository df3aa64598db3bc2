// The experts of a layer's step: gate, up and SwiGLU of each entry, then down and the weighted sum over entries.
//
// An entry is one expert for all rows that chose it; where its bytes are and who chose it was planned before
// (kernels/triton/step_plan.py). Between the two kernels the hidden values lie as the second one reads columns (product.cuh):
//   values bf16 [entry][column 2 n][width], products [entry][width / 256][column 2 n] of Layout::PRODUCTS bytes,
//   sums f32 [entry][width / 16][16]: of 16 values, by the place a column has in the product
// Only rows that chose an entry are written; what else lies there belongs to columns of a product that nobody reads.

#include "product.cuh"

constexpr int PASS = 4;  // rows of an entry that are multiplied together
constexpr int PRODUCTS = Layout<256>::PRODUCTS;

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

struct Hidden {
    u16* values;
    u8* products;
    float* sums;
    int n, width;

    // Of one row and part: 16 values of a tile, four in each of four lanes, and the sum of all in `sum`.
    DEVICE void put(int entry, int row, int tile, int part, int four, const uint2& packed, float sum) const {
        const int column = column_of(part, row, n);
        u8* to = reinterpret_cast<u8*>(values + (entry * 2 * n + column) * width + tile * ROWS);
        *reinterpret_cast<uint2*>(to + 8 * four) = packed;
        if (four != 0) return;
        const int place = n > 4 ? 8 * part + row : 4 * part + row;
        sums[(entry * (width / 16) + tile) * 16 + place] = sum;
        if (width % 256 == 0) {
            const int in_unit = tile % 16, pair = in_unit / 2;
            u8* at = products + ((entry * (width / 256) + tile / 16) * 2 * n + column) * PRODUCTS;
#pragma unroll
            for (int term = 0; term < 3; term++) {
                const u32 rounded = pack_bf16(sum, 0.0f) & 0xFFFF;
                *reinterpret_cast<u16*>(at + 32 * term + 8 * (pair % 4) + 4 * (pair / 4) + 2 * (in_unit % 2)) =
                    static_cast<u16>(rounded);
                sum -= bf16_to_float(rounded);
            }
        }
    }
};

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
    template <int SETS, class X>
    DEVICE void multiply_into(float (&total)[SETS][4], const X (&x)[SETS], int lane) {
        if constexpr (COPY > 0) {
            wait_async<0>();
            sync_warp();
        }
        multiply<KIND, UK, SETS>(total, blocks[0], blocks[1], x, lane % 4);
        if constexpr (COPY > 0) sync_warp();
    }
};

// SwiGLU of two rows of a pass (`at` and the next, if `count` is 2) of one tile, 16 lanes each, from [unit][gate, up] sums.
DEVICE void finish(const float* all, int units, const Hidden& hidden, int entry, int tile, u32 mask, int index, int count,
                   int at, int lane) {
    const int second = min(lane / 16, count - 1);
    float a = 0.0f, b = 0.0f;
#pragma unroll 4
    for (int w = 0; w < units; w++) {
        a += sum_at<1>(all + w * 2 * RED, at + second, lane % 16);
        b += sum_at<1>(all + w * 2 * RED + RED, at + second, lane % 16);
    }
    const float value = a / (1.0f + exp_of(-a)) * b;
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = shfl(value, (lane & ~3) + i);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const uint2 packed = pack_four(four);
        float sum = sum_of(packed);
        sum += shfl_xor(sum, 4);
        sum += shfl_xor(sum, 8);
        if (lane % 4 == 0 && lane / 16 < count)
            hidden.put(entry, chosen(mask, index + second), tile, part, lane % 16 / 4, packed, sum);
    }
}

// Tiles of 16 rows of an entry's gate and up products, every n_blocks_x()-th, and SwiGLU. Grid: blocks x entries; a warp for
// each unit of the columns. Without LOOPS a block has one tile. Rows are multiplied `most` (at most PASS) at a time.
template <int GATE, int UP, int UK, bool LOOPS, int UNITS, int BLOCKS>
KERNEL(UNITS * 32, BLOCKS)
gate_up_kernel(const float* x, i32 x_stride, const u8* arena, const i32* experts, const i64* offsets,
               const i32* chosen_by, i32 gate_bytes, i32 up_bytes, i64 up_at, u16* values, u8* products, float* sums,
               i32 n, i32 width, i32 most) {
    const int lane = thread_x() % LANES, warp = thread_x() / LANES, n_tiles = width / ROWS, entry = block_y();

    wait_for_previous();
    let_next_start();
    if (experts[entry] < 0) return;
    const u32 mask = static_cast<u32>(chosen_by[entry]);
    const int n_chosen = count_ones(mask), of_warp = Layout<UK>::bytes(most);
    float* red = reinterpret_cast<float*>(shared_bytes() + UNITS * of_warp);  // [2][warp][gate, up]
    u8* copy = reinterpret_cast<u8*>(red + 4 * UNITS * RED) + warp * (Unit<GATE, UK>::COPY + Unit<UP, UK>::COPY);
    const u8* expert = arena + offsets[entry];
    Unit<GATE, UK> gate{expert + warp * (UK / Block<GATE>::COLUMNS * Block<GATE>::BYTES), static_cast<u32>(gate_bytes),
                        width, copy};
    Unit<UP, UK> up{expert + up_at + warp * (UK / Block<UP>::COLUMNS * Block<UP>::BYTES), static_cast<u32>(up_bytes),
                    width, copy + Unit<GATE, UK>::COPY};

    int turn = 0;
    for (int first = 0; first < n_chosen; first += most) {
        const int count = min(n_chosen - first, most);
        const Activations<UK> activations{shared_bytes() + warp * of_warp, count};
        gate.fetch(block_x(), lane);
        constexpr bool BY_PRODUCT = needs<GATE>(SUMS_BY_PRODUCT) || needs<UP>(SUMS_BY_PRODUCT);
        constexpr bool BY_BLOCK = needs<GATE>(SUMS_BY_BLOCK) || needs<UP>(SUMS_BY_BLOCK);
        activations.template put<BY_PRODUCT, BY_BLOCK>(lane, [&](int i) {
            const float* row = x + chosen(mask, first + i) * x_stride + warp * UK;
            return [row](int column, float(&v)[4]) { load_four(row + column, v); };
        });
        FromShared gate_view[1], up_view[1];
        lane_view<GATE, UK, 1>(gate_view, activations, lane / 4, lane % 4);
        lane_view<UP, UK, 1>(up_view, activations, lane / 4, lane % 4);
        for (int tile = block_x(); tile < n_tiles; tile = LOOPS ? tile + n_blocks_x() : n_tiles, turn ^= 1) {
            float* all = red + turn * UNITS * 2 * RED;
            float total[1][4] = {}, other[1][4] = {};
            gate.template multiply_into<1>(total, gate_view, lane);
            up.fetch(tile, lane);
            put_sums<1>(all + warp * 2 * RED, total, lane / 4, lane % 4);
            up.template multiply_into<1>(other, up_view, lane);
            if (LOOPS && tile + n_blocks_x() < n_tiles) gate.fetch(tile + n_blocks_x(), lane);
            put_sums<1>(all + warp * 2 * RED + RED, other, lane / 4, lane % 4);
            sync_block();
            for (int two = 2 * warp; two < count; two += 2 * UNITS)  // a warp finishes two rows, 16 lanes each
                finish(all, UNITS, Hidden{values, products, sums, n, width}, entry, tile, mask, first + two,
                       min(count - two, 2), two, lane);
        }
        sync_warp();  // the next pass overwrites the warp's columns
    }
}

// How a lane of the second kernel reads its columns: all at once, into registers, while its weights are on their way.
template <int UK>
struct FromRegisters {
    uint4 values[UK / 32];
    uint2 of_products[3];
    float2 sums[UK / 32];
    DEVICE uint4 load_16(int at) const { return values[at / 64]; }
    DEVICE uint2 load_8(int at) const {
        const uint4& both = values[at / 64];
        return at % 64 == 0 ? uint2{both.x, both.y} : uint2{both.z, both.w};
    }
    DEVICE uint2 product(int at) const { return of_products[at / 32]; }
    DEVICE float2 block(int i) const { return sums[i]; }
};

// The columns of an entry's unit, in global memory.
template <int KIND, int UK>
struct HiddenColumns {
    const u16* values;
    const u8* products;
    const float* sums;
    int n, width;

    DEVICE FromRegisters<UK> read(int entry, int unit, int column, int place, int t) const {
        using B = Block<KIND>;
        FromRegisters<UK> x;
        const u16* from = values + (entry * 2 * n + column) * width + unit * UK;
#pragma unroll
        for (int s = 0; s < UK / 32; s++) {
            if constexpr (B::HALVES) {
                const uint2 a = load8(from + 32 * s + 4 * t), b = load8(from + 32 * s + 16 + 4 * t);
                x.values[s] = {a.x, a.y, b.x, b.y};
            } else {
                x.values[s] = load16(from + 32 * s + 8 * t);
            }
        }
        if constexpr (!is_float(KIND)) {
            if constexpr (B::SUMS == SUMS_BY_PRODUCT) {
                const u8* at = products + ((entry * (width / 256) + unit) * 2 * n + column) * PRODUCTS + 8 * t;
#pragma unroll
                for (int term = 0; term < 3; term++) x.of_products[term] = load8(at + 32 * term);
            }
            if constexpr (B::SUMS == SUMS_BY_BLOCK) {
                const float* at = sums + (entry * (width / 16) + unit * (UK / 16)) * 16 + place;
#pragma unroll
                for (int s = 0; s < UK / 32; s++) {  // sums of 32 are made of two of 16
                    const uint2 a = load8(at + 32 * s), b = load8(at + 32 * s + 16);
                    x.sums[s] = {as_float(a.x) + as_float(b.x), as_float(a.y) + as_float(b.y)};
                }
            }
        }
        return x;
    }
};

// One tile of 16 rows of the outputs of all entries, added in ascending order to acc f32 [n, hidden]. Grid: tiles. The warps
// take as many entries at a time as there are warps for; `per_entry` warps share the units of an entry's columns.
template <int KIND, int UK, int SETS, int WARPS, int BLOCKS>
KERNEL(WARPS * 32, BLOCKS)
down_kernel(const u16* values, const u8* products, const float* sums, const u8* arena, const i64* offsets,
            const i32* chosen_by, const float* weights, const i32* n_entries, i32 row_bytes, i64 down_at, float* acc,
            i32 n, i32 n_rows, i32 width, i32 per_entry) {
    constexpr int UNIT_BYTES = UK / Block<KIND>::COLUMNS * Block<KIND>::BYTES;
    const int lane = thread_x() % LANES, warp = thread_x() / LANES;
    const int g = lane / 4, t = lane % 4;
    const int tile = block_x(), at_once = WARPS / per_entry, n_units = width / UK;
    float* red = reinterpret_cast<float*>(shared_bytes());
    u8* copy = shared_bytes() + WARPS * SETS * RED * 4 + warp * Unit<KIND, UK>::COPY;

    wait_for_previous();
    let_next_start();
    const int count = *n_entries;
    const int row = thread_x() % ROWS, of = thread_x() / ROWS;
    const bool adds = of < n && tile * ROWS + row < n_rows;
    float* target = acc + static_cast<i64>(of) * n_rows + tile * ROWS + row;
    float sum = adds ? *target : 0.0f;
    const HiddenColumns<KIND, UK> columns{values, products, sums, n, width};

    for (int first = 0; first < count; first += at_once) {
        const int entry = first + warp / per_entry;
        float total[SETS][4] = {};
        if (warp / per_entry < at_once && entry < count) {
            const u8* expert = arena + offsets[entry] + down_at;
            Unit<KIND, UK> down{expert, static_cast<u32>(row_bytes), n_rows, copy};
            down.begin += warp % per_entry * UNIT_BYTES;
            down.fetch(tile, lane);
            for (int unit = warp % per_entry; unit < n_units; unit += per_entry) {
                FromRegisters<UK> x[SETS];
#pragma unroll
                for (int set = 0; set < SETS; set++)
                    x[set] = columns.read(entry, unit, lane_column<SETS>(set, g, n), 8 * set + 2 * t, t);
                down.template multiply_into<SETS>(total, x, lane);
                if (unit + per_entry < n_units) {
                    down.begin += per_entry * UNIT_BYTES;
                    down.fetch(tile, lane);
                }
            }
        }
        put_sums<SETS>(red + warp * SETS * RED, total, g, t);
        sync_block();
        if (adds) {
            for (int j = 0; j < at_once && first + j < count; j++) {
                if ((chosen_by[first + j] >> of) & 1) {
                    const float* part = red + j * per_entry * SETS * RED;
                    float output = sum_at<SETS>(part, of, row);
                    for (int k = 1; k < per_entry; k++) output += sum_at<SETS>(part + k * SETS * RED, of, row);
                    sum = fmaf(weights[(first + j) * 8 + of], output, sum);
                }
            }
        }
        if (first + at_once < count) sync_block();
    }
    if (adds) *target = sum;
}
