/* Packed matrices (panels) and the matmul of rows with them, for decode.c.

   A matrix [O, I] is stored in panels of 16 outputs, four of them interleaved: [O / 64][I][64]; the last group is
   narrower if O is not a multiple of 64. One load gives an input's weights for 16 outputs, and a thread reads memory in
   one stream. Weights are float32, bfloat16, or int8 with a bfloat16 scale per output and 32 inputs, stored before
   these. In bfloat16 inputs are in pairs, [O / 64][I / 2][64][2]; an odd last input is paired with a zero.

   Every output is ONE chain of additions over the inputs, first to last, in float32: its bits do not depend on how many
   rows, panels or threads there are. AVX512-BF16 adds a pair's two products in one instruction, and needs rows
   rounded to bfloat16 for bfloat16 matrices; otherwise rows are float32. */

#include "types.h"

enum { INT8 = 2 };
enum { PANEL = 16, SIDE = 4, GROUP = 32 }; /* outputs of a panel; panels per group; inputs of one int8 scale */
enum { MAX_ROWS = 6, PREFETCH_BYTES = 4096 };      /* rows of one block; bytes to prefetch ahead */

#ifdef __AVX__
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
enum { WIDTH = 16, BLOCK_PANELS = 4 }; /* floats of a vector; panels whose sums fit the registers */
#elif defined(__AVX__)
enum { WIDTH = 8, BLOCK_PANELS = 1 };
#else
enum { WIDTH = 4, BLOCK_PANELS = 1 };
#endif
enum { VECTORS = PANEL / WIDTH };
typedef float Floats __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
#define UNROLL _Pragma("GCC unroll 8")

#if defined(__AVX512BF16__)
enum { ROUNDED = BFLOAT16, PARTS = 1 };
#else
enum { ROUNDED = FLOAT32, PARTS = 2 };
#endif
/* The type of rows that a matrix is multiplied with. */
INLINE int rows_type(int type) { return type == BFLOAT16 ? ROUNDED : FLOAT32; }

/* Inputs that are interleaved; and their bytes per output. */
INLINE long interleave(int type) { return type == BFLOAT16 ? 2 : 1; }
INLINE long value_bytes(int type) { return type == INT8 ? 1 : 4; }

INLINE Floats widen(const void *halves) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(halves)), 16);
#else
    return (Floats)(__builtin_convertvector(*(const Halves *)halves, Words) << 16);
#endif
}

INLINE Floats from_bytes(const void *bytes) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const Bytes *)bytes, Ints), Floats);
#endif
}

/* The weights of interleaved inputs; for float32 rows the first or second of a pair (part 0 or 1). */
INLINE Floats weights_at(const char *at, int part, int type) {
    if (type == INT8) return from_bytes(at);
    if (type == FLOAT32 || PARTS == 1) return *(const Floats *)at;
    Words pairs = *(const Words *)at;
    return part ? (Floats)(pairs & 0xffff0000u) : (Floats)(pairs << 16);
}

/* Value i of a row, or the pair that starts there, in all lanes. */
INLINE Floats broadcast(const void *row, long i, int type) {
#if defined(__AVX512BF16__)
    int pair;
    if (type == BFLOAT16) return memcpy(&pair, (const uint16_t *)row + i, 4), (Floats)_mm512_set1_epi32(pair);
#endif
    return ((const float *)row)[i] - (Floats){0};
}

INLINE Floats add_products(Floats sum, Floats value, Floats weight, int type) {
#if defined(__AVX512BF16__)
    if (type == BFLOAT16) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)value, (__m512bh)weight);
#endif
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)value, (__m512)weight, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)value, (__m256)weight, (__m256)sum);
#else
    UNROLL for (int i = 0; i < WIDTH; i++) sum[i] = multiply_add(value[i], weight[i], sum[i]);
    return sum;
#endif
}

/* Bytes of `panels` panels with this number of inputs. */
INLINE long panel_bytes(long inputs, long panels, int type) {
    if (type == INT8) return (inputs + GROUP - 1) / GROUP * (GROUP + 2) * PANEL * panels;
    return (inputs + interleave(type) - 1) / interleave(type) * value_bytes(type) * PANEL * panels;
}

/* The index of the weight of (input, output) in a group of `wide` outputs in float32 or bfloat16. */
INLINE long place_of(long input, long output, long wide, int type) {
    return type == BFLOAT16 ? (input / 2 * wide + output) * 2 + input % 2 : input * wide + output;
}

/* A packed matrix; attention's keys and values are such matrices too. step: bytes from one set of interleaved inputs to
   the next; 0: that of contiguous panels. after: what is probably read next. */
typedef struct { const char *data; long inputs, panels, side_bytes, step; int type; const char *after; } Panels;

INLINE Panels panels_of(const void *data, long inputs, long outputs, int type) {
    return (Panels){data, inputs, outputs / PANEL, panel_bytes(inputs, SIDE, type), 0, type, data};
}

/* What to prefetch: `step` bytes with each step over the inputs. */
typedef struct { const char *at; long step; } Prefetch;

/* tile[rows][tile_step] = x[rows][inputs] times some panels, with constant type, rows and panels. step: bytes from one
   set of interleaved inputs to the next. */
INLINE void multiply_group(const void *x, long x_step, const char *data, long inputs, long step, const char *scales,
                          Prefetch prefetch, float *tile, long tile_step, int type, int rows, int panels) {
    const int parts = type == BFLOAT16 ? PARTS : 1;
    long ends = (inputs + interleave(type) - 1) / interleave(type);
    Floats sum[MAX_ROWS][SIDE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][p][v] = (Floats){0};
    for (long first = 0; first < ends; first += type == INT8 ? GROUP : ends) {
        long last = type == INT8 && first + GROUP < ends ? first + GROUP : ends;
        Floats scale[SIDE][VECTORS];
        if (type == INT8) {
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int v = 0; v < VECTORS; v++) scale[p][v] = widen(scales + (p * PANEL + v * WIDTH) * 2);
            scales += (GROUP + 2) * step;
        }
        for (long i = first; i < last; i++) {
            UNROLL for (int line = 0; line < panels * PANEL * value_bytes(type); line += 64)
                if (line < prefetch.step) __builtin_prefetch(prefetch.at + line, 0, 2);
            prefetch.at += prefetch.step;
            UNROLL for (int part = 0; part < parts; part++) {
                Floats weight[SIDE][VECTORS];
                UNROLL for (int p = 0; p < panels; p++)
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        weight[p][v] = weights_at(data + (p * PANEL + v * WIDTH) * value_bytes(type), part, type);
                        if (type == INT8) weight[p][v] *= scale[p][v];
                    }
                UNROLL for (int r = 0; r < rows; r++) {
                    Floats value = broadcast(x, r * x_step + i * interleave(type) + part, rows_type(type));
                    UNROLL for (int p = 0; p < panels; p++)
                        UNROLL for (int v = 0; v < VECTORS; v++)
                            sum[r][p][v] = add_products(sum[r][p][v], value, weight[p][v], rows_type(type));
                }
            }
            data += step;
        }
        if (type == INT8) data += 2 * step;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                *(Floats *)(tile + r * tile_step + p * PANEL + v * WIDTH) = sum[r][p][v];
}

/* The same, in as many parts as the registers need. panel: the first panel of the group. */
INLINE void multiply_block(const void *x, long x_step, const char *data, long inputs, long step, int panel, Prefetch prefetch,
                           float *tile, int type, int rows, int panels) {
    int group = panels < BLOCK_PANELS ? panels : BLOCK_PANELS;
    const char *values = type == INT8 ? data + 2 * step : data;
    prefetch.at += panel * PANEL * value_bytes(type);
    for (int p = 0; p < panels; p += group, prefetch.at += group * PANEL * value_bytes(type))
        multiply_group(x, x_step, values + (panel + p) * PANEL * value_bytes(type), inputs, step,
                      data + (panel + p) * PANEL * 2, prefetch, tile + p * PANEL, panels * PANEL, type, rows, group);
}

typedef void Block(const void *x, long x_step, const char *data, long inputs, long step, int panel, Prefetch prefetch,
                   float *tile);
#define NAME(type, rows, panels) block_##type##_##rows##_##panels
#define BLOCK(type, rows, panels) \
    static void NAME(type, rows, panels)(const void *x, long x_step, const char *data, long inputs, long step, int panel, \
                                         Prefetch prefetch, float *tile) { \
        multiply_block(x, x_step, data, inputs, step, panel, prefetch, tile, type, rows, panels); \
    }
#define EACH(f, type, panels) \
    f(type, 1, panels) f(type, 2, panels) f(type, 3, panels) f(type, 4, panels) f(type, 5, panels) f(type, 6, panels)
#define ENTRY(type, rows, panels) NAME(type, rows, panels),
#define BLOCKS(type) EACH(BLOCK, type, 1) EACH(BLOCK, type, 2) EACH(BLOCK, type, 4)
#define TABLE(type) {{EACH(ENTRY, type, 1)}, {EACH(ENTRY, type, 2)}, {EACH(ENTRY, type, 4)}}
BLOCKS(FLOAT32) BLOCKS(BFLOAT16) BLOCKS(INT8)
static Block *const block_of[3][3][MAX_ROWS] = {TABLE(FLOAT32), TABLE(BFLOAT16), TABLE(INT8)}; /* by type, panels, rows */

/* How outputs are written: STORE; ADD to `out`; SWIGLU: store silu(gate) * up of pairs of panels (gate, up); RESCALE:
   add to `out` times the row's scale. */
enum { STORE, ADD, SWIGLU, RESCALE };
typedef struct {
    float *out;                 /* NULL: SWIGLU with `rounded` only */
    long step;                  /* values from one row to the next */
    int mode;
    uint16_t *rounded;          /* SWIGLU: the same in bfloat16, or NULL */
    const float *scale;         /* of rows, for RESCALE */
    const float *lora;         /* LoRA outputs, of rows with an adapter */
    long lora_step;
    const float *const *gain;   /* DoRA's factors of outputs, for each row, or NULL */
    const uint8_t *has_lora;   /* of each row */
} Sink;

INLINE void swiglu(const float *tile, long count, float *out, uint16_t *rounded) {
    for (long i = 0; i < count; i += 2 * PANEL, tile += 2 * PANEL) {
        float value[PANEL];
        SIMD for (int j = 0; j < PANEL; j++) value[j] = tile[j] / (1.0f + exponential(-tile[j])) * tile[PANEL + j];
        if (out) memcpy(out + i / 2, value, sizeof value);
        if (rounded) SIMD for (int j = 0; j < PANEL; j++) put(rounded + i / 2, j, value[j], BFLOAT16);
    }
}

INLINE void finish_row(const float *tile, long row, long column, long count, const Sink *to) {
    float changed[SIDE * PANEL];
    if (to->lora && to->has_lora[row]) {
        const float *lora = to->lora + row * to->lora_step + column, *gain = to->gain[row];
        SIMD for (long i = 0; i < count; i++) changed[i] = tile[i] + lora[i];
        if (gain) SIMD for (long i = 0; i < count; i++) changed[i] *= gain[column + i];
        tile = changed;
    }
    long place = row * to->step + (to->mode == SWIGLU ? column / 2 : column);
    float *out = to->out ? to->out + place : 0;
    if (to->mode == STORE) memcpy(out, tile, (size_t)count * 4);
    else if (to->mode == ADD) SIMD for (long i = 0; i < count; i++) out[i] += tile[i];
    else if (to->mode == RESCALE) {
        float scale = to->scale[row];
        SIMD for (long i = 0; i < count; i++) out[i] = out[i] * scale + tile[i];
    } else swiglu(tile, count, out, to->rounded ? to->rounded + place : 0);
}

/* Rows, a multiple of MAX_ROWS, that fit a core's own cache. */
INLINE long rows_in_cache(long inputs, int type) {
    enum { CACHE_BYTES = 1 << 19 };
    long rows = CACHE_BYTES / bytes(inputs + 1, rows_type(type)) / MAX_ROWS * MAX_ROWS;
    return rows < MAX_ROWS ? MAX_ROWS : rows;
}

/* What to prefetch during one of `blocks` blocks of rows: data further ahead, or the block's part of what comes next. Of
   keys and values half: attention prefetches the rest (prefetch_rest). */
INLINE Prefetch prefetch_for(const Panels *w, const char *data, const char *next, long step, long block, long blocks) {
    long lines = (w->inputs + interleave(w->type) - 1) / interleave(w->type);
    long share = lines * step / blocks / (w->step ? 2 : 1);
    if (blocks == 1 && share > 4 * PREFETCH_BYTES) return (Prefetch){data + PREFETCH_BYTES, step};
    return (Prefetch){next + block * share, share / lines};
}

/* Rows `row`.. of x, in rows_type(w->type), times the panels first..last of w; `first` is a multiple of SIDE. */
static void multiply(const void *x, long x_step, long row, long rows, const Panels *w, long first, long last,
                     const Sink *to) {
    float tile[MAX_ROWS * SIDE * PANEL] __attribute__((aligned(64)));
    long high = rows_in_cache(w->inputs, w->type), end = row + rows, below;
    for (; row < end; row = below) {
        below = end - row > high ? row + high : end;
        for (long side = first; side < last; side += SIDE) {
            const char *data = w->data + side / SIDE * w->side_bytes;
            const char *next = side + SIDE < last ? data + w->side_bytes : w->after;
            if (w->step) next = w->after + (data - w->data);
            long wide = w->panels - side < SIDE ? w->panels - side : SIDE;
            long step = w->step ? w->step : wide * PANEL * value_bytes(w->type);
            long blocks = (below - row + MAX_ROWS - 1) / MAX_ROWS;
            for (long b = 0; b < blocks; b++) { /* of equal height */
                long r = row + (below - row) * b / blocks, count = row + (below - row) * (b + 1) / blocks - r;
                Prefetch prefetch = prefetch_for(w, data, next, step, b, blocks);
                for (long p = 0, group; p < wide; p += group) { /* 3 are 2 and 1 */
                    group = wide - p == 3 ? 2 : wide - p;
                    block_of[w->type][group / 2][count - 1](row_of(x, r * x_step, rows_type(w->type)), x_step, data,
                                                           w->inputs, step, (int)p, prefetch, tile);
                    for (long i = 0; i < count; i++)
                        finish_row(tile + i * group * PANEL, r + i, (side + p) * PANEL, group * PANEL, to);
                }
            }
        }
    }
}

/* --- Packing ------------------------------------------------------------------------------------------------------ */

/* GROUP values of a row from value i on, zeros past its end. */
INLINE void load_group(const void *row, long i, long inputs, float *value, int from) {
    if (i + GROUP <= inputs) SIMD for (int j = 0; j < GROUP; j++) value[j] = get(row, i + j, from);
    else for (int j = 0; j < GROUP; j++) value[j] = i + j < inputs ? get(row, i + j, from) : 0.0f;
}

/* Packs at most 16 rows of a matrix [O, I] into the lanes from `output` on of panels of `outputs` outputs. */
INLINE void pack_rows(const void *x, long rows, long inputs, int from, char *panels, long output, long outputs, int type) {
    long side = output / (SIDE * PANEL) * SIDE * PANEL, lane = output - side;
    long wide = outputs - side < SIDE * PANEL ? outputs - side : SIDE * PANEL;
    char *to = panels + side / PANEL * panel_bytes(inputs, 1, type);
    for (long i = 0; i < inputs; i += GROUP, to += (type == INT8 ? GROUP + 2 : bytes(GROUP, type)) * wide) {
        int count = inputs - i < GROUP ? (int)(inputs - i) : GROUP;
        for (long o = 0; o < rows; o++) {
            float value[GROUP], largest = 0.0f;
            load_group(row_of(x, o * inputs, from), i, inputs, value, from);
            if (type == FLOAT32) {
                for (int j = 0; j < count; j++) ((float *)to)[j * wide + lane + o] = value[j];
            } else if (type == BFLOAT16) {
                uint16_t half[GROUP];
                SIMD for (int j = 0; j < GROUP; j++) put(half, j, value[j], BFLOAT16);
                for (int j = 0; j < count; j += 2) memcpy(to + (j / 2 * wide + lane + o) * 4, half + j, 4);
            } else {
                int8_t quantized[GROUP];
                _Pragma("omp simd reduction(max : largest)")
                for (int j = 0; j < GROUP; j++) largest = fabsf(value[j]) > largest ? fabsf(value[j]) : largest;
                uint32_t scale = (bits(largest / 127.0f) + 0xffff) >> 16; /* rounded up, so that no value exceeds 127 */
                float inverse = scale ? 1.0f / from_bits(scale << 16) : 0.0f;
                SIMD for (int j = 0; j < GROUP; j++) quantized[j] = (int8_t)rintf(value[j] * inverse);
                ((uint16_t *)to)[lane + o] = (uint16_t)scale;
                for (int j = 0; j < GROUP; j++) ((int8_t *)to)[(2 + j) * wide + lane + o] = quantized[j];
            }
        }
    }
}
