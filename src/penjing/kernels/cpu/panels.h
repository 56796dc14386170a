/* Matrices in panels, and rows of numbers times them: what decode.c is made of.

   A matrix [O, I] lies in panels of 16 outputs, four of them side by side: [O / 64][I][64], the last narrower where O is
   no multiple of 64. One load brings what an input counts for in 16 outputs, and a thread reads memory in one stream.
   Numbers are float32, bfloat16, or int8 with a bfloat16 scale per output and 32 inputs, which lie before these. Every
   output is ONE chain of multiply-adds over the inputs, first to last, in float32: its bits do not depend on how many
   rows, panels or threads there are. */

#include "types.h"

enum { INT8 = 2 };
enum { PANEL = 16, SIDE = 4, GROUP = 32 }; /* outputs of a panel; panels side by side; inputs of one int8 scale */
enum { MOST_ROWS = 6, AHEAD = 4096 };      /* rows of one block of sums; bytes that are asked for beforehand */

#if defined(__AVX512F__)
enum { WIDTH = 16, BLOCK_PANELS = 4 }; /* values of a vector; panels that its registers hold sums of */
#include <immintrin.h>
#elif defined(__AVX__)
enum { WIDTH = 8, BLOCK_PANELS = 1 };
#else
enum { WIDTH = 4, BLOCK_PANELS = 1 };
#endif
enum { VECTORS = PANEL / WIDTH };
typedef float Floats __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
#define UNROLL _Pragma("GCC unroll 8")

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

/* Bytes of `panels` panels of a matrix of so many inputs. */
INLINE long panel_bytes(long inputs, long panels, int type) {
    if (type == INT8) return (inputs + GROUP - 1) / GROUP * (GROUP + 2) * PANEL * panels;
    return bytes(inputs * PANEL * panels, type);
}

/* Where a matrix's panels lie; keys and values of attention are such matrices too. step: bytes from one input to the
   next; 0: the panels side by side are all there is. */
typedef struct { const char *data; long inputs, panels, side_bytes, step; int type; } Panels;

INLINE Panels panels_of(const void *data, long inputs, long outputs, int type) {
    return (Panels){data, inputs, outputs / PANEL, panel_bytes(inputs, SIDE, type), 0, type};
}

INLINE long value_bytes(int type) { return type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1; }

/* tile[rows][tile_step] = x[rows][inputs] times some panels, with constants for type, rows and panels. step: bytes from
   one input to the next. */
INLINE void multiply_some(const float *x, long x_step, const char *data, long inputs, long step, const char *scales,
                          long ahead, float *tile, long tile_step, int type, int rows, int panels) {
    Floats sum[MOST_ROWS][SIDE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][p][v] = (Floats){0};
    for (long first = 0; first < inputs; first += type == INT8 ? GROUP : inputs) {
        long last = type == INT8 && first + GROUP < inputs ? first + GROUP : inputs;
        Floats scale[SIDE][VECTORS];
        if (type == INT8) {
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int v = 0; v < VECTORS; v++) scale[p][v] = widen(scales + (p * PANEL + v * WIDTH) * 2);
            scales += (GROUP + 2) * step;
        }
        for (long i = first; i < last; i++) {
            Floats weight[SIDE][VECTORS];
            UNROLL for (int line = 0; line < panels * PANEL * value_bytes(type); line += 64)
                __builtin_prefetch(data + ahead + line);
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const char *at = data + (p * PANEL + v * WIDTH) * value_bytes(type);
                    if (type == FLOAT32) weight[p][v] = *(const Floats *)at;
                    else if (type == BFLOAT16) weight[p][v] = widen(at);
                    else weight[p][v] = from_bytes(at) * scale[p][v];
                }
            data += step;
            UNROLL for (int r = 0; r < rows; r++) {
                float value = x[r * x_step + i];
                UNROLL for (int p = 0; p < panels; p++)
                    UNROLL for (int v = 0; v < VECTORS; v++) sum[r][p][v] += value * weight[p][v];
            }
        }
        if (type == INT8) data += 2 * step;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                *(Floats *)(tile + r * tile_step + p * PANEL + v * WIDTH) = sum[r][p][v];
}

/* The same, in as many parts as the registers need. panel: which of those side by side is the first. */
INLINE void multiply_block(const float *x, long x_step, const char *data, long inputs, long step, int panel, long ahead,
                           float *tile,
                           int type, int rows, int panels) {
    int some = panels < BLOCK_PANELS ? panels : BLOCK_PANELS;
    const char *values = type == INT8 ? data + 2 * step : data;
    for (int p = 0; p < panels; p += some)
        multiply_some(x, x_step, values + (panel + p) * PANEL * value_bytes(type), inputs, step,
                      data + (panel + p) * PANEL * 2, ahead, tile + p * PANEL, panels * PANEL, type, rows, some);
}

typedef void Block(const float *x, long x_step, const char *data, long inputs, long step, int panel, long ahead,
                           float *tile);
#define NAME(type, rows, panels) block_##type##_##rows##_##panels
#define BLOCK(type, rows, panels) \
    static void NAME(type, rows, panels)(const float *x, long x_step, const char *data, long inputs, long step, int panel, \
                                         long ahead, float *tile) { \
        multiply_block(x, x_step, data, inputs, step, panel, ahead, tile, type, rows, panels); \
    }
#define EACH(f, type, panels) \
    f(type, 1, panels) f(type, 2, panels) f(type, 3, panels) f(type, 4, panels) f(type, 5, panels) f(type, 6, panels)
#define LISTED(type, rows, panels) NAME(type, rows, panels),
#define BLOCKS(type) EACH(BLOCK, type, 1) EACH(BLOCK, type, 2) EACH(BLOCK, type, 4)
#define TABLE(type) {{EACH(LISTED, type, 1)}, {EACH(LISTED, type, 2)}, {EACH(LISTED, type, 4)}}
BLOCKS(FLOAT32) BLOCKS(BFLOAT16) BLOCKS(INT8)
static Block *const block_of[3][3][MOST_ROWS] = {TABLE(FLOAT32), TABLE(BFLOAT16), TABLE(INT8)}; /* by type, panels, rows */

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
    float changed[SIDE * PANEL];
    if (to->extra && to->has_extra[row]) {
        const float *extra = to->extra + row * to->extra_step + column, *gain = to->gain[row];
        SIMD for (long i = 0; i < count; i++) changed[i] = tile[i] + extra[i];
        if (gain) SIMD for (long i = 0; i < count; i++) changed[i] *= gain[column + i];
        tile = changed;
    }
    float *out = to->out + row * to->step + (to->mode == SWIGLU ? column / 2 : column);
    if (to->mode == STORE) memcpy(out, tile, (size_t)count * 4);
    else if (to->mode == ADD) SIMD for (long i = 0; i < count; i++) out[i] += tile[i];
    else if (to->mode == RESCALE) {
        float scale = to->scale[row];
        SIMD for (long i = 0; i < count; i++) out[i] = out[i] * scale + tile[i];
    } else for (; count > 0; count -= 2 * PANEL, tile += 2 * PANEL, out += PANEL)
        SIMD for (int i = 0; i < PANEL; i++) out[i] = tile[i] / (1.0f + exponential(-tile[i])) * tile[PANEL + i];
}

/* Rows, a multiple of MOST_ROWS, that lie in a core's own cache. */
INLINE long rows_near(long inputs) {
    enum { NEAR_BYTES = 1 << 19 };
    long rows = NEAR_BYTES / 4 / (inputs + 1) / MOST_ROWS * MOST_ROWS;
    return rows < MOST_ROWS ? MOST_ROWS : rows;
}

/* Rows `row`.. of x times the panels first..last of w; `first` is a multiple of SIDE. */
static void multiply(const float *x, long x_step, long row, long rows, const Panels *w, long first, long last,
                     const Sink *to) {
    float tile[MOST_ROWS * SIDE * PANEL] __attribute__((aligned(64)));
    long high = rows_near(w->inputs), end = row + rows, below;
    for (; row < end; row = below) {
        below = end - row > high ? row + high : end;
        for (long side = first; side < last; side += SIDE) {
            const char *data = w->data + side / SIDE * w->side_bytes;
            long wide = w->panels - side < SIDE ? w->panels - side : SIDE;
            long step = w->step ? w->step : wide * PANEL * value_bytes(w->type);
            for (long r = row, count; r < below; r += count) { /* blocks of like height */
                long left = below - r, blocks = (left + MOST_ROWS - 1) / MOST_ROWS;
                count = (left + blocks - 1) / blocks;
                long ahead = r > row ? w->side_bytes : AHEAD; /* what comes after these rows, when those lie near */
                for (long p = 0, some; p < wide; p += some) { /* 3 are 2 and 1 */
                    some = wide - p == 3 ? 2 : wide - p;
                    block_of[w->type][some / 2][count - 1](x + r * x_step, x_step, data, w->inputs, step, (int)p, ahead,
                                                                    tile);
                    for (long i = 0; i < count; i++)
                        finish_row(tile + i * some * PANEL, r + i, (side + p) * PANEL, some * PANEL, to);
                }
            }
        }
    }
}

/* GROUP values of a row from value i on, zeros beyond its end. */
INLINE void load_group(const void *row, long i, long inputs, float *value, int from) {
    if (i + GROUP <= inputs) SIMD for (int j = 0; j < GROUP; j++) value[j] = get(row, i + j, from);
    else for (int j = 0; j < GROUP; j++) value[j] = i + j < inputs ? get(row, i + j, from) : 0.0f;
}

/* Rows of a matrix [O, I], at most 16 of them, into the lanes from `output` on of panels of `outputs` outputs. */
INLINE void pack_some(const void *x, long rows, long inputs, int from, char *panels, long output, long outputs, int type) {
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
                for (int j = 0; j < count; j++) ((uint16_t *)to)[j * wide + lane + o] = half[j];
            } else {
                int8_t whole[GROUP];
                _Pragma("omp simd reduction(max : largest)")
                for (int j = 0; j < GROUP; j++) largest = fabsf(value[j]) > largest ? fabsf(value[j]) : largest;
                uint32_t scale = (bits(largest / 127.0f) + 0xffff) >> 16; /* rounded up: none is beyond 127 */
                float inverse = scale ? 1.0f / from_bits(scale << 16) : 0.0f;
                SIMD for (int j = 0; j < GROUP; j++) whole[j] = (int8_t)rintf(value[j] * inverse);
                ((uint16_t *)to)[lane + o] = (uint16_t)scale;
                for (int j = 0; j < GROUP; j++) ((int8_t *)to)[(2 + j) * wide + lane + o] = whole[j];
            }
        }
    }
}
