/* Matrices in panels, and rows of numbers times them: what decode.c is made of.

   A matrix [O, I] lies as [O / 16][I][16]: one load brings what an input counts for in 16 outputs. Numbers are float32,
   bfloat16, or int8 with a bfloat16 scale per output and 32 inputs, which lie before them. Every output is ONE chain of
   multiply-adds over the inputs, first to last, in float32: its bits do not depend on how many rows, panels or threads
   there are. */

#include "types.h"

enum { INT8 = 2 };
enum { PANEL = 16, GROUP = 32, INT8_GROUP = 2 * PANEL + GROUP * PANEL }; /* bytes of a group: scales, then values */
enum { MOST_ROWS = 12, MOST_PANELS = 4 };                                /* of one block of outputs */

#if defined(__AVX512F__)
enum { WIDTH = 16, BLOCK_ROWS = 12, BLOCK_PANELS = 4 }; /* values of a vector; what its registers hold at once */
#include <immintrin.h>
#elif defined(__AVX__)
enum { WIDTH = 8, BLOCK_ROWS = 4, BLOCK_PANELS = 1 };
#else
enum { WIDTH = 4, BLOCK_ROWS = 6, BLOCK_PANELS = 1 };
#endif
enum { VECTORS = PANEL / WIDTH };
typedef float Floats __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
#define UNROLL _Pragma("GCC unroll 12")

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

/* Bytes from one panel of a matrix of so many inputs to the next. */
INLINE long panel_bytes(long inputs, int type) {
    if (type == INT8) return (inputs + GROUP - 1) / GROUP * INT8_GROUP;
    return bytes(inputs * PANEL, type);
}

/* Where a matrix's panels lie: bytes from one panel, and from one input, to the next. Keys and values of attention are
   such matrices too. */
typedef struct { const char *data; long inputs, panel_step, input_step; int type; } Panels;

INLINE Panels panels_of(const void *data, long inputs, int type) {
    return (Panels){data, inputs, panel_bytes(inputs, type), bytes(PANEL, type), type};
}

/* tile[rows][panels * 16] = x[rows][inputs] times the first panels, with constants for type, rows and panels. */
INLINE void multiply_some(const float *x, long step, const Panels *w, const char *data, float *tile, long tile_step,
                          int type, int rows, int panels) {
    Floats sum[MOST_ROWS][MOST_PANELS][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][p][v] = (Floats){0};
    long inputs = w->inputs, panel_step = w->panel_step, input_step = w->input_step;
    for (long first = 0; first < inputs; first += type == INT8 ? GROUP : inputs) {
        long last = type == INT8 && first + GROUP < inputs ? first + GROUP : inputs;
        Floats scale[MOST_PANELS][VECTORS];
        if (type == INT8) {
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int v = 0; v < VECTORS; v++) scale[p][v] = widen(data + p * panel_step + v * WIDTH * 2);
            data += 2 * PANEL;
        }
        for (long i = first; i < last; i++) {
            Floats weight[MOST_PANELS][VECTORS];
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const char *at = data + p * panel_step + v * WIDTH * (type == FLOAT32 ? 4 : type == INT8 ? 1 : 2);
                    if (type == FLOAT32) weight[p][v] = *(const Floats *)at;
                    else if (type == BFLOAT16) weight[p][v] = widen(at);
                    else weight[p][v] = from_bytes(at) * scale[p][v];
                }
            data += type == INT8 ? PANEL : input_step;
            UNROLL for (int r = 0; r < rows; r++) {
                float value = x[r * step + i];
                UNROLL for (int p = 0; p < panels; p++)
                    UNROLL for (int v = 0; v < VECTORS; v++) sum[r][p][v] += value * weight[p][v];
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                *(Floats *)(tile + r * tile_step + p * PANEL + v * WIDTH) = sum[r][p][v];
}

/* The same, in as many parts as the registers need. */
INLINE void multiply_block(const float *x, long step, const Panels *w, const char *data, float *tile, int type,
                           int rows, int panels) {
    enum { COUNT = BLOCK_ROWS };
    int some_rows = rows < COUNT ? rows : rows % COUNT ? rows % COUNT : COUNT;
    int some_panels = panels < BLOCK_PANELS ? panels : BLOCK_PANELS;
    for (int r = 0; r < rows; r += some_rows)
        for (int p = 0; p < panels; p += some_panels)
            multiply_some(x + r * step, step, w, data + p * w->panel_step, tile + r * panels * PANEL + p * PANEL,
                          panels * PANEL, type, some_rows, some_panels);
}

typedef void Block(const float *x, long step, const Panels *w, const char *data, float *tile);
#define BLOCK(type, rows, panels) \
    static void block_##type##_##rows##_##panels(const float *x, long step, const Panels *w, const char *data, \
                                                 float *tile) { \
        multiply_block(x, step, w, data, tile, type, rows, panels); \
    }
#define BLOCKS(type) \
    BLOCK(type, 1, 1) BLOCK(type, 2, 1) BLOCK(type, 4, 1) BLOCK(type, 6, 1) BLOCK(type, 8, 1) BLOCK(type, 12, 1) \
    BLOCK(type, 1, 2) BLOCK(type, 2, 2) BLOCK(type, 4, 2) BLOCK(type, 6, 2) BLOCK(type, 8, 2) BLOCK(type, 12, 2) \
    BLOCK(type, 1, 4) BLOCK(type, 2, 4) BLOCK(type, 4, 4) BLOCK(type, 6, 4)
BLOCKS(FLOAT32) BLOCKS(BFLOAT16) BLOCKS(INT8)
#define NAME(type, rows, panels) block_##type##_##rows##_##panels
#define NAMES(type, panels) \
    {NAME(type, 1, panels), NAME(type, 2, panels), NAME(type, 4, panels), NAME(type, 6, panels), \
     NAME(type, 8, panels), NAME(type, 12, panels)}
#define FEW_NAMES(type, panels) \
    {NAME(type, 1, panels), NAME(type, 2, panels), NAME(type, 4, panels), NAME(type, 6, panels), 0, 0}
#define TABLE(type) {NAMES(type, 1), NAMES(type, 2), FEW_NAMES(type, 4)}
static Block *const block_of[3][3][6] = {TABLE(FLOAT32), TABLE(BFLOAT16), TABLE(INT8)}; /* type, panels, rows */
static const uint8_t place_of_rows[MOST_ROWS + 1] = {0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5};

/* What becomes of outputs: stored, added to what is there, of pairs of panels (gate, up) silu(gate) * up stored, or
   added to what is there times a scale of its row. */
enum { STORE, ADD, SWIGLU, RESCALE };
typedef struct {
    float *out;
    long step;                  /* values from one row to the next */
    int mode;
    const float *scale;         /* of rows, for RESCALE */
    const float *extra;         /* what adapters add, of rows whose adapter has something to say */
    long extra_step;
    const float *const *gain;   /* and DoRA's factors of outputs; of each row, or NULL */
    const uint8_t *has_extra;   /* of each row */
} Sink;

INLINE void finish_row(const float *tile, long row, long column, long count, const Sink *to) {
    float changed[MOST_PANELS * PANEL];
    if (to->extra && to->has_extra[row]) {
        const float *extra = to->extra + row * to->extra_step + column, *gain = to->gain[row];
        SIMD for (long i = 0; i < count; i++) changed[i] = tile[i] + extra[i];
        if (gain) SIMD for (long i = 0; i < count; i++) changed[i] *= gain[column + i];
        tile = changed;
    }
    float *out = to->out + row * to->step + (to->mode == SWIGLU ? column / 2 : column);
    if (to->mode == STORE) memcpy(out, tile, (size_t)count * 4);
    else if (to->mode == ADD) SIMD for (long i = 0; i < count; i++) out[i] += tile[i];
    else if (to->mode == RESCALE) { float scale = to->scale[row]; SIMD for (long i = 0; i < count; i++) out[i] = out[i] * scale + tile[i]; }
    else for (; count > 0; count -= 2 * PANEL, tile += 2 * PANEL, out += PANEL)
        SIMD for (int i = 0; i < PANEL; i++) out[i] = tile[i] / (1.0f + exponential(-tile[i])) * tile[PANEL + i];
}

/* Rows `row`.. of x times panels `panel`.. of w. x has at least 11 rows behind those, in which anything may stand. For
   SWIGLU the number of panels is a multiple of 4. */
static void multiply(const float *x, long step, long row, long rows, const Panels *w, long panel, long panels,
                     const Sink *to) {
    enum { TILE_BYTES = 1 << 19 };
    float tile[MOST_ROWS * 2 * PANEL] __attribute__((aligned(64)));
    long most = rows <= 6 ? 4 : 2, high = TILE_BYTES / 4 / (w->inputs + 1) / MOST_ROWS * MOST_ROWS;
    if (high < MOST_ROWS) high = MOST_ROWS;
    for (long end = row + rows, last; row < end; row = last) {
        last = end - row > high ? row + high : end;
        for (long p = panel, some; p < panel + panels; p += some) {
            some = panel + panels - p >= most ? most : panel + panels - p >= 2 ? 2 : 1;
            const char *data = w->data + p * w->panel_step;
            for (long r = row, count; r < last; r += count) { /* blocks of like height */
                long left = last - r, blocks = (left + MOST_ROWS - 1) / MOST_ROWS;
                count = (left + blocks - 1) / blocks;
                block_of[w->type][some / 2][place_of_rows[count]](x + r * step, step, w, data, tile);
                for (long i = 0; i < count; i++)
                    finish_row(tile + i * some * PANEL, r + i, p * PANEL, some * PANEL, to);
            }
        }
    }
}

/* Value i of a row, or 0. */
INLINE float value_at(const void *x, long i, long inputs, int type) { return i < inputs ? get(x, i, type) : 0.0f; }

/* Rows first..last of a matrix [O, I] into panels: row o is output `start + o`, and panel p of these lies at
   place p * stride + offset. */
static void pack_rows(const void *x, long first, long last, long inputs, int from, char *panels, long start,
                      long stride, long offset, int type) {
    for (long o = first; o < last; o++) {
        const void *row = row_of(x, o * inputs, from);
        char *to = panels + ((start + o) / PANEL * stride + offset) * panel_bytes(inputs, type);
        long lane = (start + o) % PANEL;
        if (type != INT8) {
            for (long i = 0; i < inputs; i++) put(to, i * PANEL + lane, get(row, i, from), type);
            continue;
        }
        for (long i = 0; i < inputs; i += GROUP, to += INT8_GROUP) {
            float largest = 0.0f;
            for (long j = i; j < i + GROUP; j++) largest = fmaxf(largest, fabsf(value_at(row, j, inputs, from)));
            uint32_t scale = (bits(largest / 127.0f) + 0xffff) >> 16; /* rounded up: none is beyond 127 */
            float inverse = scale ? 1.0f / from_bits(scale << 16) : 0.0f;
            ((uint16_t *)to)[lane] = (uint16_t)scale;
            for (long j = 0; j < GROUP; j++)
                ((int8_t *)to)[(2 + j) * PANEL + lane] = (int8_t)lrintf(value_at(row, i + j, inputs, from) * inverse);
        }
    }
}
