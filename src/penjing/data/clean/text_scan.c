// One pass over a text in UTF-8 for all cleaning rules: what it may contain (flags), counts, and the repetition
// measures of Gopher (arXiv:2112.11446, table A1). text_scan.py has the same in Python and says what each number means.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SPACE, PUNCTUATION, SYMBOL, DIGIT, LATIN, HAN, KANA, HANGUL, OTHER, CLASSES };
enum { INVISIBLE = 1, MOJIBAKE = 2, MAIL = 4, NUMBER = 8, KEY = 16, IPV6 = 32, BOILERPLATE = 64, MARK = 128 };
enum { WORDS = CLASSES, WORD_CHARS, LONG_CHARS, ALPHA_WORDS, CAPITAL_WORDS, STOP_WORDS, LINES, CLOSED_LINES, DUPLICATE_LINES, LINE_CHARS,
       DUPLICATE_CHARS, REPLACED, TAGS, FLAGS, SAME_CHAR, NGRAM_CHARS, TOP_2, TOP_3, TOP_4, DUPLICATE_5, LETTERS = DUPLICATE_5 + 6, VISIBLE, NUMBERS };
enum { MAX_WORDS = 1 << 18 };  // repetition is measured in so many words and lines from the start

typedef struct { uint64_t key; uint32_t count; uint32_t done; } Slot;

static int in(uint32_t c, uint32_t low, uint32_t high) { return c - low <= high - low; }

static int class_above_ascii(uint32_t c) {
    if (in(c, 0x4E00, 0x9FFF) || in(c, 0x3400, 0x4DBF) || in(c, 0xF900, 0xFAFF) || in(c, 0x20000, 0x3FFFF) || c == 0x3007 || c == 0x25A1)
        return HAN;  // also the mark of editors for a lost character

    if (c == 0x85 || c == 0xA0 || c == 0x1680 || in(c, 0x2000, 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
        c == 0x205F || c == 0x3000)
        return SPACE;
    if (c == 0xA1 || c == 0xAB || c == 0xB7 || c == 0xBB || c == 0xBF || in(c, 0x2010, 0x205E) || in(c, 0x3001, 0x3003) ||
        in(c, 0x3008, 0x3011) || in(c, 0x3014, 0x301F) || c == 0x30FB || in(c, 0xFE30, 0xFE4F) || in(c, 0xFF01, 0xFF0F) ||
        in(c, 0xFF1A, 0xFF20) || in(c, 0xFF3B, 0xFF40) || in(c, 0xFF5B, 0xFF65))
        return PUNCTUATION;
    if (in(c, 0xFF10, 0xFF19)) return DIGIT;
    if ((in(c, 0xC0, 0x24F) && c != 0xD7 && c != 0xF7) || in(c, 0x1E00, 0x1EFF) || in(c, 0xFF21, 0xFF3A) ||
        in(c, 0xFF41, 0xFF5A))
        return LATIN;
    if (in(c, 0x3041, 0x3096) || in(c, 0x30A1, 0x30FA) || in(c, 0x30FC, 0x30FF) || in(c, 0x31F0, 0x31FF) ||
        in(c, 0xFF66, 0xFF9D))
        return KANA;
    if (in(c, 0xAC00, 0xD7A3) || in(c, 0x1100, 0x11FF) || in(c, 0x3130, 0x318F)) return HANGUL;
    if (in(c, 0x250, 0x1FFF) || in(c, 0x2C00, 0x2DFF) || in(c, 0xA000, 0xABFF) || in(c, 0xFB00, 0xFDFF) ||
        in(c, 0xFE70, 0xFEFC) || in(c, 0x10000, 0x1CFFF) || in(c, 0x1D400, 0x1D7FF))
        return OTHER;
    return SYMBOL;
}

static uint8_t ascii_class[128];
static uint8_t is_han_stop[0x5200];  // from 0x4E00: function words of modern and of classical Chinese
static const uint16_t HAN_STOPS[] = {
    0x7684, 0x4E86, 0x662F, 0x5728, 0x4E0D, 0x6709, 0x548C, 0x6211, 0x4ED6, 0x8FD9, 0x5C31, 0x4E5F, 0x90FD, 0x800C, 0x4EE5, 0x4E4B,
    0x5176, 0x4E0E, 0x4E3A, 0x4E8E, 0x4E43, 0x66F0, 0x8005, 0x9019, 0x8207, 0x70BA, 0x65BC, 0x4F60, 0x4EEC, 0x4E00};

static int class_of(uint32_t c) { return c < 128 ? ascii_class[c] : class_above_ascii(c); }

static uint32_t decode(const uint8_t **at) {
    const uint8_t *p = *at;
    uint32_t c = *p;
    if (c < 0x80) return *at += 1, c;
    if (c < 0xE0) return *at += 2, (c & 31) << 6 | (p[1] & 63);
    if (c < 0xF0) return *at += 3, (c & 15) << 12 | (p[1] & 63) << 6 | (p[2] & 63);
    return *at += 4, (c & 7) << 18 | (p[1] & 63) << 12 | (p[2] & 63) << 6 | (p[3] & 63);
}

static uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93u;
    return h ^ h >> 32;
}

static uint64_t next_hash(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9E3779B97F4A7C15u + 0x9E37; }

// Whether nine equal characters may follow each other.
static int has_equal_run(const uint8_t *run, uint32_t n) {
    for (uint32_t i = 8; i < n; i++)
        if (run[i] == run[i - 8] && run[i] == run[i - 4]) return 1;
    return 0;
}

static int is_stop_word(uint64_t letters) {  // at most four, lower case, the first in the highest byte used
    switch (letters) {
        case 'a' << 16 | 'n' << 8 | 'd': case 't' << 16 | 'h' << 8 | 'e': case 'y' << 16 | 'o' << 8 | 'u':
        case 'h' << 16 | 'i' << 8 | 's': case 's' << 16 | 'h' << 8 | 'e':
        case 't' << 24 | 'h' << 16 | 'a' << 8 | 't': case 't' << 24 | 'h' << 16 | 'i' << 8 | 's':
        case 'w' << 24 | 'i' << 16 | 't' << 8 | 'h': case 'h' << 24 | 'a' << 16 | 'v' << 8 | 'e':
        case 't' << 24 | 'h' << 16 | 'e' << 8 | 'y': case 'f' << 24 | 'r' << 16 | 'o' << 8 | 'm':
        case 'w' << 24 | 'h' << 16 | 'a' << 8 | 't':
            return 1;
    }
    return 0;
}

// What lines of web pages have: the last eight letters of English words, and pairs of Chinese characters, both sorted.
// text_scan.py has them as text.
static const uint64_t HINTS[] = {
    0x636C69636B, 0x697073756D, 0x6C6F67696E, 0x636F6F6B6965, 0x636F6F6B696573, 0x70726976616379, 0x736974656D6170,
    0x6F70797269676874, 0x7265736572766564, 0x746973656D656E74, 0x7562736372696265, 0x7661736372697074,
    0x77736C6574746572};
static const uint64_t WEAK_HINTS[] = {  // in a short line without punctuation at its end
    0x6C6F67, 0x746F70, 0x6261636B, 0x626C6F67, 0x686F6D65, 0x6C6F6164, 0x6D656E75, 0x6D6F7265, 0x72656164,
    0x7369676E, 0x736B6970, 0x61626F7574, 0x706F737473, 0x7265706C79, 0x7368617265, 0x7465726D73, 0x63617265657273,
    0x636F6D6D656E74, 0x636F6E74616374, 0x636F6E74656E74, 0x72656C61746564, 0x737570706F7274, 0x74776974746572,
    0x61727469636C6573, 0x66616365626F6F6B, 0x7265676973746572};
static const uint64_t HAN_HINTS[] = {
    0x4E8C7EF4, 0x516C4F17, 0x516C7F51, 0x626B7801, 0x70B951FB, 0x72486743, 0x767B5F55, 0x767B9646};
static const uint64_t WEAK_HAN_HINTS[] = {
    0x4E0A4E00, 0x4E0B4E00, 0x4F1A5458, 0x514D8D23, 0x51686587, 0x51734E8E, 0x52064EAB, 0x52A05165, 0x53CB60C5,
    0x542F7528, 0x559C6B22, 0x573056FE, 0x5F00542F, 0x63A88350, 0x66F4591A, 0x672C6587, 0x672C7AD9, 0x672C7F51,
    0x67616B3E, 0x6CE8518C, 0x75286237, 0x76F85173, 0x80547CFB, 0x8BC48BBA, 0x8D234EFB, 0x8FD456DE, 0x96058BFB,
    0x969079C1, 0x99969875};

static uint8_t may_be_hint[4096];  // most words are told from all hints by this
static unsigned short_hash(uint64_t key) { return key * 0x9E3779B97F4A7C15u >> 52; }
static void remember(const uint64_t *table, unsigned bytes) {
    for (unsigned i = 0; i < bytes / sizeof *table; i++) may_be_hint[short_hash(table[i])] = 1;
}

__attribute__((constructor)) static void fill_tables(void) {
    for (unsigned i = 0; i < sizeof HAN_STOPS / sizeof *HAN_STOPS; i++) is_han_stop[HAN_STOPS[i] - 0x4E00] = 1;
    for (int c = 0; c < 128; c++)
        ascii_class[c] = in(c, 9, 13) || c == ' ' ? SPACE
                         : in(c, '0', '9')        ? DIGIT
                         : in(c | 32, 'a', 'z')   ? LATIN
                         : c && strchr(".,;:!?'\"()-", c) ? PUNCTUATION
                                                  : SYMBOL;
    remember(HINTS, sizeof HINTS), remember(WEAK_HINTS, sizeof WEAK_HINTS);
    remember(HAN_HINTS, sizeof HAN_HINTS), remember(WEAK_HAN_HINTS, sizeof WEAK_HAN_HINTS);
}

static int is_hint(const uint64_t *table, int size, uint64_t key) {
    int low = 0;
    if (!may_be_hint[short_hash(key)]) return 0;
    for (; size > 1; size -= size / 2) low += table[low + size / 2 - 1] < key ? size / 2 : 0;
    return table[low] == key;
}

static int is_closing(uint32_t c) {
    return (c < 128 && c && strchr(".,;:!?'\")]}>", c)) || c == 0x2019 || c == 0x201D || c == 0x2014 || c == 0x2026 ||
           in(c, 0x3001, 0x3002) || in(c, 0x300A, 0x3011) || c == 0xFF01 || c == 0xFF09 || c == 0xFF0C || c == 0xFF1A ||
           c == 0xFF1B || c == 0xFF1F;
}

// A byte of UTF-8 that starts a character of several bytes, and one that continues it, as they look in cp1252, Mac
// Roman, cp437, cp1250, cp1251 and cp1257.
static int is_lead(uint32_t c) {
    return in(c, 0xC2, 0xF4) || c == 0x102 || c == 0x139 || c == 0x192 || c == 0x221A || c == 0xAC || c == 0x201A ||
           c == 0x393 || c == 0x413 || in(c, 0x420, 0x421) || c == 0x432 || in(c, 0x2502, 0x257F) || c == 0x25CA;
}
static int is_trail(uint32_t lead, uint32_t c) {
    if (lead == 0xC3 && c == ' ') return 1;  // a no-break space that became a space
    if (lead == 0x192 || lead == 0x221A || lead > 0x2500) return c > 127 && !in(c, 0x2500, 0x2501) && c != 0x2550;
    return in(c, 0x80, 0xBF) || in(c, 0x100, 0x17F) || c == 0x192 || c == 0x2C6 || c == 0x2DC || in(c, 0x2013, 0x203A) ||
           c == 0x20AC || c == 0x2122 || in(c, 0x402, 0x40F) || in(c, 0x452, 0x45F) || c == 0xC7 || c == 0xC4 ||
           c == 0xEE || c == 0x2310 || c == 0x2206 || c == 0x2211 || c == 0x222B || c == 0xF1;
}
// UTF-8 read as GBK: the first bytes of Chinese punctuation and of the most frequent characters.
static int is_gbk_mark(uint32_t c) {
    return c == 0x7D1D || c == 0x951B || c == 0x9286 || c == 0x6D5C || c == 0x9428 || c == 0x93C4 || c == 0x951F || c == 0x9225;
}

static uint32_t table_size(uint32_t entries) {
    uint32_t size = 16;
    while (size < 2 * entries) size *= 2;
    return size;
}

static Slot *find(Slot *table, uint32_t size, uint64_t key) {
    uint32_t at = mix(key) & (size - 1);
    key |= !key;
    while (table[at].key && table[at].key != key) at = (at + 1) & (size - 1);
    table[at].key = key;
    return table + at;
}

// Repeated n-grams of words. `hash` is overwritten by those of n-grams.
static int repetition(uint64_t *hash, const uint32_t *chars, uint32_t words, int64_t *out) {
    uint32_t left = words, size = table_size(words);
    uint64_t *gram = malloc(words * sizeof *gram + 1);
    uint32_t *place = malloc(words * sizeof *place + 1), *slot = malloc(words * sizeof *slot + 1);
    uint64_t *before = malloc((words + 1) * sizeof *before);
    uint8_t *covered = malloc(words + 1);
    Slot *table = malloc(size * sizeof *table);
    int failed = !gram || !place || !slot || !before || !covered || !table;
    if (!failed) {
        before[0] = 0;
        for (uint32_t i = 0; i < words; i++) gram[i] = hash[i], place[i] = i, before[i + 1] = before[i] + chars[i];
        out[NGRAM_CHARS] = before[words];
    }
    for (uint32_t n = 2; n <= 10 && !failed && left; n++) {
        // place: where (n-1)-grams that occur twice start, which only can start n-grams that do
        uint32_t kept = 0;
        for (uint32_t j = 0; j < left; j++) {
            uint32_t i = place[j];
            if (i + n > words || (n > 2 && (j + 1 == left || place[j + 1] != i + 1))) continue;
            gram[kept] = mix(gram[j] * 0x9E3779B97F4A7C15u + hash[i + n - 1]);
            place[kept++] = i;
        }
        size = table_size(kept), left = 0;
        memset(table, 0, size * sizeof *table);
        if (n >= 5) memset(covered, 0, words);
        for (uint32_t j = 0; j < kept; j++) {
            Slot *found = find(table, size, gram[j]);
            slot[j] = found - table;
            if (found->count++ && n >= 5) memset(covered + place[j], 1, n);
        }
        uint64_t most = 0;
        for (uint32_t j = 0; j < kept; j++) {
            uint64_t count = table[slot[j]].count, total = count * (before[place[j] + n] - before[place[j]]);
            if (count < 2) continue;
            if (total > most) most = total;
            gram[left] = gram[j], place[left++] = place[j];
        }
        if (n >= 5)
            for (uint32_t i = 0; i < words; i++) out[DUPLICATE_5 + n - 5] += covered[i] ? chars[i] : 0;
        else
            out[TOP_2 + n - 2] = most > before[words] ? before[words] : most;
    }
    free(gram), free(place), free(slot), free(before), free(covered), free(table);
    return failed;
}

int penjing_scan(const uint8_t *text, long bytes, int64_t *out) {
    const uint8_t *at = text, *end = text + bytes;
    uint32_t limit = bytes < MAX_WORDS ? bytes : MAX_WORDS, line_slots = table_size(limit / 2 + 1), words = 0, lines = 0;
    uint64_t *hash = malloc(limit * sizeof *hash + 1);
    uint32_t *chars = malloc(limit * sizeof *chars + 1), gbk_marks = 0, previous = '\n', same = 0, named = 0;
    uint64_t line_hash = 0, word_hash = 0, *line_hashes = malloc(limit * sizeof *line_hashes / 2 + 8);
    uint32_t *lengths = malloc(limit * sizeof *lengths / 2 + 8);
    if (!hash || !chars || !line_hashes || !lengths) return free(hash), free(chars), free(line_hashes), free(lengths), 1;
    // Of the open line: characters to the last that is not a space, that one, and whether it starts with a space.
    uint64_t line_length = 0, trimmed_length = 0, trimmed_hash = 0;
    uint32_t line_last = 0, indented = 0, weak_hint = 0;
    uint64_t word_letters = 0;  // of the open word, the last eight, in lower case
    uint32_t word_length = 0, has_letter = 0;
    uint32_t number_digits = 0, number_dots = 0, gap = 9;                         // of the open number
    uint32_t key_length = 0, key_kinds = 0, colons = 0, hex_length = 0, doubled = 0;  // of the open key and address
    int64_t flags = 0;
    memset(out, 0, NUMBERS * sizeof *out);
    for (;;) {
        // a word in ASCII letters at once: most of an English text. What needs each letter goes on below.
        if (!word_length && !colons && at < end && ascii_class[*at & 127] == LATIN && *at < 128) {
            const uint8_t *run = at;
            uint64_t letters = 0, h = 0;
            for (; at < end && *at < 128 && ascii_class[*at] == LATIN; at++) {
                h = next_hash(h, *at);
                letters = letters << 8 | *at | 32;
            }
            uint32_t n = at - run;
            if (n < 9 || !has_equal_run(run, n)) {
                word_hash = h, word_letters = letters, word_length = n, has_letter = 1, line_length += n;
                out[LATIN] += n, out[CAPITAL_WORDS] += *run < 'a', out[TAGS] += previous == '<';
                if (named && (previous == '@' || previous == 0xFF20)) flags |= MAIL;
                number_digits = number_dots = 0, gap = 9, key_length += n, key_kinds |= 2;
                if (key_length >= 20 || (key_length >= 16 && key_kinds == 3)) flags |= KEY;
                for (hex_length = 0; hex_length < n && in(at[-1 - (int)hex_length] | 32, 'a', 'f');) hex_length++;
                previous = line_last = at[-1], same = 0;
                continue;
            }
            at = run;
        }
        int is_end = at >= end;
        uint32_t c = is_end ? '\n' : decode(&at);
        int kind = class_of(c);
        if (!is_end) out[kind]++;
        // words: runs of letters and digits; each character of Chinese and Japanese is one
        if (word_length && (kind < DIGIT || kind == HAN || kind == KANA)) {
            out[WORDS]++, out[WORD_CHARS] += word_length, out[ALPHA_WORDS] += has_letter > 0;
            out[STOP_WORDS] += word_length <= 4 && is_stop_word(word_letters);
            if (word_length > 2) {
                if (is_hint(HINTS, sizeof HINTS / sizeof *HINTS, word_letters)) flags |= BOILERPLATE;
                weak_hint |= is_hint(WEAK_HINTS, sizeof WEAK_HINTS / sizeof *WEAK_HINTS, word_letters);
            }
            if (word_length > 40 && has_letter < 2) out[LONG_CHARS] += word_length;
            if (words < MAX_WORDS) hash[words] = word_hash, chars[words++] = word_length;
            trimmed_hash = line_hash = next_hash(line_hash, word_hash), trimmed_length = line_length, word_length = 0;
        }
        if (kind == HAN || kind == KANA) {
            out[WORDS]++, out[WORD_CHARS]++, out[ALPHA_WORDS]++;
            out[STOP_WORDS] += in(c, 0x4E00, 0x9FFF) && is_han_stop[c - 0x4E00];
            gbk_marks += is_gbk_mark(c);
            uint64_t pair = (uint64_t)previous << 16 | c;
            if (is_hint(HAN_HINTS, sizeof HAN_HINTS / sizeof *HAN_HINTS, pair)) flags |= BOILERPLATE;
            weak_hint |= is_hint(WEAK_HAN_HINTS, sizeof WEAK_HAN_HINTS / sizeof *WEAK_HAN_HINTS, pair);
            // a lost character is like no other
            if (words < MAX_WORDS) hash[words] = mix(c == 0x25A1 ? (uint64_t)words << 32 | c : c), chars[words++] = 1;
        } else if (kind >= DIGIT) {
            if (!word_length) word_hash = word_letters = has_letter = 0, out[CAPITAL_WORDS] += in(c, 'A', 'Z');
            word_hash = next_hash(word_hash, c);
            word_letters = word_letters << 8 | (c < 128 ? c | 32 : 1);
            has_letter |= kind == LATIN ? 1 : kind == DIGIT ? 0 : 2, word_length++;
        }
        // lines
        if (c == '\n') {
            if (trimmed_length) {
                out[LINES]++, out[LINE_CHARS] += trimmed_length;
                out[CLOSED_LINES] += indented || is_closing(line_last);
                if (weak_hint && trimmed_length <= 60 && !is_closing(line_last)) flags |= BOILERPLATE;
                if (lines < limit / 2 + 1) line_hashes[lines] = trimmed_hash, lengths[lines++] = trimmed_length;
            }
            line_length = trimmed_length = line_hash = indented = weak_hint = 0;
        } else if (kind != SPACE) {
            line_length++, line_last = c;
            if (!word_length) trimmed_hash = line_hash = next_hash(line_hash, c), trimmed_length = line_length;
        } else if (line_length) {
            line_hash = next_hash(line_hash, c), line_length++;
        } else
            indented = 1;
        // numbers: digits with at most two of " -.()/+" between them
        if (kind == DIGIT) {
            number_digits++, gap = 0;
            if (number_digits >= 7 || (number_dots >= 3 && number_digits >= 4)) flags |= NUMBER;
        } else if (c < 128 && (c == ' ' || c == '-' || c == '.' || c == '(' || c == ')' || c == '/' || c == '+') && ++gap <= 2)
            number_dots += c == '.';
        else
            number_digits = number_dots = 0, gap = 9;
        // keys: runs of letters, digits, '-' and '_': 16 with letters and digits, or 20
        if (c < 128 && (kind == DIGIT || kind == LATIN || c == '-' || c == '_')) {
            key_kinds |= kind == DIGIT ? 1 : kind == LATIN ? 2 : 0;
            if (++key_length >= 20 || (key_length >= 16 && key_kinds == 3)) flags |= KEY;
        } else
            key_length = key_kinds = 0;
        if (c == ':' || (c < 128 && kind == DIGIT) || in(c | 32, 'a', 'f')) {
            colons += c == ':', doubled |= c == ':' && previous == ':', hex_length += c != ':';
            if (hex_length && (colons >= 7 || (doubled && colons >= 2))) flags |= IPV6;
        } else
            colons = hex_length = doubled = 0;
        if (previous > 127 && is_lead(previous) && is_trail(previous, c)) flags |= MOJIBAKE;
        if (c >= 0x300 && !in(c, 0x4E00, 0x9FFF) && !in(c, 0x2002, 0x20CF) && !in(c, 0x3000, 0x3029) &&
            !in(c, 0x309B, 0x33FF) && !in(c, 0xFF00, 0xFF9D))
            flags |= MARK;
        if (c > 127) {
            if (in(c, 0x80, 0x9F) && c != 0x85) flags |= MOJIBAKE;
            if (in(c, 0x80, 0x9F) || c == 0xAD || c == 0x200B || c == 0x2060 || c == 0xFEFF || c == 0x2028 || c == 0x2029)
                flags |= INVISIBLE;
            out[REPLACED] += c == 0xFFFD;
            if (c == 0xA9) flags |= BOILERPLATE;
        } else if ((c < 32 && c != '\n' && c != '\t') || c == 127)
            flags |= INVISIBLE;
        if (c == '@' || c == 0xFF20)
            named = class_of(previous) >= DIGIT || (previous && previous < 128 && strchr("._%+-", previous));
        else if (named && (previous == '@' || previous == 0xFF20) && kind >= DIGIT)
            flags |= MAIL;
        if (previous == '<' && (c == '/' || c == '!' || in(c | 32, 'a', 'z'))) out[TAGS]++;
        same = c == previous && kind != SPACE && kind != HAN ? same + 1 : 0;
        out[SAME_CHAR] += same >= 8;
        if (is_end) break;
        previous = c;
    }
    for (int kind = LATIN; kind < CLASSES; kind++) out[LETTERS] += out[kind];
    out[VISIBLE] = out[LETTERS] + out[DIGIT] + out[PUNCTUATION] + out[SYMBOL];
    out[FLAGS] = gbk_marks >= 2 ? flags | MOJIBAKE : flags;
    Slot *table = lines > 1 ? calloc(line_slots = table_size(lines), sizeof *table) : 0;
    for (uint32_t i = 0; table && i < lines; i++)
        if (find(table, line_slots, line_hashes[i])->count++) out[DUPLICATE_LINES]++, out[DUPLICATE_CHARS] += lengths[i];
    int failed = (lines > 1 && !table) || repetition(hash, chars, words, out);
    free(table), free(hash), free(chars), free(line_hashes), free(lengths);
    return failed;
}

// The words of a text as hashes, and the sketch of them for near duplicates. ngrams.py has both in Python.
// table: of each character of the basic plane its lower case, and in the highest byte 0 if it separates words, 1 if it is
// part of one, 2 if it is one. words: room for bytes / 2 + 1. Returns their number.
long penjing_words(const uint8_t *text, long bytes, const uint32_t *table, uint64_t *words) {
    const uint8_t *at = text, *end = text + bytes;
    uint64_t hash = 0;
    uint32_t open = 0;
    long count = 0;
    while (at < end) {
        uint32_t c = decode(&at), entry = c < 65536 ? table[c] : 2u << 24 | c, kind = entry >> 24;
        if (open && kind != 1) words[count++] = mix(hash), open = 0;
        if (!kind) continue;
        hash = next_hash(open ? hash : 0, entry & 0xFFFFFF), open = kind == 1;
        if (kind == 2) words[count++] = mix(hash);
    }
    if (open) words[count++] = mix(hash);
    return count;
}

enum { PERMUTATIONS = 256, BANDS = 32 };

// functions: factors, then offsets, of the permutations. out: the keys of the bands, then the distinct shingles of n words,
// 32 bits of each, in order; room for bytes / 2 + 1 of them. Returns the number of shingles, or -1 without memory.
long penjing_sketch(const uint8_t *text, long bytes, const uint32_t *classes, long n, const uint32_t *functions, uint64_t *out) {
    uint64_t *words = malloc((bytes / 2 + 1) * sizeof *words), hash = 0, power = 1;  // of the factor, for the word that leaves
    long count = words ? penjing_words(text, bytes, classes, words) : 0, found = 0;
    uint32_t least[PERMUTATIONS], size = table_size(count), *distinct = (uint32_t *)(out + BANDS);
    uint32_t *table = calloc(size, sizeof *table);
    if (!words || !table) return free(words), free(table), -1;
    memset(least, 0xFF, sizeof least);
    if (n > count) n = count;
    for (long i = 0; i < n; i++) power *= 0x9E3779B97F4A7C15u;
    for (long i = 0; i < count; i++) {
        hash = hash * 0x9E3779B97F4A7C15u + words[i] - (i < n ? 0 : words[i - n] * power);
        if (i + 1 < n) continue;
        uint32_t shingle = mix(hash) >> 32, at = shingle & (size - 1);
        shingle |= !shingle;
        while (table[at] && table[at] != shingle) at = (at + 1) & (size - 1);
        if (table[at]) continue;
        table[at] = distinct[found++] = shingle;
        for (int p = 0; p < PERMUTATIONS; p++) {
            uint32_t value = shingle * functions[p] + functions[PERMUTATIONS + p];
            least[p] = value < least[p] ? value : least[p];
        }
    }
    free(words), free(table);
    for (int band = 0; band < BANDS; band++) {
        out[band] = band;
        for (int i = band * (PERMUTATIONS / BANDS); i < (band + 1) * (PERMUTATIONS / BANDS); i++)
            out[band] = next_hash(out[band], least[i]);
        out[band] = mix(out[band]);
    }
    return found;
}
