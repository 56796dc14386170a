/* The data structures of decode.c, and its linear layers: matmuls in pieces for a team of threads, with LoRA adapters
   by row and with the norm before them. kernels/cpu/decode.py mirrors the first structures and packs the weights. */

#include "panels.h"
#include "team.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

enum { KEYS = SIDE * PANEL }; /* keys of one attention step */
enum { QUERY_ROWS = 48 };     /* most queries of a block, over all heads of one key head; more if one token has more */
enum { FEW_ROWS = 4 };             /* with so few rows, every thread normalises all of them rather than wait */

typedef struct { const char *a, *b; const float *gain; long rank; } Adapter; /* rank 0: not on this layer */
typedef struct { const char *panels; const Adapter *adapters; long inputs, outputs, type; } Linear;
typedef struct {
    const float *attention_gain, *mlp_gain, *qkv_bias, *query_gain, *key_gain; /* the last three may be NULL */
    Linear qkv, out;
    Linear gate_up, down;                                /* of a dense layer or the shared expert; or no outputs */
    Linear router, expert_gate_up, expert_down;          /* no outputs: a dense layer; else of the first expert */
    long gate_up_step, down_step;                        /* bytes from one expert to the next */
    const float *correction, *shared_gate;               /* may be NULL */
    char *keys, *values;                                 /* [slots, G] of matrices in panels: [64, K] of 64 keys each; [K, S] */
    long window, num_experts;                            /* window: keys that a query attends to; 0: all */
} Layer;
typedef struct {
    const char *embedding;
    const float *gain, *cosine, *sine; /* the tables [max_tokens, pairs] */
    const Layer *layers;
    Linear head;
    long embedding_type, cache_type, num_layers, width, query_heads, key_heads, head_dim, pairs;
    long num_slots, max_tokens, vocab_size, num_adapters, largest_rank, num_chosen, sigmoid, normalised;
    float epsilon, scaling;
} Decoder;
typedef struct {
    const int32_t *slot, *position, *id, *adapter, *logit_row; /* adapter: -1, or NULL, for the base alone */
    long rows, num_logit_rows;
    float *logits; /* [num_wanted, head.outputs] */
} Rows;

/* Inputs of linear layers: in float32, or rounded for bfloat16 matrices (see rows_type); unused ones are NULL. */
typedef struct { float *x; uint16_t *rounded; long step; } Values;

INLINE const void *for_type(const Values *v, int type) {
    return rows_type(type) == BFLOAT16 ? (const void *)v->rounded : v->x;
}

/* The state of a pass, shared by its threads; widths are multiples of a panel. */
typedef struct {
    const Decoder *model;
    const int32_t *slot, *position, *id, *adapter, *logit_row;
    long rows, num_logit_rows, num_runs, num_blocks, separate_slots, num_active;
    float *logits;
    Values normal, attn_out, inner, expert_in, expert_inner;
    float *x, *qkv, *lora, *lora_inner, *scratch;
    float *score, *weight, *shared, *expert_out; /* of mixtures; of (row, expert) pairs, as expert_in */
    int32_t *expert, *place, *end, *active;
    int32_t *run, *block; /* starts of runs with one adapter, and of blocks of one slot; and the end */
    uint8_t *has_lora;
    const float **lora_gain;
} State;
typedef struct { Team team; State state; } Pass;

INLINE long round_up(long x, long of) { return (x + of - 1) / of * of; }
INLINE long lmax(long a, long b) { return a > b ? a : b; }
INLINE long lmin(long a, long b) { return a < b ? a : b; }
INLINE Panels weights(const Linear *l) { return panels_of(l->panels, l->inputs, l->outputs, (int)l->type); }
INLINE long num_pieces(const Member *t, long items) { return lmin(items, (long)t->count * PIECES_PER_THREAD); }
/* The first item of piece i; bound(items, pieces, i + 1) is its end. */
INLINE long bound(long items, long pieces, long i) { return items * i / pieces; }

/* --- Rows --------------------------------------------------------------------------------------------------------- */

INLINE float sum_of(const Floats *lanes) {
    float value[PANEL];
    memcpy(value, lanes, sizeof value);
    for (int half = PANEL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) value[i] += value[i + half];
    return value[0];
}

/* x . y in a fixed order. */
INLINE float dot(const float *x, const float *y, long count) {
    Floats lanes[VECTORS];
    memset(lanes, 0, sizeof lanes);
    long i = 0;
    for (; i + PANEL <= count; i += PANEL)
        for (int v = 0; v < VECTORS; v++)
            lanes[v] = add_products(lanes[v], *(const Floats *)(x + i + v * WIDTH),
                                    *(const Floats *)(y + i + v * WIDTH), FLOAT32);
    float rest = 0.0f;
    for (; i < count; i++) rest = multiply_add(x[i], y[i], rest);
    return sum_of(lanes) + rest;
}

/* out = x / sqrt(mean(x^2) + epsilon) * gain; values from `count` to `wide` are 0. */
static void normalise(const float *x, const float *gain, float *out, long count, long wide, float epsilon) {
    float scale = 1.0f / sqrtf(dot(x, x, count) / (float)count + epsilon);
    SIMD for (long i = 0; i < wide; i++) out[i] = x[i] * scale * gain[i];
}

/* Normalises rows from..to of `index` (NULL: of all). */
static void normalise_rows(const State *s, const float *gain, const int32_t *index, long from, long to,
                           const Values *out) {
    long width = s->model->width, wide = round_up(width, PANEL);
    for (long r = from; r < to; r++) {
        float *normal = out->x + r * out->step;
        normalise(s->x + (index ? index[r] : r) * wide, gain, normal, width, wide, s->model->epsilon);
        if (out->rounded) SIMD for (long i = 0; i < wide; i++) put(out->rounded + r * out->step, i, normal[i], BFLOAT16);
    }
}

INLINE long max_queries(const Decoder *m) { return lmax(QUERY_ROWS, m->query_heads / m->key_heads); }
/* Floats of a thread's scratch: attention's queries, outputs, scores and sums; or a few rows, and these rounded. */
INLINE long scratch_size(const Decoder *m) {
    long attention = max_queries(m) * (2 * round_up(m->head_dim, PANEL) + KEYS + 4);
    return round_up(lmax(attention, 2 * FEW_ROWS * round_up(m->width, PANEL)), 2 * PANEL);
}

/* --- Linear layers ------------------------------------------------------------------------------------------------ */

/* How a matmul is divided into pieces: `down` blocks of `high` rows times `across` blocks of columns. */
typedef struct { long high, down, across, threads; } Grid;

static Grid grid_of(const Member *t, long rows, const Panels *w) {
    long sides = (w->panels + SIDE - 1) / SIDE, pieces = (long)t->count * PIECES_PER_THREAD;
    long cached = rows_in_cache(w->inputs, w->type);
    Grid g = {0, lmax((rows + cached - 1) / cached, 1), 0, t->count};
    g.across = lmin(sides, (2 * pieces + g.down - 1) / g.down); /* with fewer, threads finish less evenly */
    if (t->count > 1 && g.across * g.down < pieces) /* more threads than columns */
        g.down = lmax(g.down, lmin(pieces / g.across, rows / (4 * MAX_ROWS)));
    g.high = round_up((rows + g.down - 1) / g.down, MAX_ROWS);
    g.down = lmax((rows + g.high - 1) / g.high, 1);
    return g;
}

/* Multiplies with block `column` of the `across` blocks of a matrix's columns. */
static void multiply_part(const Values *in, long row, long rows, const Panels *w, long column, long across,
                          const Sink *to) {
    long sides = (w->panels + SIDE - 1) / SIDE;
    multiply(for_type(in, w->type), in->step, row, rows, w, bound(sides, across, column) * SIDE,
             lmin(bound(sides, across, column + 1) * SIDE, w->panels), to);
}

/* One piece. Prefetches where its thread will continue if all are equally fast (after the last columns comes the matrix
   that was packed next, which is read next). */
static void multiply_piece(const Grid *g, long i, const Values *in, long rows, const Panels *w, const Sink *to) {
    long row = i / g->across * g->high, sides = (w->panels + SIDE - 1) / SIDE;
    Panels part = *w;
    part.after = w->data + bound(sides, g->across, i % g->across + g->threads) * w->side_bytes;
    multiply_part(in, row, lmin(g->high, rows - row), &part, i % g->across, g->across, to);
}

/* Multiplies a run of rows with one of its adapter's two matrices, into s->lora_inner or s->lora. */
static void adapt_run(State *s, const Linear *l, const Values *in, long first, long last, int second) {
    const Adapter *a = s->adapter[first] < 0 ? 0 : l->adapters + s->adapter[first];
    long wide = s->model->largest_rank;
    int is_active = a && a->rank;
    for (long r = first; r < last; r++) {
        s->has_lora[r] = (uint8_t)is_active;
        s->lora_gain[r] = is_active ? a->gain : 0;
    }
    if (!is_active) return;
    Values lora_inner = {s->lora_inner, 0, wide};
    Sink to_inner = {.out = s->lora_inner, .step = wide}, to_lora = {.out = s->lora, .step = l->outputs};
    Panels down = panels_of(a->a, l->inputs, round_up(a->rank, PANEL), FLOAT32);
    Panels up = panels_of(a->b, a->rank, l->outputs, FLOAT32);
    multiply_part(second ? &lora_inner : in, first, last - first, second ? &up : &down, 0, 1,
                  second ? &to_lora : &to_inner);
}

/* A linear layer with adapters by row. */
static void linear(Member *t, State *s, const Linear *l, Values in, Sink sink) {
    if (s->num_runs && l->adapters) {
        sink.lora = s->lora;
        sink.lora_step = l->outputs;
        sink.gain = s->lora_gain;
        sink.has_lora = s->has_lora;
        for (int second = 0; second < 2; second++)
            FOR_PIECES(t, i, s->num_runs) adapt_run(s, l, &in, s->run[i], s->run[i + 1], second);
    }
    Panels w = weights(l);
    Grid g = grid_of(t, s->rows, &w);
    FOR_PIECES(t, i, g.down * g.across) multiply_piece(&g, i, &in, s->rows, &w, &sink);
}

/* Normalises rows `index` of x (NULL: all), then applies a layer; each thread normalises few rows for itself. */
static void normalised_linear(Member *t, State *s, const float *gain, const int32_t *index, long rows, const Linear *l,
                              Sink sink) {
    long wide = round_up(s->model->width, PANEL), local = rows <= FEW_ROWS && !s->num_runs;
    Values normal = s->normal;
    if (local) {
        normal.x = s->scratch + t->number * scratch_size(s->model);
        if (normal.rounded) normal.rounded = (uint16_t *)(normal.x + FEW_ROWS * wide);
    } else {
        long pieces = num_pieces(t, rows);
        FOR_PIECES(t, i, pieces)
            normalise_rows(s, gain, index, bound(rows, pieces, i), bound(rows, pieces, i + 1), &normal);
        if (!index) { linear(t, s, l, normal, sink); return; }
    }
    Panels w = weights(l);
    Grid g = grid_of(t, rows, &w);
    FOR_PIECES(t, i, g.down * g.across) {
        if (local) normalise_rows(s, gain, index, 0, rows, &normal);
        local = 0;
        multiply_piece(&g, i, &normal, rows, &w, &sink);
    }
}
