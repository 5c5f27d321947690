/* Random models and passes: random_passes ROUNDS

   What tests/engine/native/test_pass.py checks, for sanitizers and for processors without Python: a
   token's logits are the same bits alone, among others and in a prompt cut anywhere, on any number of
   threads; kernels agree with each other; and what is wrong is refused with nothing written. All memory
   has exactly the size that the library asks for. .ci/native runs it. */

#define _GNU_SOURCE /* memfd_create */

#include "pass.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ROWS = 3, MAX_LENGTH = 100 };

#define CHECK(condition) \
  ((condition) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #condition), exit(1)))

static uint64_t state = 1;

static uint32_t random_bits(void) { /* PCG */
  state = state * 6364136223846793005u + 1442695040888963407u;
  const uint32_t x = (uint32_t)((state >> 18 ^ state) >> 27), r = (uint32_t)(state >> 59);
  return x >> r | x << (-r & 31);
}

static int between(int first, int last) { return first + (int)(random_bits() % (last - first + 1)); }

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes);
  CHECK(memory);
  memset(memory, 0xff, bytes); /* NaN: a pass must not read what is not written */
  return memory;
}

static void *allocated[500];
static int num_allocated;

static void *keep(size_t bytes) {
  CHECK(num_allocated < 500);
  return allocated[num_allocated++] = allocate(bytes);
}

static float *random_floats(size_t count, float about, float scale) {
  float *x = keep(padded(count) * sizeof *x);
  memset(x, 0, padded(count) * sizeof *x);
  for (size_t i = 0; i < count; i++) x[i] = about + scale * (random_bits() / 2147483648.0f - 1);
  return x;
}

static const void *random_matrix(size_t n, size_t k, int int8) {
  const size_t bytes = packed_bytes(n, k, int8);
  const int type = between(0, 2), transposed = between(0, 1);
  const float about = between(0, 2) * 0.1f; /* zeros of columns in int8 differ */
  float *numbers = allocate(n * k * sizeof *numbers);
  for (size_t i = 0; i < n * k; i++) {
    const float x = about + 0.4f * (random_bits() / 2147483648.0f - 1);
    const uint16_t half = (uint16_t)((random_bits() & 0x83ff) | between(10, 13) << 10);
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (type == SOURCE_FLOAT32)
      numbers[i] = x;
    else
      ((uint16_t *)numbers)[i] = type == SOURCE_FLOAT16 ? half : bits >> 16;
  }
  uint8_t *packed = keep(bytes);
  pack(numbers, type, transposed ? 1 : k, transposed ? n : 1, n, k, int8, packed);
  free(numbers);
  return packed;
}

static Matrix random_product(size_t n, size_t k, int int8) {
  return (Matrix){random_matrix(n, k, int8), random_floats(n, 0, 0.3f)};
}

static Norm random_norm(size_t units) {
  return (Norm){random_floats(units, 1, 0.3f), random_floats(units, 0, 0.3f)};
}

static Model random_model(void) {
  static Layer layers[2];
  Model m = {.num_layers = between(1, 2), .heads = between(1, 4), .hidden = between(1, 90)};
  m.vocab = between(1, 120);
  m.max_length = between(1, MAX_LENGTH);
  m.units = m.heads * between(1, 40);
  m.int8 = between(0, 2) > 0;
  m.gelu_tanh = between(0, 1);
  m.epsilon = 1e-5f;
  const size_t c = m.units, f = m.hidden, b = m.int8;
  for (int i = 0; i < m.num_layers; i++)
    layers[i] = (Layer){random_norm(c),
                        random_product(3 * c, c, b),
                        random_product(c, c, b),
                        random_norm(c),
                        random_product(f, c, b),
                        random_product(c, f, b),
                        1 / sqrtf((float)(c / m.heads))};
  m.layers = layers;
  m.final_norm = random_norm(c);
  m.embedding = random_matrix(m.vocab, c, b);
  float *positions = keep(m.max_length * padded(c) * sizeof *positions);
  for (int i = 0; i < m.max_length; i++)
    for (size_t j = 0; j < padded(c); j++)
      positions[i * padded(c) + j] = j < c ? random_bits() / 4e9f - 0.5f : 0;
  m.positions = positions;
  m.head = between(0, 1) ? (Matrix){m.embedding, NULL}
                         : random_product(m.vocab, c, b);
  return m;
}

/* A packed matrix of an adapter: of fp16 numbers where the model is in int8, else of floats. */
static const void *random_thin(const Model *m, size_t n, size_t k) {
  if (!m->int8) return random_matrix(n, k, 0);
  const size_t groups = (n + 15) / 16;
  uint16_t *halves = keep(groups * k * LINE * sizeof *halves);
  for (size_t i = 0; i < groups * k * LINE; i++) {
    const size_t column = i / (k * LINE) * LINE + i % LINE;
    const uint16_t half = (uint16_t)((random_bits() & 0x83ff) | between(10, 13) << 10);
    halves[i] = column < n ? half : 0;
  }
  return halves;
}

/* Packs a random matrix in few bits. */
static const void *random_rest(size_t n, size_t k, int bits) {
  float *numbers = allocate(n * k * sizeof *numbers);
  for (size_t i = 0; i < n * k; i++) numbers[i] = 0.05f * (random_bits() / 2147483648.0f - 1);
  uint8_t *packed = keep(rest_bytes(n, k, bits));
  pack_rest(numbers, n, k, bits, packed);
  free(numbers);
  return packed;
}

static Change random_change(const Model *m, size_t n, size_t k) {
  Change change = {.rank = between(0, 2) ? between(1, 20) : 0};
  if (change.rank) {
    change.down = random_thin(m, change.rank, k);
    change.up = random_thin(m, n, change.rank);
    if (between(0, 1)) change.down_bias = random_floats(change.rank, 0, 0.3f);
  }
  if (m->int8 && (change.bits = between(0, 3))) change.rest = random_rest(n, k, change.bits);
  if (between(0, 1)) change.bias = random_floats(n, 0, 0.3f);
  return change;
}

/* An adapter in the layers alone or, for a model in int8, perhaps in all weights. */
static const Adapter *random_adapter(const Model *m) {
  const size_t c = m->units, f = m->hidden;
  AdapterLayer *layers = keep(m->num_layers * sizeof *layers);
  Adapter *adapter = keep(sizeof *adapter);
  for (int i = 0; i < m->num_layers; i++)
    layers[i] = (AdapterLayer){random_change(m, 3 * c, c), random_change(m, c, c),
                               random_change(m, f, c), random_change(m, c, f)};
  *adapter = (Adapter){.layers = layers};
  if (m->int8 && between(0, 1)) {
    adapter->embedding = random_change(m, m->vocab, c);
    if (adapter->embedding.rank)
      adapter->embedding.down = random_thin(m, c, adapter->embedding.rank);
    if (between(0, 1)) adapter->positions = random_thin(m, m->max_length * padded(c), 1);
    adapter->head = random_change(m, m->vocab, c);
    adapter->final_norm = random_norm(c);
    if ((adapter->more = between(0, 1) ? between(1, 40) : 0)) {
      adapter->more_embedding = random_thin(m, adapter->more, c);
      adapter->more_head = random_thin(m, adapter->more, c);
    }
  }
  return adapter;
}

/* How many tokens a row with an adapter, or NULL, knows. */
static int32_t vocab_of(const Model *m, const Adapter *adapter) {
  return m->vocab + (adapter ? adapter->more : 0);
}

typedef struct {
  const Adapter *adapter;
  int32_t ids[MAX_LENGTH], pages[MAX_LENGTH];
  int32_t done; /* tokens that are computed */
  float *logits; /* (max_length, padded vocab_of), of the row alone */
  float *states; /* (max_length, padded units), of the row alone */
} Row;

/* Computes the pieces and compares the logits or states with those of the rows alone. */
static void run_and_compare(const Model *m, uint8_t *arena, Row *rows, const Piece *pieces,
                            const int *row_of, int count) {
  const size_t units = padded(m->units);
  size_t wanted = 0, width = padded(m->vocab);
  for (int i = 0; i < count; i++) {
    const size_t own = padded(vocab_of(m, pieces[i].adapter));
    wanted += pieces[i].states ? 0 : pieces[i].num_logits;
    width = own > width ? own : width;
  }
  float *logits = allocate(wanted * width * sizeof *logits), *at = logits;
  CHECK(run_pass(m, arena, pieces, count, logits) == PASS_OK);
  for (int i = 0; i < count; i++) {
    Row *row = &rows[row_of[i]];
    row->done = pieces[i].position + pieces[i].count;
    const float *states = pieces[i].states;
    for (int t = row->done - pieces[i].num_logits; t < row->done; t++)
      if (states) {
        CHECK(!memcmp(states, row->states + t * units, m->units * sizeof *states));
        states += units;
      } else {
        const size_t own = vocab_of(m, row->adapter);
        CHECK(!memcmp(at, row->logits + t * padded(own), own * sizeof *at));
        at += width;
      }
    free(pieces[i].states);
  }
  free(logits);
}

static void check_law(const Model *m, uint8_t *arena, Row *rows) {
  for (int i = 0; i < ROWS; i++) {
    Piece whole = {rows[i].ids, rows[i].pages, m->max_length, 0, m->max_length,
                   rows[i].adapter, NULL};
    use_threads(1);
    CHECK(run_pass(m, arena, &whole, 1, rows[i].logits) == PASS_OK);
    whole.states = rows[i].states;
    CHECK(run_pass(m, arena, &whole, 1, NULL) == PASS_OK);
    rows[i].done = 0;
  }
  for (int left = ROWS; left;) {
    Piece pieces[ROWS];
    int row_of[ROWS], count = 0;
    left = 0;
    for (int i = 0; i < ROWS; i++) {
      Row *row = &rows[i];
      const int rest = m->max_length - row->done;
      left += rest > 0;
      if (!rest || between(0, 3) == 0) continue;
      const int few = between(0, 1) ? 3 : 60, n = between(1, rest < few ? rest : few);
      row_of[count] = i;
      float *states = between(0, 2) ? NULL : allocate(n * padded(m->units) * sizeof *states);
      pieces[count++] = (Piece){row->ids + row->done, row->pages,   n, row->done,
                                between(0, n),        row->adapter, states};
    }
    if (between(0, 5) == 0) use_threads(between(1, 3));
    run_and_compare(m, arena, rows, pieces, row_of, count);
  }
}

/* Pieces of random numbers, some of them wrong. Statuses are those of the rules in pass.h. */
static void check_pieces(const Model *m, uint8_t *arena, const Row *rows) {
  const int32_t top = INT32_MAX, odd[] = {-top - 1, -top, -1, 0, m->max_length, top - 1, top};
  Piece pieces[ROWS];
  int32_t ids[ROWS][MAX_LENGTH];
  int right = 1;
  size_t wanted = 0, width = padded(m->vocab);
  for (int i = 0; i < ROWS; i++) {
    const int32_t vocab = vocab_of(m, rows[i].adapter);
    width = padded(vocab) > width ? padded(vocab) : width;
    int32_t numbers[3] = {between(1, 4), between(0, m->max_length), between(0, 2)};
    if (between(0, 3) == 0) numbers[between(0, 2)] = odd[between(0, 6)];
    memcpy(ids[i], rows[i].ids, sizeof *ids);
    if (between(0, 5) == 0)
      ids[i][between(0, 3)] = between(0, 1) ? vocab + (between(0, 1) ? top - vocab : 0) : -1;
    pieces[i] =
        (Piece){ids[i], rows[i].pages, numbers[0], numbers[1], numbers[2], rows[i].adapter, NULL};
    const int64_t n = numbers[0], position = numbers[1], logits = numbers[2];
    right = right && n > 0 && position >= 0 && n + position <= m->max_length && logits >= 0 &&
            logits <= n;
    for (int t = 0; right && t < n; t++) right = ids[i][t] >= 0 && ids[i][t] < vocab;
    if (right) wanted += logits;
  }
  const size_t bytes = wanted * width * sizeof(float);
  uint8_t *logits = allocate(bytes);
  CHECK(run_pass(m, arena, pieces, ROWS, (float *)logits) == (right ? PASS_OK : PASS_BAD_PIECE));
  for (size_t i = 0; i < bytes && !right; i++) CHECK(logits[i] == 0xff);
  free(logits);
}

static void check_models(const Model *model, uint8_t *arena, const Row *rows) {
  const Piece piece = {rows[0].ids, rows[0].pages, 1, 0, 1, NULL, NULL};
  const int32_t wrong[] = {INT32_MIN, -1, 0, (1 << 24) + 1, INT32_MAX};
  for (int i = 0; i < 5; i++)
    for (int field = 0; field < 6; field++) {
      Model m = *model;
      int32_t *fields[] = {&m.num_layers, &m.units,      &m.heads, &m.hidden,
                           &m.vocab,      &m.max_length};
      *fields[field] = wrong[i];
      CHECK(run_pass(&m, arena, &piece, 1, NULL) == PASS_BAD_MODEL);
    }
  Model odd = *model;
  odd.heads = odd.units + 1; /* does not divide the units */
  CHECK(run_pass(&odd, arena, &piece, 1, NULL) == PASS_BAD_MODEL);
}

static void check_adapters(const Model *m, uint8_t *arena, const Row *rows) {
  const int32_t wrong[] = {INT32_MIN, -1, (1 << 16) + 1, INT32_MAX};
  for (int i = 0; i < 48; i++) {
    AdapterLayer layers[2] = {0};
    Adapter adapter = {.layers = layers};
    Change *changes[] = {&layers->qkv,     &layers->attention_out, &layers->ffn_hidden,
                         &layers->ffn_out, &adapter.embedding,     &adapter.head};
    *(i % 8 < 4 ? &changes[i / 8]->rank : &changes[i / 8]->bits) = wrong[i % 4];
    const Piece piece = {rows[0].ids, rows[0].pages, 1, 0, 1, &adapter, NULL};
    CHECK(run_pass(m, arena, &piece, 1, NULL) == PASS_BAD_PIECE);
  }
  const int32_t odd[] = {INT32_MIN, -1, (1 << 24) + 1 - m->vocab, INT32_MAX};
  for (int i = 0; i < 4; i++) {
    AdapterLayer layers[2] = {0};
    const Adapter adapter = {.layers = layers, .more = odd[i]};
    const Piece piece = {rows[0].ids, rows[0].pages, 1, 0, 1, &adapter, NULL};
    CHECK(run_pass(m, arena, &piece, 1, NULL) == PASS_BAD_PIECE);
  }
  for (int i = 0; i < 4 && !m->int8; i++) { /* what only models in int8 may have */
    AdapterLayer layers[2] = {{.ffn_out.bits = i == 0}};
    const Adapter adapter = {.layers = layers,
                             .head.rank = i == 1,
                             .final_norm.gamma = i == 2 ? rows[0].logits : NULL,
                             .more = i == 3};
    const Piece piece = {rows[0].ids, rows[0].pages, 1, 0, 1, &adapter, NULL};
    CHECK(run_pass(m, arena, &piece, 1, NULL) == PASS_BAD_PIECE);
  }
}

static void check_draws(const float *some, size_t count) {
  float *logits = allocate(count * sizeof *logits), *weights = allocate(count * sizeof *weights);
  void *scratch = allocate(12 * count);
  for (int i = 0; i < 30; i++) {
    const int odd = i % 3; /* logits that are no numbers, or equal */
    for (size_t j = 0; j < count; j++)
      logits[j] = odd == 1 && between(0, 2) ? (between(0, 1) ? NAN : -INFINITY)
                  : odd == 2                ? roundf(some[j])
                                            : some[j];
    const Truncation how = {between(0, 1) ? 1 : between(1, 99) / 100., between(0, 4) ? 1 : 0.5,
                            (float)between(1, 30) / 10, between(0, 2) ? 0 : 0.3f,
                            between(0, 1) ? 0 : (size_t)between(1, (int)count + 1)};
    const int32_t token = draw_token(logits, count, &how, between(0, 999) / 1000., scratch);
    CHECK(token >= 0 && (size_t)token < count);
    if (odd == 1) continue;
    const size_t k = (size_t)between(1, (int)count + 1);
    float *values = scratch;
    int32_t *tokens = (int32_t *)scratch + count;
    const size_t largest = largest_tokens(logits, count, k, tokens, values);
    CHECK(largest == (k < count ? k : count));
    for (size_t n = 0; n < largest; n++) {
      size_t better = 0;
      for (size_t j = 0; j < count; j++)
        better += logits[j] > logits[tokens[n]] ||
                  (logits[j] == logits[tokens[n]] && j < (size_t)tokens[n]);
      CHECK(better < k);
    }
    softmax_weights(logits, count, how.temperature, weights);
    size_t better = 0;
    double above = 0, whole = 0;
    for (size_t j = 0; j < count; j++) {
      const int is_better =
          logits[j] > logits[token] || (logits[j] == logits[token] && j < (size_t)token);
      better += (size_t)is_better;
      above += is_better * (double)weights[j];
      whole += (double)weights[j];
    }
    CHECK(!how.top_k || better < how.top_k);
    CHECK(above <= how.top_p * whole * (1 + 1e-5));
    CHECK(weights[token] >= how.min_p * (1 - 1e-5f));
  }
  free(scratch);
  free(weights);
  free(logits);
}

static void check_sampling(const float *logits, size_t count) {
  check_draws(logits, count);
  float *weights = allocate(count * sizeof *weights);
  double sum = 0;
  const double total = softmax_weights(logits, count, 0.7f, weights);
  for (size_t i = 0; i < count; i++) sum += weights[i];
  CHECK(total >= 1 && fabs(total - sum) < 1e-5 * sum);

  const size_t words = (count + 31) / 32;
  uint32_t *mask = allocate(words * sizeof *mask);
  int32_t *tokens = allocate(count * sizeof *tokens);
  for (size_t i = 0; i < words; i++)
    mask[i] = between(0, 3) ? between(0, 1) ? 0 : UINT32_MAX : random_bits();
  const int32_t found = only_allowed(mask, count);
  if (count % 32) CHECK(!(mask[words - 1] & ~(UINT32_MAX >> (32 - count % 32))));
  const size_t allowed = allowed_logits(logits, mask, count, weights, tokens);
  size_t at = 0;
  int32_t best = -1;
  for (size_t i = 0; i < count; i++)
    if (mask[i / 32] >> i % 32 & 1) {
      CHECK(at < allowed && tokens[at] == (int32_t)i);
      CHECK(!memcmp(&weights[at], &logits[i], sizeof *logits));
      if (!at++ || logits[i] > logits[best]) best = (int32_t)i;
    }
  CHECK(allowed_argmax(logits, mask, count) == best);
  CHECK(found == (allowed > 1 ? -2 : best));
  memset(mask, 0, words * sizeof *mask);
  CHECK(only_allowed(mask, count) == -1 && allowed_argmax(logits, mask, count) == -1);
  const int only = between(0, (int)count - 1);
  mask[only / 32] = 1u << only % 32;
  CHECK(only_allowed(mask, count) == only && allowed_argmax(logits, mask, count) == only);
  CHECK(at == allowed);
  free(tokens);
  free(mask);
  free(weights);
}

static void check_model(void) {
  const Model m = random_model();
  const size_t pages = (m.max_length + PAGE_TOKENS - 1) / PAGE_TOKENS;
  uint8_t *arena = keep(ROWS * pages * page_bytes(&m));
  Row rows[ROWS];
  /* None, one, and one that two rows may share. */
  const Adapter *adapters[] = {NULL, random_adapter(&m), random_adapter(&m)};
  for (int i = 0; i < ROWS; i++) {
    rows[i].adapter = adapters[between(0, 2)];
    const int32_t vocab = vocab_of(&m, rows[i].adapter);
    for (int t = 0; t < m.max_length; t++) rows[i].ids[t] = between(0, vocab - 1);
    for (size_t p = 0; p < pages; p++) rows[i].pages[p] = (int)((pages - 1 - p) * ROWS) + i;
    rows[i].logits = keep(m.max_length * padded(vocab) * sizeof(float));
    rows[i].states = keep(m.max_length * padded(m.units) * sizeof(float));
  }
  const int32_t vocab = vocab_of(&m, rows[ROWS - 1].adapter); /* of the row that is compared */
  const size_t width = padded(vocab);
  float *first = keep(m.max_length * width * sizeof *first);
  int compared = 0;
  for (const char *const *name = (const char *const[]){"amx", "vnni", "avx2", "neon", "plain", NULL}; *name;
       name++) {
    if (!use_kernels(*name)) continue;
    check_law(&m, arena, rows);
    for (int i = 0; i < 10; i++) check_pieces(&m, arena, rows);
    check_adapters(&m, arena, rows);
    check_models(&m, arena, rows);
    check_sampling(rows[0].logits, m.vocab);
    const float *found = rows[ROWS - 1].logits;
    double difference = 0, all = 0;
    for (int t = 0; t < m.max_length; t++)
      for (int v = 0; v < vocab; v++) {
        const double x = found[t * width + v];
        CHECK(isfinite(x));
        if (compared) difference += pow(x - first[t * width + v], 2);
        all += x * x;
      }
    CHECK(difference <= all * (m.int8 ? 1e-4 : 1e-9)); /* in int8 x may be rounded otherwise */
    const size_t bytes = m.max_length * width * sizeof *first;
    if (!compared++) memcpy(first, found, bytes);
    if (m.int8 && strcmp(*name, "plain")) CHECK(!memcmp(first, found, bytes)); /* integers are exact */
  }
  while (num_allocated) free(allocated[--num_allocated]);
}

static void *sum_bytes(void *argument) {
  const Mapping *mapping = argument;
  size_t sum = 0;
  for (size_t i = 0; i < mapping->size; i++) sum += ((const volatile uint8_t *)mapping->begin)[i];
  return (void *)sum;
}

/* Mappings that are read on several threads while their file is cut off. */
static void check_mappings(void) {
  enum { SIZE = 1 << 20, CUT = 3, MAPPINGS = 6 };
  Mapping mappings[MAPPINGS];
  pthread_t readers[MAPPINGS];
  const int file = memfd_create("cut", 0), other = memfd_create("other", 0);
  CHECK(file >= 0 && other >= 0 && !ftruncate(file, SIZE) && !ftruncate(other, SIZE));
  for (int i = 0; i < MAPPINGS; i++) {
    void *begin = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, i % 2 ? file : other, 0);
    CHECK(begin != MAP_FAILED);
    mappings[i] = (Mapping){.begin = begin, .size = SIZE};
    guard(&mappings[i]);
  }
  CHECK(pwrite(file, "1", 1, SIZE - 1) == 1 && sum_bytes(&mappings[1]) == (void *)'1');
  for (int i = 0; i < MAPPINGS; i++)
    CHECK(!pthread_create(&readers[i], NULL, sum_bytes, &mappings[i % 2 ? CUT : i]));
  CHECK(!ftruncate(file, between(0, SIZE / 2)));
  for (int i = 0; i < MAPPINGS; i++) CHECK(!pthread_join(readers[i], NULL));
  CHECK(!sum_bytes(&mappings[CUT]) && mappings[CUT].lost);
  for (int i = 0; i < MAPPINGS; i++) {
    CHECK(i == CUT || !mappings[i].lost);
    end_guard(&mappings[(i + CUT) % MAPPINGS]);
    munmap(mappings[(i + CUT) % MAPPINGS].begin, SIZE);
  }
  close(file);
  close(other);
}

int main(int count, char **arguments) {
  CHECK(count == 2);
  for (int round = 0; round < 100; round++) check_mappings();
  for (int round = 0; round < atoi(arguments[1]); round++) check_model();
  use_threads(1);
  release_scratch();
  printf("%s random models on %s\n", arguments[1], use_kernels(NULL));
}
