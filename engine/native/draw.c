/* Draws a token from its logits, without sorting all of them.

   Truncation leaves a set of candidates: the `top_k` largest logits, of these the fewest that together
   reach `top_p`, and so on. Each is found by selection (Hoare's FIND, by weight), whose time grows with
   the number of candidates; where few tokens are likely, only these are candidates from the start. */

#include "kernels.h"

#include <math.h>
#include <string.h>

enum {
  BLOCK = 32,       /* values that are compared with a bound at once */
  CHUNK = 256,      /* weights that are summed at once; a multiple of LINE */
  MAX_STRIDE = 50,  /* logits of a group, of which only the largest is compared at first */
  FEW = 32          /* for top_k of at most one in so many tokens only their weights are computed */
};
#define ROUNDED 1e-9 /* more than the relative error of a sum in double precision */

/* Candidates, the first `count` of `tokens`, and what ranks them: the larger key, then the lower token. */
typedef struct {
  const float *keys, *weights; /* of all tokens; weights may be NULL: 1 each */
  int32_t *tokens;
  size_t count;
} Candidates;

static double weight_of(const Candidates *c, int32_t token) {
  return c->weights ? (double)c->weights[token] : 1;
}

static double sum_of(const Candidates *c) {
  double sum = 0;
  for (size_t i = 0; i < c->count; i++) sum += weight_of(c, c->tokens[i]);
  return sum;
}

/* Reduces the candidates to the fewest best ones whose weights together exceed `mass`, or to all if no
   weights do. The worst of them becomes the last. */
static void select_mass(Candidates *c, double mass) {
  size_t first = 0, end = c->count; /* the range that the last one to stay is in */
  double before = 0;                /* the weight of those before `first`, which stay */
  for (uint32_t random = 1; end - first > 1;) {
    random = random * 1664525u + 1013904223u; /* a fixed choice would be slow for some order */
    const size_t at = first + (size_t)((uint64_t)random * (end - first) >> 32);
    const int32_t pivot = c->tokens[at];
    const float key = c->keys[pivot];
    c->tokens[at] = c->tokens[end - 1];
    size_t middle = first;
    double better = 0;
    for (size_t i = first; i < end - 1; i++) {
      const int32_t token = c->tokens[i];
      const int is_better = (c->keys[token] > key) | ((c->keys[token] == key) & (token < pivot));
      c->tokens[i] = c->tokens[middle];
      c->tokens[middle] = token;
      middle += (size_t)is_better;
      better += is_better * weight_of(c, token);
    }
    c->tokens[end - 1] = c->tokens[middle];
    c->tokens[middle] = pivot;
    if (before + better > mass) {
      end = middle;
    } else {
      before += better;
      if (before + weight_of(c, pivot) > mass) {
        first = middle, end = middle + 1;
      } else {
        before += weight_of(c, pivot);
        first = middle + 1;
      }
    }
  }
  c->count = end;
}

/* Removes candidates whose value is below `bound`, unless all are; the order stays. */
static void filter(Candidates *c, const float *values, float bound) {
  size_t left = 0;
  for (size_t i = 0; i < c->count; i++) {
    const int32_t token = c->tokens[i];
    if (values[token] >= bound) c->tokens[left++] = token;
  }
  if (left) c->count = left;
}

/* Makes the tokens whose value is at least `bound` the candidates; a NaN never is. */
static void collect(Candidates *c, const float *values, size_t count, float bound) {
  c->count = 0;
  for (size_t begin = 0; begin < count; begin += BLOCK) {
    const size_t end = begin + BLOCK < count ? begin + BLOCK : count;
    int any = end - begin < BLOCK;
    if (!any)
      for (size_t i = begin; i < begin + BLOCK; i++) any |= values[i] >= bound;
    if (!any) continue;
    for (size_t i = begin; i < end; i++) {
      c->tokens[c->count] = (int32_t)i;
      c->count += values[i] >= bound;
    }
  }
}

/* The k-th largest of the maxima of groups is a lower bound of the k largest logits. */
size_t largest_tokens(const float *logits, size_t count, size_t k, int32_t *tokens, float *scratch) {
  Candidates c = {logits, NULL, tokens, 0};
  const double before_last = (double)k - 0.5;
  float bound = -INFINITY;
  size_t stride = count / (4 * k);
  stride = stride < MAX_STRIDE ? stride : MAX_STRIDE;
  if (stride > 1) {
    const size_t groups = count / stride; /* logit i is in group i % groups */
    float *maxima = scratch;
    memcpy(maxima, logits, groups * sizeof *maxima);
    for (size_t i = groups; i < groups * stride; i += groups)
      for (size_t j = 0; j < groups; j++)
        maxima[j] = logits[i + j] > maxima[j] ? logits[i + j] : maxima[j];
    Candidates largest = {maxima, NULL, tokens, 0};
    collect(&largest, maxima, groups, -INFINITY);
    select_mass(&largest, before_last);
    if (largest.count) bound = maxima[tokens[largest.count - 1]];
  }
  collect(&c, logits, count, bound);
  select_mass(&c, before_last);
  return c.count;
}

static double sum_chunk(const float *weights, size_t count) {
  float sums[LINE] = {0};
  size_t i = 0;
  for (; i + LINE <= count; i += LINE)
    for (size_t j = 0; j < LINE; j++) sums[j] += weights[i + j];
  double sum = 0;
  for (size_t j = 0; j < LINE; j++) sum += (double)sums[j];
  for (; i < count; i++) sum += (double)weights[i];
  return sum;
}

/* Draws one of all tokens: first the chunk that it is in, then its place there. */
static int32_t draw_any(const float *weights, size_t count, double uniform) {
  double total = 0, before = 0, sum = 0;
  for (size_t i = 0; i < count; i += CHUNK)
    total += sum_chunk(weights + i, count - i < CHUNK ? count - i : CHUNK);
  const double mass = uniform * total;
  size_t begin = 0, size = 0;
  for (;; begin += CHUNK) {
    size = count - begin < CHUNK ? count - begin : CHUNK;
    sum = sum_chunk(weights + begin, size);
    if (before + sum > mass || begin + size == count) break;
    before += sum;
  }
  double exact = 0, through = 0; /* sum is in single precision */
  for (size_t i = 0; i < size; i++) exact += (double)weights[begin + i];
  const double within = (mass - before) / sum * exact * (1 - ROUNDED);
  size_t at = 0;
  while (at + 1 < size && (through += (double)weights[begin + at]) <= within) at++;
  return (int32_t)(begin + at);
}

static float largest_logit(const Candidates *c, const float *logits) {
  float largest = -INFINITY;
  for (size_t i = 0; i < c->count; i++) largest = fmaxf(largest, logits[c->tokens[i]]);
  return largest;
}

/* Computes the weights of softmax_weights for the candidates alone. */
static void weigh_few(const Candidates *c, const float *logits, float temperature, float *weights) {
  const float largest = largest_logit(c, logits);
  for (size_t i = 0; i < c->count; i++) {
    const int32_t token = c->tokens[i];
    weights[token] = expf(fmaxf((logits[token] - largest) / temperature, -87));
  }
}

/* Reduces the candidates to those whose surprisal, -log p, is nearest to its mean, the entropy: the fewest
   that have `share` of the weight, and those that are as near. A surprisal is a logit with a negative
   factor and an added constant, which do not change the order of distances from the mean. */
static void keep_typical(Candidates *c, const float *logits, double share, float *nearness) {
  const float largest = largest_logit(c, logits);
  const double mass = sum_of(c);
  double mean = 0;
  for (size_t i = 0; i < c->count; i++) {
    const int32_t token = c->tokens[i];
    if (logits[token] > -INFINITY)
      mean += (double)c->weights[token] * (double)(logits[token] - largest) / mass;
  }
  for (size_t i = 0; i < c->count; i++) {
    const int32_t token = c->tokens[i];
    nearness[token] = -fabsf(logits[token] - largest - (float)mean);
  }
  Candidates nearest = *c;
  nearest.keys = nearness;
  select_mass(&nearest, nextafter(share * mass, 0));
  filter(c, nearness, nearness[c->tokens[nearest.count - 1]]);
}

int32_t draw_token(const float *logits, size_t count, const Truncation *how, double uniform,
                   void *scratch) {
  float *weights = scratch, *keys = weights + count;
  Candidates c = {logits, weights, (int32_t *)(keys + count), 0};
  const size_t top_k = how->top_k && how->top_k < count ? how->top_k : count;
  const int few = top_k <= count / FEW;
  double whole = few ? 0 : kernels->weigh(logits, count, how->temperature, weights);
  uniform *= 1 - ROUNDED;
  if (top_k < count) {
    c.count = largest_tokens(logits, count, top_k, c.tokens, keys);
    if (few) weigh_few(&c, logits, how->temperature, weights);
    whole = sum_of(&c);
  } else if (how->top_p < 1 || how->min_p > 0) {
    /* The tokens below this bound have less than 1 - top_p together. */
    const float unlikely = (float)((1 - how->top_p) * whole / (double)count);
    collect(&c, weights, count, unlikely > how->min_p ? unlikely : how->min_p);
  } else if (how->typical_p < 1) {
    collect(&c, weights, count, 0);
  } else {
    return draw_any(weights, count, uniform);
  }
  if (!c.count) return 0; /* no logit is a number */
  /* select_mass needs more than a mass; with nextafter, weights that reach it are enough. */
  if (how->top_p < 1) select_mass(&c, nextafter(how->top_p * whole, 0));
  if (how->min_p > 0) filter(&c, weights, how->min_p);
  if (how->typical_p < 1) keep_typical(&c, logits, how->typical_p, keys);
  select_mass(&c, uniform * sum_of(&c));
  return c.tokens[c.count - 1];
}
