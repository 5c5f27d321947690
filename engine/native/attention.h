/* LayerNorm, GELU and attention, for one set of instructions. */

TARGET static void NAME(layer_norm)(const float *x, size_t units, Norm norm, float epsilon,
                                    float *y) {
  const size_t length = padded(units);
  floats sums[PARTS] = {{0}}, squares[PARTS] = {{0}};
  for (size_t i = 0; i < length; i += LINE)
    EACH(p, PARTS) sums[p] += NAME(load)(x + i + p * LANES);
  const float mean = NAME(sum)(sums) / units;
  for (size_t i = 0; i < length; i += LINE)
    EACH(p, PARTS) NAME(store)(y + i + p * LANES, NAME(load)(x + i + p * LANES) - mean);
  for (size_t i = units; i < length; i++) y[i] = 0;
  for (size_t i = 0; i < length; i += LINE)
    EACH(p, PARTS) {
      const floats centered = NAME(load)(y + i + p * LANES);
      squares[p] = FMA(centered, centered, squares[p]);
    }
  const float scale = 1 / sqrtf(NAME(sum)(squares) / units + epsilon);
  for (size_t i = 0; i < length; i += LANES)
    NAME(store)(y + i, FMA(NAME(load)(y + i) * scale, NAME(load)(norm.gamma + i),
                           NAME(load)(norm.beta + i)));
}

/* `count` is a multiple of LINE. The tanh form is Hendrycks and Gimpel's, gelu_new in Hugging Face's
   configurations: 0.5 x (1 + tanh u) = x / (1 + e^-2u). */
TARGET static void NAME(gelu)(float *x, size_t count, int tanh_form) {
  if (tanh_form)
    for (size_t i = 0; i < count; i += LANES) {
      const floats a = NAME(load)(x + i);
      const floats u = 1.5957691216057308f * FMA(0.044715f * a * a, a, a); /* 2 sqrt(2 / pi) */
      NAME(store)(x + i, a / (1.0f + NAME(exponential)(-u)));
    }
  else
    for (size_t i = 0; i < count; i += LANES) {
      const floats a = NAME(load)(x + i), half = 0.5f * a;
      NAME(store)(x + i, FMA(half, NAME(error_function)(a * 0.707106781f), half));
    }
}

/* A page has for each head its keys, (size, PAGE_TOKENS), and its values, (PAGE_TOKENS, padded size):
   so the keys of sixteen tokens lie beside each other, and a token's values do. Both take as many bytes.
   fp16 holds 65504 at most: larger numbers are stored as that. */

TARGET static void NAME(store_kv)(int half, const float *k, const float *v, size_t size, size_t slot,
                               void *page) {
  const size_t line = padded(size), values = line * PAGE_TOKENS + slot * line;
  if (!half) {
    float *numbers = page;
    for (size_t s = 0; s < line; s++) { /* a NaN would reach the tokens before it */
      if (s < size) numbers[s * PAGE_TOKENS + slot] = k[s];
      numbers[values + s] = s < size && isfinite(v[s]) ? v[s] : 0;
    }
    return;
  }
  uint16_t *numbers = page;
  for (size_t i = 0; i < size; i += LINE) {
    const float *from[2] = {k + i, v + i};
    float lines[2][LINE] = {{0}};
    uint16_t halves[2][LINE];
    const size_t length = size - i < LINE ? size - i : LINE;
    if (length < LINE)
      for (int j = 0; j < 2; j++) from[j] = memcpy(lines[j], from[j], length * sizeof *k);
    EACH(j, 2) EACH(p, PARTS) {
      floats x = NAME(load)(from[j] + p * LANES);
      x = LOWER(x, NAME(all)(65504.0f)); /* NaN, too */
      x = HIGHER(x, NAME(all)(-65504.0f));
      STORE_HALVES(halves[j] + p * LANES, x);
    }
    for (size_t s = 0; s < length; s++) numbers[(i + s) * PAGE_TOKENS + slot] = halves[0][s];
    memcpy(numbers + values + i, halves[1], sizeof *halves);
  }
}

/* Turns the first `count` of `length` scores to weights and the others to 0; returns their sum. */
TARGET static float NAME(softmax)(float *scores, size_t count, size_t length) {
  for (size_t t = count; t < length; t++) scores[t] = -INFINITY;
  floats most[PARTS], sums[PARTS];
  EACH(p, PARTS) most[p] = NAME(all)(-INFINITY);
  for (size_t t = 0; t < length; t += LINE)
    EACH(p, PARTS) {
      const floats x = NAME(load)(scores + t + p * LANES);
      most[p] = HIGHER(x, most[p]);
    }
  const float largest = NAME(largest)(most);
  EACH(p, PARTS) sums[p] = (floats){0};
  for (size_t t = 0; t < length; t += LINE)
    EACH(p, PARTS) {
      const floats x = NAME(load)(scores + t + p * LANES);
      const floats weight = (floats)((ints)NAME(exponential)(x - largest) & (x != -INFINITY));
      sums[p] += weight;
      NAME(store)(scores + t + p * LANES, weight);
    }
  return NAME(sum)(sums);
}

TARGET INLINE floats NAME(load_number)(int half, const uint8_t *numbers, size_t i) {
  return half ? LOAD_HALVES(numbers + i * 2) : NAME(load)((const float *)numbers + i);
}

/* The scores of Q queries against the keys of pages n, ..., n + N - 1. */
TARGET INLINE void NAME(score_pages)(int Q, int N, int half, const Queries *x, const float *q,
                                     size_t n, float *scores, size_t length) {
  floats sums[MAX_QUERIES][PARTS];
  const uint8_t *const *pages = x->pages + n;
  EACH(i, Q * N) EACH(p, PARTS) sums[i][p] = (floats){0};
  for (size_t s = 0; s < x->size; s++)
    EACH(page, N) EACH(p, PARTS) {
      const floats key = NAME(load_number)(half, pages[page], s * PAGE_TOKENS + p * LANES);
      EACH(i, Q) {
        floats *sum = &sums[page * Q + i][p];
        *sum = FMA(NAME(all)(q[i * x->stride + s]), key, *sum);
      }
    }
  EACH(page, N) EACH(i, Q) EACH(p, PARTS)
    NAME(store)(scores + i * length + (n + page) * PAGE_TOKENS + p * LANES,
                sums[page * Q + i][p] * x->scale);
}

/* The weighted sums of values, of columns [at, at + N lines). */
TARGET INLINE void NAME(add_values)(int Q, int N, int half, const Queries *x, size_t at,
                                    size_t tokens, const float *weights, size_t length,
                                    const float *inverse, float *out) {
  enum { MAX_SUMS = 16 };
  floats sums[MAX_SUMS][PARTS];
  const size_t line = padded(x->size);
  EACH(i, Q * N) EACH(p, PARTS) sums[i][p] = (floats){0};
  for (size_t t = 0; t < tokens;) {
    const uint8_t *page = x->pages[t / PAGE_TOKENS];
    const size_t end = t + PAGE_TOKENS < tokens ? t + PAGE_TOKENS : tokens;
    for (size_t number = line * PAGE_TOKENS + at; t < end; t++, number += line)
      EACH(j, N) EACH(p, PARTS) {
        const floats value = NAME(load_number)(half, page, number + j * LINE + p * LANES);
        EACH(i, Q) {
          floats *sum = &sums[j * Q + i][p];
          *sum = FMA(NAME(all)(weights[i * length + t]), value, *sum);
        }
      }
  }
  EACH(i, Q) EACH(j, N) {
    const size_t from = at + j * LINE;
    EACH(p, PARTS) sums[j * Q + i][p] *= inverse[i];
    memcpy(out + i * x->out_stride + from, sums[j * Q + i],
           (x->size - from < LINE ? x->size - from : LINE) * sizeof *out);
  }
}

/* Q queries of one row and head at positions position, position + 1, ...: each sees the tokens up to
   its own. `scores` has space for Q times the row's pages. A query's sums run over the tokens in their
   order; those beyond its position have the weight 0, which changes no sum. Q and `half` are constants. */
TARGET INLINE void NAME(attend_to)(int Q, int half, const Queries *x, const float *q,
                                   size_t position, float *scores, float *out) {
  const size_t tokens = position + Q, num_pages = (tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
  const size_t length = num_pages * PAGE_TOKENS; /* of a query's scores */

  /* Several pages or lines of values at once, where few queries would leave the processor waiting for
     each sum. */
  enum { AT_ONCE = 4 };
  size_t n = 0;
  if (Q < AT_ONCE)
    for (; n + AT_ONCE <= num_pages; n += AT_ONCE)
      NAME(score_pages)(Q, AT_ONCE, half, x, q, n, scores, length);
  for (; n < num_pages; n++) NAME(score_pages)(Q, 1, half, x, q, n, scores, length);

  float inverse[MAX_QUERIES];
  for (int i = 0; i < Q; i++)
    inverse[i] = 1 / NAME(softmax)(scores + i * length, position + i + 1, length);

  size_t at = 0;
  if (Q <= AT_ONCE)
    for (; at + AT_ONCE * LINE <= padded(x->size); at += AT_ONCE * LINE)
      NAME(add_values)(Q, AT_ONCE, half, x, at, tokens, scores, length, inverse, out);
  for (; at < x->size; at += LINE)
    NAME(add_values)(Q, 1, half, x, at, tokens, scores, length, inverse, out);
}

TARGET static size_t NAME(attend)(const Queries *x, size_t first, size_t left, float *scores,
                                  float *out) {
  const float *q = x->q + first * x->stride;
  const size_t position = x->position + first;
#define USE(Q)                                                             \
  if (left >= Q)                                                           \
    return x->half ? NAME(attend_to)(Q, 1, x, q, position, scores, out)    \
                   : NAME(attend_to)(Q, 0, x, q, position, scores, out),   \
           Q
#if LANES == LINE
  USE(12);
#endif
  USE(4);
  USE(2);
  USE(1);
#undef USE
  return 0;
}
