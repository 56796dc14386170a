/* Shared by the CPU kernels.

   Arithmetic is in float32 for every storage type. Callers of INLINE functions pass the type as a constant, so that the
   compiler makes a specialised loop for each. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HAS_TILES
#endif

enum { FLOAT32, BFLOAT16 };
enum { TILE = 64 };  /* positions, as in cpu/ops.py */
enum { LANES = 16 }; /* most values of a vector; a remainder is processed one by one */

#define INLINE static inline __attribute__((always_inline))
#define SIMD _Pragma("omp simd")
#define ROWS(threads) _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")

/* f(..., type) and f(..., type1, type2) with constants in place of the types. */
#define WITH_TYPE(f, t, ...) \
    do { if ((t) == BFLOAT16) f(__VA_ARGS__, BFLOAT16); else f(__VA_ARGS__, FLOAT32); } while (0)
#define WITH_TYPES(f, t, u, ...) \
    do { \
        if ((t) == BFLOAT16 && (u) == BFLOAT16) f(__VA_ARGS__, BFLOAT16, BFLOAT16); \
        else if ((t) == BFLOAT16) f(__VA_ARGS__, BFLOAT16, FLOAT32); \
        else if ((u) == BFLOAT16) f(__VA_ARGS__, FLOAT32, BFLOAT16); \
        else f(__VA_ARGS__, FLOAT32, FLOAT32); \
    } while (0)

INLINE uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

INLINE float get(const void *x, long i, int type) {
    return type == BFLOAT16 ? from_bits((uint32_t)((const uint16_t *)x)[i] << 16) : ((const float *)x)[i];
}

/* To bfloat16 by rounding to nearest, ties to even. NaNs made by arithmetic have zero low bits, and stay NaN. */
INLINE void put(void *x, long i, float value, int type) {
    if (type == BFLOAT16) {
        uint32_t u = bits(value);
        ((uint16_t *)x)[i] = (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
    } else {
        ((float *)x)[i] = value;
    }
}

INLINE long bytes(long count, int type) { return count * (type == BFLOAT16 ? 2 : 4); }
INLINE const void *row_of(const void *x, long i, int type) { return (const char *)x + bytes(i, type); }
INLINE void *out_row_of(void *x, long i, int type) { return (char *)x + bytes(i, type); }

/* a * b + c, rounded once where the processor can. Of the plain expression a compiler makes either, and not always the same
   in two loops. */
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* e^x to within 2e-7 of it: 2^n e^r, |r| <= ln(2) / 2, by Taylor's series. 0 below the least normal number. */
INLINE float exponential(float x) {
    float high = x > 88.0f ? 88.0f : x;
    float shifted = multiply_add(high, 1.44269504f, 12582912.0f); /* 1.5 x 2^23: what is added to it is rounded to a whole number */
    float n = shifted - 12582912.0f;
    float r = multiply_add(-n, 1.42860677e-6f, multiply_add(-n, 0.693145752f, high)); /* the first part is exact */
    float series = 1.38888889e-3f;
    series = multiply_add(r, series, 8.33333333e-3f);
    series = multiply_add(r, series, 4.16666667e-2f);
    series = multiply_add(r, series, 1.66666667e-1f);
    series = multiply_add(r, series, 0.5f);
    series = multiply_add(r, series, 1.0f);
    series = multiply_add(r, series, 1.0f);
    float power = from_bits((bits(shifted) - 0x4B400000u + 127u) << 23);
    return x < -87.0f ? 0.0f : series * power;
}

/* Whether matrix units are used: they exist, and the system allows it. */
extern int penjing_tiles;

#ifdef HAS_TILES
enum { STRIP = 32 }; /* columns, and tokens, of two stacked tiles */

/* Eight tiles of 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} LAYOUT = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* 16 x 16 values of four bytes, transposed. */
INLINE void transpose_rows(__m512i *x) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

/* Packs a strip of x[tokens, width], STRIP columns from `column` and STRIP tokens from `token`, as two tiles of 16
   columns, padded with zeros. transposed: columns become rows, else pairs of tokens do. step: values between tokens;
   row: bytes from one row of a tile to the next. */
INLINE void pack_strip(const uint16_t *x, long tokens, long width, long step, long token, long column, char *out,
                       long row, int transposed) {
    __m512i low, high, tile[2][16];
    uint16_t order[32];
    for (int i = 0; i < 32; i++) order[i] = (uint16_t)(i / 2 + i % 2 * 32); /* 0, 32, 1, 33, ... */
    low = _mm512_loadu_si512(order);
    high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    long columns = width - column < STRIP ? width - column : STRIP;
    __mmask32 here = ~(uint32_t)0 >> (32 - columns);
    for (int i = 0; i < 16; i++, token += 2) {
        const uint16_t *from = x + token * step + column;
        __m512i even = _mm512_maskz_loadu_epi16(token < tokens ? here : 0, from);
        __m512i odd = _mm512_maskz_loadu_epi16(token + 1 < tokens ? here : 0, from + step);
        tile[0][i] = _mm512_permutex2var_epi16(even, low, odd);
        tile[1][i] = _mm512_permutex2var_epi16(even, high, odd);
    }
    for (int half = 0; half < 2; half++) {
        if (transposed) transpose_rows(tile[half]);
        for (int i = 0; i < 16; i++) _mm512_store_si512(out + (half * 16 + i) * row, tile[half][i]);
    }
}
#endif

/* Before a thread's first tile. */
INLINE void begin_thread(void *before) {
#ifdef HAS_TILES
    if (penjing_tiles) { _tile_storeconfig(before); _tile_loadconfig(&LAYOUT); }
#else
    (void)before;
#endif
}

/* As another library may have left it. */
INLINE void end_thread(const void *before) {
#ifdef HAS_TILES
    if (penjing_tiles) _tile_loadconfig(before);
#else
    (void)before;
#endif
}

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLES
#endif
#ifdef HAS_SHUFFLES
typedef uint16_t EightOf16 __attribute__((vector_size(16)));
typedef uint32_t EightOf32 __attribute__((vector_size(32)));

/* 8 x 8 values transposed in three rounds, in which neighbours of 1, 2 and 4 values change places. */
#define TURN_EIGHT(name, Value, Eight) \
    INLINE void name(const Value *x, long step, Value *out, long out_step) { \
        Eight a[8], b[8]; \
        for (int i = 0; i < 8; i++) memcpy(&a[i], x + i * step, sizeof(Eight)); \
        for (int i = 0; i < 8; i += 2) { \
            b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14); \
            b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15); \
        } \
        for (int i = 0; i < 8; i += 4) \
            for (int j = i; j < i + 2; j++) { \
                a[j] = __builtin_shufflevector(b[j], b[j + 2], 0, 1, 8, 9, 4, 5, 12, 13); \
                a[j + 2] = __builtin_shufflevector(b[j], b[j + 2], 2, 3, 10, 11, 6, 7, 14, 15); \
            } \
        for (int j = 0; j < 4; j++) { \
            b[j] = __builtin_shufflevector(a[j], a[j + 4], 0, 1, 2, 3, 8, 9, 10, 11); \
            b[j + 4] = __builtin_shufflevector(a[j], a[j + 4], 4, 5, 6, 7, 12, 13, 14, 15); \
        } \
        for (int i = 0; i < 8; i++) memcpy(out + i * out_step, &b[i], sizeof(Eight)); \
    }
#else
#define TURN_EIGHT(name, Value, Eight) \
    INLINE void name(const Value *x, long step, Value *out, long out_step) { \
        for (int i = 0; i < 8; i++) \
            for (int j = 0; j < 8; j++) out[j * out_step + i] = x[i * step + j]; \
    }
#endif

TURN_EIGHT(transpose_16, uint16_t, EightOf16)
TURN_EIGHT(transpose_32, uint32_t, EightOf32)
