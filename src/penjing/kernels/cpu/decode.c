/* A decoder's forward pass over rows of many sequences in one call: embedding, all blocks, last norm, head.

   A row is one token of one sequence. Keys and values of earlier tokens are in slots, one per sequence. Threads share
   the work of every stage (team.h). A row's results are bit-identical for any other rows in the pass and any number of
   threads. */

#include "linear.h"

/* --- Embedding ---------------------------------------------------------------------------------------------------- */

static void embed(Member *t, State *s) {
    const Decoder *m = s->model;
    long wide = round_up(m->width, PANEL), pieces = num_pieces(t, s->rows);
    FOR_PIECES(t, i, pieces)
        for (long r = bound(s->rows, pieces, i); r < bound(s->rows, pieces, i + 1); r++) {
            const void *row = row_of(m->embedding, s->id[r] * m->width, (int)m->embedding_type);
            float *x = s->x + r * wide;
            for (long j = 0; j < wide; j++) x[j] = j < m->width ? get(row, j, (int)m->embedding_type) : 0.0f;
        }
}

/* --- Attention ---------------------------------------------------------------------------------------------------- */

/* The keys and values of one head of a slot: matrices in panels, of type m->cache_type. */
INLINE char *keys_of(const Decoder *m, const Layer *l, long slot, long head) {
    long type = m->cache_type, size = round_up(m->head_dim, interleave((int)type));
    return l->keys + bytes((slot * m->key_heads + head) * round_up(m->max_tokens, KEYS) * size, (int)type);
}
INLINE char *values_of(const Decoder *m, const Layer *l, long slot, long head) {
    long size = round_up(m->head_dim, PANEL);
    return l->values + bytes((slot * m->key_heads + head) * round_up(m->max_tokens, KEYS) * size, (int)m->cache_type);
}

/* Stores a key as one output of the key matrix. */
INLINE void put_key(const Decoder *m, char *keys, long position, const float *x, int type) {
    long size = m->head_dim, wide = round_up(size, interleave(type));
    keys += bytes(position / KEYS * KEYS * wide, type);
    for (long i = 0; i < wide; i++) put(keys, place_of(i, position % KEYS, KEYS, type), i < size ? x[i] : 0.0f, type);
}

/* Stores a value as one input of the value matrix. alone: the pair's other half is not there yet, and set to 0. */
INLINE void put_value(const Decoder *m, char *values, long position, const float *x, int alone, int type) {
    long size = m->head_dim, wide = round_up(size, PANEL);
    for (long i = 0; i < size; i++) put(values, place_of(position, i, wide, type), x[i], type);
    for (long i = 0; alone && i < wide; i++) put(values, place_of(position + 1, i, wide, type), 0.0f, type);
}

/* Stores a key or a value in its slot. */
INLINE void store_kv(const State *s, const Layer *l, long row, long head, const float *x, int is_value, int type) {
    const Decoder *m = s->model;
    long position = s->position[row], slot = s->slot[row];
    int is_last = row + 1 == s->rows || s->slot[row + 1] != slot;
    if (!is_value) put_key(m, keys_of(m, l, slot, head), position, x, type);
    else put_value(m, values_of(m, l, slot, head), position, x,
                   is_last && position % interleave(type) < interleave(type) - 1, type);
}

/* Bias, norm and RoPE of one head of a row; stores keys and values in the slot. Heads: queries, keys, values. */
static void prepare_head(const State *s, const Layer *l, long row, long head) {
    const Decoder *m = s->model;
    long size = m->head_dim, pairs = m->pairs, queries = m->query_heads, keys = m->key_heads;
    float *x = s->qkv + row * l->qkv.outputs + head * size;
    if (l->qkv_bias) for (long i = 0; i < size; i++) x[i] += l->qkv_bias[head * size + i];
    if (head < queries + keys) {
        const float *gain = head < queries ? l->query_gain : l->key_gain;
        if (gain) normalise(x, gain, x, size, size, m->epsilon);
        const float *cosine = m->cosine + s->position[row] * pairs, *sine = m->sine + s->position[row] * pairs;
        SIMD for (long i = 0; i < pairs; i++) {
            float first = x[i], second = x[i + pairs];
            x[i] = first * cosine[i] - second * sine[i];
            x[i + pairs] = second * cosine[i] + first * sine[i];
        }
    }
    if (head < queries) {
        float scale = 1.0f / sqrtf((float)size);
        SIMD for (long i = 0; i < size; i++) x[i] *= scale;
    } else {
        int is_value = head >= queries + keys;
        WITH_TYPE(store_kv, m->cache_type, s, l, row, head - queries - is_value * keys, x, is_value);
    }
}

/* One step of a query's online softmax: turns its scores of KEYS keys, of which it sees first..last, into weights in
   place. Earlier sums must be multiplied by `scale`. */
INLINE void softmax_step(float *score, long first, long last, float *largest, float *sum, float *scale, int type) {
    float top = *largest, total[PANEL] = {0}, weight[PANEL];
    SIMD for (long i = 0; i < KEYS; i++) score[i] = i >= first && i <= last ? score[i] : -INFINITY;
    _Pragma("omp simd reduction(max : top)")
    for (long i = 0; i < KEYS; i++) top = score[i] > top ? score[i] : top;
    float above = top < -1e30f ? -1e30f : top; /* no visible key so far */
    *scale = exponential(*largest - above);
    for (long i = 0; i < KEYS; i += PANEL) {
        SIMD for (int j = 0; j < PANEL; j++) total[j] += weight[j] = exponential(score[i + j] - above);
        SIMD for (int j = 0; j < PANEL; j++) put(score, i + j, weight[j], type);
    }
    for (int half = PANEL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) total[i] += total[i + half];
    *sum = *sum * *scale + total[0];
    *largest = top;
}

/* Copies a row to another type, padded with zeros up to `wide`. */
INLINE void copy_row(const float *x, long count, long wide, void *to, int type) {
    SIMD for (long i = 0; i < count; i++) put(to, i, x[i], type);
    for (long i = count; i < wide; i++) put(to, i, 0.0f, type);
}

/* Stores a query's attention output, `size` values of a row from `column` on. */
INLINE void store_attn_out(const State *s, long row, long column, const float *out, float share, long size) {
    const Values *to = &s->attn_out;
    long place = row * to->step + column, end = row * to->step + s->model->query_heads * s->model->head_dim;
    if (to->x) {
        SIMD for (long i = 0; i < size; i++) to->x[place + i] = out[i] * share;
        if (!column && end % 2) to->x[end] = 0; /* the pair's other half: widths are even */
    }
    if (to->rounded) {
        SIMD for (long i = 0; i < size; i++) put(to->rounded + place, i, out[i] * share, BFLOAT16);
        if (!column && end % 2) to->rounded[end] = 0;
    }
}

/* The first keys and values that piece i, one block of rows and one key head, attends to. */
typedef struct { const char *keys, *values; long start; } KVStart;

INLINE KVStart kv_start(const State *s, const Layer *l, long i) {
    const Decoder *m = s->model;
    int type = (int)m->cache_type;
    long head = i % m->key_heads, row = s->block[s->num_blocks - 1 - i / m->key_heads];
    long start = l->window ? lmax(0, s->position[row] + 1 - l->window) / KEYS * KEYS : 0;
    return (KVStart){keys_of(m, l, s->slot[row], head) + bytes(start * round_up(m->head_dim, interleave(type)), type),
                  values_of(m, l, s->slot[row], head) + bytes(start * round_up(m->head_dim, PANEL), type), start};
}

/* Prefetches, in a query's softmax step, its part of the second half of the next keys or values. Prefetching all in the
   matmuls would exceed memory bandwidth, and stall. */
INLINE void prefetch_rest(const char *next, long count, long q, long queries) {
    for (long at = count / 2 * (queries + q) / queries; at < count / 2 * (queries + q + 1) / queries; at += 64)
        __builtin_prefetch(next + at, 0, 2);
}

/* softmax(q k^T) v of a block of rows of one sequence and the query heads of one key head, in one pass over the keys.
   Steps are aligned to positions, so a query's result does not depend on its block. next: where this thread
   probably continues; type: of the cache. */
INLINE void attend_block(const State *s, const Layer *l, long i, KVStart kv, KVStart next, float *scratch, int type) {
    const Decoder *m = s->model;
    const int x_type = rows_type(type);
    long head = i % m->key_heads, block = s->num_blocks - 1 - i / m->key_heads, row = s->block[block];
    long shared = m->query_heads / m->key_heads, queries = (s->block[block + 1] - row) * shared;
    long size = m->head_dim, wide = round_up(size, PANEL), end = s->position[s->block[block + 1] - 1] + 1;
    void *query = scratch;
    float *score = scratch + max_queries(m) * wide;
    float *sum = score + max_queries(m) * KEYS, *out = sum + 3 * max_queries(m);
    float *largest = sum + queries, *scale = largest + queries;
    for (long q = 0; q < queries; q++) {
        const float *from = s->qkv + (row + q / shared) * l->qkv.outputs + (head * shared + q % shared) * size;
        copy_row(from, size, wide, out_row_of(query, q * wide, x_type), x_type);
        memset(out + q * wide, 0, (size_t)wide * 4);
        largest[q] = -INFINITY;
        sum[q] = 0.0f;
    }
    long key_bytes = bytes(KEYS * round_up(size, interleave(type)), type), values_bytes = bytes(KEYS * wide, type);
    long line = value_bytes(type);
    Panels k = {kv.keys, size, SIDE, key_bytes, KEYS * line, type, 0};
    Panels v = {kv.values, KEYS, wide / PANEL, SIDE * PANEL * line, wide * line, type, 0};
    Sink scores = {.out = score, .step = KEYS}, outs = {.out = out, .step = wide, .mode = RESCALE, .scale = scale};
    for (long start = kv.start; start < end; start += KEYS, k.data = k.after, v.data = v.after) {
        v.inputs = lmin(KEYS, end - start);
        k.after = start + KEYS < end ? k.data + key_bytes : next.keys;
        v.after = start + KEYS < end ? v.data + values_bytes : next.values;
        multiply(query, wide, 0, queries, &k, 0, SIDE, &scores);
        for (long q = 0; q < queries; q++) {
            long last = s->position[row + q / shared], first = l->window ? last + 1 - l->window : 0;
            prefetch_rest(k.after, key_bytes, q, queries);
            prefetch_rest(v.after, values_bytes, q, queries);
            softmax_step(score + q * KEYS, first - start, last - start, largest + q, sum + q, scale + q, x_type);
        }
        multiply(score, KEYS * 4 / bytes(1, x_type), 0, queries, &v, 0, v.panels, &outs);
    }
    for (long q = 0; q < queries; q++)
        store_attn_out(s, row + q / shared, (head * shared + q % shared) * size, out + q * wide, 1.0f / sum[q], size);
}

/* The heads of a row that share one key head. */
static void prepare_heads(const State *s, const Layer *l, long row, long head) {
    long queries = s->model->query_heads, keys = s->model->key_heads, shared = queries / keys;
    for (long h = head * shared; h < (head + 1) * shared; h++) prepare_head(s, l, row, h);
    prepare_head(s, l, row, queries + head);
    prepare_head(s, l, row, queries + keys + head);
}

static void attention(Member *t, State *s, const Layer *l) {
    const Decoder *m = s->model;
    long heads = m->key_heads, items = s->rows * heads, pieces = num_pieces(t, items), last = s->num_blocks * heads;
    normalised_linear(t, s, l->attention_gain, 0, s->rows, &l->qkv, (Sink){.out = s->qkv, .step = l->qkv.outputs});
    if (!s->separate_slots) /* blocks attend to keys of other blocks */
        FOR_PIECES(t, i, pieces)
            for (long j = bound(items, pieces, i); j < bound(items, pieces, i + 1); j++)
                prepare_heads(s, l, j / heads, j % heads);
    FOR_PIECES(t, i, last) {
        long block = s->num_blocks - 1 - i / heads;
        float *scratch = s->scratch + t->number * scratch_size(m);
        KVStart kv = kv_start(s, l, i), next = kv_start(s, l, lmin(i + t->count, last - 1));
        for (long r = s->block[block]; s->separate_slots && r < s->block[block + 1]; r++) prepare_heads(s, l, r, i % heads);
        if (m->cache_type == BFLOAT16) attend_block(s, l, i, kv, next, scratch, BFLOAT16);
        else attend_block(s, l, i, kv, next, scratch, FLOAT32);
    }
    linear(t, s, &l->out, s->attn_out, (Sink){.out = s->x, .step = l->out.outputs, .mode = ADD});
}

/* --- MLP and mixture of experts ------------------------------------------------------------------------------------ */

/* Selects a row's experts and their weights. */
static void route(const State *s, const Layer *l, long row) {
    const Decoder *m = s->model;
    long count = l->router.outputs, chosen = m->num_chosen, experts = l->num_experts;
    float *score = s->score + row * count, sum = 0.0f, top = -INFINITY;
    if (m->sigmoid) {
        for (long e = 0; e < experts; e++) score[e] = 1.0f / (1.0f + exponential(-score[e]));
    } else {
        for (long e = 0; e < experts; e++) top = score[e] > top ? score[e] : top;
        for (long e = 0; e < experts; e++) sum += score[e] = exponential(score[e] - top);
        for (long e = 0; e < experts; e++) score[e] /= sum;
    }
    int32_t *expert = s->expert + row * chosen;
    float *weight = s->weight + row * chosen, total = 0.0f;
    for (long k = 0; k < chosen; k++) {
        long best = -1;
        float highest = 0.0f;
        for (long e = 0; e < experts; e++) {
            float value = score[e] + (l->correction ? l->correction[e] : 0.0f);
            int taken = 0;
            for (long j = 0; j < k; j++) taken |= expert[j] == e;
            if (!taken && (best < 0 || value > highest)) { best = e; highest = value; }
        }
        expert[k] = (int32_t)best;
        total += weight[k] = score[best];
    }
    for (long k = 0; k < chosen; k++)
        weight[k] = (m->normalised ? weight[k] / (total + 1e-20f) : weight[k]) * m->scaling;
}

/* Sorts (row, expert) pairs by expert; end[e] is where expert e ends, and `active` lists experts with rows. */
static void sort_pairs(State *s, const Layer *l) {
    long pairs = s->rows * s->model->num_chosen;
    memset(s->end, 0, (size_t)(l->num_experts + 1) * sizeof *s->end);
    for (long p = 0; p < pairs; p++) s->end[s->expert[p] + 1]++;
    s->num_active = 0;
    for (long e = 0; e < l->num_experts; e++) {
        if (s->end[e + 1]) s->active[s->num_active++] = (int32_t)e;
        s->end[e + 1] += s->end[e];
    }
    for (long p = 0; p < pairs; p++) s->place[p] = s->end[s->expert[p]]++;
}

/* One linear layer of all experts. */
static void experts_linear(Member *t, State *s, const Linear *first, long expert_bytes, Values in, Sink sink) {
    Panels w = weights(first);
    long sides = (w.panels + SIDE - 1) / SIDE, active = lmax(s->num_active, 1);
    long across = lmax(lmin(sides, num_pieces(t, active * sides) / active), 1);
    FOR_PIECES(t, i, active * across) {
        long e = s->active[i / across], start = e ? s->end[e - 1] : 0;
        Panels part = w;
        part.data += e * expert_bytes;
        multiply_part(&in, start, s->end[e] - start, &part, i % across, across, &sink);
    }
}

/* Copies a normalised row to the inputs of its experts. */
static void gather_inputs(const State *s, long row) {
    const Values *from = &s->normal, *to = &s->expert_in;
    for (long pair = row * s->model->num_chosen; pair < (row + 1) * s->model->num_chosen; pair++) {
        long place = s->place[pair] * to->step, start = row * from->step;
        if (to->x) memcpy(to->x + place, from->x + start, (size_t)to->step * sizeof *to->x);
        if (to->rounded) memcpy(to->rounded + place, from->rounded + start, (size_t)to->step * sizeof *to->rounded);
    }
}

/* Adds the weighted sum of a row's experts, and the shared expert, to x. */
static void combine(State *s, const Layer *l, long r) {
    long chosen = s->model->num_chosen, wide = round_up(s->model->width, PANEL);
    float gate = 1.0f;
    if (l->shared_gate) gate = 1.0f / (1.0f + exponential(-dot(s->normal.x + r * wide, l->shared_gate, s->model->width)));
    for (long i = 0; i < wide; i++) {
        float sum = 0.0f;
        for (long k = r * chosen; k < (r + 1) * chosen; k++)
            sum += s->weight[k] * s->expert_out[s->place[k] * wide + i];
        if (l->down.outputs) sum += gate * s->shared[r * wide + i];
        s->x[r * wide + i] += sum;
    }
}

INLINE Sink swiglu_to(const Values *v) {
    return (Sink){.out = v->x, .step = v->step, .mode = SWIGLU, .rounded = v->rounded};
}

static void mixture(Member *t, State *s, const Layer *l) {
    const Decoder *m = s->model;
    long rows = s->rows, wide = round_up(m->width, PANEL), pieces = num_pieces(t, rows);
    FOR_PIECES(t, i, pieces)
        normalise_rows(s, l->mlp_gain, 0, bound(rows, pieces, i), bound(rows, pieces, i + 1), &s->normal);
    linear(t, s, &l->router, s->normal, (Sink){.out = s->score, .step = l->router.outputs});
    FOR_PIECES(t, i, pieces)
        for (long r = bound(rows, pieces, i); r < bound(rows, pieces, i + 1); r++) route(s, l, r);
    FOR_PIECES(t, i, 1) sort_pairs(s, l);
    FOR_PIECES(t, i, pieces)
        for (long r = bound(rows, pieces, i); r < bound(rows, pieces, i + 1); r++) gather_inputs(s, r);
    experts_linear(t, s, &l->expert_gate_up, l->gate_up_step, s->expert_in, swiglu_to(&s->expert_inner));
    experts_linear(t, s, &l->expert_down, l->down_step, s->expert_inner, (Sink){.out = s->expert_out, .step = wide});
    if (l->down.outputs) {
        linear(t, s, &l->gate_up, s->normal, swiglu_to(&s->inner));
        linear(t, s, &l->down, s->inner, (Sink){.out = s->shared, .step = wide});
    }
    FOR_PIECES(t, i, pieces)
        for (long r = bound(rows, pieces, i); r < bound(rows, pieces, i + 1); r++) combine(s, l, r);
}

static void mlp(Member *t, State *s, const Layer *l) {
    normalised_linear(t, s, l->mlp_gain, 0, s->rows, &l->gate_up, swiglu_to(&s->inner));
    linear(t, s, &l->down, s->inner, (Sink){.out = s->x, .step = l->down.outputs, .mode = ADD});
}

/* --- The pass ----------------------------------------------------------------------------------------------------- */

/* The work of every thread of a pass. Outside FOR_PIECES it must not read memory that is freed with the pass. */
static void run(Member *t, void *state) {
    State *s = state;
    const Decoder *m = s->model;
    embed(t, s);
    for (const Layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        attention(t, s, l);
        (l->num_experts ? mixture : mlp)(t, s, l);
    }
    if (s->num_logit_rows)
        normalised_linear(t, s, m->gain, s->logit_row, s->num_logit_rows, &m->head,
                          (Sink){.out = s->logits, .step = m->head.outputs});
}

/* Finds runs of rows with one adapter, and blocks of rows of one slot. */
static void find_runs(State *s) {
    const Decoder *m = s->model;
    long limit = max_queries(m) / (m->query_heads / m->key_heads);
    s->num_runs = s->num_blocks = 0;
    s->separate_slots = 1;
    for (long r = 0; r < s->rows; r++) {
        if (s->adapter && (!r || s->adapter[r] != s->adapter[r - 1] || r - s->run[s->num_runs - 1] >= limit))
            s->run[s->num_runs++] = (int32_t)r;
        int same = r && s->slot[r] == s->slot[r - 1];
        if (same && r - s->block[s->num_blocks - 1] < limit) continue;
        s->separate_slots &= !same;
        s->block[s->num_blocks++] = (int32_t)r;
    }
    s->run[s->num_runs] = s->block[s->num_blocks] = (int32_t)s->rows;
}

/* Lays out a pass's memory from `at` on (NULL: only to compute its size); returns its end. */
static char *lay_out(State *s, const Decoder *m, long rows, long threads, char *at) {
    long inner = 0, qkv = 0, lora = 0, experts = 0, expert_inner = 0, wide = round_up(m->width, PANEL);
    for (const Layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        inner = lmax(inner, l->gate_up.outputs / 2);
        qkv = lmax(qkv, l->qkv.outputs);
        lora = lmax(lora, lmax(lmax(l->gate_up.outputs, l->qkv.outputs), lmax(l->down.outputs, l->out.outputs)));
        experts = lmax(experts, l->router.outputs);
        expert_inner = lmax(expert_inner, l->expert_gate_up.outputs / 2);
    }
    long pairs = experts ? rows * m->num_chosen : 0;
    long rounded = rows_type((int)m->head.type) == BFLOAT16, exact = !rounded || m->largest_rank;
    if (!m->largest_rank) lora = 0;
#define LAY(name, count) \
    do { s->name = (count) > 0 ? (void *)at : 0; at += round_up((long)sizeof *s->name * (count), 64); } while (0)
#define LAY_VALUES(name, rows, width, in_float) \
    do { s->name.step = width; LAY(name.x, in_float ? (rows) * (width) : 0); \
         LAY(name.rounded, rounded ? (rows) * (width) : 0); } while (0)
    LAY(x, rows * wide);
    LAY_VALUES(normal, rows, wide, 1);
    LAY_VALUES(attn_out, rows, round_up(m->query_heads * m->head_dim, PANEL), exact);
    LAY_VALUES(inner, rows, inner, exact);
    LAY_VALUES(expert_in, pairs, wide, !rounded);
    LAY_VALUES(expert_inner, pairs, expert_inner, !rounded);
    LAY(qkv, rows * qkv);
    LAY(lora, rows * lora);
    LAY(lora_inner, rows * m->largest_rank);
    LAY(scratch, threads * scratch_size(m));
    LAY(score, rows * experts);
    LAY(weight, pairs);
    LAY(shared, experts ? rows * wide : 0);
    LAY(expert_out, pairs * wide);
    LAY(expert, pairs);
    LAY(place, pairs);
    LAY(end, experts + 1);
    LAY(has_lora, rows);
    LAY(lora_gain, rows);
    LAY(active, experts + 1);
    LAY(run, rows + 1);
    LAY(block, rows + 1);
#undef LAY_VALUES
#undef LAY
    return at;
}

/* Bytes of memory for a pass over `rows`: the number of rows or of logit rows, whichever is larger. */
long penjing_decode_bytes(const Decoder *m, long rows, int threads) {
    State s;
    return lay_out(&s, m, rows, threads, 0) - (char *)0;
}

/* Allocates the state of a decoder's passes, with a team of threads; NULL: out of memory. */
void *penjing_decode_open(const Decoder *m) {
    Pass *pass = aligned_alloc(64, (size_t)round_up(sizeof *pass, 64));
    if (!pass) return 0;
    memset(pass, 0, sizeof *pass);
    pass->state.model = m;
    pass->team.work = run;
    pass->team.context = &pass->state;
    return pass;
}

void penjing_decode_close(void *pass) {
    stop_team(&((Pass *)pass)->team);
    free(pass);
}

/* One pass. memory: of `penjing_decode_bytes`, aligned to 64 bytes. Returns 2 for a slot, position, id, adapter or
   logit row that is out of range. */
int penjing_decode(void *pass, const Rows *input, void *memory, int threads) {
    State *s = &((Pass *)pass)->state;
    const Decoder *m = s->model;
    for (long r = 0; r < input->rows; r++) {
        if (input->slot[r] < 0 || input->slot[r] >= m->num_slots) return 2;
        if (input->position[r] < 0 || input->position[r] >= m->max_tokens) return 2;
        if (input->id[r] < 0 || input->id[r] >= m->vocab_size) return 2;
        if (input->adapter && input->adapter[r] >= m->num_adapters) return 2;
    }
    for (long i = 0; i < input->num_logit_rows; i++)
        if (input->logit_row[i] < 0 || input->logit_row[i] >= input->rows) return 2;
    if (!input->rows) return 0;
    s->slot = input->slot;
    s->position = input->position;
    s->id = input->id;
    s->adapter = m->num_adapters ? input->adapter : 0;
    s->logit_row = input->logit_row;
    s->rows = input->rows;
    s->num_logit_rows = input->num_logit_rows;
    s->logits = input->logits;
    threads = (int)lmin(threads, MAX_THREADS);
    lay_out(s, m, lmax(input->rows, input->num_logit_rows), threads, memory);
    find_runs(s);
    run_team(&((Pass *)pass)->team, threads);
    return 0;
}

/* Packs a matrix [O, I] into panels of `outputs` outputs: its panel p, the first of which starts with `start` zeros,
   becomes panel p * stride + offset. */
void penjing_pack(const void *x, long rows, long inputs, int from_type, char *panels, long outputs, long start,
                  long stride, long offset, int type, int threads) {
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")
    for (long p = start / PANEL; p <= (start + rows - 1) / PANEL; p++) {
        long first = lmax(p * PANEL, start), last = lmin((p + 1) * PANEL, start + rows);
        const void *source = row_of(x, (first - start) * inputs, from_type);
        long output = (p * stride + offset) * PANEL + first % PANEL, rows_here = last - first;
#define PACK(from_type) \
        do { if (type == INT8) pack_rows(source, rows_here, inputs, from_type, panels, output, outputs, INT8); \
             else if (type == BFLOAT16) pack_rows(source, rows_here, inputs, from_type, panels, output, outputs, BFLOAT16); \
             else pack_rows(source, rows_here, inputs, from_type, panels, output, outputs, FLOAT32); } while (0)
        if (from_type == BFLOAT16) PACK(BFLOAT16); else PACK(FLOAT32);
    }
}

/* Requests huge pages: a pass reads all weights, and fewer pages mean fewer TLB misses and page faults. */
void penjing_use_large_pages(void *memory, long count) {
#ifdef MADV_HUGEPAGE
    madvise(memory, (size_t)count, MADV_HUGEPAGE); /* if refused, pages stay small */
#else
    (void)memory, (void)count;
#endif
}
