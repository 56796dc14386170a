// One pass over a text in UTF-8 for all cleaning rules: what it may contain (flags), counts, and the repetition
// measures of Gopher (arXiv:2112.11446, table A1). text_scan.py has the same in Python and says what each number means.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SPACE, PUNCTUATION, SYMBOL, DIGIT, LATIN, HAN, KANA, HANGUL, OTHER, CLASSES };
enum { INVISIBLE = 1, MOJIBAKE = 2, MAIL = 4, NUMBER = 8, KEY = 16, IPV6 = 32, BOILERPLATE = 64, MARK = 128 };
enum { WORDS = CLASSES, WORD_CHARS, LONG_CHARS, ALPHA_WORDS, CAPITAL_WORDS, STOP_WORDS, LINES, CLOSED_LINES, LINE_CHARS,
       DUPLICATE_CHARS, REPLACED, TAGS, FLAGS, SAME_CHAR, NGRAM_CHARS, TOP_2, TOP_3, TOP_4, DUPLICATE_5, LETTERS = DUPLICATE_5 + 6, VISIBLE, NUMBERS };
enum { MAX_WORDS = 1 << 18 };  // repetition is measured in so many words and lines from the start

typedef struct { uint64_t key; uint32_t count; uint32_t done; } Slot;

static int in(uint32_t c, uint32_t low, uint32_t high) { return c - low <= high - low; }

// What text_scan.py hands over: of each character its class in the lowest four bits, these bits, and in the high byte the
// flags that it sets alone; and words (the last eight letters) and pairs of Chinese characters with what they are.
enum { CLOSING = 16, STOP = 32, LEAD = 64, ANY_LEAD = 1024, GBK_MARK = 4096 };  // the bit after LEAD: what may follow it
enum { STOP_WORD = 1, HINT, WEAK_HINT, KNOWN = 4096 };
static const uint16_t *characters;
static uint64_t known[KNOWN];
static uint8_t known_kind[KNOWN];  // 0 = a free place

static unsigned place_of(uint64_t key) {
    unsigned at = key * 0x9E3779B97F4A7C15u >> 52;
    while (known_kind[at] && known[at] != key) at = (at + 1) % KNOWN;
    return at;
}

void penjing_tables(const uint16_t *of_characters, const uint64_t *keys, const uint8_t *kinds, long count) {
    characters = of_characters;
    for (long i = 0; i < count; i++) {
        unsigned at = place_of(keys[i]);
        known[at] = keys[i], known_kind[at] = kinds[i];
    }
}

static int is_letter(uint8_t c) { return in(c | 32, 'a', 'z'); }

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
    uint32_t *chars = malloc(limit * sizeof *chars + 1), gbk_marks = 0, previous = '\n', before = 0, same = 0, named = 0;
    uint64_t line_hash = 0, word_hash = 0, *line_hashes = malloc(limit * sizeof *line_hashes / 2 + 8);
    uint32_t *lengths = malloc(limit * sizeof *lengths / 2 + 8);
    if (!hash || !chars || !line_hashes || !lengths) return free(hash), free(chars), free(line_hashes), free(lengths), 1;
    // Of the open line: characters to the last that is not a space, the entry of that one, and whether it starts with a space.
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
        if (!word_length && !colons && at < end && is_letter(*at)) {
            const uint8_t *run = at;
            uint64_t letters = 0, h = 0;
            for (; at < end && is_letter(*at); at++) {
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
                previous = at[-1], before = line_last = characters[previous], same = 0;
                continue;
            }
            at = run;
        }
        int is_end = at >= end;
        uint32_t c = is_end ? '\n' : decode(&at);
        uint32_t entry = characters[c], kind = entry & 15;
        if (!is_end) out[kind]++;
        // words: runs of letters and digits; each character of Chinese and Japanese is one
        if (word_length && (kind < DIGIT || kind == HAN || kind == KANA)) {
            out[WORDS]++, out[WORD_CHARS] += word_length, out[ALPHA_WORDS] += has_letter > 0;
            uint8_t known_as = known_kind[place_of(word_letters)];
            out[STOP_WORDS] += known_as == STOP_WORD, flags |= known_as == HINT ? BOILERPLATE : 0;
            weak_hint |= known_as == WEAK_HINT;
            if (word_length > 40 && has_letter < 2) out[LONG_CHARS] += word_length;
            if (words < MAX_WORDS) hash[words] = word_hash, chars[words++] = word_length;
            trimmed_hash = line_hash = next_hash(line_hash, word_hash), trimmed_length = line_length, word_length = 0;
        }
        if (kind == HAN || kind == KANA) {
            out[WORDS]++, out[WORD_CHARS]++, out[ALPHA_WORDS]++;
            out[STOP_WORDS] += (entry & STOP) > 0, gbk_marks += (entry & GBK_MARK) > 0;
            uint8_t known_as = known_kind[place_of(1ull << 63 | (uint64_t)previous << 16 | c)];
            flags |= known_as == HINT ? BOILERPLATE : 0, weak_hint |= known_as == WEAK_HINT;
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
                out[CLOSED_LINES] += indented || line_last & CLOSING;
                if (weak_hint && trimmed_length <= 60 && !(line_last & CLOSING)) flags |= BOILERPLATE;
                if (lines < limit / 2 + 1) line_hashes[lines] = trimmed_hash, lengths[lines++] = trimmed_length;
            }
            line_length = trimmed_length = line_hash = indented = weak_hint = 0;
        } else if (kind != SPACE) {
            line_length++, line_last = entry;
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
        if (before & entry >> 1 & (LEAD | ANY_LEAD) || (previous == 0xC3 && c == ' ')) flags |= MOJIBAKE;
        flags |= entry >> 8 & (INVISIBLE | MOJIBAKE | BOILERPLATE | MARK);
        out[REPLACED] += c == 0xFFFD;
        if (c == '@' || c == 0xFF20)
            named = (before & 15) >= DIGIT || (previous && previous < 128 && strchr("._%+-", previous));
        else if (named && (previous == '@' || previous == 0xFF20) && kind >= DIGIT)
            flags |= MAIL;
        if (previous == '<' && (c == '/' || c == '!' || in(c | 32, 'a', 'z'))) out[TAGS]++;
        same = c == previous && kind != SPACE && kind != HAN ? same + 1 : 0;
        out[SAME_CHAR] += same >= 8;
        if (is_end) break;
        previous = c, before = entry;
    }
    for (int kind = LATIN; kind < CLASSES; kind++) out[LETTERS] += out[kind];
    out[VISIBLE] = out[LETTERS] + out[DIGIT] + out[PUNCTUATION] + out[SYMBOL];
    out[FLAGS] = gbk_marks >= 2 ? flags | MOJIBAKE : flags;
    Slot *table = lines > 1 ? calloc(line_slots = table_size(lines), sizeof *table) : 0;
    for (uint32_t i = 0; table && i < lines; i++)
        if (find(table, line_slots, line_hashes[i])->count++) out[DUPLICATE_CHARS] += lengths[i];
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
